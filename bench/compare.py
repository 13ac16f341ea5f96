#!/usr/bin/env python3
"""Compares two live programs step by step, so that a few percent can be told apart on a busy machine.

Both programs start at once and stay alive. Each prints one "ready" line, then answers every line "step" on its standard
input by running exactly one step and printing {"seconds": ..., "loss": ...}. After a warm-up they take single steps in
the order A B B A, so that drift of the machine cancels; each such quadruple gives one ratio, the geometric mean of its
two pairs. The result is the median ratio with a 95 % bootstrap interval of the median.

The last line on standard output is one JSON object: name, ratio (of / over, below 1 means `of` is faster), low, high,
pairs, of, over; or name, value, unit, low, high, pairs. `ratio` is null unless the losses of both programs agree at
every step. Exit code 1 after a failure or time-out of a program, and with --check when the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass

import amp_comparisons
import levels_comparison
import live
import memory_comparisons
import optim_comparisons
import private_comparisons
from live import ProgramError, Side, say

DEFAULT_PAIRS = 60
# Leaves glibc as it is, which gives large freed blocks back to the kernel and faults them in again at the next step;
# our program otherwise calls gradus::base::keep_freed_memory() first.
GLIBC_AS_IT_IS = {"GRADUS_BENCH_HEAP": "default"}


@dataclass(frozen=True)
class Comparison:
    """Two programs that run the same training, and the bar for their ratio."""

    name: str
    about: str
    of: Side
    over: Side
    threads: int
    tolerance: float  # Of the loss, absolute, or relative where the loss exceeds 1.
    at_most: float | None = None
    at_least: float | None = None

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        """Returns the JSON object and whether the bar is met."""
        return compare(self, arguments)


@dataclass(frozen=True)
class Measurement:
    """One program that measures a value by itself, in samples."""

    name: str
    about: str
    program: str
    unit: str
    threads: int
    at_most: float | None = None
    at_least: float | None = None

    def run(self, arguments: argparse.Namespace) -> tuple[dict, bool]:
        """Returns the JSON object and whether the bar is met."""
        return measure(self, arguments)


def _cpp(program: str, **environment: str) -> Side:
    return Side("gradus (C++)" + (" with glibc as it is" if environment else ""), "cpp", program, (), environment)


def _python(program: str) -> Side:
    return Side("torch (Python, eager)", "python", program)


GPT = "GPT 6 layers, width 256, 8 heads, vocabulary 1024, batch 8 x 128, float32, fused AdamW, 2 threads"
COMPARISONS = {
    c.name: c
    for c in [
        Comparison("gpt-step", GPT, _cpp("gpt-step"), _python("gpt-step"), 2, 1e-5, at_most=1.0),
        Comparison(
            "mlp-step",
            "100 steps of an MLP 64-32-32-10, batch 32, float32, SGD, 1 thread",
            _cpp("mlp-step"), _python("mlp-step"), 1, 1e-5, at_most=0.55,
        ),
        Comparison(
            "null-cpp",
            "gpt-step against itself: what this method calls equal",
            _cpp("gpt-step"), _cpp("gpt-step"), 2, 0.0, at_most=1.02, at_least=0.98,
        ),
        Comparison(
            "gpt-step-malloc",
            "gpt-step with glibc told to keep freed blocks, over gpt-step as it is",
            _cpp("gpt-step"), _cpp("gpt-step", **GLIBC_AS_IT_IS), 2, 0.0,
        ),
        Measurement(
            "op-plane",
            "what a pass-through op-plane guard adds to an operator call in a small GPT's step, 1 thread",
            "gradus_bench_op_plane", "us an operator", 1, 1.0,
        ),
        Measurement(
            "autocast-op",
            "what autocast adds to a listed operator whose arguments need no cast, 1 thread",
            "gradus_bench_autocast", "us an operator", 1, 1.0,
        ),
        Measurement(
            "noise-speed",
            "time of normal_ over that of seeded Gaussian noise added in place, 6.4 M float32 values, 1 thread",
            "gradus_bench_noise", "times as fast", 1, at_least=3.0,
        ),
        *memory_comparisons.ALL,
        *optim_comparisons.ALL,
        *amp_comparisons.ALL,
        *levels_comparison.ALL,
        *private_comparisons.ALL,
    ]
}  # fmt: skip


def compare(c: Comparison, arguments: argparse.Namespace) -> tuple[dict, bool]:
    """Runs a comparison of two programs in ABBA quadruples."""
    threads = arguments.threads or c.threads
    pairs = arguments.pairs or DEFAULT_PAIRS
    with live.live([c.of, c.over], arguments, threads) as programs:
        torch = live.versions(programs, threads)
        say(f"{c.name}: {c.about}; torch {torch}, {threads} threads, seed {arguments.seed}")
        warm_up = [of / over for of, over in live.take_turns(programs, (live.WARM_UP_STEPS + 1) // 2)]
        say(f"warm-up ratios {min(warm_up):.3f} .. {max(warm_up):.3f}")
        live.check_quiet(programs)
        ratios = [of / over for of, over in live.take_turns(programs, pairs)]
        live.check_quiet(programs)
    for program in programs:
        say(f"{program.side.label}: median {statistics.median(program.seconds) * 1e3:.2f} ms a step")
    median, low, high = live.median_interval(ratios, arguments.seed)
    fault = live.disagreement(programs[0].losses, programs[1].losses, c.tolerance)
    met = not fault and live.meets(median, low, high, c.at_most, c.at_least)
    if fault:
        say(f"no ratio: {fault}")
    else:
        first, last = programs[0].losses[0], programs[0].losses[-1]
        say(f"losses agree at all {len(programs[0].losses)} steps ({first:.4f} to {last:.4f})")
        live.report_bar(met, c.at_least, c.at_most)
    result = {"name": c.name, "ratio": None if fault else round(median, 4)}
    result |= {"low": round(low, 4), "high": round(high, 4), "pairs": pairs}
    return result | {"of": c.of.label, "over": c.over.label}, met


def measure(m: Measurement, arguments: argparse.Namespace) -> tuple[dict, bool]:
    """Runs a program that prints {"samples": [...]} and returns its JSON object and whether it meets its bar."""
    threads = arguments.threads or m.threads
    command = [str(live.binary(arguments.build, m.program)), "--threads", str(threads), "--seed", str(arguments.seed)]
    command += ["--pairs", str(arguments.pairs or DEFAULT_PAIRS)]
    say(f"{m.name}: {m.about}; {threads} threads, seed {arguments.seed}")
    program = live.Program(Side(m.program, "cpp", m.program), command, max(arguments.timeout, 600.0))
    try:
        answer = program.ready()
        samples = [float(x) for x in answer["samples"]]
    finally:
        program.close()
    say(f"{answer.get('calls')} operator calls a step, torch {answer.get('torch')}")
    median, low, high = live.median_interval(samples, arguments.seed)
    met = live.meets(median, low, high, m.at_most, m.at_least)
    live.report_bar(met, m.at_least, m.at_most)
    result = {"name": m.name, "value": round(median, 4), "unit": m.unit, "low": round(low, 4), "high": round(high, 4)}
    return result | {"pairs": len(samples)}, met


def _list() -> None:
    for c in COMPARISONS.values():
        bar = live.limits(c.at_least, c.at_most)
        print(f"{c.name:18s} {c.about}" + (f" [bar {bar}]" if bar else ""))


def main(argv: list[str] | None = None) -> int:
    """Command line of bench/compare.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a comparison that --list names")
    parser.add_argument("--list", action="store_true", help="name all comparisons and their bars")
    parser.add_argument("--pairs", type=int, help="rounds, there and back (default: the comparison's own, 60 of two)")
    parser.add_argument("--threads", type=int, help="threads of both programs (default: the comparison's own)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and bootstrap (default 0)")
    parser.add_argument("--build", help="build folder (default: the newer of build/release and build/dev)")
    parser.add_argument("--python", help="interpreter of the Python peers (default: .venv-peers/bin/python)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one answer (default 120)")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time of the process, on a busy machine"
    )
    parser.add_argument("--long", action="store_true", help="budget-all: at five budgets a model, not two")
    parser.add_argument("--models", help="budget-all: only these, separated by commas")
    parser.add_argument("--folder", help="offload-disk: where files go (default: the temporary folder)")
    parser.add_argument("--check", action="store_true", help="exit 1 when the bar is missed")
    arguments = parser.parse_args(argv)
    if arguments.list:
        _list()
        return 0
    comparison = COMPARISONS.get(arguments.name or "")
    if comparison is None:
        parser.error(f"name must be one of {', '.join(COMPARISONS)}; got {arguments.name!r}")
    if any(count is not None and count < 1 for count in (arguments.pairs, arguments.threads)):
        parser.error("--pairs and --threads must be at least 1")
    try:
        result, met = comparison.run(arguments)
    except ProgramError as error:
        say(f"[compare] {comparison.name}: {error}")
        return 1
    print(json.dumps(result))
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
