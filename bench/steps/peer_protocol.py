"""The protocol of bench/compare.py on the side of the Python peers."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping

import torch


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def serve(
    name: str,
    step: Callable[[], float | None],
    requests: Mapping[str, Callable[[], object]] | None = None,
    loss: Callable[[], float] | None = None,
) -> int:
    """Answers the requests on standard input until it ends; returns the exit code.

    A step is timed without `loss`, which gives the answer's loss where step does not. `requests` are the peer's own.
    """
    own = requests or {}
    print(json.dumps({"ready": name, "torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = line.removesuffix("\n")
        if request in own:
            print(json.dumps(own[request]()), flush=True)
            continue
        if request != "step":
            known = " and ".join(repr(each) for each in ("step", *own))
            print(f"[bench] requests are {known}; got {line!r}", file=sys.stderr)
            return 1
        start, cpu_start = time.perf_counter(), time.process_time()
        value = step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        if loss is not None:
            value = loss()
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": value}), flush=True)
    return 0
