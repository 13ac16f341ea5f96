"""Runs operators and two small nets under torch.autocast on the CPU for amp_autocast_parity_test.cpp to compare.

The result is one dict of tensors: "operator/<name>" is an operator's result; "<net>/weight/<name>" a net's first
weights, "<net>/input/<step>" and "<net>/target/<step>" its batches, "<net>/activation/<name>" results of layers in the
first step, "<net>/loss/<step>" and, after the last step, "<net>/final/<name>".
"""

import sys

import torch
import torch.nn.functional as F

STEPS = 8
RATE = 0.1


def operators(out):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(6, 6, generator=generator) for _ in range(2))
    p = torch.rand(6, 6, generator=generator)
    c = a.bfloat16()
    image = torch.randn(2, 4, 8, 8, generator=generator)
    kernel = torch.randn(4, 4, 3, 3, generator=generator)
    q = torch.randn(1, 2, 4, 8, generator=generator)
    index = torch.tensor([0, 2])
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    for name, tensor in {"a": a, "b": b, "p": p, "image": image, "kernel": kernel, "q": q}.items():
        out["input/" + name] = tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = {
            "mm": torch.mm(a, b),
            "linear": F.linear(a, b),
            "addmm": torch.addmm(a, a, b),
            "bmm": torch.bmm(a[None], b[None]),
            "matmul": a @ b,
            "conv2d": F.conv2d(image, kernel),
            "conv_transpose2d": F.conv_transpose2d(image, kernel),
            "attention": F.scaled_dot_product_attention(q, q, q),
            "prelu": F.prelu(c, p[0, :1]),
            "softmax": c.softmax(-1),
            "layer_norm": F.layer_norm(c, (6,)),
            "batch_norm": F.batch_norm(image.bfloat16(), None, None, training=True),
            "sum": c.sum(),
            "exp": c.exp(),
            "gelu": F.gelu(c),
            "add": c + a,
            "mse_loss": F.mse_loss(c, b),
            "cross_entropy": F.cross_entropy(c, labels),
            "binary_cross_entropy": F.binary_cross_entropy(p.bfloat16(), p),
            "smooth_l1_loss": F.smooth_l1_loss(c, b),
            "cdist": torch.cdist(c, c),
            "trace": c.trace(),
            "prod": c.prod(),
            "inverse": torch.inverse(c),
            "cat": torch.cat([c, a]),
            "cat_lower": torch.cat([c, c]),
            "stack": torch.stack([a, c]),
            "index_copy": a.index_copy(0, index, c[:2]),
        }
    for name, tensor in results.items():
        out["operator/" + name] = tensor.detach()


def gpt(w, x, note):
    h = F.embedding(x, w["embedding"])
    for i in range(2):
        layer = f"{i}."
        t = note(layer + "norm1", F.layer_norm(h, (32,), w[layer + "norm1"]))
        t = note(layer + "qkv", F.linear(t, w[layer + "qkv"]))
        q, k, v = t.view(*x.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        t = note(layer + "attention", F.scaled_dot_product_attention(q, k, v, is_causal=True))
        t = note(layer + "proj", F.linear(t.transpose(1, 2).reshape(h.shape), w[layer + "proj"]))
        h = note(layer + "sum", h + t)
        t = F.linear(F.layer_norm(h, (32,), w[layer + "norm2"]), w[layer + "up"])
        h = h + F.linear(note(layer + "gelu", F.gelu(t)), w[layer + "down"])
    return note("logits", F.linear(h, w["embedding"])).flatten(0, 1)


def cnn(w, x, note):
    for i in range(2):
        x = note(f"{i}.conv", F.conv2d(x, w[f"{i}.conv"], padding=1, stride=2))
        x = note(f"{i}.norm", F.batch_norm(x, None, None, w[f"{i}.norm"], training=True))
        x = F.relu(x)
    return note("logits", F.linear(note("mean", x.mean((2, 3))), w["head"]))


def train(name, net, shapes, batch, out):
    generator = torch.Generator().manual_seed(5)
    w = {}
    for key, shape in shapes.items():
        w[key] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        out[f"{name}/weight/{key}"] = w[key].clone()
        w[key].requires_grad_()
    for step in range(STEPS):
        x, y = batch(generator)
        out[f"{name}/input/{step}"], out[f"{name}/target/{step}"] = x, y

        def note(key, tensor, first=step == 0):
            if first:
                out[f"{name}/activation/{key}"] = tensor.detach().clone()
            return tensor

        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(w, x, note), y)
        loss.backward()
        out[f"{name}/loss/{step}"] = loss.detach()
        with torch.no_grad():
            for parameter in w.values():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    for key, tensor in w.items():
        out[f"{name}/final/{key}"] = tensor.detach().clone()


def main():
    torch.set_num_threads(1)
    out = {}
    operators(out)
    shapes = {"embedding": (64, 32)}
    for i in range(2):
        shapes |= {f"{i}.norm1": (32,), f"{i}.qkv": (96, 32), f"{i}.proj": (32, 32)}
        shapes |= {f"{i}.norm2": (32,), f"{i}.up": (128, 32), f"{i}.down": (32, 128)}
    train(
        "gpt", gpt, shapes,
        lambda g: (torch.randint(0, 64, (2, 16), generator=g), torch.randint(0, 64, (32,), generator=g)), out,
    )  # fmt: skip
    shapes = {"0.conv": (8, 3, 3, 3), "0.norm": (8,), "1.conv": (16, 8, 3, 3), "1.norm": (16,), "head": (10, 16)}
    train(
        "cnn", cnn, shapes,
        lambda g: (torch.randn(8, 3, 16, 16, generator=g), torch.randint(0, 10, (8,), generator=g)), out,
    )  # fmt: skip
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
