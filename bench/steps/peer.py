"""The Python peers of gradus_bench_step: same model, sizes, weights, data and optimizer in eager torch.

peer.py gpt-step|mlp-step [--threads N] [--seed N] speaks the protocol that bench/compare.py describes.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peer_protocol import add_common_arguments, serve  # noqa: E402
from torch import nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "parity"))
from gpt_model import Gpt, GptOptions  # noqa: E402

Step = Callable[[], float]


def gpt_step(generator: torch.Generator) -> Step:
    options = GptOptions(vocabulary=1024, context=128, layers=6, heads=8, width=256)
    model = Gpt(options)
    model.reset_parameters(generator)
    batches = [torch.randint(0, options.vocabulary, (8, options.context + 1), generator=generator) for _ in range(8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    count = 0

    def step() -> float:
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.view(-1, options.vocabulary), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def mlp_step(generator: torch.Generator) -> Step:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)
    inputs = torch.randn(32, 64, generator=generator)
    targets = torch.randint(0, 10, (32,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> float:
        for _ in range(100):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return loss.item()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["gpt-step", "mlp-step"])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    step = {"gpt-step": gpt_step, "mlp-step": mlp_step}[arguments.name](generator)
    return serve(arguments.name, step)


if __name__ == "__main__":
    sys.exit(main())
