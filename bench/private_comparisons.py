"""Comparisons of a DP-SGD step: time and peak memory over the plain step, and Opacus' time over ours."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import live
from live import Side, say

MIB = 1 << 20
WARM_UP_ROUNDS = 3
# A private step differs from a plain one by noise and clipping: losses cannot agree. Unit tests compare the sums.


def ours(model: str, mode: str, *, track: bool = False) -> Side:
    arguments = ("--model", model, "--mode", mode, *(("--track", "1") if track else ()))
    return Side(f"gradus {model} {mode}", "cpp", "private", arguments)


def opacus(model: str, mode: str) -> Side:
    return Side(f"Opacus {model} {mode}", "python", model, ("--mode", mode), script="private_peer.py")


@dataclass(frozen=True)
class PrivateSteps:
    """Time of `of`'s step over `over`'s; with a bar for memory, both programs' peaks as well."""

    name: str
    about: str
    of: Side
    over: Side
    at_most: float | None = None
    at_least: float | None = None
    rounds: int = 10
    peak_at_most: float | None = None

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        threads, rounds = arguments.threads or 1, arguments.pairs or self.rounds
        with live.live([self.of, self.over], arguments, threads) as programs:
            torch = live.versions(programs, threads)
            say(f"{self.name}: {self.about}; torch {torch}, {threads} threads, seed {arguments.seed}")
            live.take_turns(programs, WARM_UP_ROUNDS)
            live.check_quiet(programs)
            ratios = [a / b for a, b in live.take_turns(programs, rounds)]
        for program in programs:
            say(f"{program.side.label}: median {statistics.median(program.seconds) * 1e3:.2f} ms a step")
        median, low, high = live.median_interval(ratios, arguments.seed)
        met = live.meets(median, low, high, self.at_most, self.at_least)
        say(f"time {median:.3f} [{low:.3f}, {high:.3f}]")
        live.report_bar(met, self.at_least, self.at_most)
        result = {"name": self.name, "ratio": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
        result |= {"pairs": rounds, "of": self.of.label, "over": self.over.label}
        if self.peak_at_most is not None:
            ratio = self.peak_ratio(arguments, threads)
            met = met and ratio <= self.peak_at_most
            say(f"peak {ratio:.3f} of the plain step's (at most {self.peak_at_most})")
            result |= {"peak_ratio": round(ratio, 4)}
        return result, met

    def peak_ratio(self, arguments: argparse.Namespace, threads: int) -> float:
        """Peak tensor bytes of a step over those of `over`'s, each program counting its own."""
        sides = [Side(s.label, s.kind, s.program, (*s.arguments, "--track", "1")) for s in (self.of, self.over)]
        peaks = []
        with live.live(sides, arguments, threads) as programs:
            live.versions(programs, threads)
            for program in programs:
                for _ in range(2):
                    program.step()
                peaks.append(int(program.ask("peak")["peak"]))
                say(f"{program.side.label}: peak {peaks[-1] / MIB:.1f} MiB")
        return peaks[0] / peaks[1]


MODELS = {
    "cnn": ("convolutions 1-16-32 and two linear layers, batch 256", 1.3, "ew", 1.5),
    "resnet": ("ResNet-18 with GroupNorm, batch 64 of 3x32x32", 1.4, "ew", 1.8),
    "gpt": ("GPT 4 layers, width 256, vocabulary 8192, batch 16 x 128", 1.2, "ew", 1.25),
    "lstm": ("Embedding, LSTM 64-128, Linear, batch 64 x 64", 3.5, "hooks", 3.5),
    "embedding": ("Embedding 50000 x 128 and two linear layers, batch 64 x 32", 4.0, "ghost", 2.5),
}

ALL = [
    *(
        PrivateSteps(
            f"private-{model}", f"{about}, float32, SGD, clipped to 1 with noise 1, over the plain step, 1 thread",
            ours(model, "private"), ours(model, "plain"), at_most=bar, peak_at_most=1.15,
        )
        for model, (about, bar, _, _) in MODELS.items()
    ),
    PrivateSteps(
        "private-embedding-noiseless", f"{MODELS['embedding'][0]}, clipped to 1, over the plain step, 1 thread",
        ours("embedding", "noiseless"), ours("embedding", "plain"), at_most=1.5,
    ),
    *(
        PrivateSteps(
            f"private-{model}-opacus", f"{about}: the fastest mode of Opacus 1.6.0 over ours, 1 thread",
            opacus(model, mode), ours(model, "private"), at_least=bar,
        )
        for model, (about, _, mode, bar) in MODELS.items()
    ),
]  # fmt: skip
