"""The collectives that are measured: what their size means, what each rank gives, and what it must end with.

| collective     | size                           | count                   | busbw / algbw, N ranks |
|----------------|--------------------------------|-------------------------|------------------------|
| all_reduce     | of the tensor                  | its elements            | 2 (N - 1) / N          |
| broadcast      | of the tensor                  | its elements            | 1                      |
| reduce         | of the tensor                  | its elements            | 1                      |
| all_gather     | of every rank's output         | of every rank's input   | (N - 1) / N            |
| reduce_scatter | of every rank's input          | of every rank's output  | (N - 1) / N            |
| all_to_all     | of every rank's input          | of one piece of it      | (N - 1) / N            |
| gather         | of the root's output           | of every rank's input   | (N - 1) / N            |
| scatter        | of the root's input            | of every rank's output  | (N - 1) / N            |

Where each rank has a share, the size is rounded down to a multiple of N elements. Importing this does not import torch.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playground.runtime.remote import Remote, remote

REDUCTION = -1
"""In place of a rank: the reduction over all ranks."""
Piece = tuple[int, int]
"""(source, index): the piece of `count` elements at `index` in what the rank `source` gives, or in the `REDUCTION`."""


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    name: str
    backend_call: Remote
    """The backend's own: `call(buffers, op)`."""
    factor: Callable[[int], float]
    """Of N ranks: what a link carries for each byte of the size; busbw is this times algbw."""
    pieces_given: Callable[[int, int], int] = lambda rank, size: 1
    """Of (rank, size): how many pieces of `count` elements this rank gives."""
    pieces_expected: Callable[[int, int], list[Piece]]
    """Of (rank, size): the pieces this rank must end with; none where that is not defined."""
    in_place: bool = False
    """Whether one tensor is given and received. Where there are two, each rank has a share of the size."""
    reduces: bool = False
    root: int = -1
    """The rank at the root; -1 where all ranks do the same."""


def share_of_others(size: int) -> float:
    """The fraction of a tensor, cut into a piece per rank, that belongs to other ranks."""
    return (size - 1) / size


def one_from_each(rank: int, size: int) -> list[Piece]:
    return [(source, 0) for source in range(size)]


COLLECTIVES = {
    spec.name: spec
    for spec in (
        CollectiveSpec(
            name="all_reduce",
            backend_call=remote("playground.tools.bench.workload:all_reduce"),
            factor=lambda size: 2 * share_of_others(size),
            pieces_expected=lambda rank, size: [(REDUCTION, 0)],
            in_place=True,
            reduces=True,
        ),
        CollectiveSpec(
            name="broadcast",
            backend_call=remote("playground.tools.bench.workload:broadcast"),
            factor=lambda size: 1.0,
            pieces_expected=lambda rank, size: [(0, 0)],
            in_place=True,
            root=0,
        ),
        CollectiveSpec(
            name="reduce",
            backend_call=remote("playground.tools.bench.workload:reduce"),
            factor=lambda size: 1.0,
            pieces_expected=lambda rank, size: [(REDUCTION, 0)] if rank == 0 else [],
            in_place=True,
            reduces=True,
            root=0,
        ),
        CollectiveSpec(
            name="all_gather",
            backend_call=remote("playground.tools.bench.workload:all_gather"),
            factor=share_of_others,
            pieces_expected=one_from_each,
        ),
        CollectiveSpec(
            name="reduce_scatter",
            backend_call=remote("playground.tools.bench.workload:reduce_scatter"),
            factor=share_of_others,
            pieces_given=lambda rank, size: size,
            pieces_expected=lambda rank, size: [(REDUCTION, rank)],
            reduces=True,
        ),
        CollectiveSpec(
            name="all_to_all",
            backend_call=remote("playground.tools.bench.workload:all_to_all"),
            factor=share_of_others,
            pieces_given=lambda rank, size: size,
            pieces_expected=lambda rank, size: [(source, rank) for source in range(size)],
        ),
        CollectiveSpec(
            name="gather",
            backend_call=remote("playground.tools.bench.workload:gather"),
            factor=share_of_others,
            pieces_expected=lambda rank, size: one_from_each(rank, size) if rank == 0 else [],
            root=0,
        ),
        CollectiveSpec(
            name="scatter",
            backend_call=remote("playground.tools.bench.workload:scatter"),
            factor=share_of_others,
            pieces_given=lambda rank, size: size if rank == 0 else 0,
            pieces_expected=lambda rank, size: [(0, rank)],
            root=0,
        ),
    )
}
