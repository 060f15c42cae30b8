import torch
import torch.distributed as dist


class Enter(torch.autograd.Function):
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


class Leave(torch.autograd.Function):
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
    """Return the output of an MLP that is cut over the ranks, [length, width].

    tokens: [length, width], the same on all ranks. columns: this rank's part
    of the first matrix, [width, features / N]; rows: its part of the second,
    [features / N, width].
    """
    hidden = torch.relu(Enter.apply(tokens) @ columns)
    return Leave.apply(hidden @ rows)
