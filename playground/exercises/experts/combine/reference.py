import torch
import torch.distributed as dist


def combine(
    rank: int,
    size: int,
    results: torch.Tensor,
    received: list[int],
    sent: list[int],
    order: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the output of each of this rank's tokens, [tokens, width].

    results: [rows, width], what experts here made of the rows that came:
    received[r] of them from rank r, one rank after the other. sent: how many
    this rank had sent to each. It had sorted them: row order[i] went i-th.
    Row j is of token j // k. weights: [tokens, k], those of a token's rows.
    """
    # write this
    back = results.new_empty(sum(sent), results.shape[1])
    dist.all_to_all_single(back, results, sent, received)
    rows = torch.empty_like(back)
    rows[order] = back
    rows = rows.view(*weights.shape, results.shape[1])
    return (rows * weights.unsqueeze(-1)).sum(1)
    # until here
