"""Training over a slow link: average less often, or send less of each gradient.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground bytes

Each rank has different labels, so that no rank could do without the others. With DiLoCo, ranks
train alone for H steps, then average their changes. Compression sends a part of each gradient;
error feedback adds what was not sent to the next gradient.
Source: Douillard et al., DiLoCo, 2023, arXiv 2311.08105; Karimireddy et al., Error Feedback Fixes
SignSGD, 2019, arXiv 1901.09847; Vogels et al., PowerSGD, 2019, arXiv 1905.13727
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CLASSES, FEATURES, HIDDEN = 8, 32, 128
STEPS, BATCH = 64, 16
BLOCK = 64
"""Numbers that share a scale in `int8_by_blocks`."""


def new_model() -> nn.Module:
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batch_of(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the center of their class: [batch, features], [batch]. A rank has the classes
    whose number leaves its rank as the remainder (or all, if there are more ranks than classes)."""
    generator = torch.Generator(torch.get_default_device())
    generator.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    generator.manual_seed(1 + step * size + rank)
    own = torch.arange(CLASSES)[rank % CLASSES :: min(size, CLASSES)]
    labels = own[torch.randint(len(own), (BATCH,), generator=generator)]
    return centers[labels] + 1.5 * torch.randn(BATCH, FEATURES, generator=generator), labels


def loss_of_all(model: nn.Module) -> float:
    """The loss for points of all classes, which no rank has trained on; the mean over the ranks."""
    batches = [batch_of(10_000 + step, 0, 1) for step in range(32)]
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in batches]
    return round(Wire().mean(torch.stack(losses).mean()).item(), 3)


class Wire:
    """Collectives that count the bytes a rank hands in."""

    def __init__(self) -> None:
        self.bytes = 0

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, by an all-reduce."""
        self.bytes += tensor.nbytes
        total = tensor / dist.get_world_size()
        dist.all_reduce(total)
        return total

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """That of each rank."""
        self.bytes += tensor.nbytes
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        return gathered


class DiLoCo:
    """After every `period` steps, an outer step for the mean of what the ranks have changed."""

    def __init__(self, model: nn.Module, period: int) -> None:
        self.model = model
        self.period = period
        self.steps = 0
        self.outer = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        self.optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)

    def after_step(self, wire: Wire) -> None:
        self.steps += 1
        if self.steps % self.period:
            return
        for outer, param in zip(self.outer, self.model.parameters(), strict=True):
            outer.grad = wire.mean(outer.detach() - param.detach())  # as if it were a gradient
        self.optimizer.step()
        for outer, param in zip(self.outer, self.model.parameters(), strict=True):
            param.data.copy_(outer)


Compressed: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The mean over the ranks of what was sent, and what this rank has sent of its own."""
Compress: TypeAlias = Callable[[torch.Tensor, Wire], Compressed]


def everything(grad: torch.Tensor, wire: Wire) -> Compressed:
    return wire.mean(grad), grad


def top_k(grad: torch.Tensor, wire: Wire) -> Compressed:
    """The two percent that are largest: 4 bytes each, and 4 for the place."""
    flat = grad.flatten()
    places = flat.abs().topk(max(1, len(flat) // 50)).indices.int()
    own = torch.zeros_like(flat).index_put((places.long(),), flat[places.long()])
    total = torch.zeros_like(flat)
    values = wire.gather(flat[places.long()])
    for there, value in zip(wire.gather(places), values, strict=True):
        total.index_add_(0, there.long(), value)
    return (total / dist.get_world_size()).view_as(grad), own.view_as(grad)


def int8_by_blocks(grad: torch.Tensor, wire: Wire) -> Compressed:
    """A byte for each number; 64 numbers share a scale, so that a large one coarsens few."""
    blocks = F.pad(grad.flatten(), (0, -grad.numel() % BLOCK)).view(-1, BLOCK)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
    rounded = (blocks / scale).round().to(torch.int8)
    sent = [
        (each * by).flatten()[: grad.numel()].view_as(grad)
        for each, by in zip(wire.gather(rounded), wire.gather(scale), strict=True)
    ]
    return torch.stack(sent).mean(dim=0), sent[dist.get_rank()]


AdamW, SGD = partial(torch.optim.AdamW, lr=3e-3), partial(torch.optim.SGD, lr=0.3)


@dataclass(frozen=True)
class Rung:
    """A way to train."""

    optimizer: Callable[..., torch.optim.Optimizer]
    compress: Compress | None = None
    """What is sent of each gradient; None: nothing."""
    period: int = 0
    """Steps between DiLoCo's outer steps; 0: there are none."""


LADDER = {
    "DDP, AdamW": Rung(AdamW, everything),
    "H = 1": Rung(AdamW, period=1),
    "H = 8": Rung(AdamW, period=8),
    "H = 32": Rung(AdamW, period=32),
    "alone": Rung(AdamW),
    "DDP, SGD": Rung(SGD, everything),
    "int8": Rung(SGD, int8_by_blocks),
    "top 2 %": Rung(SGD, top_k),
}


def send_gradients(
    model: nn.Module, missing: list[torch.Tensor], compress: Compress, wire: Wire, feedback: bool
) -> None:
    """Put the mean of what the ranks send in the place of each gradient. `missing`: what this rank
    has not sent of earlier gradients."""
    for param, rest in zip(model.parameters(), missing, strict=True):
        wanted = param.grad + rest
        mean, own = compress(wanted, wire)
        param.grad = mean
        if feedback:
            rest.copy_(wanted - own)


def train(
    rung: Rung, rank: int, size: int, feedback: bool = False, steps: int = STEPS,
    after_step: Callable[[int, nn.Module, Wire], object] = lambda step, model, wire: None,
) -> tuple[nn.Module, Wire]:  # fmt: skip
    """Returns the model, and the wire that has counted the bytes."""
    model, wire = new_model(), Wire()
    optimizer = rung.optimizer(model.parameters())
    outer = DiLoCo(model, rung.period) if rung.period else None
    missing = [torch.zeros_like(param) for param in model.parameters()]
    for step in range(1, steps + 1):
        inputs, labels = batch_of(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if rung.compress:
            send_gradients(model, missing, rung.compress, wire, feedback)
        optimizer.step()
        if outer:
            outer.after_step(wire)
        after_step(step, model, wire)
    return model, wire


def print_ladder(
    rank: int, world_size: int, names: Sequence[str] = tuple(LADDER), steps: int = STEPS
) -> None:
    """Train on each rung, with error feedback where gradients are compressed."""
    for name in names:
        model, wire = train(LADDER[name], rank, world_size, feedback=True, steps=steps)
        loss = loss_of_all(model)
        if rank == 0:
            print(f"{name}: loss {loss}, {wire.bytes / 1000:.1f} kB")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_ladder(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # gives gloo's threads time to free the last tensors: they need the GIL
    dist.destroy_process_group()
