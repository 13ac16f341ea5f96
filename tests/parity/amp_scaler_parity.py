"""Runs 50 random scripts under torch.amp.GradScaler("cpu") and writes what it saw for amp_scaler_parity_test.cpp.

The result is one dict; for each script N:
  "<N>/script"    the script as text, one operation a line (class Run says what each does)
  "<N>/initial"   the parameters of all models, flat
  "<N>/inputs"    the inputs of its forward passes, [passes, BATCH, INPUTS]
  "<N>/steps"     for each step operation whether the optimizer stepped
  "<N>/scales"    [updates, 2]: scale and growth tracker after each update
  "<N>/parameters" [updates, parameters]
"""

import random
import sys

import torch

SEEDS = 5
BATCH, INPUTS, HIDDEN, OUTPUTS = 5, 4, 6, 3
SHAPES = [(HIDDEN, INPUTS), (HIDDEN,), (OUTPUTS, HIDDEN), (OUTPUTS,)]


def sizes():
    return [int(torch.Size(shape).numel()) for shape in SHAPES]


class Counting:
    """An optimizer that tells whether the scaler let it step."""

    def __init__(self, optimizer):
        self.stepped = False
        original = optimizer.step

        def step(*args, **kwargs):
            self.stepped = True
            return original(*args, **kwargs)

        optimizer.step = step
        self.optimizer = optimizer


class Run:
    """One script's models, optimizers and scaler; each method is one operation of the script."""

    def __init__(self, initial, inputs):
        self.flat, self.inputs, self.passes = initial, inputs, 0
        self.models, self.optimizers, self.outputs = [], [], []
        self.steps, self.scales, self.parameters = [], [], []

    def scaler(self, scale, growth, backoff, interval, enabled):
        self.scaler_object = torch.amp.GradScaler(
            "cpu", float(scale), float(growth), float(backoff), int(interval), enabled == "1"
        )

    def model(self, squeeze):
        """`squeeze`: gradients above 3.4e4 overflow, as they would in float16."""
        offset = len(self.models) * sum(sizes())
        parts = self.flat[offset : offset + sum(sizes())].split(sizes())
        parameters = [part.clone().view(shape).requires_grad_() for part, shape in zip(parts, SHAPES, strict=True)]
        self.models.append((parameters, squeeze == "1"))

    def optimizer(self, kind, rate, *models):
        parameters = [p for m in models for p in self.models[int(m)][0]]
        if kind == "adamw":
            made = torch.optim.AdamW(parameters, lr=float(rate), foreach=False)
        else:
            momentum = 0.9 if kind == "momentum" else 0.0
            made = torch.optim.SGD(parameters, lr=float(rate), momentum=momentum, foreach=False)
        self.optimizers.append(Counting(made))

    def owned(self, index):
        return [p for group in self.optimizers[int(index)].optimizer.param_groups for p in group["params"]]

    def zero(self, optimizer):
        self.optimizers[int(optimizer)].optimizer.zero_grad()

    def forward(self):
        x = self.inputs[self.passes]
        self.passes += 1
        self.outputs = []
        for (w1, b1, w2, b2), squeeze in self.models:
            y = torch.tanh(x @ w1.t() + b1) @ w2.t() + b2
            if squeeze:
                y = (y * 1e-34) * 1e34
            self.outputs.append((y * y).mean())

    def loss(self, coefficients):
        total = torch.zeros(())
        for coefficient, output in zip(coefficients, self.outputs, strict=True):
            if float(coefficient) != 0:
                total = total + float(coefficient) * output
        return total

    def backward(self, retain, *coefficients):
        self.scaler_object.scale(self.loss(coefficients)).backward(retain_graph=retain == "1")

    def penalty(self, *coefficients):
        loss = self.loss(coefficients)
        chosen = [p for m, c in enumerate(coefficients) if float(c) != 0 for p in self.models[m][0]]
        scaled = torch.autograd.grad(self.scaler_object.scale(loss), chosen, create_graph=True)
        inverse = 1.0 / self.scaler_object.get_scale()
        norm = torch.zeros(())
        for gradient in scaled:
            norm = norm + (gradient * inverse).square().sum()
        self.scaler_object.scale(loss + norm.sqrt()).backward()

    def poison(self, model, parameter, value):
        gradient = self.models[int(model)][0][int(parameter)].grad
        gradient.view(-1)[-1] = float(value)

    def unscale(self, optimizer):
        self.scaler_object.unscale_(self.optimizers[int(optimizer)].optimizer)

    def clip_norm(self, optimizer, bound):
        torch.nn.utils.clip_grad_norm_(self.owned(optimizer), float(bound))

    def clip_value(self, optimizer, bound):
        torch.nn.utils.clip_grad_value_(self.owned(optimizer), float(bound))

    def step(self, optimizer):
        counting = self.optimizers[int(optimizer)]
        counting.stepped = False
        self.scaler_object.step(counting.optimizer)
        self.steps.append(float(counting.stepped))

    def update(self, scale=None):
        self.scaler_object.update(None if scale is None else float(scale))
        # There is no public name for the tracker of a disabled scaler, or an enabled one.
        self.scales.append([self.scaler_object.get_scale(), float(self.scaler_object._get_growth_tracker())])
        self.parameters.append(torch.cat([p.detach().reshape(-1) for model, _ in self.models for p in model]))

    def reload(self):
        """Goes on with a new scaler that has other settings until it loads the old one's state."""
        state = self.scaler_object.state_dict()
        self.scaler_object = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=7)
        self.scaler_object.load_state_dict(state)


