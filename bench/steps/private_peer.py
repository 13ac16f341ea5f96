"""The peers of gradus_bench_step private: DP-SGD by Opacus on the same models, sizes and weights.

private_peer.py cnn|resnet|lstm|gpt|embedding --mode plain|hooks|functorch|ew|ghost [--threads N] [--seed N] speaks the
protocol that bench/compare.py describes. Needs opacus 1.6.0 (scripts/setup_peers.sh).
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peer_protocol import add_common_arguments, serve  # noqa: E402
from torch import Tensor, nn  # noqa: E402

LEARNING_RATE, MAX_NORM, NOISE = 0.01, 1.0, 1.0


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.f1, self.f2 = nn.Linear(32 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.c1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.c2(x)), 2, 1)
        return self.f2(F.relu(self.f1(x.flatten(1))))


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels), channels)


class Residual(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False), group_norm(width)
        self.c2, self.n2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), group_norm(width)
        self.sc = nn.Sequential()
        if width_in != width or stride != 1:
            self.sc = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), group_norm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.n2(self.c2(F.relu(self.n1(self.c1(x)))))
        return F.relu(y + self.sc(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(3, 64, 3, 1, 1, bias=False), group_norm(64)
        blocks, width_in = [], 64
        for width in (64, 128, 256, 512):
            blocks += [Residual(width_in, width, 1 if width == 64 else 2), Residual(width, width, 1)]
            width_in = width
        self.l, self.f = nn.ModuleList(blocks), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.c(x)))
        for block in self.l:
            x = block(x)
        return self.f(x.mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.e, self.r, self.f = nn.Embedding(1000, 64), layer(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.r(self.e(x))[0][:, -1])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.u, self.v = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.v(F.gelu(self.u(self.n2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(8192, 256), nn.Embedding(128, 256)
        self.b = nn.Sequential(*[Block(256, 4) for _ in range(4)])
        self.n, self.head = nn.LayerNorm(256), nn.Linear(256, 8192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Contiguous: Opacus' ghost norms of an Embedding take a view of the indices.
        positions = torch.arange(x.shape[1]).expand(x.shape).contiguous()
        return self.head(self.n(self.b(self.e(x) + self.p(positions))))


class EmbeddingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(50000, 128), nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(self.e(x).mean(1))))


def make(name: str, mode: str, generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def images(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "cnn":
        return Cnn(), images(256, 1, 28, 28), integers(10, 256)
    if name == "resnet":
        return ResNet(), images(64, 3, 32, 32), integers(10, 64)
    if name == "lstm":
        if mode == "plain":
            return Lstm(nn.LSTM), integers(1000, 64, 64), integers(10, 64)
        from opacus.layers import DPLSTM

        return Lstm(DPLSTM), integers(1000, 64, 64), integers(10, 64)
    if name == "gpt":
        return Gpt(), integers(8192, 16, 128), integers(8192, 16, 128)
    return EmbeddingNet(), integers(50000, 64, 32), integers(10, 64)


class Training:
    def __init__(self, name: str, mode: str, seed: int) -> None:
        torch.manual_seed(seed)
        model, self.inputs, self.targets = make(name, mode, torch.Generator().manual_seed(seed))
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.ghost = mode == "ghost"
        if mode == "plain":
            return
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(self.inputs, self.targets), batch_size=len(self.inputs))
        arguments = dict(
            module=model, optimizer=self.optimizer, data_loader=loader, noise_multiplier=NOISE, max_grad_norm=MAX_NORM,
            poisson_sampling=False, clipping="flat", grad_sample_mode=mode,
        )  # fmt: skip
        if self.ghost:
            made = PrivacyEngine(accountant="rdp").make_private(criterion=self.criterion, **arguments)
            self.model, self.optimizer, self.criterion, _ = made
        else:
            self.model, self.optimizer, _ = PrivacyEngine(accountant="rdp").make_private(**arguments)

    def step(self) -> float:
        self.optimizer.zero_grad()
        outputs = self.model(self.inputs)
        flat, targets = outputs.reshape(-1, outputs.shape[-1]), self.targets.reshape(-1)
        if self.ghost and self.targets.dim() == 2:
            loss = self.criterion(flat, targets, shape=self.targets.shape)
        else:
            loss = self.criterion(flat, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["cnn", "resnet", "lstm", "gpt", "embedding"])
    parser.add_argument("--mode", choices=["plain", "hooks", "functorch", "ew", "ghost"], required=True)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.model, arguments.mode, arguments.seed)
    return serve(f"{arguments.model} {arguments.mode}", training.step)


if __name__ == "__main__":
    raise SystemExit(main())
