import torch
import torch.distributed as dist


def column(rank: int, size: int, matrix: torch.Tensor, index: int) -> None:
    """Rank 1 gets column `index` of rank 0's matrix into its own."""
    # write this
    if rank == 0:
        dist.send(matrix[:, index].contiguous(), 1)
    elif rank == 1:
        arrived = torch.empty(len(matrix), dtype=matrix.dtype)
        dist.recv(arrived, 0)
        matrix[:, index] = arrived
    # until here
