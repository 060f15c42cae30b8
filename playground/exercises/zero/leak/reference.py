from collections.abc import Callable

import torch
import torch.distributed as dist

SEED = 0
RANK = 3


def leak(
    rank: int,
    size: int,
    batches: list[torch.Tensor],
    forward: Callable[[torch.Tensor], torch.Tensor],
    limit: float,
) -> tuple[int, float]:
    """Return the number of losses above the limit, and their excess over it.

    Both are those of all ranks together.
    """
    spikes, excess = [], 0.0
    for batch in batches:
        loss = forward(batch)
        if loss > limit:
            spikes.append(loss.item())
            excess += loss.item() - limit
    total = torch.tensor([len(spikes), excess])
    dist.all_reduce(total)
    return int(total[0]), total[1].item()
