"""Two more rungs, signs and PowerSGD, and all in one table: the loss by bytes and by seconds of a
slow link."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.bytes.lesson import (
    LADDER,
    SGD,
    STEPS,
    Compressed,
    Rung,
    Wire,
    batch_of,
    everything,
    loss_of_all,
    new_model,
    train,
)

LINK, COMPUTING = 10e6 / 8, 0.004
"""Bytes per second of the link, 10 Mbit/s, and the seconds that a step is taken to compute."""
SECONDS, BYTES = 0.3, 50_000
"""Budgets of a rank: when they are used up, losses are compared."""


def sign(grad: torch.Tensor, wire: Wire) -> Compressed:
    """A bit for each number, and their mean size."""
    bits = F.pad((grad.flatten() > 0).byte(), (0, -grad.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8)
    packed = (bits * weights).sum(dim=1).byte()
    scales = wire.gather(grad.abs().mean().view(1))
    signs = [(byte[:, None] & weights) > 0 for byte in wire.gather(packed)]
    sent = [
        scale * (each.flatten()[: grad.numel()].view_as(grad) * 2.0 - 1)
        for scale, each in zip(scales, signs, strict=True)
    ]
    return torch.stack(sent).mean(dim=0), sent[dist.get_rank()]


def power_sgd(grad: torch.Tensor, wire: Wire, *, columns: int) -> Compressed:
    """A matrix as the product of two narrow ones, by a step of power iteration. All ranks begin
    with the same random numbers. Vectors are sent whole."""
    if grad.dim() < 2:
        return everything(grad, wire)
    generator = torch.Generator(device="cpu").manual_seed(0)
    right = torch.randn(grad.shape[1], columns, generator=generator, device="cpu")
    left = torch.linalg.qr(wire.mean(grad @ right.to(grad.device))).Q
    own = grad.T @ left
    return left @ wire.mean(own).T, left @ own.T


RUNGS = {
    **LADDER,
    "sign": Rung(SGD, sign),
    "rank 1": Rung(SGD, partial(power_sgd, columns=1)),
    "rank 2": Rung(SGD, partial(power_sgd, columns=2)),
}


def seconds_of(steps: int, wire: Wire) -> float:
    return steps * COMPUTING + wire.bytes / LINK


class Budgets:
    """The model after the last step within each budget."""

    def __init__(self) -> None:
        self.by_second = self.by_byte = new_model()

    def after_step(self, step: int, model: nn.Module, wire: Wire) -> None:
        if seconds_of(step, wire) <= SECONDS:
            self.by_second = copy.deepcopy(model)
        if wire.bytes <= BYTES:
            self.by_byte = copy.deepcopy(model)


def first_error(rung: Rung, rank: int, size: int) -> float | None:
    """The error of the first mean gradient, relative to its norm."""
    if not rung.compress:
        return None
    model = new_model()
    inputs, labels = batch_of(1, rank, size)
    F.cross_entropy(model(inputs), labels).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    exact = torch.cat([Wire().mean(grad).flatten() for grad in grads])
    sent = torch.cat([rung.compress(grad, Wire())[0].flatten() for grad in grads])
    return round(((sent - exact).norm() / exact.norm()).item(), 3)


def ladder(rank: int, size: int) -> dict[str, dict[str, dict[str, float | None]]]:
    """Train for 64 steps on each rung: the loss without and with error feedback, the error of the
    first mean gradient, what was sent, and the losses after 0.3 s and after 50 kB.

    A step is taken to compute for 4 ms, and the link to carry 10 Mbit/s. Where gradients are
    compressed, the last two losses are those with feedback.
    """
    rungs = {}
    for name, rung in RUNGS.items():
        budgets = Budgets()
        model, wire = train(rung, rank, size, True, after_step=budgets.after_step)
        loss = loss_of_all(model)
        rungs[name] = {
            "loss": loss_of_all(train(rung, rank, size)[0]) if rung.compress else loss,
            "fed_back": loss if rung.compress else None,
            "error": first_error(rung, rank, size),
            "kB": round(wire.bytes / 1000, 1),
            "seconds": round(seconds_of(STEPS, wire), 2),
            "at_0.3_s": loss_of_all(budgets.by_second),
            "at_50_kB": loss_of_all(budgets.by_byte),
        }
    return {"rungs": rungs}
