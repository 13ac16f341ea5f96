"""Programs that stay alive and take single steps in turn: the engine of bench/compare.py, which says how and why."""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator, Sequence
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


class ProgramError(Exception):
    """A program ended, answered nonsense or did not answer in time."""


@dataclass(frozen=True)
class Side:
    """One of the programs."""

    label: str
    kind: str  # "cpp" (gradus_bench_step), "python" (a script of bench/steps)
    program: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    script: str = "peer.py"


class Program:
    """A live program under the step protocol."""

    def __init__(self, side: Side, command: list[str], timeout_s: float, clock: str = "wall"):
        self.side, self.timeout_s = side, timeout_s
        self._clock = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
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

    def ask(self, request: str) -> dict:
        """Sends a request and returns the answer."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise ProgramError(self._ended()) from error
        return self._read()

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        answer = self.ask("step")
        try:
            seconds, loss = float(answer[self._clock]), float(answer["loss"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProgramError(f"{self.side.label} must answer {self._clock} and loss; got {answer}") from error
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def binary(build: str | None, name: str) -> Path:
    folders = [Path(build)] if build else [ROOT / "build" / preset for preset in ("release", "dev")]
    found = [folder / "bench" / name for folder in folders if (folder / "bench" / name).exists()]
    if not found:
        tried = ", ".join(str(folder / "bench") for folder in folders)
        raise ProgramError(f"{name} is not built (looked in {tried}); build it, or name the build folder with --build")
    return max(found, key=lambda path: path.stat().st_mtime)


def python_interpreter(chosen: str | None) -> Path:
    path = Path(chosen) if chosen else ROOT / ".venv-peers" / "bin" / "python"
    if not path.exists():
        raise ProgramError(f"no Python for the peers at {path}: run scripts/setup_peers.sh, or name one with --python")
    return path


def command(side: Side, arguments: argparse.Namespace, threads: int) -> list[str]:
    if side.kind == "cpp":
        head = [str(binary(arguments.build, "gradus_bench_step"))]
    else:
        head = [str(python_interpreter(arguments.python)), str(ROOT / "bench" / "steps" / side.script)]
    return [*head, side.program, *side.arguments, "--threads", str(threads), "--seed", str(arguments.seed)]


def check_quiet(programs: list[Program]) -> None:
    """Fails if a program that waits for its turn burns processor time."""
    before = [program.cpu_seconds() for program in programs]
    time.sleep(IDLE_CHECK_SECONDS)
    for program, start in zip(programs, before, strict=True):
        busy = (program.cpu_seconds() - start) / IDLE_CHECK_SECONDS
        if busy > IDLE_LIMIT:
            raise ProgramError(f"{program.side.label} keeps {busy:.2f} of a core busy while it waits for its turn")


def versions(programs: list[Program], threads: int) -> str:
    """Waits for all programs and returns their torch; fails unless all have the same, and the threads asked for."""
    ready = [program.ready() for program in programs]
    found = {str(answer.get("torch")).partition("+")[0] for answer in ready}
    if len(found) > 1:
        raise ProgramError(f"all programs must use the same torch; got {' and '.join(sorted(found))}")
    for answer, program in zip(ready, programs, strict=True):
        if answer.get("threads") != threads:
            raise ProgramError(f"{program.side.label} must use {threads} threads; got {answer.get('threads')}")
    return found.pop()


@contextlib.contextmanager
def live(sides: Sequence[Side], arguments: argparse.Namespace, threads: int) -> Iterator[list[Program]]:
    """Starts the programs and ends them, whatever happens."""
    programs: list[Program] = []
    try:
        for each in sides:
            programs.append(Program(each, command(each, arguments, threads), arguments.timeout, arguments.clock))
        yield programs
    finally:
        for program in programs:
            program.close()


def take_turns(programs: Sequence[Program], rounds: int) -> list[list[float]]:
    """Seconds of a step by program, round for round: all step once in order and once in reverse; the geometric mean."""
    result = []
    for _ in range(rounds):
        there = [program.step() for program in programs]
        back = [program.step() for program in reversed(programs)]
        result.append([math.sqrt(a * b) for a, b in zip(there, reversed(back), strict=True)])
    return result


def losses_part(programs: Sequence[Program], tolerance: float) -> str:
    """Says where the losses of a program part from the first one's, or ""."""
    for program in programs[1:]:
        fault = disagreement(programs[0].losses, program.losses, tolerance)
        if fault:
            return f"{programs[0].side.label}, {program.side.label}: {fault}"
    return ""


def limits(at_least: float | None, at_most: float | None) -> str:
    """A bar in words: ">= 0.98 and <= 1.02"."""
    parts = [f">= {at_least:g}"] if at_least is not None else []
    return " and ".join(parts + ([f"<= {at_most:g}"] if at_most is not None else []))


def report_bar(met: bool, at_least: float | None, at_most: float | None) -> None:
    bar = limits(at_least, at_most)
    if bar:
        say(f"bar {bar}: {'met' if met else 'MISSED'}")
