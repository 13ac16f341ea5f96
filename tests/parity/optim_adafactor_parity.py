"""Runs torch.optim's Adam and Adafactor on fixed random gradients for optim_adafactor_parity_test.cpp.

The result is one dict of tensors (torch::pickle_load reads nothing richer), with keys
"<case>/initial/<parameter>", "<case>/gradient/<step>/<parameter>", "<case>/final/<parameter>" and
"<case>/state/<parameter>.<name>".
"""

import math
import sys

import torch
from optim_parity import run_case

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


def main():
    torch.set_num_threads(1)
    out = {}
    for name, (optimizer_class, arguments) in CASES.items():
        run_case(f"{name}_float64", optimizer_class, arguments, torch.float64, SHAPES, out)
        run_case(f"{name}_float32", optimizer_class, arguments, torch.float32, SHAPES, out)
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
