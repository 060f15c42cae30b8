"""An order in which everything comes after what it needs: of any lanes, and where some things never come."""

from __future__ import annotations

from hypothesis import given, strategies as st

from playground.see.analyse import Edge, in_order

LANES, LENGTH = 3, 6
edges = st.tuples(st.tuples(st.integers(0, LANES - 1), st.integers(0, LENGTH - 1)), st.just(False))


def comes_before(needs: dict[Edge, list[Edge]]) -> set[Edge]:
    """What can come at all, found by trying again and again."""
    been: set[Edge] = set()
    for _ in range(LANES * LENGTH):
        for lane in range(LANES):
            place = sum(rank == lane for (rank, _), _ in been)
            edge = ((lane, place), False)
            if place < LENGTH and been.issuperset(needs.get(edge, [])):
                been.add(edge)
    return been


@given(st.dictionaries(edges, st.lists(edges, max_size=3)))
def test_everything_comes_after_what_it_needs(needs: dict[Edge, list[Edge]]) -> None:
    lanes: dict[int, list[Edge]] = {lane: [((lane, place), False) for place in range(LENGTH)] for lane in range(LANES)}
    order = in_order(lanes, lambda edge: needs.get(edge, ()))
    places = {edge: place for place, edge in enumerate(order)}
    for edge, place in places.items():
        (lane, number), _ = edge
        assert order[edge] == lane
        assert number == 0 or places[(lane, number - 1), False] < place
        assert all(places[need] < place for need in needs.get(edge, []))
    assert order.keys() == comes_before(needs)
