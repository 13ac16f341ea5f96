"""check_events.py RUN: holds a run's TensorBoard events, read by tensorboard itself, against metrics.jsonl.

Prints each difference; exit code 1 if there is one, 77 if tensorboard is not installed.
"""

import json
import struct
import sys
from pathlib import Path

SCALARS = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "memory/peak_bytes": "peak_bytes",
    "validation/loss": "validation_loss",
}


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def main() -> int:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        print("tensorboard is not installed here: scripts/setup.sh puts it into .venv")
        return 77
    run = Path(sys.argv[1])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    faults = []
    for tag, key in SCALARS.items():
        # The newest value of a step counts: a killed run's last steps are done again.
        got = {event.step: event.value for event in events.Scalars(tag)}
        expected = {m["step"]: as_float32(m[key]) for m in metrics if m.get(key) is not None}
        if got != expected:
            steps = sorted(s for s in got.keys() | expected.keys() if got.get(s) != expected.get(s))
            faults.append(f"{tag} differs at steps {steps[:5]}: {[got.get(s) for s in steps[:5]]}")
    print("\n".join(faults) or f"{len(metrics)} steps agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
