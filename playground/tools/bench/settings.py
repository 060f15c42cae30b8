"""The settings of a benchmark: one object from the command line to the ranks. Does not import
torch.

| collective     | size                     | count                    | busbw / algbw, N ranks |
|----------------|--------------------------|--------------------------|------------------------|
| all_reduce     | of the tensor            | its elements             | 2 (N - 1) / N          |
| broadcast      | of the tensor            | its elements             | 1                      |
| reduce         | of the tensor            | its elements             | 1                      |
| all_gather     | of every rank's output   | of every rank's input    | (N - 1) / N            |
| reduce_scatter | of every rank's input    | of every rank's output   | (N - 1) / N            |
| all_to_all     | of every rank's input    | of one piece of it       | (N - 1) / N            |
| gather         | of the root's output     | of every rank's input    | (N - 1) / N            |
| scatter        | of the root's input      | of every rank's output   | (N - 1) / N            |

The size is rounded down to a multiple of an element; where each rank has a share, of N elements.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, takewhile

from playground.algorithms import ALGORITHMS_BY_COLLECTIVE, BACKEND
from playground.algorithms.bytes_sent import share_of_others, times_sent
from playground.base.errors import UsageError
from playground.base.flags import check_flags, flag
from playground.ui.units import format_bytes

REDUCTION = -1
"""In place of a rank: the reduction over all ranks."""
Piece = tuple[int, int]
"""(source, index): the piece of `count` elements at `index` in what the rank `source` gives, or in
the `REDUCTION`."""


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective: what each rank gives and must end with."""

    name: str
    factor: Callable[[int], float]
    """busbw / algbw on N ranks: what a link carries for each byte of the size."""
    pieces_expected: Callable[[int, int], list[Piece]]
    """Called as (rank, size): the pieces this rank must end with; none where that is not
    defined."""
    pieces_given: Callable[[int, int], int] = lambda rank, size: 1
    """Called as (rank, size): the number of pieces of `count` elements that this rank gives."""
    in_place: bool = False
    """Whether one tensor is given and received. Where there are two, each rank has a share of the
    size."""
    reduces: bool = False
    root: int = -1
    """The rank at the root; -1 where all ranks do the same."""


def at_root(pieces: Callable[[int, int], list[Piece]]) -> Callable[[int, int], list[Piece]]:
    """These pieces on rank 0, and none on the others."""
    return lambda rank, size: [] if rank else pieces(rank, size)


COLLECTIVES = {
    each.name: each
    for each in (
        CollectiveSpec(
            "all_reduce",
            factor=lambda n: times_sent(n, "all_reduce"),
            pieces_expected=lambda r, n: [(REDUCTION, 0)],
            in_place=True,
            reduces=True,
        ),
        CollectiveSpec(
            "broadcast",
            factor=lambda n: 1.0,
            pieces_expected=lambda r, n: [(0, 0)],
            in_place=True,
            root=0,
        ),
        CollectiveSpec(
            "reduce",
            factor=lambda n: 1.0,
            pieces_expected=at_root(lambda r, n: [(REDUCTION, 0)]),
            in_place=True,
            reduces=True,
            root=0,
        ),
        CollectiveSpec(
            "all_gather",
            factor=share_of_others,
            pieces_expected=lambda r, n: [(source, 0) for source in range(n)],
        ),
        CollectiveSpec(
            "reduce_scatter",
            factor=share_of_others,
            pieces_expected=lambda r, n: [(REDUCTION, r)],
            pieces_given=lambda r, n: n,
            reduces=True,
        ),
        CollectiveSpec(
            "all_to_all",
            factor=share_of_others,
            pieces_expected=lambda r, n: [(source, r) for source in range(n)],
            pieces_given=lambda r, n: n,
        ),
        CollectiveSpec(
            "gather",
            factor=share_of_others,
            pieces_expected=at_root(lambda r, n: [(source, 0) for source in range(n)]),
            root=0,
        ),
        CollectiveSpec(
            "scatter",
            factor=share_of_others,
            pieces_expected=lambda r, n: [(0, r)],
            pieces_given=lambda r, n: n if r == 0 else 0,
            root=0,
        ),
    )
}
"""By name; r is the rank, n the number of ranks."""


def geometric_range(begin: int, end: int) -> tuple[int, ...]:
    """`begin`, then `FACTOR` times the one before, as long as that is not beyond `end`."""
    return tuple(takewhile(lambda size: size <= end, (begin * FACTOR**step for step in count())))


