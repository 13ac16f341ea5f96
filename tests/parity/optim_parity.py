"""Runs torch.optim on fixed random gradients and writes what it saw for optim_parity_test.cpp.

The result is one dict of tensors (torch::pickle_load reads nothing richer), with keys
"<case>/initial/<parameter>", "<case>/gradient/<step>/<parameter>", "<case>/final/<parameter>",
"<case>/state/<parameter>.<name>" and "<case>/norm/<step>".
"""

import sys

import torch

STEPS = 20
SHAPES = [(7, 5), (11,), (3, 2, 2), ()]
CASES = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_amsgrad": (
        torch.optim.AdamW,
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adamw_maximize": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
}


def run_case(name, optimizer_class, arguments, dtype, shapes, out, clip=False):
    """Records one optimizer on parameters of `shapes`: also for optim_adafactor_parity.py."""
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    for index, parameter in enumerate(parameters):
        out[f"{name}/initial/{index}"] = parameter.detach().clone()
    # The plain Python loop, not the kernels that the C++ side calls: an oracle of its own.
    optimizer = optimizer_class(parameters, foreach=False, **arguments)
    for step in range(STEPS):
        for index, parameter in enumerate(parameters):
            # The last parameter joins late: its step count and its first momentum differ.
            joined = index + 1 < len(parameters) or step >= 5
            parameter.grad = None
            if joined:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                out[f"{name}/gradient/{step}/{index}"] = parameter.grad.clone()
        if clip:
            out[f"{name}/norm/{step}"] = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
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
        arguments = {"fused": False, **arguments}
        run_case(f"{name}_float64", optimizer_class, arguments, torch.float64, SHAPES, out)
        run_case(f"{name}_float32", optimizer_class, arguments, torch.float32, SHAPES, out)
    adamw, arguments = CASES["adamw"]
    run_case("adamw_clipped_float64", adamw, {"fused": False, **arguments}, torch.float64, SHAPES, out, clip=True)
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
