"""Comparisons of optimizer steps: time over torch.optim's, and 8-bit state over float32 state."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import live
from live import Program, Side, say

MIB = 1 << 20
WARM_UP_ROUNDS = 3


def ours(mode: str, program: str = "optim") -> Side:
    return Side(f"gradus {mode}", "cpp", program, ("--mode", mode))


def theirs(mode: str, what: str) -> Side:
    return Side(f"torch.optim {what}", "python", "optim", ("--mode", mode), script="optim_peer.py")


def state_bytes(programs: Sequence[Program]) -> list[int]:
    return [int(program.ask("state")["state_bytes"]) for program in programs]


@dataclass(frozen=True)
class OptimizerSteps:
    """Time of a step of one optimizer over another's, on the same parameters and gradients."""

    name: str
    about: str
    of: Side
    over: Side
    at_most: float | None = None
    at_least: float | None = None
    tolerance: float | None = 1e-5  # Of the sum of |first values|; None where the two are not the same algorithm.
    rounds: int = 20

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        with live.live([self.of, self.over], arguments, threads) as programs:
            torch = live.versions(programs, threads)
            say(f"{self.name}: {self.about}; torch {torch}, {threads} threads, seed {arguments.seed}")
            live.take_turns(programs, WARM_UP_ROUNDS)
            live.check_quiet(programs)
            ratios = [a / b for a, b in live.take_turns(programs, rounds)]
            of_bytes, over_bytes = state_bytes(programs)
            fault = "" if self.tolerance is None else live.losses_part(programs, self.tolerance)
        for program, size in zip(programs, (of_bytes, over_bytes), strict=True):
            say(f"{program.side.label}: median {statistics.median(program.seconds) * 1e3:.2f} ms a step, "
                f"{size / MIB:.1f} MiB of state")  # fmt: skip
        median, low, high = live.median_interval(ratios, arguments.seed)
        say(f"time {median:.3f} [{low:.3f}, {high:.3f}], state {of_bytes / over_bytes:.4f}")
        if fault:
            say(f"no ratio: {fault}")
        met = not fault and live.meets(median, low, high, self.at_most, self.at_least)
        live.report_bar(met, self.at_least, self.at_most)
        result = {"name": self.name, "ratio": None if fault else round(median, 4)}
        result |= {"low": round(low, 4), "high": round(high, 4), "pairs": rounds}
        result |= {"state_ratio": round(of_bytes / over_bytes, 4)}
        return result | {"of": self.of.label, "over": self.over.label}, met


@dataclass(frozen=True)
class SameLoss:
    """Final losses of two optimizers' trainings: the mean of the last steps."""

    name: str
    about: str
    of: Side
    over: Side
    at_most: float = 0.01  # Of the relative difference.
    at_least: float | None = None
    steps: int = 300
    last: int = 30

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads = arguments.threads or 1
        with live.live([self.of, self.over], arguments, threads) as programs:
            live.versions(programs, threads)
            for program in programs:
                for _ in range(self.steps):
                    program.step()
            of_bytes, over_bytes = state_bytes(programs)
            finals = [statistics.fmean(program.losses[-self.last :]) for program in programs]
        for program, final in zip(programs, finals, strict=True):
            say(f"{program.side.label}: {program.losses[0]:.4f} to {final:.4f} (mean of the last {self.last})")
        difference = abs(finals[0] / finals[1] - 1.0)
        say(f"apart by {difference:.4%}; state {of_bytes / over_bytes:.4f}")
        fell = all(final < 0.7 * program.losses[0] for program, final in zip(programs, finals, strict=True))
        if not fell:
            say("no value: a loss that does not fall shows nothing")
        met = fell and math.isfinite(difference) and difference <= self.at_most
        live.report_bar(met, None, self.at_most)
        result = {"name": self.name, "value": round(difference, 6) if fell else None, "unit": "relative difference"}
        return result | {"losses": [round(final, 5) for final in finals], "steps": self.steps,
                         "state_ratio": round(of_bytes / over_bytes, 4)}, met  # fmt: skip


MILLIONS = "25 million parameters, float32, 1 thread"


def over_torch(mode: str, what: str, at_most: float) -> OptimizerSteps:
    about = f"a step of {mode} over torch.optim.{what}'s; {MILLIONS}"
    return OptimizerSteps(mode, about, ours(mode), theirs(mode, what), at_most=at_most)


def over_float32(mode: str, full: str) -> list[OptimizerSteps | SameLoss]:
    about = f"a step of {mode} over our {full}'s; {MILLIONS}"
    loss = f"final loss of {mode} over {full}'s, 300 steps of a small GPT"
    return [
        OptimizerSteps(mode, about, ours(mode), ours(full), tolerance=None),
        SameLoss(f"{mode}-loss", loss, ours(mode, "optim-gpt"), ours(full, "optim-gpt")),
    ]


ALL = (
    over_torch("adamw", "AdamW(fused)", 1.05),
    over_torch("adam", "Adam(fused)", 1.05),
    over_torch("sgd", "SGD(fused)", 1.05),
    over_torch("adafactor", "Adafactor(foreach)", 0.9),
    *over_float32("adam8bit", "adamw"),
    *over_float32("sgd8bit", "sgd"),
)
