import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def lost_sum(rank: int, size: int, tables: list[torch.Tensor]) -> float:
    """Replace each table by the sum of all ranks' tables, in place.

    Return the largest element of all sums. A table may be float32 on one rank
    and float64 on another, and it may be a transposed view.
    """
    largest = 0.0
    for table in tables:
        dense = table.double().contiguous()
        dist.all_reduce(dense)
        table.copy_(dense)
        largest = max(largest, dense.max().item())
    return largest
