"""Do N ranks with B/N samples each equal one process with B? The proof, and four ways to break it.

    torchrun --nproc-per-node 4 lesson.py
    python -m playground prove
    python -m playground prove -n 3 --batch-size 64
    python -m playground prove -n 8 --all-reduce ring

Each rank computes two things: its part of the work of N ranks, and, alone, the whole work of one
process. Both start from the same weights and see the same batches, without dropout; after every
step their parameters are compared.
The proof comes first, then four ways in which N ranks are not one process, as they happen in
practice. With the command each comes with what must hold if its explanation is right: a difference
that is rounding, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.mnist import Net
from playground.lessons.partition import share
from playground.lessons.sgd.lesson import average_gradients

SEED = 1234
Batch = tuple[torch.Tensor, torch.Tensor]
Average = Callable[[nn.Module], object]


def mean_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One process: the mean over the whole batch."""
    return F.nll_loss(model(images), labels)


def equal_shares(samples: int, size: int) -> list[int]:
    """How many samples of a batch each rank gets."""
    return [share(samples, rank, size) for rank in range(size)]


def part_of_loss(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, shares_of: Any = equal_shares
) -> torch.Tensor:
    """N ranks: the sum over this one's samples, over B/N. The mean of all parts is `mean_loss`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = shares_of(len(images), size)
    output = model(images.split(shares)[rank])
    total = F.nll_loss(output, labels.split(shares)[rank], reduction="sum")
    return total / (len(images) / size)


class Training:
    """SGD by one process; or by N ranks, if each has its part of the loss and `average` averages
    the gradients."""

    def __init__(
        self, model: nn.Module, loss: Any = mean_loss, average: Average = lambda model: None,
        lr: float = 0.01, momentum: float = 0.5,
    ) -> None:  # fmt: skip
        self.model = model
        self.loss = loss
        self.average = average
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """`images` and `labels` are the whole batch."""
        self.optimizer.zero_grad()
        self.loss(self.model, images, labels).backward()
        self.average(self.model)
        self.optimizer.step()


def compare(
    batches: Iterable[Batch], one_process: Training, *n_ranks: Training
) -> Iterator[list[float]]:
    """N ranks, with every gradient synchronisation, compared with one process on whole batches: the
    largest difference of any parameter, on any rank, after each step.

    The first number is the largest parameter itself.
    """
    for images, labels in batches:
        one_process.step(images, labels)
        alone = parameters(one_process.model)
        found = [max_abs_diff(alone)]
        for training in n_ranks:
            training.step(images, labels)
            found.append(max_abs_diff(parameters(training.model), alone))
        largest = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        yield list(largest.tolist())


def max_abs_diff(one: torch.Tensor, other: torch.Tensor | float = 0.0) -> float:
    """The largest difference of two elements; infinite where one of them is not a finite number."""
    return (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def parameters(model: nn.Module) -> torch.Tensor:
    """All parameters, flattened into one vector, [elements]."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


# N ranks equal one process by Training(new_net(seed), part_of_loss, average_gradients). Each way to
# break it has something else in one of the three places.


def summed(seed: int = SEED) -> Training:
    """Gradients are added up and not divided by the number of ranks: as if the learning rate were N
    times as large."""

    def add_gradients(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)

    return Training(new_net(seed), part_of_loss, add_gradients)


def unweighted_shares(seed: int = SEED) -> Training:
    """Shares are unequal (here the last rank has one sample) and each rank's mean loss counts as
    much as any other's: so it is with DistributedDataParallel too. The cure: each rank's sum of
    losses, over the size of the whole batch."""

    def own_mean(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rank, shares = dist.get_rank(), one_for_the_last(len(images), dist.get_world_size())
        return mean_loss(model, images.split(shares)[rank], labels.split(shares)[rank])

    return Training(new_net(seed), own_mean, average_gradients)


def one_for_the_last(samples: int, size: int) -> list[int]:
    """Shares as unequal as can be."""
    return [*equal_shares(samples - 1, size - 1), 1]


def own_weights(seed: int = SEED) -> Training:
    """Each rank starts from weights of its own. The averaged gradients are the same on all ranks,
    so all take the same steps, and stay as far apart as they were."""
    return Training(new_net(seed + dist.get_rank()), part_of_loss, average_gradients)


def batch_norm(seed: int = SEED) -> Training:
    """BatchNorm normalises by the mean and variance of the samples it sees: a rank's share, not the
    batch. With statistics that are added up over all ranks (SyncBatchNorm) it is the batch
    again."""
    return Training(new_batch_norm_net(seed), part_of_loss, average_gradients)


def new_net(seed: int = SEED, dtype: torch.dtype = torch.float64) -> nn.Module:
    """`Net`, its weights drawn with `seed` (the same in every dtype), without dropout, whose masks
    would differ."""
    torch.manual_seed(seed)
    return Net().to(dtype).eval()


def new_batch_norm_net(seed: int = SEED) -> nn.Module:
    """A small network with BatchNorm: images [batch, 1, 28, 28] → log-probabilities [batch, 10]."""
    torch.manual_seed(seed)
    first = [nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(288, 10), nn.LogSoftmax(1)).double()


def random_batches(dtype: torch.dtype = torch.float64, steps: int = 5) -> list[Batch]:
    """Whole batches of 64 images and labels, the same on every rank."""
    torch.manual_seed(SEED)
    drawn = [(torch.rand(64, 1, 28, 28), torch.randint(10, (64,))) for _ in range(steps)]
    return [(images.to(dtype), labels) for images, labels in drawn]


def prove(rank: int, size: int) -> None:
    """Print how far N ranks are from one process after the last step: as they should be, in two
    number formats, and broken."""
    rows = []
    for dtype in (torch.float64, torch.float32):
        nets = [new_net(SEED, dtype) for _ in range(3)]
        by_hand = Training(nets[0], part_of_loss, average_gradients)
        ddp = Training(DistributedDataParallel(nets[1]), part_of_loss)
        *_, (_, *found) = compare(random_batches(dtype), Training(nets[2]), by_hand, ddp)
        rows += [("average_gradients", dtype, found[0]), ("ddp", dtype, found[1])]
    for broken in (summed, unweighted_shares, own_weights, batch_norm) if size > 1 else ():
        model = new_batch_norm_net() if broken is batch_norm else new_net()
        *_, (_, difference) = compare(random_batches(), Training(model), broken())
        rows.append((broken.__name__, torch.float64, difference))
    for name, dtype, difference in rows:
        if rank == 0:
            is_rounding = difference < 1000 * torch.finfo(dtype).eps
            print(f"{name:18}{dtype}  {'rounding' if is_rounding else f'{difference:.1e}'}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    prove(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
