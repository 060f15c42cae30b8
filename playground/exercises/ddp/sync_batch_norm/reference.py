import torch
import torch.distributed as dist

EPSILON = 1e-5


def sync_batch_norm(
    rank: int,
    size: int,
    inputs: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
) -> torch.Tensor:
    """Normalise [samples, features] with the statistics of all ranks' samples.

    Updates `running_mean` and `running_var` [features] in place.
    """
    # write this
    x = inputs.double()
    count = torch.tensor([float(len(x))])
    total = torch.cat([x.sum(0), x.square().sum(0), count])
    dist.all_reduce(total)
    samples = total[-1]
    mean, square = total[:-1].view(2, -1) / samples
    variance = square - mean.square()
    unbiased = variance * samples / (samples - 1)
    running_mean.lerp_(mean.float(), momentum)
    running_var.lerp_(unbiased.float(), momentum)
    return ((x - mean) / (variance + EPSILON).sqrt()).float()
    # until here
