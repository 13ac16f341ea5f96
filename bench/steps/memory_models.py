"""The models of bench/steps/memory_models.h in plain torch, cut into blocks for torch.utils.checkpoint.

A model has blocks: functions from a tuple of tensors to a tuple of tensors, to be run one after the other between
start() and loss(). The tuple carries what later blocks need, as skip connections.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "parity"))
from gpt_model import Gpt, GptOptions  # noqa: E402

State = tuple[Tensor, ...]
Block = Callable[..., State]


class MemoryModel:
    """A module, its batch and its blocks."""

    module: nn.Module
    batch: list[Tensor]
    blocks: list[Block]
    learning_rate = 1e-3

    def start(self) -> State:
        raise NotImplementedError

    def loss(self, *state: Tensor) -> Tensor:
        raise NotImplementedError

    def name(self, parameter: str) -> str:
        """What the C++ model calls a parameter."""
        return parameter

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """As memory_models.cpp: in the order of the C++ names, matrices from N(0, 1 / fan-in)."""
        for name, parameter in sorted((self.name(name), p) for name, p in self.module.named_parameters()):
            if parameter.dim() >= 2:
                fan_in = parameter.numel() // parameter.size(0)
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def single(function: Callable[[Tensor], Tensor]) -> Block:
    """A block of the state's first tensor; the others pass by."""
    return lambda x, *rest: (function(x), *rest)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


class MlpChain(MemoryModel):
    learning_rate = 0.5

    def __init__(self, generator: torch.Generator):
        width, layers, batch = 256, 24, 4096
        parts: list[nn.Module] = []
        for i in range(layers):
            parts += [nn.GELU()] if i > 0 else []
            parts += [nn.Linear(width, width)]
        self.module = nn.Sequential(*parts)
        self.draw_weights(generator)
        self.x = torch.randn(batch, width, generator=generator)
        self.y = torch.randint(0, width, (batch,), generator=generator)
        self.batch = [self.x, self.y]
        self.blocks = [single(self.module[i : i + 2]) for i in range(0, len(self.module), 2)]

    def start(self) -> State:
        return (self.x,)

    def loss(self, *state: Tensor) -> Tensor:
        return cross_entropy(state[0], self.y)


class Gpt12(MemoryModel):
    def __init__(self, generator: torch.Generator):
        options = GptOptions(vocabulary=1024, context=256, layers=12, heads=8, width=256)
        self.module = Gpt(options)
        self.draw_weights(generator)
        self.x, self.y = (torch.randint(0, 1024, (2, 256), generator=generator) for _ in range(2))
        self.batch = [self.x, self.y]
        self.blocks = [single(block) for block in self.module.blocks]

    def start(self) -> State:
        return (self.module.wte(self.x) + self.module.wpe.weight,)

    def loss(self, *state: Tensor) -> Tensor:
        return cross_entropy(F.linear(self.module.ln_f(state[0]), self.module.wte.weight), self.y)


class BareBlock(nn.Module):
    def __init__(self, width: int = 256, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.u, self.v = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.v(F.gelu(self.u(self.n2(x))))


class BareGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(1024, 256)
        self.b = nn.ModuleList(BareBlock() for _ in range(16))
        self.h = nn.Linear(256, 1024, bias=False)


class Gpt16(MemoryModel):
    def __init__(self, generator: torch.Generator):
        self.module = BareGpt()
        self.draw_weights(generator)
        self.x, self.y = (torch.randint(0, 1024, (8, 256), generator=generator) for _ in range(2))
        self.batch = [self.x, self.y]
        self.blocks = [single(block) for block in self.module.b]

    def start(self) -> State:
        return (self.module.e(self.x),)

    def loss(self, *state: Tensor) -> Tensor:
        return cross_entropy(self.module.h(state[0]), self.y)


class ResNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(32, outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64)
        inputs = 64
        for stage in range(4):
            outputs = 64 << stage
            first = ResNetBlock(inputs, outputs, 1 if stage == 0 else 2)
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, ResNetBlock(outputs, outputs, 1)))
            inputs = outputs
        self.fc = nn.Linear(inputs, 10)


class ResNet18(MemoryModel):
    def __init__(self, generator: torch.Generator):
        self.module = net = ResNet()
        self.draw_weights(generator)
        self.x = torch.randn(8, 3, 64, 64, generator=generator)
        self.y = torch.randint(0, 10, (8,), generator=generator)
        self.batch = [self.x, self.y]
        self.blocks = [single(block) for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage]

    def start(self) -> State:
        return (F.relu(self.module.bn1(self.module.conv1(self.x))),)

    def loss(self, *state: Tensor) -> Tensor:
        return cross_entropy(self.module.fc(state[0].mean((2, 3))), self.y)


