"""Memory comparisons for bench/compare.py: budgets against torch.utils.checkpoint, offload, compression."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import live
from live import Program, ProgramError, Side, say

MODELS = ("mlp", "resnet", "unet", "gpt", "lstm", "transformer")
# Of bench/steps/checkpoint_peer.py.
THEIR_MODES = ("plain", "block", "block-reentrant", "sqrt", "sqrt-reentrant", "selective")
# Whose peaks are budgets, the first two that differ and save something.
BUDGETS_OF = ("block", "sqrt", "selective", "block-reentrant", "sqrt-reentrant")
LONG_SHARES = (0.75, 0.5, 0.35, 0.25)
WORTH_A_BUDGET = 0.95  # Of plain's peak: a budget above is hardly one.
DIFFERENT = 0.03  # Budgets closer than this are one.
TOLERANCE = 1e-5
WARM_UP_ROUNDS = 2
CHOICE_ROUNDS = 2
MIB = 1 << 20
# What gradus::base::keep_freed_memory() does for ours: theirs gets the same allocator settings.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def ours(model: str, mode: str, **options: object) -> Side:
    flags = tuple(text for key, value in options.items() for text in (f"--{key}", str(value)))
    return Side(f"gradus {mode}", "cpp", "budget", ("--model", model, "--mode", mode, *flags))


def theirs(model: str, mode: str) -> Side:
    label = f"torch.utils.checkpoint {mode}" if mode != "plain" else "torch plain"
    return Side(label, "python", model, ("--mode", mode), KEEP_FREED_MEMORY, "checkpoint_peer.py")


@dataclass(frozen=True)
class Mode:
    """What a mode of theirs takes."""

    name: str
    peak: int
    seconds: float


@dataclass(frozen=True)
class Plain:
    """Bytes of a plain step of ours."""

    peak: int
    resting: int  # Parameters, buffers and batch.
    gradients: int

    def budget(self, share: float) -> int:
        """All that must be, and a share of the activations at their peak."""
        return self.resting + self.gradients + int(share * (self.peak - self.resting))


@dataclass(frozen=True)
class Row:
    """One model at one budget."""

    model: str
    budget_of: str
    budget: int
    mode: str  # Theirs, the fastest within the budget.
    peak: int  # Ours, measured.
    ours: list[float]  # Our time over our plain time, round for round.
    theirs: list[float]
    absolute: list[float]  # Our time over theirs.
    fault: str = ""
    predicted_ratio: float | None = None  # Over plain, by our plan; none where there is no plan.
    predicted_peak: int | None = None

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]


def measure_plain(model: str, arguments: argparse.Namespace, threads: int) -> Plain:
    with live.live([ours(model, "plain", track=1)], arguments, threads) as (program,):
        program.ready()
        program.step()
        answer = program.ask("peak")
    return Plain(answer["peak"], answer["resting"], answer["gradients"])


def measure_modes(model: str, arguments: argparse.Namespace, threads: int) -> list[Mode]:
    """Peak and time of each of their modes, all taking turns."""
    with live.live([theirs(model, mode) for mode in THEIR_MODES], arguments, threads) as programs:
        live.versions(programs, threads)
        live.take_turns(programs, 1)
        rounds = live.take_turns(programs, CHOICE_ROUNDS)
        peaks = [program.ask("peak")["peak"] for program in programs]
    seconds = [min(column) for column in zip(*rounds, strict=True)]
    return [Mode(*each) for each in zip(THEIR_MODES, peaks, seconds, strict=True)]


def choose_budgets(modes: Sequence[Mode], plain: Plain, long: bool) -> list[tuple[str, int]]:
    """Names and bytes: peaks that modes of theirs reach, and in long mode shares of plain's activations."""
    by_name = {mode.name: mode for mode in modes}
    if long:
        budgets = [(f"{share:.0%} of plain", plain.budget(share)) for share in LONG_SHARES]
        least = min(modes, key=lambda mode: mode.peak)
        return [*budgets, (f"least of theirs ({least.name})", least.peak)]
    chosen: list[tuple[str, int]] = []
    for name in BUDGETS_OF:
        peak = by_name[name].peak
        small = peak < WORTH_A_BUDGET * by_name["plain"].peak
        if small and all(abs(peak / other - 1) > DIFFERENT for _, other in chosen):
            chosen.append((f"their {name}", peak))
    return chosen[:2]


