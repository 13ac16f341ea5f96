"""The peers of gradus_bench_step amp: a training step under torch.autocast.

amp_peer.py gpt|cnn --mode fp32|bf16|fp16 [--threads N] [--seed N] speaks the protocol that bench/compare.py describes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peer_protocol import add_common_arguments, serve  # noqa: E402
from torch import Tensor, nn  # noqa: E402

VOCABULARY, WIDTH, HEADS, LAYERS = 1024, 256, 4, 4
BATCHES = 4
FLOAT16_SCALE = 1024.0


class Block(nn.Module):
    """A GPT block, before each half a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.u, self.v = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.v(F.gelu(self.u(self.n2(x))))


class Gpt(nn.Module):
    """Token embedding, blocks, linear head; no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH)
        self.b = nn.ModuleList(Block() for _ in range(LAYERS))
        self.h = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.e(tokens)
        for block in self.b:
            x = block(x)
        return self.h(x).view(-1, VOCABULARY)


class Cnn(nn.Module):
    """Six convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for out in (64, 128, 256):
            layers += [nn.Conv2d(width, out, 3, 1, 1), nn.BatchNorm2d(out), nn.ReLU()]
            layers += [nn.Conv2d(out, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        self.l = nn.Sequential(*layers)  # noqa: E741
        self.f = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.f(self.l(images).mean((2, 3)))


@torch.no_grad()
def draw(module: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 1:
            if name.endswith("bias"):
                parameter.zero_()
            continue
        fan_in = parameter.numel() // parameter.shape[0]
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)


class Training:
    """One model, its batches and its optimizer."""

    def __init__(self, model: str, mode: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        gpt = model == "gpt"
        self.module = Gpt() if gpt else Cnn()
        draw(self.module, generator)
        self.batches = []
        for _ in range(BATCHES):
            if gpt:
                x = torch.randint(0, VOCABULARY, (4, 128), generator=generator)
                self.batches.append((x, torch.randint(0, VOCABULARY, (512,), generator=generator)))
            else:
                x = torch.randn(32, 3, 32, 32, generator=generator)
                self.batches.append((x, torch.randint(0, 10, (32,), generator=generator)))
        self.dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
        self.scale = FLOAT16_SCALE if mode == "fp16" else 1.0
        rate = (0.01 if gpt else 0.002) / self.scale
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=rate, fused=True)
        self.count = 0

    def step(self) -> float:
        x, y = self.batches[self.count % len(self.batches)]
        self.count += 1
        self.optimizer.zero_grad()
        autocast = torch.autocast("cpu", dtype=self.dtype) if self.dtype else contextlib.nullcontext()
        with autocast:
            loss = F.cross_entropy(self.module(x).float(), y)
        (loss if self.scale == 1 else loss * self.scale).backward()
        self.optimizer.step()
        return loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["gpt", "cnn"])
    parser.add_argument("--mode", choices=["fp32", "bf16", "fp16"], default="bf16")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.model, arguments.mode, arguments.seed)
    return serve("amp", training.step)


if __name__ == "__main__":
    sys.exit(main())
