"""Runs torch.optim's Adam and Adafactor on fixed random gradients for optim_adafactor_parity_test.cpp.

The result is one dict of tensors (torch::pickle_load reads nothing richer), with keys
"<case>/initial/<parameter>", "<case>/gradient/<step>/<parameter>", "<case>/final/<parameter>" and
"<case>/state/<parameter>.<name>".
"""

import math
import sys

import torch

STEPS = 20
SHAPES = [(70, 50), (11,), (6, 4, 3, 3), (1, 9), ()]
CASES = {
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam_amsgrad": (
        torch.optim.Adam,
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adam_maximize": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adafactor_decay": (torch.optim.Adafactor, {"lr": 1e-1, "weight_decay": 0.1, "maximize": True}),
    "adafactor_eps": (
        torch.optim.Adafactor,
        {"lr": 2e-2, "beta2_decay": -0.5, "eps": (0.5, 2.0), "d": 1.5},
    ),
    "adafactor_no_clip": (torch.optim.Adafactor, {"lr": 5e-2, "d": math.inf}),
}


def run_case(name, optimizer_class, arguments, dtype, out):
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES]
    for index, parameter in enumerate(parameters):
        out[f"{name}/initial/{index}"] = parameter.detach().clone()
    # The plain Python loop, not the kernels that the C++ side calls: an oracle of its own.
    optimizer = optimizer_class(parameters, foreach=False, **arguments)
    for step in range(STEPS):
        for index, parameter in enumerate(parameters):
            # The last parameter joins late: its step count differs.
            parameter.grad = None
            if index + 1 < len(parameters) or step >= 5:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                out[f"{name}/gradient/{step}/{index}"] = parameter.grad.clone()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        out[f"{name}/final/{index}"] = parameter.detach().clone()
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if torch.is_tensor(value):
                out[f"{name}/state/{index}.{key}"] = value.clone()


def main():
    torch.set_num_threads(1)
    out = {}
    for name, (optimizer_class, arguments) in CASES.items():
        run_case(f"{name}_float64", optimizer_class, arguments, torch.float64, out)
        run_case(f"{name}_float32", optimizer_class, arguments, torch.float32, out)
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
