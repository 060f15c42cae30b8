import torch
import torch.distributed as dist

SEED = 0
RANK = 2


def wrong_offset(
    rank: int,
    size: int,
    sizes: list[int],
    share: torch.Tensor,
) -> torch.Tensor:
    """Return the shares of all ranks, one behind another: [sum(sizes)]."""
    whole = torch.zeros(sum(sizes), dtype=share.dtype)
    start = sum(sizes[:rank])
    whole[start : start + len(share)] = share
    dist.all_reduce(whole)
    return whole
