import torch
import torch.distributed as dist


def groups(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Leave in `tensor` what the first rank of its kind has in its own.

    That is rank 0 of the even ranks, and rank 1 of the odd ones.
    """
    # write this
    evens = dist.new_group([*range(0, size, 2)])
    odds = dist.new_group([*range(1, size, 2)])
    dist.broadcast(tensor, src=rank % 2, group=odds if rank % 2 else evens)
    # until here
