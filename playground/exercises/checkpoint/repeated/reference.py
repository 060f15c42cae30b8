import torch
import torch.distributed as dist

SEED = 0
RANK = 2


def repeated(
    rank: int,
    size: int,
    order: list[int],
    taken: int,
) -> list[int]:
    """Return the samples that this rank trains on after it has resumed.

    order: the samples of the epoch, the same on all ranks. The ranks have taken
    them from the front: `taken` is how many this rank has trained on.
    """
    seen = torch.tensor(taken)
    dist.all_reduce(seen)
    rest = order[int(seen) :]
    return rest[rank::size]
