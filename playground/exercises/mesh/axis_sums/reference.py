import math

import torch
import torch.distributed as dist


def axis_sums(
    rank: int,
    size: int,
    shape: tuple[int, ...],
    tensor: torch.Tensor,
) -> list[torch.Tensor]:
    """Return, for each axis of a mesh, the sum of the tensors along it.

    shape: ranks along each axis; the last coordinate changes fastest.
    """
    # write this
    sums = []
    for axis in range(len(shape)):
        step = math.prod(shape[axis + 1 :])
        for first in range(size):
            if first // step % shape[axis] == 0:
                ranks = [first + at * step for at in range(shape[axis])]
                group = dist.new_group(ranks)
                if rank in ranks:
                    total = tensor.clone()
                    dist.all_reduce(total, group=group)
                    sums.append(total)
    return sums
    # until here
