from collections.abc import Callable

import torch
import torch.distributed as dist

SEED = 0
RANK = 0


def lost_speedup(
    rank: int,
    size: int,
    lengths: list[int],
    compute: Callable[[int], None],
) -> float:
    """Compute each document on one rank, and return the speedup: the tokens of
    all documents, divided by those of the rank that has most.

    lengths: tokens of each document, the same list on all ranks. `compute`
    takes the number of a document. The longest document comes first, and each
    goes to the rank that has fewest tokens so far.
    """
    loads = [0] * size
    numbers = range(len(lengths))
    order = sorted(numbers, key=lambda number: lengths[number], reverse=True)
    for number in order:
        owner = loads.index(min(loads))
        loads[owner] += lengths[number]
        if owner == rank:
            compute(number)
    most = torch.tensor(loads[rank])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return sum(lengths) / most.item()
