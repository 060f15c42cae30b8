import torch
import torch.distributed as dist


def merge(
    rank: int,
    size: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys of all ranks.

    query, key, value: this rank's, [length / N, width]. All keys are visible.
    """
    output, lse = torch.zeros_like(query), query[:, :1] * 0 - torch.inf
    for hop in range(size):
        scores = query @ key.T / query.shape[1] ** 0.5
        block_lse = scores.logsumexp(1, keepdim=True)
        block_output = (scores - block_lse).exp() @ value
        # write this
        both = torch.logaddexp(lse, block_lse)
        output = output * (lse - both).exp()
        output = output + block_output * (block_lse - both).exp()
        lse = both
        # until here
        if hop + 1 < size:
            block = torch.stack([key, value])
            arriving = torch.empty_like(block)
            send = dist.P2POp(dist.isend, block, (rank + 1) % size)
            receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % size)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            key, value = arriving
    return output
