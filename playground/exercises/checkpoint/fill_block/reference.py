from collections.abc import Callable

import torch

Pair = tuple[int, int]


def fill_block(
    rank: int,
    size: int,
    block: torch.Tensor,
    start: Pair,
    saved: list[tuple[Pair, Pair]],
    read: Callable[[int, slice, slice], torch.Tensor],
) -> None:
    """Fill this rank's block of a matrix from a checkpoint of other blocks.

    block: of the rows and columns from `start` on. saved: by file, the row and
    column at which its block begins, and how many rows and columns it has.
    read(file, rows, columns): a part of that block, counted from its begin.
    """
    # write this
    for file, (begin, shape) in enumerate(saved):
        theirs, own = [], []
        for dim in (0, 1):
            low = max(begin[dim], start[dim])
            end = start[dim] + block.shape[dim]
            high = max(low, min(begin[dim] + shape[dim], end))
            theirs.append(slice(low - begin[dim], high - begin[dim]))
            own.append(slice(low - start[dim], high - start[dim]))
        if all(part.start < part.stop for part in own):
            block[own[0], own[1]] = read(file, theirs[0], theirs[1])
    # until here
