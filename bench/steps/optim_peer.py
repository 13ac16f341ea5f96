"""The peers of gradus_bench_step optim: torch.optim's steps on the same parameters and gradients.

optim_peer.py optim --mode adamw|adam|adafactor|sgd [--threads N] [--seed N] speaks the protocol that bench/compare.py
describes.
"""

import argparse
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402

WIDTH, VOCABULARY, CONTEXT, LAYERS = 512, 8192, 1024, 5


def shapes() -> list[tuple[int, ...]]:
    block: list[tuple[int, ...]] = [
        (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,),
        (WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,),
    ]  # fmt: skip
    result = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *(LAYERS * block), (VOCABULARY, WIDTH)]
    for channels in (64, 128):
        result += [(channels, channels, 3, 3), (channels,)]
    return result


def make_optimizer(mode: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if mode == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if mode == "adam":
        return torch.optim.Adam(parameters, lr=1e-3, fused=True)
    if mode == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)
    return torch.optim.Adafactor(parameters, lr=1e-3, foreach=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["optim"])
    parser.add_argument("--mode", choices=["adamw", "adam", "adafactor", "sgd"], required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    parameters = []
    for shape in shapes():
        parameters.append(torch.randn(shape, generator=generator).mul_(0.02).requires_grad_())
        parameters[-1].grad = torch.randn(shape, generator=generator).mul_(1e-3)
    optimizer = make_optimizer(arguments.mode, parameters)
    print(json.dumps({"ready": "optim", "torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        if line == "state\n":
            tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
            print(json.dumps({"state_bytes": sum(t.untyped_storage().nbytes() for t in tensors)}), flush=True)
            continue
        if line != "step\n":
            print(f"[bench] requests are 'step' and 'state'; got {line!r}", file=sys.stderr)
            return 1
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        with torch.no_grad():
            loss = sum(abs(p.view(-1)[0].item()) for p in parameters)
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
