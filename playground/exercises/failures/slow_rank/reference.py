from collections.abc import Callable

import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def slow_rank(
    rank: int,
    size: int,
    documents: list[int],
    compute: Callable[[int, int], float],
) -> float:
    """Return the sum of all ranks' losses.

    documents: lengths of this rank's. `compute(count, length)` computes the
    loss of `count` documents that are padded to `length` tokens.
    """
    ordered = sorted(documents, reverse=True)
    loss, longest = torch.zeros(()), 0
    for start in range(0, len(ordered), 2):
        lengths = ordered[start : start + 2]
        longest = max(lengths)
        loss += compute(len(lengths), longest)
    dist.all_reduce(loss)
    return loss.item()
