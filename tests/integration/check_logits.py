"""check_logits.py MODEL EXPECTED...: loads a saved model in Python and compares its logits with the C++ program's.

MODEL is a run's model.safetensors; each EXPECTED holds ids [B, T], C++ logits [B, T, V] and the options as metadata.
Prints a line for each, "same logits: ..." or "other logits: ..." with the largest difference. Exit code 77 if torch or
safetensors is not installed.
"""

import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))

TOLERANCE = 1e-5  # Absolute.


def main() -> int:
    try:
        import torch
        from safetensors import safe_open
        from safetensors.torch import load_file
    except ImportError as error:
        print(f"{error}: scripts/setup.sh puts it into .venv")
        return 77
    from gpt_model import Gpt, GptOptions

    torch.set_num_threads(1)
    weights = load_file(sys.argv[1])
    for path in sys.argv[2:]:
        expected = load_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        numbers = {key: int(metadata[key]) for key in ("context", "layers", "heads", "width")}
        model = Gpt(GptOptions(vocabulary=expected["logits"].shape[-1], bias=bool(int(metadata["bias"])), **numbers))
        model.load_state_dict(weights)  # Strict: no name missing, none too many.
        model.eval()
        with torch.no_grad():
            logits = model(expected["ids"])
        gap = (logits - expected["logits"]).abs().max().item()
        verdict = "same" if gap <= TOLERANCE else "other"
        print(f"{verdict} logits: largest difference {gap:g} of {logits.abs().max().item():g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
