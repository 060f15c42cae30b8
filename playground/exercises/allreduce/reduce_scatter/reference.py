import torch
import torch.distributed as dist


def reduce_scatter(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Leave in chunk `rank` of `tensor` the sum of that chunk over all ranks.

    The other chunks may hold anything.
    """
    chunks = tensor.tensor_split(size)
    left, right = (rank - 1) % size, (rank + 1) % size
    # write this
    for step in range(1, size):
        outgoing = chunks[(rank - step) % size]
        mine = chunks[(rank - step - 1) % size]
        theirs = torch.empty_like(mine)
        request = dist.isend(outgoing, right)
        dist.recv(theirs, left)
        request.wait()
        mine += theirs
    # until here
