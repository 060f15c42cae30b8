"""Training over a slow link: average less often, or send less of each gradient.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground bytes

Each rank has other labels, so that none could do without the rest. DiLoCo lets ranks train alone
for H steps, and averages what they have changed. Compression sends a part of each gradient; error
feedback adds what was not sent to the next one.
Source: Douillard et al., DiLoCo, 2023, arXiv 2311.08105; Karimireddy et al., Error Feedback Fixes
SignSGD, 2019, arXiv 1901.09847; Vogels et al., PowerSGD, 2019, arXiv 1905.13727
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CLASSES, FEATURES, HIDDEN = 8, 32, 128
STEPS, BATCH = 64, 16
LINK = 10e6 / 8
"""Bytes per second of the link that is imagined: 10 Mbit/s."""
BLOCK = 64
"""Numbers that have one scale in `int8_by_blocks`."""


def new_model() -> nn.Module:
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batch_of(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the center of their class: [batch, features], [batch]. A rank has the classes
    whose number leaves its rank as the remainder (or all, if there are more ranks than classes)."""
    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)
    torch.manual_seed(1 + step * size + rank)
    own = torch.arange(CLASSES)[rank % CLASSES :: min(size, CLASSES)]
    labels = own[torch.randint(len(own), (BATCH,))]
    return centers[labels] + 1.5 * torch.randn(BATCH, FEATURES), labels


def loss_of_all(model: nn.Module) -> float:
    """The loss for points of all classes, which no rank has trained on; the mean over the ranks."""
    batches = [batch_of(STEPS + 1 + step, 0, 1) for step in range(32)]
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


def average(model: nn.Module, wire: Wire) -> None:
    """DDP: the mean gradient, in every step."""
    for param in model.parameters():
        param.grad = wire.mean(param.grad)


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


def diloco(rank: int, size: int, steps: int = STEPS) -> dict[str, dict[str, float]]:
    """Average in each step, after every 8 and 32 steps, and never; as many steps by each way.

    The inner optimizer is AdamW, the outer one SGD with Nesterov's momentum. `seconds_on_link` are
    those that the bytes take at 10 Mbit/s.
    """
    results: dict[str, dict[str, float]] = {"loss": {}, "kilobytes": {}, "seconds_on_link": {}}
    for way in ("every step", "H = 8", "H = 32", "alone"):
        model, wire = new_model(), Wire()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        outer = DiLoCo(model, int(way[4:])) if way.startswith("H") else None
        for step in range(steps):
            inputs, labels = batch_of(step, rank, size)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            if way == "every step":
                average(model, wire)
            optimizer.step()
            if outer:
                outer.after_step(wire)
        results["loss"][way] = loss_of_all(model)
        results["kilobytes"][way] = round(wire.bytes / 1000, 1)
        results["seconds_on_link"][way] = round(wire.bytes / LINK, 2)
    return results


Compressed = tuple[torch.Tensor, torch.Tensor]
"""The mean over the ranks of what was sent, and what this rank has sent of its own."""


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


METHODS: dict[str, Callable[[torch.Tensor, Wire], Compressed]] = {
    "float32": everything,
    "int8": int8_by_blocks,
    "sign": sign,
    "top 2 %": top_k,
    "rank 1": partial(power_sgd, columns=1),
    "rank 2": partial(power_sgd, columns=2),
}


def train(method: str, feedback: bool, rank: int, size: int) -> tuple[float, float, int]:
    """Returns the loss after training, the relative error of the first mean gradient, and the bytes
    handed in for a step."""
    model, wire, compress = new_model(), Wire(), METHODS[method]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    params = list(model.parameters())
    missing = [torch.zeros_like(param) for param in params]  # what has not been sent so far
    error = 0.0
    for step in range(STEPS):
        inputs, labels = batch_of(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        exact = [Wire().mean(param.grad) for param in params] if step == 0 else []
        for param, rest in zip(params, missing, strict=True):
            wanted = param.grad + rest
            mean, own = compress(wanted, wire)
            param.grad = mean
            if feedback:
                rest.copy_(wanted - own)
        if exact:
            pairs = zip(exact, params, strict=True)
            off = torch.cat([(whole - param.grad).flatten() for whole, param in pairs])
            error = (off.norm() / torch.cat([whole.flatten() for whole in exact]).norm()).item()
        optimizer.step()
    return loss_of_all(model), error, wire.bytes // STEPS


def compressed(rank: int, size: int) -> dict[str, dict[str, float]]:
    """Compress gradients in six ways, without and with error feedback.

    What was not sent is lost without feedback: a small number in the same direction for ever. With
    it, it adds up until it is sent. `error` is that of the first mean gradient.
    """
    names = ("loss", "with_feedback", "error", "bytes_per_step")
    results: dict[str, dict[str, float]] = {name: {} for name in names}
    for method in METHODS:
        loss, error, sent = train(method, False, rank, size)
        results["loss"][method] = loss
        results["with_feedback"][method] = train(method, True, rank, size)[0]
        results["error"][method] = round(error, 3)
        results["bytes_per_step"][method] = sent
    return results


def print_steps(rank: int, world_size: int) -> None:
    """Run both steps, and print what they return on rank 0: a row for each way."""
    for step in (diloco, compressed):
        results = step(rank, world_size)
        for way in results["loss"] if rank == 0 else ():
            values = [f"{name} {values[way]}" for name, values in results.items()]
            print(f"{way}: {', '.join(values)}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
