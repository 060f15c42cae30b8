import torch
import torch.distributed as dist


def mean(rank: int, size: int, losses: torch.Tensor) -> float:
    """The mean loss of all samples of all ranks.

    `losses` [samples] are those of this rank; their number may differ.
    """
    # write this
    total = torch.zeros(2, dtype=torch.float64)
    total[0], total[1] = losses.sum(), len(losses)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
    # until here
