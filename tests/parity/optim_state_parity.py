"""Exchanges optimizer state with optim_state_parity_test.cpp, in flat safetensors files.

record <folder>    runs torch.optim and torch's schedulers and writes, for each case, <case>.before (parameters and
                   state after some steps), <case>.steps (gradients of more steps and the parameters after them), and
                   schedules (the learning rates of each scheduler).
continue <folder>  loads each <case>.cpp, state that the C++ side wrote, into a fresh torch.optim optimizer with other
                   hyperparameters, takes one step on its gradients and writes <case>.continued.
"""

import json
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

BEFORE = 5
STEPS = 20
SHAPES = [(7, 5), (11,), (3, 2, 2), (), (4, 6)]
MATRICES = [(7, 5), (4, 6), (5, 5), (6, 1), (2, 9)]
SCHEDULE_STEPS = 60

CASES = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}, {"betas": (0.7, 0.9)}),
    "adamw_amsgrad": (torch.optim.AdamW, {"amsgrad": True}, {}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6}, {}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5}),
    "sgd": (torch.optim.SGD, {}, {}),
    "muon": (torch.optim.Muon, {}, {"momentum": 0.8}),
    "muon_rms": (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 4}, {}),
}
# Fixed when an optimizer is made: the C++ side cannot change them afterwards, so both sides start with them.
FIXED = ("amsgrad", "nesterov", "adjust_lr_fn", "ns_steps")


def save(path, tensors, groups=None):
    metadata = {} if groups is None else {"param_groups": json.dumps(groups)}
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


def flat_state(optimizer):
    return {
        f"state.{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if torch.is_tensor(value)
    }


def shapes_of(case):
    return MATRICES if case.startswith("muon") else SHAPES


def make(case, parameters, own):
    optimizer_class, arguments, second = CASES[case]
    if not own:
        arguments, second = {k: v for k, v in arguments.items() if k in FIXED}, {}
        if optimizer_class is torch.optim.SGD and case != "sgd":
            arguments["momentum"] = 0.7
    groups = [
        {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 3e-3, "weight_decay": 0.0, **second},
    ]
    if not own:
        for group in groups:
            group.update({"lr": 0.5, "weight_decay": 0.5})
    kinds = {} if optimizer_class is torch.optim.Muon else {"foreach": False, "fused": False}
    return optimizer_class(groups, **arguments, **kinds)


def record_case(folder, case, dtype):
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes_of(case)]
    optimizer = make(case, parameters, own=True)
    steps = {}
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            before = {f"parameter.{i}": p for i, p in enumerate(parameters)} | flat_state(optimizer)
            save(folder / f"{case}.before", before, optimizer.state_dict()["param_groups"])
        for index, parameter in enumerate(parameters):
            parameter.grad = None
            # The last parameter has no state yet when the state is saved.
            if index + 1 < len(parameters) or step >= BEFORE + 2:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                if step >= BEFORE:
                    steps[f"gradient.{step - BEFORE}.{index}"] = parameter.grad
        optimizer.step()
    steps |= {f"after.{i}": p for i, p in enumerate(parameters)}
    steps |= {f"after.{name}": value for name, value in flat_state(optimizer).items()}
    save(folder / f"{case}.steps", steps)


def record_schedules(folder):
    lr = torch.optim.lr_scheduler
    schedules = {
        "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=SCHEDULE_STEPS, eta_min=0.05),
        "linear": lambda o: lr.LinearLR(o, start_factor=0.25, end_factor=0.75, total_iters=40),
        "step": lambda o: lr.StepLR(o, step_size=7, gamma=0.5),
        "multistep": lambda o: lr.MultiStepLR(o, milestones=[5, 20, 20, 33], gamma=0.5),
        "exponential": lambda o: lr.ExponentialLR(o, gamma=0.9),
        "polynomial": lambda o: lr.PolynomialLR(o, total_iters=40, power=1.5),
        "one_cycle": lambda o: lr.OneCycleLR(o, max_lr=2.0, total_steps=SCHEDULE_STEPS),
        "one_cycle_linear": lambda o: lr.OneCycleLR(
            o, 2.0, SCHEDULE_STEPS, pct_start=0.41, anneal_strategy="linear", div_factor=5.0, final_div_factor=10.0
        ),
        "one_cycle_three": lambda o: lr.OneCycleLR(o, 2.0, SCHEDULE_STEPS, pct_start=0.37, three_phase=True),
        "sequential": lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.1, 1.0, 10), lr.CosineAnnealingLR(o, 50)], milestones=[10]
        ),
    }
    rates = {}
    for name, make_schedule in schedules.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0, momentum=0.9)
        schedule = make_schedule(optimizer)
        values = []
        for _ in range(SCHEDULE_STEPS):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        rates[name] = torch.tensor(values, dtype=torch.float64)
    save(folder / "schedules", rates)


def names():
    for case in CASES:
        for dtype in (torch.float64, torch.float32):
            yield case, dtype, f"{case}_{str(dtype).removeprefix('torch.')}"


def record(folder):
    record_schedules(folder)
    for case, dtype, name in names():
        record_case(folder, case, dtype)
        for part in ("before", "steps"):
            (folder / f"{case}.{part}").rename(folder / f"{name}.{part}")


def resume(folder):
    for case, _, name in names():
        path = folder / f"{name}.cpp"
        if not path.exists():
            continue
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            groups = json.loads(file.metadata()["param_groups"])
        count = len(shapes_of(case))
        parameters = [tensors[f"parameter.{i}"].clone().requires_grad_() for i in range(count)]
        optimizer = make(case, parameters, own=False)
        state = {}
        for key, tensor in tensors.items():
            if key.startswith("state."):
                _, index, kind = key.split(".")
                state.setdefault(int(index), {})[kind] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for i, parameter in enumerate(parameters):
            parameter.grad = tensors[f"gradient.{i}"]
        optimizer.step()
        save(folder / f"{name}.continued", {f"parameter.{i}": p for i, p in enumerate(parameters)})


def main():
    torch.set_num_threads(1)
    {"record": record, "continue": resume}[sys.argv[1]](pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    main()
