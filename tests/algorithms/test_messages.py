"""What our algorithms send and receive: how many messages and bytes, into which memory, and beside
whose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from ranks import observed

from playground import launch
from playground.algorithms import ALGORITHMS, all_reduce, load_algorithm, load_all_reduce
from playground.algorithms.cost_model import IN_FLIGHT, RING_PIECE
from playground.algorithms.executor import Addressed, Group, WatchingExecutor, Works, executed_by
from playground.world import RankFailed

NAMES = sorted(ALGORITHMS)


def docstring_costs(collective: str, name: str) -> list[tuple[str, str, str]]:
    """(for which ranks, messages, bytes), as an algorithm's docstring has them: Python in N, S, P,
    E, K and rank."""
    code = (
        load_algorithm(collective, name)
        if collective == "all_reduce"
        else getattr(all_reduce, collective)
    )
    text = code.__doc__ or ""
    rows = [
        line.strip().strip("|").split("|")
        for line in text.splitlines()
        if line.strip().startswith("|")
    ]
    return [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows[2:]]


def messages_of(call: Callable[[], object]) -> dict[str, int]:
    """How many messages this rank sends in a call, and how many bytes."""
    sent: list[int] = []

    def note(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        sent.extend(part.nbytes for part, _ in send)

    with observed(note):
        call()
    return {"messages": len(sent), "bytes": sum(sent)}


def count_messages(rank: int, size: int, numel: int, names: list[str]) -> dict[str, dict[str, int]]:
    """What this rank sends, by all-reduce, and in the two phases of the ring."""
    whole, share = torch.zeros(numel), torch.zeros(numel // size)
    counts = {name: messages_of(lambda name=name: load_all_reduce(name)(whole)) for name in names}  # type: ignore[misc]
    counts["reduce_scatter"] = messages_of(
        lambda: load_algorithm("reduce_scatter", "ring")(share, whole)
    )
    counts["all_gather"] = messages_of(lambda: load_algorithm("all_gather", "ring")(whole, share))
    return counts


@pytest.mark.parametrize(
    "size", [2, 5, *(pytest.param(size, marks=pytest.mark.stress) for size in (3, 4, 8))]
)
def test_messages_and_bytes_are_what_docstrings_say(size: int, world: Worlds) -> None:
    numel = 840 * 8  # divisible by every size, and by every power of two among them
    names = [name for name in NAMES if ALGORITHMS[name].has_messages]
    counted = {name: ("all_reduce", name) for name in names} | {
        collective: (collective, "ring") for collective in ("reduce_scatter", "all_gather")
    }
    power = 1 << (size.bit_length() - 1)
    for rank, counts in enumerate(world(size).run(count_messages, numel, names)):
        known: dict[str, Any] = {
            "N": size,
            "S": numel * 4,
            "P": power,
            "E": size - power,
            "K": 1,
            "rank": rank,
        }
        known |= {"H": 1, "L": size}
        for name, (collective, algorithm) in counted.items():
            row = next(
                row for row in docstring_costs(collective, algorithm) if eval(row[0], dict(known))
            )
            messages = eval(row[1], {**known, "log2": math.log2})
            nbytes = eval(row[2], {**known, "log2": math.log2, "messages": messages})
            assert (counts[name]["messages"], counts[name]["bytes"]) == (
                messages,
                pytest.approx(nbytes),
            ), name


class Waited:
    """A message under way, which is no longer one of `still` when it has been waited for."""

    def __init__(self, work: Any, still: list[Any]) -> None:
        self.work = work
        self.still = still
        still.append(self)

    def wait(self) -> None:
        self.work.wait()
        self.still.remove(self)


class Started(WatchingExecutor):
    """Knows which messages have been started and not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.still: list[Any] = []

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        works = self.inner.start(group, send, receive)
        return Works(
            *([Waited(work, self.still) for work in each] for each in (works.sends, works.receives))
        )


def count_what_is_under_way(rank: int, size: int, numel: int) -> dict[str, int]:
    """How many messages are under way when a collective has returned, by its name."""
    started, counts = Started(), {}
    with executed_by(started):
        for name in NAMES:
            load_all_reduce(name)(torch.ones(numel, dtype=torch.uint8))
            counts[name] = len(started.still)
        share, whole = torch.ones(2), torch.ones(2 * size)
        load_algorithm("reduce_scatter", "ring")(share, whole)
        load_algorithm("all_gather", "ring")(whole, share)
    return {**counts, "phases": len(started.still)}


def test_all_messages_are_waited_for(world: Worlds) -> None:
    """Also those that are sent: the program may write the tensor when the call has returned."""
    counts = dict.fromkeys([*NAMES, "phases"], 0)
    assert world(3).run(count_what_is_under_way, 6 * RING_PIECE + 5) == [counts] * 3


def memory_beside(rank: int, size: int, name: str, numel: int) -> int:
    """Bytes of memory, other than the tensor's, into which the algorithm receives or from which it
    sends."""
    tensor, beside = torch.zeros(numel), {}

    def note(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        for part, _ in [*send, *receive]:
            storage = part.untyped_storage()
            if storage.data_ptr() != tensor.untyped_storage().data_ptr():
                beside[storage.data_ptr()] = storage.nbytes()

    with observed(note):
        load_all_reduce(name)(tensor)
    return sum(beside.values())


def test_the_pipelined_ring_needs_memory_for_two_pieces(world: Worlds) -> None:
    numel = 4 * RING_PIECE  # 16 pieces' worth of float32
    for beside in world(2).run(memory_beside, "pipelined-ring", numel):
        assert 0 < beside <= IN_FLIGHT * RING_PIECE


def test_the_ring_needs_memory_for_one_chunk(world: Worlds) -> None:
    assert world(3).run(memory_beside, "ring", 300) == [400] * 3


def fail_inside_all_reduce(rank: int, size: int) -> None:
    tensor = torch.ones(100)

    def note(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        if rank == 1 and tensor.max() > 1:  # it has added something already
            raise ValueError("no more")

    with observed(note):
        load_all_reduce("ring")(tensor)


def test_a_rank_that_fails_inside_an_algorithm_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 3 failed: ValueError: no more") as caught:
        launch(fail_inside_all_reduce, 3)
    assert caught.value.rank == 1


def receive_across_all_reduce(rank: int, size: int, names: list[str]) -> list[str]:
    """A receive of the user's own is under way, between the same two ranks, while our messages
    pass."""
    received = []
    for name in names:
        letter = torch.zeros(3)
        waiting = dist.irecv(letter, 1 - rank)
        load_all_reduce(name)(torch.ones(1000))
        dist.send(torch.full((3,), 7.0), 1 - rank)
        waiting.wait()
        received.append("from the other" if (letter == 7).all() else str(letter.tolist()))
    return received


def test_messages_of_the_user_are_left_alone(world: Worlds) -> None:
    assert world(2).run(receive_across_all_reduce, NAMES) == [["from the other"] * len(NAMES)] * 2
