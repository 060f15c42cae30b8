import torch
import torch.distributed as dist


def flat(rank: int, size: int, gradients: list[torch.Tensor]) -> None:
    """Leave in each of these tensors its mean over all ranks.

    A single `dist.all_reduce` is called for all of them.
    """
    # write this
    row = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(row)
    row /= size
    parts = row.split([each.numel() for each in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    # until here
