"""gpt_parity.py FOLDER: holds gpt_model.py against what the C++ GPT wrote (gpt_parity_test.cpp).

FOLDER/weights.safetensors has the model's state, FOLDER/results.safetensors a batch with its logits and gradients, and
the options and the seed of the weights as metadata. Prints each difference; exit code 1 if there is one.
"""

import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt_model import Gpt, GptOptions  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

LOGIT_TOLERANCE = 1e-5  # Absolute; logits are of order 0.1 here.
GRADIENT_TOLERANCE = 1e-5  # Of the largest value of the gradient at hand.


def main() -> int:
    folder = sys.argv[1]
    torch.set_num_threads(1)
    with safe_open(f"{folder}/results.safetensors", framework="pt") as file:
        metadata = file.metadata()
    options = GptOptions(
        **{key: int(metadata[key]) for key in ("vocabulary", "context", "layers", "heads", "width")},
        bias=bool(int(metadata["bias"])),
    )
    weights = load_file(f"{folder}/weights.safetensors")
    results = load_file(f"{folder}/results.safetensors")
    faults = []

    drawn = Gpt(options)
    drawn.reset_parameters(torch.Generator().manual_seed(int(metadata["seed"])))
    faults += [
        f"{n}: the same seed draws other weights" for n, p in drawn.named_parameters() if not p.equal(weights[n])
    ]

    model = Gpt(options)
    model.load_state_dict(weights)  # Strict: no name missing, none too many.
    logits = model(results["ids"])
    F.cross_entropy(logits.view(-1, options.vocabulary), results["targets"].view(-1)).backward()
    gap = (logits - results["logits"]).abs().max().item()
    if not gap <= LOGIT_TOLERANCE:
        faults.append(f"logits differ by {gap:g} (tolerance {LOGIT_TOLERANCE:g})")
    for name, parameter in model.named_parameters():
        expected = results[f"grad.{name}"]
        gap = (parameter.grad - expected).abs().max().item()
        if not gap <= GRADIENT_TOLERANCE * expected.abs().max().item():
            faults.append(f"gradient of {name} differs by {gap:g}")
    print("\n".join(faults) or "logits and gradients agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