ALGORITHMS = tuple(
    dict.fromkeys(
        [
            BACKEND,
            *(name for algorithms in ALGORITHMS_BY_COLLECTIVE.values() for name in algorithms),
        ]
    )
)
"""Every algorithm of any collective."""
MEMORY = "memory"
"""A row beside the algorithms, with --limit: all ranks copy their tensors at once."""
FACTOR = 4
"""Ratio of each size to the one before."""
DTYPES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4,
    "int64": 8,
}  # fmt: skip
"""Bytes per element."""
OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
"""Name of each in `dist.ReduceOp`."""
MAX_TRIALS = 100_000
"""Per size: beyond, one size of one algorithm takes more than ten minutes."""


def available_algorithms(collective: str) -> tuple[str, ...]:
    """The backend's, and ours if there are any."""
    return (BACKEND, *ALGORITHMS_BY_COLLECTIVE.get(collective, ()))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Raises `UsageError` for what cannot be measured."""

    collectives: tuple[str, ...] = flag(
        ("all_reduce",), "Collectives to measure", name="--collective", choices=COLLECTIVES
    )
    algorithms: tuple[str, ...] = flag(
        (BACKEND, "auto"),
        "All-reduce algorithms to measure (ring: also reduce_scatter and all_gather)",
        name="--algorithm",
        choices=ALGORITHMS,
    )
    """The same for every collective, which takes those that it has. By default the program's own,
    and ours that is best: the ring that is taught is neither, and one word away."""
    sizes: tuple[int, ...]
    """Bytes, from small to large."""
    dtype: str = flag("float32", "Data type of the elements.", choices=DTYPES)
    op: str = flag("sum", "Reduction operation.", choices=OPS)
    iterations: int = flag(20, "Number of trials per size.", least=1, most=MAX_TRIALS)
    limit: bool = flag(
        False, "Also measure the memory: a row in which all ranks copy their tensors at once."
    )

    def __post_init__(self) -> None:
        check_flags(self)
        for collective in self.collectives:
            if not self.algorithms_of(collective):
                has, asked = ", ".join(available_algorithms(collective)), ",".join(self.algorithms)
                raise UsageError(
                    f"--algorithm {asked} for {collective}: it has {has}, ask for one of them"
                )

    def check_world(self, size: int) -> None:
        """Raise `UsageError` if the smallest size has no element, or none for each of `size` ranks
        where they share."""
        for collective in self.collectives:
            needed = DTYPES[self.dtype] * (1 if COLLECTIVES[collective].in_place else size)
            if self.sizes[0] < needed:
                asked = f"--begin {format_bytes(self.sizes[0])} is too small"
                raise UsageError(
                    f"{asked}: {collective} of {self.dtype} on {size} ranks needs at least "
                    f"{needed} bytes"
                )

    def check_memory(self, local_size: int, size: int, available: int) -> None:
        """Raise `UsageError` if `local_size` ranks of a world of `size` need more than `available`
        bytes: a tensor or two, and the needs of algorithm and check. The all-to-all all-reduce
        alone receives every rank's tensor."""
        tensors = (2 + size if "all-to-all" in self.algorithms else 4) + 2 * self.limit
        needed = self.sizes[-1] * local_size * tensors
        if needed > available:
            what = (
                f"sizes up to {format_bytes(self.sizes[-1])}: {local_size} ranks need about "
                f"{needed:,} bytes of"
            )
            raise UsageError(
                f"{what} memory and {available:,} are free: use a smaller --end or fewer ranks"
            )

    def algorithms_of(self, collective: str) -> tuple[str, ...]:
        """Algorithms to measure for this collective, in the order of the table."""
        return tuple(name for name in available_algorithms(collective) if name in self.algorithms)

    def count(self, collective: str, nbytes: int, size: int) -> int:
        """Elements of the tensor, or of a rank's share of it."""
        elements = nbytes // DTYPES[self.dtype]
        return elements if COLLECTIVES[collective].in_place else elements // size

    @property
    def document(self) -> dict[str, object]:
        """As --json prints them: with the algorithms that are measured."""
        measured = {
            name for collective in self.collectives for name in self.algorithms_of(collective)
        }
        return asdict(self) | {"algorithms": tuple(name for name in ALGORITHMS if name in measured)}
