"""The peers of gradus_bench_step optim: torch.optim's steps on the same parameters and gradients.

optim_peer.py optim --mode adamw|adam|adafactor|sgd [--threads N] [--seed N] speaks the protocol that bench/compare.py
describes.
"""

import argparse
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from peer_protocol import add_common_arguments, serve  # noqa: E402

WIDTH, VOCABULARY, CONTEXT, LAYERS = 512, 8192, 1024, 5


def shapes() -> list[tuple[int, ...]]:
    block: list[tuple[int, ...]] = [
        (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,),
        (WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,),
    ]  # fmt: skip
    result = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *(LAYERS * block), (VOCABULARY, WIDTH)]
    for channels in (64, 128):
        result += [(channels, channels, 3, 3), (channels,)]
    return result


def make_optimizer(mode: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if mode == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if mode == "adam":
        return torch.optim.Adam(parameters, lr=1e-3, fused=True)
    if mode == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)
    return torch.optim.Adafactor(parameters, lr=1e-3, foreach=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["optim"])
    parser.add_argument("--mode", choices=["adamw", "adam", "adafactor", "sgd"], required=True)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    parameters = []
    for shape in shapes():
        parameters.append(torch.randn(shape, generator=generator).mul_(0.02).requires_grad_())
        parameters[-1].grad = torch.randn(shape, generator=generator).mul_(1e-3)
    optimizer = make_optimizer(arguments.mode, parameters)

    def state() -> dict[str, int]:
        tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return {"state_bytes": sum(t.untyped_storage().nbytes() for t in tensors)}

    @torch.no_grad()
    def loss() -> float:
        return sum(abs(p.view(-1)[0].item()) for p in parameters)

    return serve("optim", optimizer.step, {"state": state}, loss)


if __name__ == "__main__":
    sys.exit(main())
