from collections.abc import Callable

import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def lost_gradients(
    rank: int,
    size: int,
    microbatches: list[torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[float, float]:
    """Return the sum of this rank's gradients, and the mean of all ranks' sums.

    `backward` returns the gradient of a microbatch, in bfloat16.
    """
    total = torch.zeros(1)
    for batch in microbatches:
        gradient = backward(batch)
        total += gradient
    mean = total.clone()
    dist.all_reduce(mean)
    return total.item(), mean.item() / size
