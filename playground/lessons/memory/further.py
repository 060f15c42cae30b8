"""Mixed precision by hand, sums over ranks in bfloat16, checkpoints by torch, and gradients of
microbatches.

Source: Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from playground.lessons.ladder.lesson import flat
from playground.lessons.memory.lesson import (
    Activations,
    Checkpoint,
    adam_state,
    compare,
    loss_of,
    nbytes,
    new_model,
    run_block,
    tokens_of,
)
from playground.measurement.interleave import Heartbeat


def mixed_precision(rank: int, size: int) -> dict[str, object]:
    """Train a model in float32, in bfloat16, in bfloat16 with float32 masters, and with autocast.

    bfloat16 has 8 significant bits: an update below about 1/512 of a weight is rounded away. So
    bfloat16 alone stalls. A master is a float32 copy that the optimizer steps for.
    """
    methods = ("float32", "bfloat16", "masters", "autocast")
    return {"methods": {method: train(method, tokens_of(rank, batch=2)) for method in methods}}


def train(method: str, tokens: torch.Tensor, steps: int = 150) -> dict[str, float]:
    """Returns the last loss, the mean over the ranks; the bytes held per parameter; and the part of
    the weights that the last step has moved."""
    model = new_model()
    if method in ("bfloat16", "masters"):
        model.bfloat16()
    params = list(model.parameters())
    stepped = params
    if method == "masters":
        stepped = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.Adam(stepped, lr=3e-4)
    heartbeat = Heartbeat()
    for step in range(steps):
        heartbeat.beat(phase=f"training: {method}", step=step, steps=steps)
        model.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=method == "autocast"):
            loss = loss_of(model, tokens)
        loss.backward()
        flat(model)
        before = nn.utils.parameters_to_vector(stepped).detach()
        if method == "masters":
            step_masters(optimizer, stepped, params)
        else:
            optimizer.step()
    moved = (nn.utils.parameters_to_vector(stepped) != before).float().mean().item()
    held = {*params, *stepped, *(param.grad for param in params), *adam_state(optimizer)}
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    per_parameter = nbytes(held) / len(before)
    return {"loss": round(mean.item(), 3), "bytes": per_parameter, "moved": round(moved, 2)}


def step_masters(optimizer: Any, masters: Sequence[Any], params: Sequence[Any]) -> None:
    """Step in float32, then round the parameters off the masters."""
    for master, param in zip(masters, params, strict=True):
        master.grad = param.grad.float()
    optimizer.step()
    for master, param in zip(masters, params, strict=True):
        param.data.copy_(master)
        master.grad = None  # a float32 copy of the gradient is not kept


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


def beside_torch(rank: int, size: int) -> dict[str, object]:
    """Keep all activations, or each block's input alone, by hand and by torch: the KiB kept, the
    work, and whether gradients are equal bit for bit. torch's second forward hides what it keeps.
    """
    by_torch = partial(checkpoint, use_reentrant=False)
    ways = {"all": run_block, "by_hand": Checkpoint.apply, "by_torch": by_torch}
    rows = compare(rank, ways)
    rows["by_torch"]["at_most"] = None
    return {"ways": rows}


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
