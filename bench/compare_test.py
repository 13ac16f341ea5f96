"""Tests of bench/compare.py with small fake programs: python3 bench/compare_test.py."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import textwrap
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402

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
        mock.patch.object(compare, "_command", lambda side, arguments, threads: commands[side.program]),
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

        for ratio in compare.run_quadruples(Drifting(), Drifting(), 3):
            self.assertAlmostEqual(ratio, 1.0, places=12)

    def test_steps_alternate_in_abba_order(self):
        order = []

        def program(name):
            fake_program = mock.Mock()
            fake_program.step.side_effect = lambda: order.append(name) or 1.0
            return fake_program

        compare.run_quadruples(program("A"), program("B"), 2)
        self.assertEqual("".join(order), "ABBAABBA")

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
            compare._command(compare.Side("a", "cpp", "x"), arguments, 1)
        with self.assertRaisesRegex(compare.ProgramError, "scripts/setup_peers.sh"):
            compare._command(compare.Side("a", "python", "x"), arguments, 1)

    def test_interval_holds_the_median_and_repeats(self):
        samples = [1.0 + 0.01 * ((7 * i) % 11) for i in range(60)]
        median, low, high = compare.median_interval(samples, 3)
        self.assertTrue(low <= median <= high)
        self.assertLess(high - low, 0.05)
        self.assertEqual((median, low, high), compare.median_interval(samples, 3))

    def test_bar_allows_noise_but_no_more(self):
        self.assertTrue(compare.meets(0.99, 0.98, 1.0, 1.0, None))
        self.assertTrue(compare.meets(1.02, 0.99, 1.05, 1.0, None))
        self.assertFalse(compare.meets(1.02, 1.01, 1.05, 1.0, None))
        self.assertFalse(compare.meets(1.04, 0.99, 1.2, 1.0, None))
        self.assertFalse(compare.meets(0.9, 0.89, 0.91, 1.02, 0.98))

    def test_list_names_every_comparison(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            self.assertEqual(compare.main(["--list"]), 0)
        for name in compare.COMPARISONS:
            self.assertIn(name, output.getvalue())


if __name__ == "__main__":
    unittest.main()
