"""Tests of bench/compare.py with small fake programs: python3 bench/compare_test.py."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402
import live  # noqa: E402
import memory_comparisons as memory  # noqa: E402

# The Python whose torch gradus links.
TORCH_PYTHON = live.ROOT / ".venv" / "bin" / "python"
SLEEPER = """
    import json, sys, time
    print(json.dumps({"ready": "fake", "torch": "1.0", "threads": 1}), flush=True)
    loss = 3.0
    for line in sys.stdin:
        loss *= 0.99
        print(json.dumps({"seconds": SECONDS, "loss": loss}), flush=True)
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def fake(seconds: str = "0.002") -> list[str]:
    return python(SLEEPER.replace("SECONDS", seconds))


def run(of: list[str], over: list[str], *, tolerance: float = 1e-6, at_most: float | None = None, **options):
    """Runs a comparison of two commands; returns exit code, the last line's object (or None) and the messages."""
    commands = {"a": of, "b": over}
    sides = [compare.Side(label, "cpp", label) for label in commands]
    comparison = compare.Comparison("fake", "two fakes", *sides, threads=1, tolerance=tolerance, at_most=at_most)
    flags = ["--check"] if options.pop("check", False) else []
    arguments = flags + [f"--{key}={value}" for key, value in {"pairs": 5, "timeout": 5, **options}.items()]
    output, messages = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(compare.COMPARISONS, {"fake": comparison}),
        mock.patch.object(live, "command", lambda side, arguments, threads: commands[side.program]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(messages),
    ):
        code = compare.main(["fake", *arguments])
    lines = output.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines else None, messages.getvalue()