def best_within(modes: Sequence[Mode], budget: int) -> Mode | None:
    fitting = [mode for mode in modes if mode.peak <= budget]
    return min(fitting, key=lambda mode: mode.seconds) if fitting else None


def run_row(
    model: str, name: str, budget: int, best: Mode, arguments: argparse.Namespace, threads: int, rounds: int
) -> Row:
    """Four programs take turns: ours within the budget, ours plain, theirs within the budget, theirs plain."""
    sides = [
        ours(model, "budget", bytes=budget),
        ours(model, "plain"),
        theirs(model, best.name),
        theirs(model, "plain"),
    ]
    with live.live(sides, arguments, threads) as programs:
        live.versions(programs, threads)
        live.take_turns(programs, WARM_UP_ROUNDS)
        live.check_quiet(programs)
        times = live.take_turns(programs, rounds)
        live.check_quiet(programs)
        answer = programs[0].ask("peak")
        peak = answer["peak"]
        fault = live.losses_part(programs, TOLERANCE)
    if peak > budget:
        fault = f"peak of {peak} bytes is above the budget of {budget}"
    return Row(
        model, name, budget, best.name, peak,
        [a / b for a, b, _, _ in times], [c / d for _, _, c, d in times], [a / c for a, _, c, _ in times], fault,
        answer.get("predicted_ratio"), answer.get("predicted_peak"),
    )  # fmt: skip


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def mean_interval(rows: Sequence[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """Geometric mean of the rows' medians, and its 95 % bootstrap interval: rounds are drawn anew within each row."""
    generator = random.Random(seed)

    def resample() -> float:
        return geometric_mean([statistics.median(generator.choices(row, k=len(row))) for row in rows])

    means = sorted(resample() for _ in range(live.RESAMPLES))
    middle = geometric_mean([statistics.median(row) for row in rows])
    return middle, means[int(0.025 * live.RESAMPLES)], means[int(0.975 * live.RESAMPLES) - 1]


def describe(row: Row, seed: int) -> tuple[dict, float, float, float]:
    """The row's line, said and as an object, with its ratio and interval."""
    median, low, high = live.median_interval(row.ratios, seed)
    mine, other, absolute = (statistics.median(values) for values in (row.ours, row.theirs, row.absolute))
    predicted = "no plan"
    if row.predicted_ratio is not None and row.predicted_peak is not None:
        predicted = f"predicted {row.predicted_ratio:.3f}, {row.predicted_peak / MIB:.1f}"
    say(
        f"{row.model:12s} {row.budget_of:26s} {row.budget / MIB:7.1f} MiB: ours {mine:.3f} of plain "
        f"(peak {row.peak / MIB:.1f}; {predicted}), theirs {other:.3f} ({row.mode}); "
        f"ratio {median:.3f} [{low:.3f}, {high:.3f}], absolute {absolute:.3f}"
        + (f"; NOT VALID: {row.fault}" if row.fault else "")
    )
    entry = {"model": row.model, "budget_of": row.budget_of, "budget": row.budget, "peak": row.peak, "mode": row.mode}
    entry |= {"predicted_ratio": row.predicted_ratio, "predicted_peak": row.predicted_peak}
    entry |= {"ours": round(mine, 4), "theirs": round(other, 4), "absolute": round(absolute, 4)}
    entry |= {"ratio": None if row.fault else round(median, 4), "low": round(low, 4), "high": round(high, 4)}
    return entry, median, low, high


@dataclass(frozen=True)
class BudgetAll:
    """Our slow-down under a budget over theirs, for each model and budget."""

    name: str = "budget-all"
    about: str = "slow-down within a peak over torch.utils.checkpoint's best, six models, geometric mean, 1 thread"
    at_most: float = 0.9
    at_least: float | None = None
    row_at_most: float = 1.0
    rounds: int = 12

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        chosen = arguments.models.split(",") if arguments.models else MODELS
        entries: list[dict] = []
        valid: list[Row] = []
        met = True
        for model in chosen:
            plain = measure_plain(model, arguments, threads)
            modes = measure_modes(model, arguments, threads)
            base = modes[0]
            say(f"{model}: plain {plain.peak / MIB:.1f} MiB (resting {plain.resting / MIB:.1f}); theirs: " + ", ".join(
                f"{m.name} {m.peak / MIB:.1f} MiB {m.seconds / base.seconds:.2f}" for m in modes))  # fmt: skip
            for name, budget in choose_budgets(modes, plain, arguments.long):
                best = best_within(modes, budget)
                if best is None:
                    say(f"{model:12s} {name:26s} {budget / MIB:7.1f} MiB: none of theirs fits")
                    continue
                try:
                    row = run_row(model, name, budget, best, arguments, threads, rounds)
                except ProgramError as error:
                    say(f"{model:12s} {name:26s} {budget / MIB:7.1f} MiB: FAILED: {error}")
                    entries.append({"model": model, "budget_of": name, "budget": budget, "ratio": None})
                    met = False
                    continue
                entry, median, low, high = describe(row, arguments.seed)
                entries.append(entry)
                met &= not row.fault and live.meets(median, low, high, self.row_at_most, None)
                if not row.fault:
                    valid.append(row)
        result: dict = {"name": self.name, "ratio": None}
        if valid:
            mean, low, high = mean_interval([row.ratios for row in valid], arguments.seed)
            absolute = geometric_mean([statistics.median(row.absolute) for row in valid])
            say(f"geometric mean {mean:.3f} [{low:.3f}, {high:.3f}], absolute {absolute:.3f}, {len(valid)} rows")
            met &= live.meets(mean, low, high, self.at_most, None)
            result |= {"ratio": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}
            result |= {"absolute": round(absolute, 4)}
        met &= bool(valid)
        live.report_bar(met, None, self.at_most)
        return result | {"pairs": rounds, "rows": entries}, met


@dataclass(frozen=True)
class BudgetGpt50:
    """Our time over our plain time on the 16-layer GPT at half of its activations."""

    name: str = "budget-gpt-50"
    about: str = "a 16-layer GPT with half of its activation memory over plain, 1 thread"
    at_most: float = 1.10
    at_least: float | None = None
    rounds: int = 12

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        plain = measure_plain("gpt16", arguments, threads)
        budget = plain.budget(0.5)
        sides = [ours("gpt16", "budget", bytes=budget), ours("gpt16", "plain")]
        with live.live(sides, arguments, threads) as programs:
            live.versions(programs, threads)
            live.take_turns(programs, WARM_UP_ROUNDS)
            ratios = [a / b for a, b in live.take_turns(programs, rounds)]
            peak = programs[0].ask("peak")["peak"]
            fault = live.losses_part(programs, 0.0)
        if peak > budget:
            fault = f"peak of {peak} bytes is above the budget of {budget}"
        median, low, high = live.median_interval(ratios, arguments.seed)
        sizes = f"plain {plain.peak / MIB:.1f} MiB, budget {budget / MIB:.1f}, peak {peak / MIB:.1f}"
        say(f"{sizes}; over plain {median:.3f} [{low:.3f}, {high:.3f}]")
        if fault:
            say(f"no ratio: {fault}")
        met = not fault and live.meets(median, low, high, self.at_most, None)
        live.report_bar(met, None, self.at_most)
        result = {"name": self.name, "ratio": None if fault else round(median, 4)}
        result |= {"low": round(low, 4), "high": round(high, 4), "pairs": rounds, "budget": budget, "peak": peak}
        return result | {"of": programs[0].side.label, "over": programs[1].side.label}, met


def stall_share(answer: dict) -> float:
    """The part of a step that stood still for transfers."""
    return (answer["write_wait_s"] + answer["read_wait_s"]) / answer["seconds"]


@dataclass(frozen=True)
class OffloadDisk:
    """Stall share of a step with prefetch over that of a step without."""

    name: str = "offload-disk"
    about: str = "stall share with activations on disk, with prefetch over without, 12-layer GPT, 1 thread"
    at_most: float = 0.5
    at_least: float | None = None
    rounds: int = 20

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            sides = [
                Side(f"gradus {mode}", "cpp", "offload", ("--model", "gpt", "--mode", mode, "--folder", folder))
                for mode in ("prefetch", "on-demand")
            ]
            with live.live(sides, arguments, threads) as programs:
                live.versions(programs, threads)
                live.take_turns(programs, WARM_UP_ROUNDS)
                samples = [self._round(programs) for _ in range(rounds)]
                last = [program.ask("stall") for program in programs]
                fault = live.losses_part(programs, 0.0)
        with_prefetch, without = (statistics.median(column) for column in zip(*samples, strict=True))
        say(f"stall share {with_prefetch:.4f} with prefetch, {without:.4f} without ({last[0]['access']}; a step wrote "
            f"{last[0]['bytes_out'] / MIB:.1f} MiB; with prefetch {last[0]['prefetch_hits']} reads were ready, "
            f"{last[0]['prefetch_late']} late, {last[0]['prefetch_misses']} missed)")  # fmt: skip
        ratios = [a / b for a, b in samples if b > 0]
        if not ratios:
            fault = fault or "no step without prefetch ever waited"
        if fault:
            say(f"no ratio: {fault}")
            return {"name": self.name, "ratio": None, "pairs": rounds}, False
        median, low, high = live.median_interval(ratios, arguments.seed)
        met = live.meets(median, low, high, self.at_most, None)
        live.report_bar(met, None, self.at_most)
        result = {"name": self.name, "ratio": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
        return result | {"with": round(with_prefetch, 5), "without": round(without, 5), "pairs": rounds}, met

    @staticmethod
    def _round(programs: Sequence[Program]) -> tuple[float, float]:
        """Mean stall shares of two steps each, in the order A B B A."""
        shares: dict[int, list[float]] = {0: [], 1: []}
        for i in (0, 1, 1, 0):
            programs[i].step()
            shares[i].append(stall_share(programs[i].ask("stall")))
        return statistics.fmean(shares[0]), statistics.fmean(shares[1])


@dataclass(frozen=True)
class CompressVgg:
    """Bytes that forward leaves for backward, plain over encoded. No time is measured: one sample says all."""

    name: str = "compress-vgg"
    about: str = "stashed bytes of a VGG-like network, plain over encoded: lossless, and with fp16 (bar 1.8)"
    at_most: float | None = None
    at_least: float = 1.4
    reduced_at_least: float = 1.8
    steps: int = 5

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads = arguments.threads or 1
        with live.live([Side("gradus", "cpp", "compress")], arguments, threads) as (program,):
            live.versions([program], threads)
            for _ in range(self.steps):
                program.step()
            stash = program.ask("stash")
        lossless, reduced = stash["plain"] / stash["lossless"], stash["plain"] / stash["reduced"]
        say(f"plain {stash['plain'] / MIB:.1f} MiB; lossless {lossless:.2f} times less, with fp16 {reduced:.2f}")
        met = lossless >= self.at_least and reduced >= self.reduced_at_least
        live.report_bar(met, self.at_least, None)
        result = {"name": self.name, "value": round(lossless, 4), "unit": "times fewer bytes"}
        return result | {"with_fp16": round(reduced, 4), "bytes": stash}, met


ALL = (BudgetAll(), BudgetGpt50(), OffloadDisk(), CompressVgg())
