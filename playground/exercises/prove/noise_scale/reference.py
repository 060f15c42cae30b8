import torch
import torch.distributed as dist


def noise_scale(
    rank: int,
    size: int,
    gradients: torch.Tensor,
    batch: int,
) -> float:
    """Estimate the noise scale of the gradient, in samples.

    gradients: [microbatches, parameters], each the mean gradient of `batch`
    samples. All ranks have the same number of microbatches.
    """
    # write this
    count = size * len(gradients)
    mean = gradients.sum(0) / count
    dist.all_reduce(mean)
    small = gradients.square().sum() / count
    dist.all_reduce(small)
    large = mean.square().sum()
    signal = (count * large - small) / (count - 1)
    variance = (small - large) * batch * count / (count - 1)
    return (variance / signal).item()
    # until here
