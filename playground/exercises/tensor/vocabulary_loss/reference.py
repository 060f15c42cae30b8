import torch
import torch.distributed as dist


def vocabulary_loss(
    rank: int,
    size: int,
    logits: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Return the mean cross entropy over all tokens, on every rank.

    logits: [tokens, vocabulary / N], this rank's part of the vocabulary:
    words rank * vocabulary / N and following. targets: [tokens], words.
    """
    # write this
    highest = logits.amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    logits = logits - highest[:, None]
    total = logits.exp().sum(-1)
    dist.all_reduce(total)
    words = logits.shape[1]
    column = targets - rank * words
    is_mine = (column >= 0) & (column < words)
    of_target = logits.gather(1, column.where(is_mine, 0)[:, None])[:, 0]
    of_target = of_target * is_mine
    dist.all_reduce(of_target)
    return (total.log() - of_target).mean()
    # until here
