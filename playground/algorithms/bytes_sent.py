"""The bytes that a rank sends in a collective, by formulas. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable

TIMES_SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often a rank sends all of a tensor but its own shard, by a ring or straight."""
TIMES_SENT_AT: dict[str, Callable[[int, int], float]] = {
    "broadcast": lambda size, place: float(place < size - 1),
    "reduce": lambda size, place: float(place > 0),
    "gather": lambda size, place: float(place > 0),
    "scatter": lambda size, place: 0.0 if place else share_of_others(size),
    "barrier": lambda size, place: 0.0,
    "monitored_barrier": lambda size, place: 0.0,
}
"""How often each of N ranks sends its tensor, by its place in the ring that begins with the
root."""


def share_of_others(size: int) -> float:
    """The fraction of a tensor, cut into a shard per rank, that belongs to other ranks."""
    return (size - 1) / size


def times_sent(size: int, *collectives: str) -> float:
    """What each of N ranks sends in these collectives, in whole tensors. Raises `KeyError` for one
    that is not in `TIMES_SENT`."""
    return sum(TIMES_SENT[name] for name in collectives) * share_of_others(size)


def bytes_sent(collective: str, size: int, nbytes: int, place: int = 0) -> float:
    """Bytes that one of N ranks sends in a collective, by the formula of its usual algorithm.
    `nbytes` is S, the larger of what this rank gives and what it gets; `place` is how many ranks
    after the root it comes, N - 1 at most.

    | collective     | algorithm          | S                     | sent by a rank               |
    |----------------|--------------------|-----------------------|------------------------------|
    | all_reduce     | ring               | the tensor            | 2 (N - 1) / N S              |
    | reduce_scatter | ring               | a rank's whole input  | (N - 1) / N S                |
    | all_gather     | ring               | a rank's whole output | (N - 1) / N S                |
    | all_to_all     | each to each       | a rank's whole input  | (N - 1) / N S                |
    | broadcast      | ring from the root | the tensor            | S; the last in the ring: 0   |
    | reduce         | ring to the root   | the tensor            | S; the root: 0               |
    | gather         | each to the root   | a rank's input        | S; the root: 0               |
    | scatter        | the root to each   | the root's input      | the root: (N - 1) / N S      |
    | barrier        |                    |                       | 0                            |

    A backend may choose another algorithm: gloo's broadcast is a tree, NCCL chooses by size. All
    ranks together send the same in a tree; single ranks send more or less. Raises `KeyError` for a
    collective that is not in the table.
    """
    if collective in TIMES_SENT_AT:
        return TIMES_SENT_AT[collective](size, place) * nbytes
    return times_sent(size, collective) * nbytes
