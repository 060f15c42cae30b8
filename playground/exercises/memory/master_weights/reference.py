import torch
import torch.distributed as dist


def master_weights(
    rank: int,
    size: int,
    param: torch.Tensor,
    master: torch.Tensor,
    gradient: torch.Tensor,
    rate: float,
) -> None:
    """Take a step of SGD with the mean gradient of all ranks.

    param, gradient: bfloat16. master: float32, the parameter before it is
    rounded. `param` and `master` are changed in place.
    """
    # write this
    total = gradient.float()
    dist.all_reduce(total)
    master -= rate * total / size
    param.copy_(master)
    # until here
