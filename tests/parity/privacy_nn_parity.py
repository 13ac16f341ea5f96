"""privacy_nn_parity.py FOLDER: holds torch.nn's layers against those of gradus (privacy_nn_parity_test.cpp).

Each FOLDER/case_N.safetensors has a trained layer's state (state.*), inputs (in.*) and results (out.*), and its kind
and options as metadata. The state is loaded, strictly, into the layer of torch.nn, whose results must be the same. Then
a new layer is drawn, and its state and results are written to FOLDER/reply_N.safetensors for the other way. Prints each
difference; exit code 1 if there is one.
"""

import pathlib
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

TOLERANCE = 1e-12  # Of the larger of 1 and the largest value; all is float64.
BOOLS = {"bias", "add_bias_kv", "add_zero_attn", "batch_first", "bidirectional"}
LAYERS = {
    "attention": torch.nn.MultiheadAttention,
    "rnn": torch.nn.RNN,
    "gru": torch.nn.GRU,
    "lstm": torch.nn.LSTM,
}


def layer_of(metadata: dict[str, str]) -> torch.nn.Module:
    options: dict[str, object] = {}
    for name, value in metadata.items():
        if name in ("kind", "need_weights", "average_attn_weights"):
            continue
        options[name] = value if name == "nonlinearity" else bool(int(value)) if name in BOOLS else int(value)
    return LAYERS[metadata["kind"]](dtype=torch.float64, **options)


def results_of(layer: torch.nn.Module, metadata: dict[str, str], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    if metadata["kind"] == "attention":
        output, weights = layer(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            key_padding_mask=inputs.get("key_padding_mask"),
            attn_mask=inputs.get("attn_mask"),
            need_weights=bool(int(metadata["need_weights"])),
            average_attn_weights=bool(int(metadata["average_attn_weights"])),
        )
        return [output] if weights is None else [output, weights]
    x = inputs["input"]
    if "lengths" in inputs:
        first = bool(int(metadata["batch_first"]))
        x = pack_padded_sequence(x, inputs["lengths"], batch_first=first, enforce_sorted=False)
    states = [inputs[name] for name in ("h", "c") if name in inputs]
    output, last = layer(x, *([tuple(states)] if len(states) == 2 else states))
    output = output.data if "lengths" in inputs else output
    return [output, *last] if isinstance(last, tuple) else [output, last]


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check(path: pathlib.Path) -> list[str]:
    """Compares one case, and writes its reply."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    inputs, expected = part(tensors, "in."), part(tensors, "out.")
    layer = layer_of(metadata)
    layer.load_state_dict(part(tensors, "state."), strict=True)
    results = results_of(layer, metadata, inputs)
    faults = []
    if len(results) != len(expected):
        faults.append(f"{path.name}: {len(results)} results for {len(expected)}")
    for i, result in enumerate(results[: len(expected)]):
        other = expected[str(i)]
        if other.shape != result.shape:
            faults.append(f"{path.name}: result {i} has shape {tuple(other.shape)}, torch.nn's {tuple(result.shape)}")
            continue
        scale = max(1.0, result.abs().max().item())
        difference = (other - result).abs().max().item() / scale
        if not difference <= TOLERANCE:
            faults.append(f"{path.name} ({metadata}): result {i} differs by {difference:.3g}")

    reply = layer_of(metadata)
    for parameter in reply.parameters():
        parameter.normal_(0, 0.5)
    content = {f"state.{name}": value for name, value in reply.state_dict().items()}
    content |= {f"out.{i}": value.contiguous() for i, value in enumerate(results_of(reply, metadata, inputs))}
    save_file(content, path.with_name(path.name.replace("case_", "reply_")))
    return faults


def main() -> int:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    faults = []
    with torch.no_grad():
        for path in sorted(pathlib.Path(sys.argv[1]).glob("case_*.safetensors")):
            faults += check(path)
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
