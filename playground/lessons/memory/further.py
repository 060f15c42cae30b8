"""Checkpoints by torch, sums over ranks in bfloat16, and gradients of microbatches."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from playground.lessons.ladder.lesson import flat
from playground.lessons.memory.lesson import (
    Activations,
    Checkpoint,
    compare,
    loss_of,
    new_model,
    run_block,
    tokens_of,
)


def beside_torch(rank: int, size: int) -> dict[str, object]:
    """Keep all activations, or each block's input alone, by hand and by torch: the KiB kept, the
    work, and whether gradients are equal bit for bit. torch's second forward hides what it keeps.
    """
    by_torch = partial(checkpoint, use_reentrant=False)
    ways = {"all": run_block, "by_hand": Checkpoint.apply, "by_torch": by_torch}
    rows = compare(rank, ways)
    rows["by_torch"]["at_most"] = None
    return {"ways": rows}


def summed(rank: int, size: int) -> dict[str, object]:
    """Add up gradients over the ranks in bfloat16 and in float32: the relative errors of the sums.

    Each addition in bfloat16 rounds to 8 bits, so large worlds add up in float32.
    """
    torch.manual_seed(rank)
    gradient = torch.randn(10_000).bfloat16()
    exact = gradient.double()
    dist.all_reduce(exact)
    errors: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32):
        total = gradient.to(dtype, copy=True)
        dist.all_reduce(total)
        errors[str(dtype)[6:]] = two_digits((total - exact).norm() / exact.norm())
    return errors


def two_digits(number: torch.Tensor) -> float:
    return float(f"{number.item():.1e}")


def accumulation(rank: int, size: int) -> dict[str, object]:
    """A batch whole, and in four microbatches whose gradients are added up: the KiB kept at most.

    The ranks average after the last microbatch, so there are no more messages than before.
    `difference` is that to the gradients of the whole batch.
    """
    kept, gradients = {}, []
    for count in (1, 4):
        model = new_model()
        with Activations(model) as activations:
            for microbatch in tokens_of(rank).chunk(count):
                (loss_of(model, microbatch) / count).backward()
        flat(model)
        kept[f"{count} x {8 // count} sequences"] = activations.peak // 1024
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    difference = (gradients[0] - gradients[1]).abs().max()
    return {"kept": kept, "difference": two_digits(difference)}
