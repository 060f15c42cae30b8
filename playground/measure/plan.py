"""What there is to measure and what of it was asked for: names and numbers, known before torch is imported.

| collective     | size                       | count       | factor from algbw to busbw, N ranks |
|----------------|----------------------------|-------------|-------------------------------------|
| all_reduce     | of the tensor              | of it all   | 2 (N - 1) / N                       |
| broadcast      | of the tensor              | of it all   | 1                                   |
| reduce         | of the tensor              | of it all   | 1                                   |
| all_gather     | of what a rank ends with   | a rank's    | (N - 1) / N                         |
| reduce_scatter | of what a rank begins with | a rank's    | (N - 1) / N                         |
| all_to_all     | of what a rank has         | a rank's    | (N - 1) / N                         |
| gather         | of what the root ends with | a rank's    | (N - 1) / N                         |
| scatter        | of what the root deals out | a rank's    | (N - 1) / N                         |

Where each rank has a share, the size is rounded down to a multiple of N elements.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from playground.measure import sizes as spelling
from playground.runtime.errors import Impossible

BACKEND = "backend"
USUAL_ALGORITHMS = (BACKEND, "auto", "ring")
ELEMENT = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
"""Bytes of one element, by type."""
OPS = {
    "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip
"""torch's names, by ours."""


@dataclass(frozen=True)
class Shape:
    """How a collective's figures are defined."""

    factor: Callable[[int], float]
    """Of N ranks: what a link carries for each byte of the size."""
    shared: bool = True
    """Whether each rank has a share of the size."""
    reduces: bool = False
    root: int = -1


def theirs(size: int) -> float:
    """Of N equal shares, those of the others."""
    return (size - 1) / size


SHAPES = {
    "all_reduce": Shape(lambda size: 2 * theirs(size), shared=False, reduces=True),
    "broadcast": Shape(lambda size: 1.0, shared=False, root=0),
    "reduce": Shape(lambda size: 1.0, shared=False, reduces=True, root=0),
    "all_gather": Shape(theirs),
    "reduce_scatter": Shape(theirs, reduces=True),
    "all_to_all": Shape(theirs),
    "gather": Shape(theirs, root=0),
    "scatter": Shape(theirs, root=0),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured, and how often."""

    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    """For all_reduce; the other collectives are the backend's."""
    sizes: tuple[int, ...]
    dtype: str
    op: str
    iterations: int
    warmup: int
    limit: bool
    seed: int

    def algorithms_of(self, collective: str) -> tuple[str, ...]:
        return self.algorithms if collective == "all_reduce" else (BACKEND,)

    def count(self, collective: str, nbytes: int, size: int) -> int:
        """Elements of the whole, or of a rank's share of it."""
        elements = nbytes // ELEMENT[self.dtype]
        return elements // size if SHAPES[collective].shared else elements

    def memory(self, ranks: int, size: int) -> int:
        """Bytes that `ranks` ranks of a world of `size` need for the largest size, about.

        A tensor or two, and what the algorithm and the check need beside them. all-to-all alone receives every
        rank's tensor.
        """
        tensors = 2 + size if "all-to-all" in self.algorithms and "all_reduce" in self.collectives else 4
        return self.sizes[-1] * ranks * (tensors + 2 * self.limit)


def check_sizes(begin: int, end: int, dtype: str, collectives: Sequence[str], size: int) -> None:
    """Raise `Impossible` unless a row of sizes can begin and end like this."""
    first, element = spelling.written(begin), ELEMENT[dtype]
    if begin > end:
        raise Impossible(f"--begin {first} is beyond --end {spelling.written(end)}: sizes go from small to large")
    if begin % element:
        raise Impossible(f"--begin {first} is not a multiple of {element} bytes, the size of one {dtype}")
    for collective in collectives:
        if SHAPES[collective].shared and begin < element * size:
            raise Impossible(
                f"--begin {first} is too small: {collective} needs one {dtype} for each of {size} ranks, "
                f"so at least {element * size} bytes"
            )


def check_algorithms(collectives: Sequence[str], algorithms: Sequence[str]) -> None:
    """Raise `Impossible` if one of our algorithms was asked for a collective that only the backend has."""
    ours = [name for name in algorithms if name != BACKEND]
    others = [name for name in collectives if name != "all_reduce"]
    if ours and others:
        raise Impossible(
            f"--algorithm {ours[0]} for {others[0]}: ours are algorithms for all_reduce alone, "
            f"leave --algorithm out for the others"
        )
