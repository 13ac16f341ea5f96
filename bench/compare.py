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
import math
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 10
RESAMPLES = 2000
IDLE_CHECK_SECONDS = 0.2
IDLE_LIMIT = 0.1
# A median past the limit still passes within this factor if the interval contains the limit.
NOISE_ALLOWANCE = 1.03
# LibTorch's OpenMP workers spin after each parallel region (milliseconds), which would steal the other program's cores
# while this one waits for its turn. Both programs get the same settings. KMP_* is for a LibTorch built on libomp.
QUIET_WORKERS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
# Leaves glibc as it is, which gives large freed blocks back to the kernel and faults them in again at the next step;
# our program otherwise calls gradus::base::keep_freed_memory() first.
GLIBC_AS_IT_IS = {"GRADUS_BENCH_HEAP": "default"}


class ProgramError(Exception):
    """A program ended, answered nonsense or did not answer in time."""


@dataclass(frozen=True)
class Side:
    """One of the two programs."""

    label: str
    kind: str  # "cpp" (gradus_bench_step), "python" (bench/steps/peer.py)
    program: str
    environment: dict[str, str] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Measurement:
    """One program that measures a value by itself, in samples."""

    name: str
    about: str
    program: str
    unit: str
    threads: int
    at_most: float


def _cpp(program: str, **environment: str) -> Side:
    return Side("gradus (C++)" + (" with glibc as it is" if environment else ""), "cpp", program, environment)


def _python(program: str) -> Side:
    return Side("torch (Python, eager)", "python", program)


GPT = "GPT 6 layers, width 256, 8 heads, vocabulary 1024, batch 8 x 128, float32, fused AdamW, 2 threads"
COMPARISONS: dict[str, Comparison | Measurement] = {
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
    ]
}  # fmt: skip


