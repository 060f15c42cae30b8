import torch
import torch.distributed as dist


def doubling(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Leave in `tensor`, on every rank, the sum of all ranks' tensors.

    That takes about log2(size) steps.
    """
    power = 1 << (size.bit_length() - 1)  # the largest power of two <= size
    theirs = torch.empty_like(tensor)
    # write this
    if rank >= power:
        dist.send(tensor, rank - power)
        dist.recv(tensor, rank - power)
        return
    if rank + power < size:
        dist.recv(theirs, rank + power)
        tensor += theirs
    distance = 1
    while distance < power:
        partner = rank ^ distance
        request = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        request.wait()
        tensor += theirs
        distance *= 2
    if rank + power < size:
        dist.send(tensor, rank + power)
    # until here
