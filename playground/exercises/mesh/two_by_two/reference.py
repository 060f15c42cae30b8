import torch
import torch.distributed as dist


def two_by_two(
    rank: int,
    size: int,
    data: dist.ProcessGroup,
    tensor: dist.ProcessGroup,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    columns: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return the mean squared error over the samples of all ranks.

    data, tensor: this rank's groups. tokens, targets: [samples, width], the
    same in the tensor group; in the data group each rank has others, and
    perhaps not as many. columns: [width, features / N], rows: [features / N,
    width]: this rank's parts of an MLP, the same in the data group.
    """
    # write this
    count = torch.tensor(float(targets.numel()), dtype=torch.float64)
    dist.all_reduce(count, group=data)
    summand = torch.relu(tokens @ columns) @ rows
    others = summand.detach().clone()
    dist.all_reduce(others, group=tensor)
    output = summand + (others - summand.detach())
    loss = ((output - targets) ** 2).sum() / count
    loss.backward()
    for param in (columns, rows):
        dist.all_reduce(param.grad, group=data)
    total = loss.detach().clone()
    dist.all_reduce(total, group=data)
    return total
    # until here
