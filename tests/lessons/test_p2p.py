"""p2p: what each function leaves on every rank is what its table says, in a world of any size."""

from __future__ import annotations

import pytest
from fixtures import Worlds
from test_lessons import docstring_table

from playground.lessons.p2p import lesson as p2p


def leave_tensors(rank: int, size: int) -> dict[str, float]:
    """What each function of p2p leaves."""
    functions = [
        p2p.blocking, p2p.immediate, p2p.exchange, p2p.batch, p2p.ring, p2p.any_source, p2p.tags,
    ]  # fmt: skip
    return {function.__name__: function(rank, size).item() for function in functions}  # type: ignore[no-untyped-call]


def test_p2p_leaves_what_its_tables_say(world: Worlds) -> None:
    by_rank = world(3).run(leave_tensors)
    for name in by_rank[0]:
        table = docstring_table("p2p", name)
        assert [row["after"] for row in table] == [found[name] for found in by_rank], name


@pytest.mark.parametrize("size", [2, 4, 5])
def test_p2p_in_any_world(size: int, world: Worlds) -> None:
    found = world(size).run(leave_tensors)
    left = [(rank - 1) % size for rank in range(size)]
    expected = {
        "blocking": [1.0, 1.0, 0.0, 0.0, 0.0],
        "immediate": [1.0, 1.0, 0.0, 0.0, 0.0],
        "exchange": [10.0 + other for other in left],
        "batch": [10.0 + other for other in left],
        "ring": [float(size), *(rank + 1.0 for rank in range(1, size))],
        "any_source": [10.0, *(20.0 + 2 * rank for rank in range(1, size))],
        "tags": [0.0, 4.0, 0.0, 0.0, 0.0],
    }
    for name, values in expected.items():
        assert [each[name] for each in found] == values[:size], name
