from collections.abc import Callable

import torch
import torch.distributed as dist


def accuracy(
    rank: int,
    size: int,
    samples: int,
    is_right: Callable[[int], bool],
) -> float:
    """The fraction of the test set that the model gets right, on every rank.

    is_right(index): whether it does for this one of `samples`, numbered from 0.
    Each sample is computed once, on one of the ranks.
    """
    # write this
    counts = torch.zeros(2, dtype=torch.float64)
    for index in range(rank, samples, size):
        counts += torch.tensor([is_right(index), 1])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
    # until here
