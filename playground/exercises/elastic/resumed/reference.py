import torch
import torch.distributed as dist

SEED = 0
RANK = 2


def resumed(
    rank: int,
    size: int,
    snapshots: dict[int, torch.Tensor],
) -> tuple[int, torch.Tensor]:
    """Return the step to resume from, and the sum of all shares of its state.

    snapshots: this rank's share of the state, by step; it has all steps up to
    its newest one.
    """
    step = torch.tensor(max(snapshots))
    dist.all_reduce(step, op=dist.ReduceOp.MIN)
    state = snapshots[int(step)].clone()
    dist.all_reduce(state)
    return int(step), state
