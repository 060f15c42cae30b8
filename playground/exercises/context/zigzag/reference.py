import torch


def zigzag(
    rank: int,
    size: int,
    length: int,
    hop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens, and which keys they see.

    length: of the whole sequence, cut into 2N runs; rank r has runs r and
    2N - 1 - r. hop: how often each rank has passed the block of keys that it
    had to rank + 1; after 0 hops it has its own. The positions: [length / N].
    What they see of the block that is here now: bool, [length / N, length / N],
    a row for each of this rank's queries.
    """
    # write this
    runs = torch.arange(length).chunk(2 * size)
    source = (rank - hop) % size
    mine = torch.cat([runs[rank], runs[2 * size - 1 - rank]])
    keys = torch.cat([runs[source], runs[2 * size - 1 - source]])
    return mine, keys <= mine[:, None]
    # until here
