from collections.abc import Callable

import torch.distributed as dist


def agree(
    rank: int,
    size: int,
    steps: list[int],
    is_whole: Callable[[int], bool],
) -> int | None:
    """The newest step of which every rank has a whole snapshot, or None.

    steps: those of which this rank has one, in any order. is_whole(step):
    whether this rank's snapshot of that step can be read.
    """
    # write this
    whole = [step for step in steps if is_whole(step)]
    everyones: list[list[int]] = [[] for _ in range(size)]
    dist.all_gather_object(everyones, whole)
    common = set(whole).intersection(*everyones)
    return max(common, default=None)
    # until here