class CompareTest(unittest.TestCase):
    def test_ratio_is_that_of_the_seconds_reported(self):
        code, result, _ = run(fake("0.001"), fake("0.004"))
        self.assertEqual(code, 0)
        self.assertEqual(
            result, {"name": "fake", "ratio": 0.25, "low": 0.25, "high": 0.25, "pairs": 5, "of": "a", "over": "b"}
        )

    def test_linear_drift_of_the_machine_cancels(self):
        state = {"now": 1.0}

        class Drifting:
            def step(self):
                state["now"] *= 1.01
                return state["now"]

        for count in (2, 4):
            for times in live.take_turns([Drifting() for _ in range(count)], 3):
                for seconds in times:
                    self.assertAlmostEqual(seconds / times[0], 1.0, places=12)

    def test_steps_alternate_in_abba_order(self):
        order = []

        def program(name):
            fake_program = mock.Mock()
            fake_program.step.side_effect = lambda: order.append(name) or 1.0
            return fake_program

        live.take_turns([program("A"), program("B")], 2)
        self.assertEqual("".join(order), "ABBAABBA")
        order.clear()
        live.take_turns([program(name) for name in "ABCD"], 1)
        self.assertEqual("".join(order), "ABCDDCBA")

    def test_each_program_gets_its_own_two_steps(self):
        first, second = mock.Mock(), mock.Mock()
        first.step.side_effect, second.step.side_effect = [1.0, 4.0], [9.0, 9.0]
        self.assertEqual(live.take_turns([first, second], 1), [[2.0, 9.0]])

    def test_ratio_is_null_where_losses_part(self):
        other = python(SLEEPER.replace("SECONDS", "0.002").replace("0.99", "0.98"))
        code, result, messages = run(fake(), other)
        self.assertEqual(code, 0)
        self.assertIsNone(result["ratio"])
        self.assertIn("losses part at step 0", messages)

    def test_ratio_is_null_where_a_loss_is_not_a_number(self):
        bad = python(SLEEPER.replace("SECONDS", "0.002").replace("0.99", 'float("nan")'))
        _, result, _ = run(bad, bad)
        self.assertIsNone(result["ratio"])

    def test_ratio_is_null_where_nothing_trains(self):
        still = python(SLEEPER.replace("SECONDS", "0.002").replace("0.99", "1"))
        _, result, messages = run(still, still)
        self.assertIsNone(result["ratio"])
        self.assertIn("no training took place", messages)

    def test_missed_bar_fails_only_under_check(self):
        slow, fast = fake("0.004"), fake("0.002")
        self.assertEqual(run(slow, fast, at_most=1.0)[0], 0)
        self.assertEqual(run(slow, fast, at_most=1.0, check=True)[0], 1)
        self.assertEqual(run(fast, slow, at_most=1.0, check=True)[0], 0)

    def test_a_program_that_dies_is_named_with_its_last_words(self):
        dying = python("import sys; print('out of luck', file=sys.stderr); sys.exit(3)")
        code, result, messages = run(fake(), dying)
        self.assertEqual((code, result), (1, None))
        self.assertIn("b ended, exit code 3:\nout of luck", messages)

    def test_a_program_that_dies_in_mid_run_is_named(self):
        dying = python(SLEEPER.replace("SECONDS", "0.002").replace("loss *=", "loss < 2.9 and sys.exit(4); loss *="))
        code, result, messages = run(dying, fake())
        self.assertEqual((code, result), (1, None))
        self.assertIn("a ended, exit code 4", messages)

    def test_a_silent_program_times_out(self):
        code, result, messages = run(fake(), python("import time; time.sleep(60)"), timeout=0.5)
        self.assertEqual((code, result), (1, None))
        self.assertIn("b did not answer within 0.5 s", messages)

    def test_nonsense_is_refused(self):
        for text, message in (("print('hello')", "must answer JSON"), ("print('[1]')", "must answer a JSON object")):
            code, _, messages = run(fake(), python(text))
            self.assertEqual(code, 1)
            self.assertIn(message, messages)

    def test_another_torch_is_refused(self):
        code, _, messages = run(fake(), python(SLEEPER.replace("SECONDS", "1").replace('"1.0"', '"2.0"')))
        self.assertEqual(code, 1)
        self.assertIn("must use the same torch; got 1.0 and 2.0", messages)

    def test_another_number_of_threads_is_refused(self):
        code, _, messages = run(fake(), fake(), threads=2)
        self.assertEqual(code, 1)
        self.assertIn("must use 2 threads; got 1", messages)

    def test_a_program_that_spins_while_idle_is_refused(self):
        spinning = python(
            "import threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin, daemon=True).start()\n"
            + textwrap.dedent(SLEEPER).replace("SECONDS", "0.002")
        )
        code, _, messages = run(fake(), spinning)
        self.assertEqual(code, 1)
        self.assertIn("b keeps", messages)

    def test_a_missing_program_says_how_to_get_it(self):
        arguments = argparse.Namespace(build="/nowhere", python="/nowhere/python", seed=0)
        with self.assertRaisesRegex(compare.ProgramError, "gradus_bench_step is not built .*--build"):
            live.command(live.Side("a", "cpp", "x"), arguments, 1)
        with self.assertRaisesRegex(compare.ProgramError, "scripts/setup_peers.sh"):
            live.command(live.Side("a", "python", "x"), arguments, 1)

    def test_interval_holds_the_median_and_repeats(self):
        samples = [1.0 + 0.01 * ((7 * i) % 11) for i in range(60)]
        median, low, high = live.median_interval(samples, 3)
        self.assertTrue(low <= median <= high)
        self.assertLess(high - low, 0.05)
        self.assertEqual((median, low, high), live.median_interval(samples, 3))

    def test_bar_allows_noise_but_no_more(self):
        self.assertTrue(live.meets(0.99, 0.98, 1.0, 1.0, None))
        self.assertTrue(live.meets(1.02, 0.99, 1.05, 1.0, None))
        self.assertFalse(live.meets(1.02, 1.01, 1.05, 1.0, None))
        self.assertFalse(live.meets(1.04, 0.99, 1.2, 1.0, None))
        self.assertFalse(live.meets(0.9, 0.89, 0.91, 1.02, 0.98))

    def test_list_names_every_comparison(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            self.assertEqual(compare.main(["--list"]), 0)
        for name in compare.COMPARISONS:
            self.assertIn(name, output.getvalue())

    def test_processor_time_is_taken_where_asked_for(self):
        program = python(SLEEPER.replace('"seconds": SECONDS', '"seconds": 1.0, "cpu_seconds": 0.5'))
        other = python(SLEEPER.replace('"seconds": SECONDS', '"seconds": 1.0, "cpu_seconds": 0.25'))
        self.assertEqual(run(program, other)[1]["ratio"], 1.0)
        self.assertEqual(run(program, other, clock="cpu")[1]["ratio"], 2.0)
        self.assertIn("must answer cpu_seconds and loss", run(fake(), other, clock="cpu")[2])


BUDGET = """
    import json, sys
    print(json.dumps({"ready": "fake", "torch": "1.0", "threads": 1}), flush=True)
    loss = 3.0
    for line in sys.stdin:
        if line == "peak\\n":
            print(json.dumps({"peak": PEAK, "resting": 100, "gradients": 100, "loss": loss}), flush=True)
            continue
        loss *= RATE
        print(json.dumps({"seconds": SECONDS, "loss": loss}), flush=True)
"""
# Their modes: bytes and seconds.
MODES = {
    "plain": (1100, 1.0),
    "block": (500, 1.4),
    "block-reentrant": (520, 1.5),
    "sqrt": (700, 1.2),
    "sqrt-reentrant": (700, 1.3),
    "selective": (1090, 1.1),
}


def budget_program(peak: int, seconds: float, rate: float = 0.99) -> list[str]:
    text = BUDGET.replace("PEAK", str(peak)).replace("SECONDS", str(seconds)).replace("RATE", str(rate))
    return python(text)


class MemoryComparisonsTest(unittest.TestCase):
    def budget_all(self, ours: dict[str, tuple[int, float]], *flags: str, rate: float = 0.99):
        """Runs budget-all on one model; `ours` gives bytes and seconds of mode plain and, by bytes, of each budget."""

        def command(side, arguments, threads):
            options = dict(zip(side.arguments[::2], side.arguments[1::2], strict=True))
            if side.kind == "python":
                return budget_program(*MODES[options["--mode"]])
            if options["--mode"] == "plain":
                return budget_program(*ours["plain"])
            chosen = ours.get(options["--bytes"])
            return budget_program(*chosen, rate) if chosen else python("import sys; sys.exit('does not fit')")

        output, messages = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(live, "command", command),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(messages),
        ):
            arguments = ["budget-all", "--models=mlp", "--pairs=2", "--timeout=5", "--check", *flags]
            code = compare.main(arguments)
        return code, json.loads(output.getvalue().splitlines()[-1]), messages.getvalue()

    def test_ratio_is_our_slow_down_over_that_of_their_fastest_mode_within_the_peak(self):
        # At 500 only block fits: 1.4. At 700 sqrt is the fastest: 1.2.
        ours = {"plain": (1100, 2.0), "500": (490, 2.1), "700": (700, 1.8)}
        code, result, _ = self.budget_all(ours)
        self.assertEqual(code, 0)
        self.assertEqual([row["mode"] for row in result["rows"]], ["block", "sqrt"])
        self.assertEqual([row["budget"] for row in result["rows"]], [500, 700])
        self.assertAlmostEqual(result["rows"][0]["ratio"], 1.05 / 1.4, places=4)
        self.assertAlmostEqual(result["rows"][1]["ratio"], 0.9 / 1.2, places=4)
        self.assertAlmostEqual(result["ratio"], 0.75, places=4)
        self.assertAlmostEqual(result["rows"][0]["absolute"], 2.1 / 1.4, places=4)

    def test_one_row_above_its_bar_fails_though_the_mean_is_low(self):
        code, result, _ = self.budget_all({"plain": (1100, 2.0), "500": (490, 1.0), "700": (700, 2.5)})
        self.assertEqual(code, 1)
        self.assertLess(result["ratio"], 0.9)

    def test_a_peak_above_the_budget_is_not_valid(self):
        code, result, messages = self.budget_all({"plain": (1100, 2.0), "500": (501, 2.1), "700": (700, 1.8)})
        self.assertEqual(code, 1)
        self.assertIsNone(result["rows"][0]["ratio"])
        self.assertIn("peak of 501 bytes is above the budget of 500", messages)

    def test_losses_that_part_are_not_valid(self):
        ours = {"plain": (1100, 2.0), "500": (490, 2.1), "700": (700, 1.8)}
        code, result, messages = self.budget_all(ours, rate=0.98)
        self.assertEqual(code, 1)
        self.assertIsNone(result["ratio"])
        self.assertIn("losses part at step 0", messages)

    def test_a_budget_that_we_do_not_fit_is_a_missed_row(self):
        code, result, messages = self.budget_all({"plain": (1100, 2.0), "700": (700, 1.8)})
        self.assertEqual(code, 1)
        self.assertIsNone(result["rows"][0]["ratio"])
        self.assertIn("does not fit", messages)

    def test_budgets_are_peaks_that_differ_and_save_something(self):
        modes = [memory.Mode(name, *values) for name, values in MODES.items()]
        plain = memory.Plain(1100, 100, 100)
        self.assertEqual(memory.choose_budgets(modes, plain, long=False), [("their block", 500), ("their sqrt", 700)])
        flat = [memory.Mode(name, 1100 if name != "selective" else 600, 1.0) for name in MODES]
        self.assertEqual(memory.choose_budgets(flat, plain, long=False), [("their selective", 600)])
        shares = memory.choose_budgets(modes, plain, long=True)
        self.assertEqual([budget for _, budget in shares], [950, 700, 550, 450, 500])

    def test_nobody_is_chosen_where_nothing_fits(self):
        modes = [memory.Mode(name, *values) for name, values in MODES.items()]
        self.assertIsNone(memory.best_within(modes, 499))
        self.assertEqual(memory.best_within(modes, 1090).name, "selective")
        self.assertEqual(memory.best_within(modes, 2000).name, "plain")

    def test_mean_is_geometric_over_the_medians_and_its_interval_holds_it(self):
        rows = [[0.5, 0.5, 0.6], [2.0, 2.0, 1.9]]
        mean, low, high = memory.mean_interval(rows, 0)
        self.assertAlmostEqual(mean, 1.0)
        self.assertTrue(low <= mean <= high)
        self.assertEqual((mean, low, high), memory.mean_interval(rows, 0))

    def test_compression_needs_both_of_its_factors(self):
        text = """
            import json, sys
            print(json.dumps({"ready": "fake", "torch": "1.0", "threads": 1}), flush=True)
            for line in sys.stdin:
                stash = {"plain": 200, "lossless": 100, "reduced": REDUCED}
                print(json.dumps(stash if line == "stash\\n" else {"seconds": 1.0, "loss": 1.0}), flush=True)
        """
        arguments = argparse.Namespace(threads=None, timeout=5.0, clock="wall")
        for reduced, met in ((100, True), (120, False)):
            command = python(text.replace("REDUCED", str(reduced)))
            with (
                mock.patch.object(live, "command", lambda *_, command=command: command),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                result, passed = memory.CompressVgg().run(arguments)
            self.assertEqual(passed, met)
            self.assertEqual(result["value"], 2.0)
            self.assertAlmostEqual(result["with_fp16"], 200 / reduced, places=4)

    def test_stall_share_counts_both_waits(self):
        self.assertAlmostEqual(memory.stall_share({"write_wait_s": 0.1, "read_wait_s": 0.3, "seconds": 2.0}), 0.2)

    @unittest.skipUnless(TORCH_PYTHON.exists(), "needs scripts/setup.sh")
    def test_peak_of_allocations_is_right_for_a_known_case(self):
        # 10 and 20 live together, then 20 and 5, then 5 and 1.
        known = """
            import torch
            from checkpoint_peer import peak_of_allocations, segments

            def allocate():
                make = lambda mebibytes: torch.empty(mebibytes << 20, dtype=torch.uint8)
                a, b = make(10), make(20)
                del a
                c = make(5)
                del b
                d = make(1)
                return 4.0

            peak, result = peak_of_allocations(allocate)
            blocks = [lambda *state, i=i: (*state, i) for i in range(7)]
            print(peak >> 20, result, [part() for part in segments(blocks)])
        """
        done = subprocess.run(
            [TORCH_PYTHON, "-c", textwrap.dedent(known)],
            env={**os.environ, "PYTHONPATH": str(live.ROOT / "bench" / "steps")},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        self.assertEqual(done.stdout, "30 4.0 [(0, 1, 2), (3, 4, 5, 6)]\n")


if __name__ == "__main__":
    unittest.main()
