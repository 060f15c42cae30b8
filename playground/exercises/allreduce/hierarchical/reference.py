import torch
import torch.distributed as dist


def hierarchical(
    rank: int,
    size: int,
    tensor: torch.Tensor,
    inner: dist.ProcessGroup,
    across: dist.ProcessGroup,
) -> None:
    """Leave in `tensor` the sum of all ranks' tensors, on every rank.

    inner: the ranks of this host. across: those with its place on all hosts.
    """
    # write this
    each = len(tensor) // dist.get_world_size(inner)
    shard = torch.empty_like(tensor[:each])
    dist.reduce_scatter_tensor(shard, tensor, group=inner)
    dist.all_reduce(shard, group=across)
    dist.all_gather_into_tensor(tensor, shard, group=inner)
    # until here
