import torch


def zigzag(
    rank: int,
    size: int,
    length: int,
    hop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens, and which keys they see.

    length: of the whole sequence, split into 2N chunks; rank r has chunks r and
    2N - 1 - r. hop: how often each rank has passed the block of keys that it
    had to rank + 1; after 0 hops it has its own. The positions: [length / N].
    What they see of the block that is here now: bool, [length / N, length / N],
    a row for each of this rank's queries.
    """
    # write this
    chunks = torch.arange(length).chunk(2 * size)
    source = (rank - hop) % size
    mine = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
    keys = torch.cat([chunks[source], chunks[2 * size - 1 - source]])
    return mine, keys <= mine[:, None]
    # until here