class Program:
    """A live program under the step protocol."""

    def __init__(self, side: Side, command: list[str], timeout_s: float):
        self.side, self.timeout_s = side, timeout_s
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._errors = tempfile.TemporaryFile()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **QUIET_WORKERS, **side.environment},
            )
        except OSError as error:
            raise ProgramError(f"{side.label} does not start: {error}") from error

    def ready(self) -> dict:
        """Waits for the program's first line."""
        answer = self._read()
        if "ready" not in answer:
            raise ProgramError(f"{self.side.label} must print a 'ready' line first; got {answer}")
        return answer

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        assert self._process.stdin
        try:
            self._process.stdin.write(b"step\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProgramError(self._ended()) from error
        answer = self._read()
        try:
            seconds, loss = float(answer["seconds"]), float(answer["loss"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProgramError(f"{self.side.label} must answer seconds and loss; got {answer}") from error
        if not seconds > 0:
            raise ProgramError(f"{self.side.label} must take time for a step; got {seconds} s")
        self.losses.append(loss)
        self.seconds.append(seconds)
        return seconds

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the program, whatever its state."""
        if self._process.stdin:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _read(self) -> dict:
        assert self._process.stdout
        deadline = time.monotonic() + self.timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise ProgramError(f"{self.side.label} did not answer within {self.timeout_s:g} s (--timeout)")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise ProgramError(self._ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ProgramError(f"{self.side.label} must answer JSON; got {line[:200]!r}") from error
        if not isinstance(answer, dict):
            raise ProgramError(f"{self.side.label} must answer a JSON object; got {line[:200]!r}")
        return answer

    def _ended(self) -> str:
        try:
            code: int | str = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            code = "none, it closed its output"
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"{self.side.label} ended, exit code {code}" + (f":\n{text[-2000:]}" if text else "")


def median_interval(samples: list[float], seed: int) -> tuple[float, float, float]:
    """Median of the samples and the 95 % percentile-bootstrap interval of the median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return statistics.median(samples), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def disagreement(of: list[float], over: list[float], tolerance: float) -> str:
    """Says where two loss trajectories part, or "" if they agree and are those of a training."""
    for i, (a, b) in enumerate(zip(of, over, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)):
            return f"losses part at step {i}: {a!r} and {b!r} (tolerance {tolerance:g})"
    if len(set(of)) < 2:
        return f"the loss never changed from {of[0]!r}: no training took place"
    return ""


def meets(median: float, low: float, high: float, at_most: float | None, at_least: float | None) -> bool:
    """Whether a bar is met: the median within the limit, or so close that the interval contains the limit."""
    met = True
    if at_most is not None:
        met &= median <= at_most or (low <= at_most <= high and median <= at_most * NOISE_ALLOWANCE)
    if at_least is not None:
        met &= median >= at_least or (low <= at_least <= high and median >= at_least / NOISE_ALLOWANCE)
    return met


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _binary(build: str | None, name: str) -> Path:
    folders = [Path(build)] if build else [ROOT / "build" / preset for preset in ("release", "dev")]
    found = [folder / "bench" / name for folder in folders if (folder / "bench" / name).exists()]
    if not found:
        tried = ", ".join(str(folder / "bench") for folder in folders)
        raise ProgramError(f"{name} is not built (looked in {tried}); build it, or name the build folder with --build")
    return max(found, key=lambda path: path.stat().st_mtime)


def _python_interpreter(chosen: str | None) -> Path:
    path = Path(chosen) if chosen else ROOT / ".venv-peers" / "bin" / "python"
    if not path.exists():
        raise ProgramError(f"no Python for the peers at {path}: run scripts/setup_peers.sh, or name one with --python")
    return path


def _command(side: Side, arguments: argparse.Namespace, threads: int) -> list[str]:
    if side.kind == "cpp":
        head = [str(_binary(arguments.build, "gradus_bench_step"))]
    else:
        head = [str(_python_interpreter(arguments.python)), str(ROOT / "bench" / "steps" / "peer.py")]
    return [*head, side.program, "--threads", str(threads), "--seed", str(arguments.seed)]


def _check_quiet(programs: list[Program]) -> None:
    """Fails if a program that waits for its turn burns processor time."""
    before = [program.cpu_seconds() for program in programs]
    time.sleep(IDLE_CHECK_SECONDS)
    for program, start in zip(programs, before, strict=True):
        busy = (program.cpu_seconds() - start) / IDLE_CHECK_SECONDS
        if busy > IDLE_LIMIT:
            raise ProgramError(f"{program.side.label} keeps {busy:.2f} of a core busy while it waits for its turn")


def run_quadruples(of: Program, over: Program, pairs: int) -> list[float]:
    """Ratios of / over of ABBA quadruples."""
    ratios = []
    for _ in range(pairs):
        a1, b1 = of.step(), over.step()
        b2, a2 = over.step(), of.step()
        ratios.append(math.sqrt(a1 * a2 / (b1 * b2)))
    return ratios


def compare(c: Comparison, arguments: argparse.Namespace) -> tuple[dict, bool]:
    """Runs a comparison; returns its JSON object and whether it meets its bar."""
    threads = arguments.threads or c.threads
    programs: list[Program] = []
    try:
        for side in (c.of, c.over):
            programs.append(Program(side, _command(side, arguments, threads), arguments.timeout))
        ready = [program.ready() for program in programs]
        versions = {str(answer.get("torch")).partition("+")[0] for answer in ready}
        if len(versions) > 1:
            raise ProgramError(f"both programs must use the same torch; got {' and '.join(sorted(versions))}")
        for answer, program in zip(ready, programs, strict=True):
            if answer.get("threads") != threads:
                raise ProgramError(f"{program.side.label} must use {threads} threads; got {answer.get('threads')}")
        _say(f"{c.name}: {c.about}; torch {versions.pop()}, {threads} threads, seed {arguments.seed}")
        warm_up = run_quadruples(*programs, (WARM_UP_STEPS + 1) // 2)
        _say(f"warm-up ratios {min(warm_up):.3f} .. {max(warm_up):.3f}")
        _check_quiet(programs)
        ratios = run_quadruples(*programs, arguments.pairs)
        _check_quiet(programs)
    finally:
        for program in programs:
            program.close()
    for program in programs:
        _say(f"{program.side.label}: median {statistics.median(program.seconds) * 1e3:.2f} ms a step")
    median, low, high = median_interval(ratios, arguments.seed)
    fault = disagreement(programs[0].losses, programs[1].losses, c.tolerance)
    met = not fault and meets(median, low, high, c.at_most, c.at_least)
    if fault:
        _say(f"no ratio: {fault}")
    else:
        first, last = programs[0].losses[0], programs[0].losses[-1]
        _say(f"losses agree at all {len(programs[0].losses)} steps ({first:.4f} to {last:.4f})")
        _report_bar(met, c.at_least, c.at_most)
    result = {"name": c.name, "ratio": None if fault else round(median, 4)}
    result |= {"low": round(low, 4), "high": round(high, 4), "pairs": arguments.pairs}
    return result | {"of": c.of.label, "over": c.over.label}, met


def measure(m: Measurement, arguments: argparse.Namespace) -> tuple[dict, bool]:
    """Runs a program that prints {"samples": [...]} and returns its JSON object and whether it meets its bar."""
    threads = arguments.threads or m.threads
    command = [str(_binary(arguments.build, m.program)), "--threads", str(threads), "--seed", str(arguments.seed)]
    command += ["--pairs", str(arguments.pairs)]
    _say(f"{m.name}: {m.about}; {threads} threads, seed {arguments.seed}")
    program = Program(Side(m.program, "cpp", m.program), command, max(arguments.timeout, 600.0))
    try:
        answer = program.ready()
        samples = [float(x) for x in answer["samples"]]
    finally:
        program.close()
    _say(f"{answer.get('calls')} operator calls a step, torch {answer.get('torch')}")
    median, low, high = median_interval(samples, arguments.seed)
    met = meets(median, low, high, m.at_most, None)
    _report_bar(met, None, m.at_most)
    result = {"name": m.name, "value": round(median, 4), "unit": m.unit, "low": round(low, 4), "high": round(high, 4)}
    return result | {"pairs": len(samples)}, met


def _report_bar(met: bool, at_least: float | None, at_most: float | None) -> None:
    limits = [f">= {at_least:g}"] if at_least is not None else []
    limits += [f"<= {at_most:g}"] if at_most is not None else []
    if limits:
        _say(f"bar {' and '.join(limits)}: {'met' if met else 'MISSED'}")


def _list() -> None:
    for c in COMPARISONS.values():
        limits = [f">= {c.at_least:g}"] if isinstance(c, Comparison) and c.at_least is not None else []
        limits += [f"<= {c.at_most:g}"] if c.at_most is not None else []
        print(f"{c.name:18s} {c.about}" + (f" [bar {' and '.join(limits)}]" if limits else ""))


def main(argv: list[str] | None = None) -> int:
    """Command line of bench/compare.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a comparison that --list names")
    parser.add_argument("--list", action="store_true", help="name all comparisons and their bars")
    parser.add_argument("--pairs", type=int, default=60, help="ABBA quadruples, at least 60 for a claim (default 60)")
    parser.add_argument("--threads", type=int, help="threads of both programs (default: the comparison's own)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and bootstrap (default 0)")
    parser.add_argument("--build", help="build folder (default: the newer of build/release and build/dev)")
    parser.add_argument("--python", help="interpreter of the Python peers (default: .venv-peers/bin/python)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one answer (default 120)")
    parser.add_argument("--check", action="store_true", help="exit 1 when the bar is missed")
    arguments = parser.parse_args(argv)
    if arguments.list:
        _list()
        return 0
    comparison = COMPARISONS.get(arguments.name or "")
    if comparison is None:
        parser.error(f"name must be one of {', '.join(COMPARISONS)}; got {arguments.name!r}")
    if arguments.pairs < 1 or (arguments.threads is not None and arguments.threads < 1):
        parser.error("--pairs and --threads must be at least 1")
    run: Callable = compare if isinstance(comparison, Comparison) else measure
    try:
        result, met = run(comparison, arguments)
    except ProgramError as error:
        _say(f"[compare] {comparison.name}: {error}")
        return 1
    print(json.dumps(result))
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
