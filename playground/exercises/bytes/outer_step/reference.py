import torch
import torch.distributed as dist


def outer_step(
    rank: int,
    size: int,
    shared: list[torch.Tensor],
    params: list[torch.Tensor],
    velocity: list[torch.Tensor],
    rate: float,
    momentum: float,
) -> None:
    """DiLoCo's outer step, after the ranks have trained alone for a while.

    All three lists have a tensor for each parameter, and change in place.
    shared: the parameters after the last outer step, the same on all ranks.
    params: those of this rank, after its own steps. velocity: Nesterov's, for
    you to keep; zeros before the first outer step.
    """
    # write this
    for start, param, v in zip(shared, params, velocity, strict=True):
        change = start - param
        dist.all_reduce(change)
        change /= size
        v.mul_(momentum).add_(change)
        start.sub_(rate * (change + momentum * v))
        param.copy_(start)
    # until here
