"""One process with whole batches, and ranks with shares of them, side by side: the first is what the others must equal.

Whatever is to be compared starts from the same weights, sees the same batches, and draws nothing at random on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.runtime import device, report
from playground.training.data import Batch, Images
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import Settings
from playground.training.sync import Sync

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Called as `loss(output, labels, batch)`: `batch` is the number of samples of all ranks together."""


class OneProcess:
    """Plain SGD on whole batches, made of torch alone. Every rank can afford one, and needs nobody for it."""

    def __init__(self, model: nn.Module, settings: Settings, lr: float | None = None) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr or settings.lr, momentum=settings.momentum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.nll_loss(self.model(images), labels).backward()
        self.optimizer.step()


class Replica:
    """This rank's model, which steps on its share of every batch; `sync` is to keep all replicas one.

    `shares` says how many samples each rank gets; without it they are as equal as can be.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, sync: Sync, loss: Loss | None = None, shares: Sequence[int] = ()
    ) -> None:
        self.model, self.sync, self.loss = model, sync, loss or weighted
        rank, size = dist.get_rank(), dist.get_world_size()
        shares = shares or [share(settings.batch_size, each, size) for each in range(size)]
        self.mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(images[self.mine]), labels[self.mine], len(labels)).backward()
        self.sync.after_backward()
        self.optimizer.step()
        self.sync.after_step(last=False)


def weighted(output: torch.Tensor, labels: torch.Tensor, batch: int) -> torch.Tensor:
    """This rank's part of the mean over the whole batch.

    One process divides the sum of all losses by `batch`. Averaging over ranks divides by their number, so that is
    multiplied in: then unequal shares weigh what they should, each sample as much as any other.
    """
    return F.nll_loss(output, labels, reduction="sum") * dist.get_world_size() / batch


def unweighted(output: torch.Tensor, labels: torch.Tensor, batch: int) -> torch.Tensor:
    """The mean over this rank's samples, however many they are."""
    return F.nll_loss(output, labels)


def net(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """`Net`, its weights drawn with `seed` (the same in every type), without dropout, whose masks would differ."""
    torch.manual_seed(seed)
    return Net().to(device(), dtype).eval()


def batches(settings: Settings, steps: int, dtype: torch.dtype = torch.float64) -> Iterator[Batch]:
    """The whole batch of each step: samples in the order of the file, from its start again after its end."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(steps):
        first = step * settings.batch_size
        images, labels = data.__getitems__([place % len(data) for place in range(first, first + settings.batch_size)])
        yield images.to(device(), dtype), labels.to(device())
        report(step=step)


def side_by_side(settings: Settings, steps: int, *runs: OneProcess | Replica) -> None:
    """Let all of them take the same steps."""
    for images, labels in batches(settings, steps):
        for run in runs:
            run.step(images, labels)


def parameters(run: OneProcess | Replica) -> torch.Tensor:
    """All parameters in a row, [elements]."""
    return flat(run.model.parameters())


def gradients(run: OneProcess | Replica) -> torch.Tensor:
    """The gradients of its last step in a row, [elements]."""
    return flat(param.grad for param in run.model.parameters() if param.grad is not None)


def statistics(run: OneProcess | Replica) -> torch.Tensor:
    """The running means and variances of all BatchNorms in a row, [elements]."""
    return flat(buffer for buffer in run.model.buffers() if buffer.is_floating_point())


def apart(one: torch.Tensor, other: torch.Tensor | float = 0.0) -> float:
    """The largest difference between elements; infinite where one is not a number."""
    return (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def on_any_rank(figures: Any) -> Any:
    """Each of `figures` (lists of numbers, however deep), the largest that any rank has of it. All must call this."""
    largest = torch.tensor(figures, dtype=torch.float64, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def from_rank_0(values: torch.Tensor) -> torch.Tensor:
    """`values` less those of rank 0. All must call this."""
    root = values.clone()
    dist.broadcast(root, src=0)
    return values - root