class UNetStage(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNetUp(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * outputs, outputs, 2, 2)
        self.stage = UNetStage(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.stage(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int, levels: int):
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(UNetStage(a, b) for a, b in zip([inputs, *widths], widths, strict=False))
        self.bottom = UNetStage(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(UNetUp(w) for w in reversed(widths))
        self.out = nn.Conv2d(width, outputs, 1)


class UNetModel(MemoryModel):
    """A block is a level: on the way down with its pooling, on the way up with its skip."""

    def __init__(self, generator: torch.Generator):
        self.module = net = UNet(3, 4, 16, 4)
        self.draw_weights(generator)
        self.x = torch.randn(4, 3, 128, 128, generator=generator)
        self.y = torch.randint(0, 4, (4, 128, 128), generator=generator)
        self.batch = [self.x, self.y]
        self.blocks = [self._down(stage) for stage in net.down]
        self.blocks += [single(net.bottom)]
        self.blocks += [self._up(level) for level in net.up]

    @staticmethod
    def _down(stage: nn.Module) -> Block:
        def run(x: Tensor, *skips: Tensor) -> State:
            y = stage(x)
            return (F.max_pool2d(y, 2), *skips, y)

        return run

    @staticmethod
    def _up(level: nn.Module) -> Block:
        return lambda x, *skips: (level(x, skips[-1]), *skips[:-1])

    def start(self) -> State:
        return (self.x,)

    def loss(self, *state: Tensor) -> Tensor:
        return F.cross_entropy(self.module.out(state[0]), self.y)


class LstmLanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.ModuleList(nn.LSTM(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)


class Lstm(MemoryModel):
    """One-layer LSTMs, which compute what one of several layers does."""

    learning_rate = 0.5

    def __init__(self, generator: torch.Generator):
        self.module = LstmLanguageModel(1024, 256, 4)
        self.draw_weights(generator)
        self.x, self.y = (torch.randint(0, 1024, (32, 64), generator=generator) for _ in range(2))
        self.batch = [self.x, self.y]
        self.blocks = [single(self._layer(layer)) for layer in self.module.lstm]

    @staticmethod
    def _layer(layer: nn.LSTM) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x)[0]

    def name(self, parameter: str) -> str:
        match = re.fullmatch(r"lstm\.(\d+)\.(\w+)_l0", parameter)
        return f"lstm.{match[2]}_l{match[1]}" if match else parameter

    def start(self) -> State:
        return (self.module.embedding(self.x.t().contiguous()),)

    def loss(self, *state: Tensor) -> Tensor:
        return cross_entropy(self.module.head(state[0].transpose(0, 1).contiguous()), self.y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
        B, T, C = x.shape
        q = self.query(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k, v = self.key_value(memory).view(B, -1, 2, self.heads, C // self.heads).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
        return self.output(y.transpose(1, 2).reshape(B, T, C))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        asks = self.norm_1(x)
        x = x + self.attention(asks, asks, visible, False)
        return x + self.down(F.relu(self.up(self.norm_2(x))))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = Attention(width, heads), Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        asks = self.norm_1(x)
        x = x + self.attention(asks, asks, None, True)
        x = x + self.cross(self.norm_2(x), memory, visible, False)
        return x + self.down(F.relu(self.up(self.norm_3(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.source_embedding, self.target_embedding = (nn.Embedding(vocabulary, width) for _ in range(2))
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        frequencies = (torch.arange(0, width, 2, dtype=torch.double) * (-math.log(10000.0) / width)).exp()
        angles = torch.arange(context, dtype=torch.double).unsqueeze(1) * frequencies
        table = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
        self.register_buffer("positions", table, persistent=False)

    def embed(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        x = table(ids) * math.sqrt(table.embedding_dim)
        return x + self.positions[: ids.size(1)].to(x.dtype)


class EncoderDecoder(MemoryModel):
    """The state is (encoder's stream, visible keys), then (decoder's stream, memory, visible keys)."""

    def __init__(self, generator: torch.Generator):
        self.module = net = Transformer(1024, 128, 4, 256, 8, 1024)
        self.draw_weights(generator)
        self.source, self.target, self.y = (torch.randint(0, 1024, (4, 128), generator=generator) for _ in range(3))
        self.padding = torch.zeros(4, 128, dtype=torch.bool)
        for i in range(4):
            self.padding[i, 128 - 8 * i :] = True
        self.batch = [self.source, self.target, self.y, self.padding]
        self.blocks = [self._encode(layer) for layer in net.encoder]
        self.blocks += [self._decode(layer, first=i == 0) for i, layer in enumerate(net.decoder)]

    @staticmethod
    def _encode(layer: EncoderLayer) -> Block:
        return lambda x, visible: (layer(x, visible), visible)

    def _decode(self, layer: DecoderLayer, first: bool) -> Block:
        def run(*state: Tensor) -> State:
            if first:
                x, visible = state
                memory = self.module.encoder_norm(x)
                x = self.module.embed(self.module.target_embedding, self.target)
            else:
                x, memory, visible = state
            return (layer(x, memory, visible), memory, visible)

        return run

    def start(self) -> State:
        visible = self.padding.logical_not().unsqueeze(1).unsqueeze(1)
        return (self.module.embed(self.module.source_embedding, self.source), visible)

    def loss(self, *state: Tensor) -> Tensor:
        logits = F.linear(self.module.decoder_norm(state[0]), self.module.target_embedding.weight)
        return cross_entropy(logits, self.y)


MODELS: dict[str, Callable[[torch.Generator], MemoryModel]] = {
    "mlp": MlpChain,
    "resnet": ResNet18,
    "unet": UNetModel,
    "gpt": Gpt12,
    "lstm": Lstm,
    "transformer": EncoderDecoder,
    "gpt16": Gpt16,
}
