import torch
import torch.distributed as dist


def handover(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Rank 0 sends its tensor, and rank 1 receives it into its own."""
    # write this
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    # until here
