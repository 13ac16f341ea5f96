"""The peers of gradus_bench_step budget: a training step with torch.utils.checkpoint.

checkpoint_peer.py MODEL --mode MODE [--threads N] [--seed N] speaks the protocol that bench/compare.py describes,
and answers "peak" with the tensor bytes of one step, as gradus_bench_step does.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from memory_models import MODELS, Block, MemoryModel, State  # noqa: E402
from peer_protocol import add_common_arguments, serve  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default}


def keep_products(context, operator, *arguments, **keywords) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def not_reentrant(block: Block, *state: Tensor) -> State:
    return checkpoint(block, *state, use_reentrant=False)


def reentrant(block: Block, *state: Tensor) -> State:
    # Without an input that needs a gradient, the reentrant form gives the block's weights none.
    if not any(x.requires_grad for x in state):
        return block(*state)
    return checkpoint(block, *state, use_reentrant=True)


def selective(block: Block, *state: Tensor) -> State:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(block, *state, use_reentrant=False, context_fn=contexts)


def segments(blocks: list[Block]) -> list[Block]:
    """Blocks joined as checkpoint_sequential does: floor(sqrt(n)) segments of equal length, the rest in the last."""
    count = math.isqrt(len(blocks))
    length = len(blocks) // count
    cuts = [i * length for i in range(count)] + [len(blocks)]

    def join(part: list[Block]) -> Block:
        def run(*state: Tensor) -> State:
            for block in part:
                state = block(*state)
            return state

        return run

    return [join(blocks[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


def run_plain(model: MemoryModel, state: State) -> State:
    for block in model.blocks:
        state = block(*state)
    return state


def run_blocks(how: Callable[..., State], model: MemoryModel, state: State) -> State:
    for block in model.blocks:
        state = how(block, *state)
    return state


def run_segments(how: Callable[..., State], model: MemoryModel, state: State) -> State:
    *most, last = segments(model.blocks)
    for segment in most:
        state = how(segment, *state)
    return last(*state)  # Its backward comes first: checkpoint_sequential leaves it alone.


MODES: dict[str, Callable[[MemoryModel, State], State]] = {
    "plain": run_plain,
    "block": functools.partial(run_blocks, not_reentrant),
    "block-reentrant": functools.partial(run_blocks, reentrant),
    "sqrt": functools.partial(run_segments, not_reentrant),
    "sqrt-reentrant": functools.partial(run_segments, reentrant),
    "selective": functools.partial(run_blocks, selective),
}


class Training:
    def __init__(self, model: str, mode: str, seed: int):
        self.model = MODELS[model](torch.Generator().manual_seed(seed))
        self.run = MODES[mode]
        self.optimizer = torch.optim.SGD(self.model.module.parameters(), lr=self.model.learning_rate)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model.loss(*self.run(self.model, self.model.start()))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def peak(self) -> dict:
        self.optimizer.zero_grad()
        module = self.model.module
        resting = storage_bytes([*module.parameters(), *module.buffers(), *self.model.batch])
        extra, loss = peak_of_allocations(self.step)
        gradients = storage_bytes(p.grad for p in module.parameters() if p.grad is not None)
        return {"peak": resting + extra, "resting": resting, "gradients": gradients, "loss": loss}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def peak_of_allocations(function: Callable[[], float]) -> tuple[int, float]:
    """The most bytes that CPU tensors made by function() take at one time, and what it returns.

    From the allocator's own reports to the profiler. It does not report the end of a block that is older than the
    profile, so such blocks count as alive throughout.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--mode", choices=list(MODES), required=True)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.model, arguments.mode, arguments.seed)
    name = f"{arguments.model} {arguments.mode}"
    return serve(name, training.step, {"peak": training.peak})


if __name__ == "__main__":
    sys.exit(main())
