import torch
import torch.distributed as dist
from torch import nn


def gather_free(
    rank: int,
    size: int,
    layer: nn.Linear,
    shard: torch.Tensor,
) -> None:
    """Let `layer` have its weight only while forward or backward needs it.

    `shard` is flat: this rank's part of `weight.view(-1)`, in rank order.
    Between its uses, and now, the storage of `layer.weight` has 0 bytes.
    """
    storage = layer.weight.untyped_storage()
    nbytes = storage.nbytes()
    # write this

    def gather(*_: object) -> None:
        storage.resize_(nbytes)
        dist.all_gather_into_tensor(layer.weight.data.view(-1), shard)

    def free(*_: object) -> None:
        storage.resize_(0)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(free)
    layer.register_full_backward_pre_hook(gather)
    layer.weight.register_post_accumulate_grad_hook(free)
    free()
    # until here
