"""Mixed precision by hand, sums over ranks in bfloat16, checkpoints by torch, of parts of a block
and of several layers, and gradients of microbatches.

Source: Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740; Chen et al., Training
Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174; Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022, arXiv 2205.05198
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from playground.lessons.memory.lesson import (
    WIDTH,
    Activations,
    Block,
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
from playground.training.averaging import flat


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

    "selective" computes only the last two layers of a block again, which keep ten of its eighteen
    tensors.
    """
    by_torch = partial(checkpoint, use_reentrant=False)
    ways = {"all": run_block, "by_hand": Checkpoint.apply, "by_torch": by_torch}
    rows = compare(rank, {**ways, "selective": compute_mlp_again})
    rows["by_torch"]["at_most"] = None
    return {"ways": rows}


def compute_mlp_again(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = block.attend(x)
    return x + Checkpoint.apply(block.mlp, x)


LAYERS, SAMPLES = 32, 256
TENSOR = SAMPLES * WIDTH * 4 // 1024
"""KiB of a layer's input."""


def every_few_layers(rank: int, size: int) -> dict[str, object]:
    """Keep the input of every k-th of 32 equal layers alone: the KiB kept after forward, at most,
    and at most by a formula.

    A layer keeps two tensors. Checkpoints keep 32 / k inputs and, while k layers are computed
    again, 2 k tensors, one of which is such an input. The sum is least near k = sqrt(32 / 2). The
    work is the same for each k.
    """
    rows = {"all": step_in_segments(1, run_block)}
    forms = {"all": 2 * LAYERS}
    for k in (1, 2, 4, 8, 16, 32):
        rows[f"k = {k}"] = step_in_segments(k, Checkpoint.apply)
        forms[f"k = {k}"] = LAYERS // k + 2 * k - 1
    alone = rows["all"]["work"]
    return {
        "segments": {
            name: {**row, "by_formula": forms[name] * TENSOR, "work": round(row["work"] / alone, 2)}
            for name, row in rows.items()
        }
    }


def step_in_segments(k: int, run: Callable[..., Any]) -> dict[str, float]:
    """What a forward and a backward of the layers keep, k at a time, and their work in FLOPs."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    )
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    with Activations(model) as activations, FlopCounterMode(display=False) as counter:
        for first in range(0, LAYERS, k):
            x = run(model[first : first + k], x)
        kept = activations.held
        x.sum().backward()
    return {
        "kept": kept // 1024,
        "at_most": activations.peak // 1024,
        "work": counter.get_total_flops(),
    }


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
