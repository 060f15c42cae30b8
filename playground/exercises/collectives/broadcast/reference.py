import torch
import torch.distributed as dist


def broadcast(rank: int, size: int, tensor: torch.Tensor, root: int) -> None:
    """Leave in every rank's `tensor` what rank `root` has in its own."""
    # write this
    if rank == root:
        for other in range(size):
            if other != root:
                dist.send(tensor, other)
    else:
        dist.recv(tensor, root)
    # until here
