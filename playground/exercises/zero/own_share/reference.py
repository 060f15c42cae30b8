from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F


def own_share(
    rank: int,
    size: int,
    parameters: torch.Tensor,
    gradient: torch.Tensor,
    step: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Take a step with the mean gradient, each rank for its shard alone.

    `step(shard, gradient)` changes `shard` in place. It is called once, with
    ceil(len(parameters) / size) elements. All ranks have all parameters then.
    """
    # write this
    each = -(-len(parameters) // size)
    padding = (0, each * size - len(parameters))
    flat = F.pad(parameters, padding)
    mine = torch.empty_like(flat[:each])
    dist.reduce_scatter_tensor(mine, F.pad(gradient, padding))
    mine /= size
    shard = flat[rank * each : (rank + 1) * each].clone()
    step(shard, mine)
    dist.all_gather_into_tensor(flat, shard)
    parameters.copy_(flat[: len(parameters)])
    # until here
