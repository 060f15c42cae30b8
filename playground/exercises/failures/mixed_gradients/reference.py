import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def mixed_gradients(
    rank: int,
    size: int,
    gradients: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the sum over all ranks of each gradient, by parameter.

    gradients: those of this rank, in the order in which its backward has
    computed them.
    """
    sums = {}
    for name in sorted(gradients):
        total = gradients[name].clone()
        dist.all_reduce(total)
        sums[name] = total
    return sums
