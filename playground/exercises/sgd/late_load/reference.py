import torch
import torch.distributed as dist

SEED = 0
RANK = 2


def late_load(
    rank: int,
    size: int,
    saved: torch.Tensor | None,
    gradients: list[torch.Tensor],
) -> float:
    """Train from a checkpoint that one rank has, and return the weight.

    saved: weight and velocity, float64, on the rank that has the checkpoint,
    and None on the others. A step: the velocity is halved, the mean gradient of
    all ranks is added to it, and the velocity is subtracted from the weight.
    """
    owner = torch.tensor(-1 if saved is None else rank)
    dist.all_reduce(owner, op=dist.ReduceOp.MAX)
    state = torch.zeros(2, dtype=torch.float64)
    if saved is not None:
        state.copy_(saved)
    dist.broadcast(state, int(owner))
    weight, velocity = state.tolist()
    for gradient in gradients:
        mean = gradient.clone()
        dist.all_reduce(mean)
        velocity = velocity / 2 + mean.item() / size
        weight -= velocity
    return weight
