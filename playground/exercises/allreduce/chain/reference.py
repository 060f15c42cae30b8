import torch
import torch.distributed as dist


def chain(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Leave in `tensor`, on every rank, the sum of all ranks' tensors.

    Each rank talks to its neighbours only.
    """
    left, right = rank - 1, rank + 1
    theirs = torch.empty_like(tensor)
    # write this
    if rank > 0:
        dist.recv(theirs, left)
        tensor += theirs
    if right < size:
        dist.send(tensor, right)
        dist.recv(tensor, right)
    if rank > 0:
        dist.send(tensor, left)
    # until here
