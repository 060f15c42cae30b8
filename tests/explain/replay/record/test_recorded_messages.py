"""Recorded messages are the messages: as many, and as many bytes, as closed forms say, and each has
its other end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Start, Worlds
from gpus import COLD

from playground import Deadlock, RankFailed
from playground.algorithms import ALGORITHMS, executor, load_all_reduce
from playground.algorithms.cost_model import ELEMENT, Task
from playground.explain.hang import Kind
from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    WAIT,
    Event,
    Recording,
)
from playground.explain.replay.record.run import Recorded
from playground.explain.replay.render.chrome import to_chrome
from playground.explain.replay.render.text_report import recording_texts
from playground.testing import World
from playground.ui.rendering import render
from playground.world.backends import BACKENDS

NUMEL = 840
"""Divisible by every number of ranks here, and by every power of two among them."""


def record(world: World, folder: Path, fn: Callable[..., object], *args: object) -> Recording:
    world.run(Recorded(fn, folder), *args)
    return read_recording(folder / "0")


def reduce_by_all(rank: int, size: int, batched: bool, numels: Sequence[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "IN_BATCHES", {"cpu"} if batched else set())
        for name, numel in product(ALGORITHMS, numels):
            if ALGORITHMS[name].has_messages:
                load_all_reduce(name)(torch.zeros(numel))


def around(recording: Recording, event: Event) -> str:
    """The name of the collective that an event lies in."""
    events = recording.ranks[event.rank].events
    while event.kind != COLLECTIVE and event.parent is not None:
        event = events[event.parent]
    return event.name


def receive_from_nobody(rank: int, size: int) -> None:
    """Of `size` ranks none has this number. Before it, a receive from anyone, which nobody sends
    to: the run ends as soon as rank 0 is in its own."""
    if rank == 1:
        dist.irecv(torch.ones(3))
    dist.barrier()
    if rank == 0:
        dist.recv(torch.ones(3), size)
    dist.barrier()


@pytest.mark.torch(2, 14)  # older ones may end before they have recorded it
def test_a_rank_that_does_not_exist_is_not_taken_for_anyone(world: Worlds, tmp_path: Path) -> None:
    # gloo may end the process: tests/world/test_strangers.py
    with pytest.raises((Deadlock, RankFailed)) as caught:
        record(world(2), tmp_path, receive_from_nobody)
    assert caught.value.diagnosis
    assert caught.value.diagnosis.kind == Kind.STRANGER
    recording = read_recording(tmp_path / "0")
    receives = sorted(recording.events(RECEIVE), key=lambda each: each.rank)
    assert [(each.number_of_peer, each.is_with_stranger) for each in receives] == [
        (2, True),
        (None, False),
    ]
    alone = replace(recording, ranks=(recording.ranks[0], replace(recording.ranks[1], events=())))
    text = " ".join(render(recording_texts(alone), 80).split())
    assert "first rank 0's receive from rank 2 of 2, which does not exist" in text
    arguments = [entry.get("args", {}) for entry in json.loads(to_chrome(alone))["traceEvents"]]
    assert 2 in [each.get("peer") for each in arguments]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4, 5, 8))]
)
def test_messages_and_bytes_are_those_of_the_closed_forms(
    size: int, batched: bool, world: Worlds, tmp_path: Path
) -> None:
    """Also where messages go in batches, as on nccl."""
    recording = record(world(size), tmp_path, reduce_by_all, batched, [NUMEL])
    sends = list(recording.events(SEND))
    for name, spec in ALGORITHMS.items():
        if spec.cost is not None:
            total = spec.cost.load()(Task(size, NUMEL * ELEMENT, size)).total
            code = spec.code.name
            mine = [
                event.nbytes
                for event in sends
                if around(recording, event) == f"all_reduce ({code})"
            ]
            pieces = 2 if batched and name == "pipelined-ring" else 1
            assert len(mine) == total.messages * pieces, name
            assert sum(mine) == pytest.approx(total.bytes), name
    assert ends_of(sends, lambda event: (event.rank, event.peer)) == ends_of(
        recording.events(RECEIVE), lambda event: (event.peer, event.rank)
    )
    assert [rank.dropped for rank in recording.ranks] == [0] * size
    assert all(event.end < float("inf") for event in recording.events())


def ends_of(
    events: Iterator[Event] | list[Event], ways: Callable[[Event], object]
) -> list[tuple[object, ...]]:
    """What tells messages apart, the same at both ends."""
    return sorted(
        (ways(event), event.group, event.tag, event.message, event.nbytes) for event in events
    )


def reduce_in_turn(rank: int, size: int) -> None:
    load_all_reduce("ring")(torch.full((size,), 10.0**rank))


def test_values_are_those_that_travelled(world: Worlds, tmp_path: Path) -> None:
    recording = record(world(3), tmp_path, reduce_in_turn)
    sent = {(event.rank, event.peer, event.message): event for event in recording.events(SEND)}
    for event in recording.events(RECEIVE):
        assert event.peer is not None
        other = sent[event.peer, event.rank, event.message]
        assert event.values == other.values
        assert other.start <= event.end
    for event in recording.events(COLLECTIVE):
        assert event.values == (111.0,) * 3
    first = recording.ranks[0].events
    assert [event.offset for event in first if event.kind == SEND] == [2, 1, 0, 2]
    assert {recording.sources[event.source or 0].file for event in first if event.kind == SEND} == {
        "playground/algorithms/all_reduce.py"
    }


def reduce_in_background(rank: int, size: int, in_thread: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKENDS["gloo"], "allows_threads", in_thread)
        reduce_asynchronously()


def reduce_asynchronously() -> None:
    works = [load_all_reduce("ring")(torch.ones(100), async_op=True) for _ in range(3)]
    for work in works:
        assert work.wait()  # type: ignore[attr-defined]
        assert work.is_completed()  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_collective_in_the_background_is_waited_for(
    in_thread: bool, world: Worlds, tmp_path: Path
) -> None:
    """Where the backend allows no second thread, it lies on the lane of the first, with its
    messages."""
    recording = record(world(2), tmp_path, reduce_in_background, in_thread)
    for rank in recording.ranks:
        calls = [event for event in rank.events if event.kind == COLLECTIVE]
        assert [event.lane for event in calls] == ["background" if in_thread else "main"] * 3
        assert {event.lane for event in rank.events if event.kind == SEND} == {calls[0].lane}
        waits = [event for event in rank.events if event.kind == WAIT and event.lane == "main"]
        awaited = [event.awaits for event in waits if event.parent is None]
        assert awaited == [(event.number,) for event in calls]


def talk(rank: int, size: int) -> None:
    """Rank 0 and rank 1 talk in every way that torch.distributed has; and rank 2 with rank 1 in a
    group."""
    other, tensor, group = 1 - rank, torch.full((2,), float(rank)), dist.new_group([1, 2])
    if rank == 2:
        dist.recv(torch.zeros(1), group=group)
        dist.irecv(torch.zeros(1), group=group).wait()
        return
    if rank:
        dist.send(tensor, 0)
        dist.isend(tensor, 0).wait()
    else:
        assert dist.recv(tensor) == 1
        dist.irecv(tensor).wait()
    batch = [
        dist.P2POp(dist.isend, torch.ones(3), other, tag=3),
        dist.P2POp(dist.irecv, torch.zeros(3), other, tag=3),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for _ in range(2 * rank):
        dist.send(torch.ones(1), 2, group=group)


def test_messages_of_the_program(world: Worlds, tmp_path: Path) -> None:
    """Those from anyone among them: who it was is known in the end. torch says which rank of the
    group it was where it is asked, and which of the world where it tells."""
    recording = record(world(3), tmp_path, talk)
    receives = [
        (e.name, e.peer, e.message, e.tag, e.values)
        for e in recording.ranks[0].events
        if e.kind == RECEIVE
    ]
    assert receives == [
        ("recv", 1, 0, 0, (1.0, 1.0)), ("irecv", 1, 1, 0, (1.0, 1.0)), ("irecv", 1, 0, 3, (1.0, 1.0,
        1.0))
    ]  # fmt: skip
    sends = [
        (e.name, e.peer, e.message, e.tag) for e in recording.ranks[1].events if e.kind == SEND
    ]
    assert sends == [
        ("send", 0, 0, 0),
        ("isend", 0, 1, 0),
        ("isend", 0, 0, 3),
        ("send", 2, 0, 0),
        ("send", 2, 1, 0),
    ]
    received = [
        (event.name, event.peer, event.message)
        for event in recording.ranks[2].events
        if event.kind == RECEIVE
    ]
    assert received == [("recv", 1, 0), ("irecv", 1, 1)]
    assert {
        recording.sources[event.source or 0].function for event in recording.events(SEND, WAIT)
    } == {"talk"}
    assert match_messages(recording).unmatched == []


def call_collectives(rank: int, size: int) -> None:
    mine, rows = torch.full((2,), float(rank)), [torch.zeros(2) for _ in range(size)]
    dist.all_reduce(mine)
    dist.all_gather(rows, mine)
    dist.broadcast(mine, 1)
    dist.gather(mine, rows if rank == 0 else None, 0)
    dist.all_gather_into_tensor(torch.zeros(4), mine)
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(1000), group=pair, async_op=True).wait()
    dist.barrier()
    dist.all_reduce(torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True))


def test_collectives_of_torch(world: Worlds, tmp_path: Path) -> None:
    recording = record(world(2), tmp_path, call_collectives)
    called = [
        (e.name, e.nbytes, e.peer, e.values)
        for e in recording.ranks[1].events
        if e.kind == COLLECTIVE
    ]
    ones = (1.0, 1.0)
    assert called == [
        ("all_reduce", 8, None, ones), ("all_gather", 8, None, ones + ones), ("broadcast", 8, 1,
        ones),
        ("gather", 8, 0, ones), ("all_gather_into_tensor", 8, None, ones + ones), ("all_reduce",
        4000, None, None),
        ("barrier", 0, None, None), ("all_reduce", 2 * (8 + 4), None, None),
    ]  # fmt: skip


def functions_in_force(rank: int, size: int) -> list[int]:
    from playground.algorithms import collectives

    owners = (dist, dist.distributed_c10d, collectives, torch.nn.Module, torch.autograd)
    return [
        id(value) for owner in owners for _, value in sorted(vars(owner).items()) if callable(value)
    ]


def in_force_before_during_and_after(rank: int, size: int, folder: Path) -> tuple[bool, bool]:
    before = functions_in_force(rank, size)
    during = Recorded(functions_in_force, folder)(rank, size)
    return during == before, functions_in_force(rank, size) == before


def test_nothing_is_in_the_way_when_nothing_is_recorded(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(in_force_before_during_and_after, tmp_path) == [(False, True)] * 2


@pytest.mark.gpu
def test_a_recording_counts_each_message_once(run_cli: Run, pair: int, tmp_path: Path) -> None:
    """Each send with its receive."""
    file = tmp_path / "run.playground"
    ran = run_cli("allreduce", "-n", pair, "--backend", "nccl", "--see", file)
    assert ran.code == 0, ran.err
    matched, unmatched = match_messages(read_recording(file))
    assert matched
    assert unmatched == []


@pytest.mark.gpu
@pytest.mark.stress
@pytest.mark.parametrize("newest", ["1", "0"])
def test_every_message_of_a_recording_is_over(
    newest: str, start_cli: Start, pair: int, tmp_path: Path
) -> None:
    """Those of batches, too, for which the older ProcessGroupNCCL gives no works of their own."""
    file = tmp_path / "run.playground"
    words = ("p2p", "--backend", "nccl", "-n", pair, "--see", file)
    run = start_cli(*words, TORCH_DIST_USE_NCCL2=newest)
    _, err = run.communicate(timeout=COLD)
    assert run.returncode == 0, err
    assert "Exception ignored" not in err
    events = [*read_recording(file).events(SEND, RECEIVE)]
    assert {event.name for event in events} >= {"send", "recv", "isend", "irecv"}
    assert [event for event in events if event.end == float("inf")] == []
