"""Opt levels for bench/compare.py: time, peak and final loss of each level over O0."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import live
from live import Side, say

MODES = ("O0", "O1", "O2", "O3", "O3-keep-batchnorm", "bf16", "bf16-stochastic")
MODELS = ("cnn", "gpt")
WARM_UP_ROUNDS = 2
MIB = 1 << 20
LAST_STEPS = 4  # Over which the final loss is a mean: each batch once.


def side(model: str, mode: str) -> Side:
    return Side(mode, "cpp", "levels", ("--model", model, "--mode", mode))


@dataclass(frozen=True)
class AmpLevels:
    """All levels take turns in single steps of the same training; each over O0."""

    name: str = "amp-levels"
    about: str = "step time, peak and final loss of each opt level over O0, CNN with BatchNorm and GPT, 1 thread"
    at_most: float | None = None
    at_least: float | None = None
    rounds: int = 10

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        rows: list[dict] = []
        for model in arguments.models.split(",") if arguments.models else MODELS:
            rows += self._run_model(model, arguments, threads, rounds)
        finite = all(row["final_loss"] == row["final_loss"] for row in rows)
        return {"name": self.name, "ratio": None, "pairs": rounds, "rows": rows}, finite

    def _run_model(self, model: str, arguments: argparse.Namespace, threads: int, rounds: int) -> list[dict]:
        with live.live([side(model, mode) for mode in MODES], arguments, threads) as programs:
            torch = live.versions(programs, threads)
            live.take_turns(programs, WARM_UP_ROUNDS)
            live.check_quiet(programs)
            times = live.take_turns(programs, rounds)
            peaks = [program.ask("peak") for program in programs]
        say(f"{model}, torch {torch}, {threads} threads, {len(programs[0].losses)} steps")
        say(f"{'level':18s} {'ms a step':>9s} {'over O0 [95 %]':>22s} {'peak MiB':>9s} {'over O0':>8s} "
            f"{'at rest':>8s} {'final loss':>10s} {'skipped':>7s} {'scale':>8s}")  # fmt: skip
        rows = []
        for i, (mode, program, peak) in enumerate(zip(MODES, programs, peaks, strict=True)):
            ratio, low, high = live.median_interval([each[i] / each[0] for each in times], arguments.seed)
            loss = statistics.fmean(program.losses[-LAST_STEPS:])
            peak_ratio = peak["peak"] / peaks[0]["peak"]
            milliseconds = statistics.median(each[i] for each in times) * 1e3
            say(
                f"{mode:18s} {milliseconds:9.1f} {ratio:8.3f} [{low:.3f}, {high:.3f}] {peak['peak'] / MIB:9.1f} "
                f"{peak_ratio:8.3f} {peak['resting'] / MIB:8.1f} {loss:10.4f} {peak['skipped']:7d} {peak['scale']:8g}"
            )
            rows.append({
                "model": model, "level": mode, "time": round(ratio, 4), "low": round(low, 4), "high": round(high, 4),
                "peak": round(peak_ratio, 4), "peak_bytes": peak["peak"], "resting_bytes": peak["resting"],
                "final_loss": round(loss, 5), "skipped": peak["skipped"],
            })  # fmt: skip
        return rows


ALL = (AmpLevels(),)
