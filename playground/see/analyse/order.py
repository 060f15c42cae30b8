"""An order of what happened on several lanes in which everything comes after what it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from playground.see.analyse.timeline import Edge

Where = TypeVar("Where")


def in_order(lanes: Mapping[Where, Iterable[Edge]], needs: Callable[[Edge], Iterable[Edge]]) -> dict[Edge, Where]:
    """All edges with their lanes, each after those before it on its lane and after all that it needs.

    One that needs what never comes is left out, with all behind it on its lane. Takes time linear in the number of
    edges and of their needs.
    """
    order: dict[Edge, Where] = {}
    held_up: dict[Edge, list[Iterator[Edge]]] = defaultdict(list)

    def go_along(lane: Where) -> Iterator[Edge]:
        """Yields whatever has to come before it can go on."""
        for edge in lanes[lane]:
            yield from (need for need in needs(edge) if need not in order)
            order[edge] = lane
            free.extend(held_up.pop(edge, ()))

    free = [go_along(lane) for lane in lanes]
    while free:
        walk = free.pop()
        if (missing := next(walk, None)) is not None:
            held_up[missing].append(walk)
    return order
