import torch
import torch.distributed as dist


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(context, tokens):
        return tokens.view_as(tokens)

    @staticmethod
    def backward(context, gradient):
        # write this
        total = gradient.clone()
        dist.all_reduce(total)
        return total
        # until here


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(context, summand):
        # write this
        total = summand.clone()
        dist.all_reduce(total)
        return total
        # until here

    @staticmethod
    def backward(context, gradient):
        # write this
        return gradient
        # until here


def mirrored(
    rank: int,
    size: int,
    tokens: torch.Tensor,
    columns: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return the output, [length, width], of an MLP sharded over the ranks.

    tokens: [length, width], the same on all ranks. columns: this rank's shard
    of the first matrix, [width, features / N]; rows: its shard of the second,
    [features / N, width].
    """
    hidden = torch.relu(CopyToRegion.apply(tokens) @ columns)
    return ReduceFromRegion.apply(hidden @ rows)
