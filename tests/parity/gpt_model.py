"""The GPT of gradus/models/gpt.h in plain Python: same state names, same operators, same order of random draws."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GptOptions:
    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    bias: bool = True


class Attention(nn.Module):
    def __init__(self, o: GptOptions):
        super().__init__()
        self.heads, self.dropout = o.heads, o.dropout
        self.qkv = nn.Linear(o.width, 3 * o.width, bias=o.bias)
        self.proj = nn.Linear(o.width, o.width, bias=o.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Mlp(nn.Module):
    def __init__(self, o: GptOptions):
        super().__init__()
        self.up = nn.Linear(o.width, 4 * o.width, bias=o.bias)
        self.down = nn.Linear(4 * o.width, o.width, bias=o.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, o: GptOptions):
        super().__init__()
        self.dropout = o.dropout
        self.ln_1 = nn.LayerNorm(o.width)
        self.attn = Attention(o)
        self.ln_2 = nn.LayerNorm(o.width)
        self.mlp = Mlp(o)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.ln_1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Gpt(nn.Module):
    def __init__(self, o: GptOptions):
        super().__init__()
        self.options = o
        self.wte = nn.Embedding(o.vocabulary, o.width)
        self.wpe = nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o) for _ in range(o.layers))
        self.ln_f = nn.LayerNorm(o.width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the weights in the order that GptImpl::reset_parameters documents."""
        residual = 0.02 / math.sqrt(2 * self.options.layers)
        draws = [(self.wte, 0.02), (self.wpe, 0.02)]
        for b in self.blocks:
            draws += [(b.attn.qkv, 0.02), (b.attn.proj, residual), (b.mlp.up, 0.02), (b.mlp.down, residual)]
        for module, deviation in draws:
            module.weight.normal_(0.0, deviation, generator=generator)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        x = F.dropout(x, self.options.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)
