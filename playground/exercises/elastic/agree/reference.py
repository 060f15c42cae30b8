import torch.distributed as dist


def agree(rank: int, size: int, steps: list[int]) -> int | None:
    """The newest step of which every rank has a snapshot; None if there is
    none.

    steps: those of which this rank has one, in any order.
    """
    # write this
    everyones: list[list[int]] = [[] for _ in range(size)]
    dist.all_gather_object(everyones, steps)
    common = set(steps).intersection(*everyones)
    return max(common, default=None)
    # until here
