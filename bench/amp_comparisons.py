"""Mixed precision for bench/compare.py: autocast against Python's, float16 against float32, and where losses end."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import live
from live import Side, say

DEFAULT_PAIRS = 40
WARM_UP_ROUNDS = 3
# Of the losses of two bf16 trainings on kernels that add in different orders; or of fp16's against fp32's.
TOLERANCE = 0.02
LOSS_STEPS = 300
LAST_STEPS = 12  # Over which the final loss is a mean: three times each batch.
FINAL_TOLERANCE = 0.01
# What gradus::base::keep_freed_memory() does for ours: theirs gets the same allocator settings.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def ours(model: str, mode: str) -> Side:
    return Side(f"gradus {mode}", "cpp", "amp", ("--model", model, "--mode", mode))


def theirs(model: str, mode: str) -> Side:
    return Side(f"torch.autocast {mode}", "python", model, ("--mode", mode), KEEP_FREED_MEMORY, "amp_peer.py")


@dataclass(frozen=True)
class AmpStep:
    """A training step under autocast over another one of the same training."""

    name: str
    about: str
    of: Side
    over: Side
    at_most: float
    at_least: float | None = None

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, pairs = arguments.threads or 1, arguments.pairs or DEFAULT_PAIRS
        with live.live([self.of, self.over], arguments, threads) as programs:
            say(f"{self.name}: {self.about}; torch {live.versions(programs, threads)}, {threads} threads")
            live.take_turns(programs, WARM_UP_ROUNDS)
            live.check_quiet(programs)
            ratios = [a / b for a, b in live.take_turns(programs, pairs)]
            fault = live.losses_part(programs, TOLERANCE)
        for program in programs:
            say(f"{program.side.label}: median {statistics.median(program.seconds) * 1e3:.2f} ms a step")
        if fault:
            say(f"no ratio: {fault}")
        median, low, high = live.median_interval(ratios, arguments.seed)
        met = not fault and live.meets(median, low, high, self.at_most, None)
        live.report_bar(met, None, self.at_most)
        result = {"name": self.name, "ratio": None if fault else round(median, 4), "low": round(low, 4)}
        result |= {"high": round(high, 4), "pairs": pairs, "clock": arguments.clock}
        return result | {"of": self.of.label, "over": self.over.label}, met


@dataclass(frozen=True)
class AmpLosses:
    """Final losses of bf16 and fp16 training over fp32's. No time is measured."""

    name: str = "amp-losses"
    about: str = f"final loss after {LOSS_STEPS} steps, largest difference from fp32's: bf16, fp16, gpt, cnn"
    at_most: float = FINAL_TOLERANCE
    at_least: float | None = None

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads = arguments.threads or 1
        final: dict[str, dict[str, float]] = {"gpt": {}, "cnn": {}}
        for model, mode in [("gpt", "fp32"), ("gpt", "bf16"), ("gpt", "fp16"), ("cnn", "fp32"), ("cnn", "bf16")]:
            with live.live([ours(model, mode)], arguments, threads) as (program,):
                live.versions([program], threads)
                for _ in range(LOSS_STEPS):
                    program.step()
                final[model][mode] = statistics.fmean(program.losses[-LAST_STEPS:])
                say(f"{model} {mode}: {program.losses[0]:.4f} to {final[model][mode]:.4f}")
        differences = {
            f"{model}-{mode}": abs(loss / losses["fp32"] - 1)
            for model, losses in final.items()
            for mode, loss in losses.items()
            if mode != "fp32"
        }
        worst = max(differences.values())
        live.report_bar(worst <= self.at_most, None, self.at_most)
        result = {"name": self.name, "value": round(worst, 5), "unit": "of fp32's loss"}
        return result | {"losses": final}, worst <= self.at_most


GPT = "GPT 4 layers, width 256, 4 heads, vocabulary 1024, batch 4 x 128, SGD, 1 thread"
CNN = "6 convolutions 64 to 256 with BatchNorm, batch 32 of 3 x 32 x 32, SGD, 1 thread"
ALL = (
    AmpStep("bf16-gpt", f"{GPT}: bf16 autocast", ours("gpt", "bf16"), theirs("gpt", "bf16"), at_most=1.0),
    AmpStep("bf16-cnn", f"{CNN}: bf16 autocast", ours("cnn", "bf16"), theirs("cnn", "bf16"), at_most=1.0),
    AmpStep("fp16-gpt", f"{GPT}: fp16 autocast over fp32", ours("gpt", "fp16"), ours("gpt", "fp32"), at_most=1.5),
    AmpLosses(),
)