def write_script(kind, rng):
    """The lines of a script of one kind."""
    models = 1 if kind in ("plain", "growth", "penalty") else rng.randint(1, 3)
    if kind == "several":
        models = rng.randint(2, 3)
    squeeze = int(rng.random() < 0.5 or kind == "growth")
    interval = rng.randint(2, 3) if kind == "growth" else rng.randint(3, 6)
    growth, backoff = rng.choice([(2.0, 0.5), (2.0, 0.5), (1.7, 0.3), (4.0, 0.25)])
    scale = rng.choice([2.0**16, 2.0**10, 2.0**20, 1000.0])
    lines = [f"scaler {scale} {growth} {backoff} {interval} {int(kind != 'disabled')}"]
    lines += [f"model {squeeze}"] * models
    if models == 1 or (kind != "several" and rng.random() < 0.3):
        groups = [list(range(models))]
    else:
        groups = [[m] for m in range(models)]
    for group in groups:
        optimizer = rng.choice(["sgd 0.05", "momentum 0.02", "adamw 0.01"])
        lines.append(f"optimizer {optimizer} " + " ".join(map(str, group)))
    every = range(len(groups))
    for _ in range(14):
        lines += iteration(kind, rng, models, groups)
        if kind == "reload" and rng.random() < 0.4:
            lines.append("reload")
    lines += [f"zero {k}" for k in every]
    return lines


def iteration(kind, rng, models, groups):
    every = range(len(groups))
    lines = [f"zero {k}" for k in every]
    window = rng.randint(2, 4) if kind == "accumulate" else 1
    # The disabled scaler has nobody to skip for: its parameters would become NaN and equal nothing.
    overflow = rng.random() < (0.1 if kind == "growth" else 0.3) and kind != "disabled"
    at = rng.randrange(window)
    for micro in range(window):
        lines.append("forward")
        coefficients = [round(rng.uniform(0.2, 3.0), 3) for _ in range(models)]
        if overflow and micro == at and rng.random() < 0.5:
            coefficients[rng.randrange(models)] = rng.choice(["inf", "nan"])
            overflow = False
        weights = " ".join(str(c) for c in coefficients)
        if kind == "penalty":
            lines.append(f"penalty {weights}")
        elif kind == "several" and rng.random() < 0.6:
            other = " ".join(str(round(rng.uniform(-5.0, 5.0), 3)) for _ in range(models))
            lines += [f"backward 1 {weights}", f"backward 0 {other}"]
        else:
            lines.append(f"backward 0 {weights}")
        if overflow and micro == at:
            value = rng.choice(["inf", "-inf", "nan"])
            lines.append(f"poison {rng.randrange(models)} {rng.randrange(len(SHAPES))} {value}")
    order = list(every)
    rng.shuffle(order)
    for k in order:
        if kind == "norm" or (kind not in ("plain", "value") and rng.random() < 0.3):
            # A clip of the last optimizer before the first steps, or each before its own step.
            lines += [f"unscale {k}", f"clip_norm {k} {round(rng.uniform(0.01, 2.0), 3)}"]
        elif kind == "value":
            lines += [f"unscale {k}", f"clip_value {k} {round(rng.uniform(0.001, 0.5), 3)}"]
        elif rng.random() < 0.2:
            lines.append(f"unscale {k}")
        if rng.random() < 0.5:
            lines.append(f"step {k}")
    lines += [f"step {k}" for k in order if f"step {k}" not in lines]
    fixed = kind == "static" or rng.random() < 0.05
    lines.append(f"update {rng.choice([64.0, 1024.0, 333.0, 2.0**15])}" if fixed and rng.random() < 0.7 else "update")
    return lines


KINDS = ["plain", "several", "norm", "value", "penalty", "accumulate", "reload", "growth", "static", "disabled"]


def main():
    torch.set_num_threads(1)
    out = {}
    number = 0
    for kind in KINDS:
        for seed in range(SEEDS):
            rng = random.Random(f"{kind} {seed}")
            lines = write_script(kind, rng)
            generator = torch.Generator().manual_seed(number)
            models = sum(line.startswith("model") for line in lines)
            passes = sum(line == "forward" for line in lines)
            initial = 0.5 * torch.randn(models * sum(sizes()), generator=generator)
            inputs = torch.randn(passes, BATCH, INPUTS, generator=generator)
            run = Run(initial, inputs)
            for line in lines:
                name, *arguments = line.split()
                getattr(run, name)(*arguments)
            out[f"{number}/script"] = f"# {kind} {seed}\n" + "\n".join(lines) + "\n"
            out[f"{number}/initial"] = initial
            out[f"{number}/inputs"] = inputs
            out[f"{number}/steps"] = torch.tensor(run.steps)
            out[f"{number}/scales"] = torch.tensor(run.scales, dtype=torch.float64)
            out[f"{number}/parameters"] = torch.stack(run.parameters)
            number += 1
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
