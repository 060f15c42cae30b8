"""Messages to and from a rank that does not exist: no other rank is taken for it, and it is told at
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground import Deadlock, RankFailed
from playground.explain.hang import STRANGERS, Doing, Kind, Operation, RankState
from playground.explain.hang.diagnosis import explain_failure
from playground.explain.hang.states import DONE, SEND

FOREVER = 300.0


def ring_without_size(rank: int, size: int) -> None:
    work = dist.isend(torch.ones(3), rank + 1)
    dist.recv(torch.zeros(3), rank - 1)
    assert work
    work.wait()


def chain_that_sends_on(rank: int, size: int) -> None:
    if rank:
        dist.recv(torch.ones(3), rank - 1)
    dist.send(torch.ones(3), rank + 1)


def receive_from_nobody(rank: int, size: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(3), size)


def send_to_nobody_in_a_group(rank: int, size: int) -> None:
    """The numbers of the group's ranks in the world are 1 and 2."""
    group = dist.new_group([1, 2])
    if rank == 2:
        dist.recv(torch.ones(3), group=group, group_src=2)


@pytest.mark.parametrize(
    ("fn", "size", "sentences"),
    [
        (
            ring_without_size,
            2,
            {0: "is in receive from rank -1 of 2", 1: "is in send to rank 2 of 2"},
        ),
        (chain_that_sends_on, 3, {2: "is in send to rank 3 of 3"}),
        (receive_from_nobody, 2, {0: "is in receive from rank 2 of 2"}),
        (send_to_nobody_in_a_group, 3, {2: "is in receive from rank 2 of 2"}),
    ],
)
def test_a_rank_that_does_not_exist_is_told_with_the_line(
    fn: Callable[[int, int], None],
    size: int,
    sentences: Mapping[int, str],
    world: Worlds,
) -> None:
    # gloo may write where it must not, and end a process, before that is proved; and one rank may
    # be in its call, for which no answer can come, before the other is in its own
    with pytest.raises((Deadlock, RankFailed)) as caught:
        world(size, timeout=FOREVER).run(fn)
    found = caught.value.diagnosis
    assert found
    assert found.kind == Kind.STRANGER
    said = " ".join(found.sentence.split())
    assert {*found.culprits} <= {*sentences}
    if not isinstance(caught.value, Deadlock):
        assert "was killed by SIG" in caught.value.headline
        said = said.replace(" has called ", " is in ")
    first = min(found.culprits)
    assert f"rank {first} {sentences[first]}, which does not exist" in said
    assert "test_strangers.py:" in said


def test_a_message_to_nobody_is_told_of_a_rank_that_died_in_it() -> None:
    """gloo may end the process."""
    lost = Operation(
        kind=SEND,
        name=SEND,
        index=0,
        group=(0, 1),
        peer=STRANGERS + 2,
        line="ring.py:7",
        state=DONE,
    )
    states = [
        RankState(rank=0, doing=Doing.FINISHED),
        RankState(rank=1, doing=Doing.DEAD, end="was killed by SIGSEGV", operations=(lost,)),
    ]
    found = explain_failure(states)
    assert found
    assert (found.kind, found.culprits, found.line) == (Kind.STRANGER, (1,), "ring.py:7")
    assert "rank 1 has called send to rank 2 of 2, which does not exist" in found.sentence
    # its messages are not all known, and so neither is whether that is one to nobody
    unknown = replace(states[1], unnamed="which ranks a group has")
    assert explain_failure([states[0], unknown]) is None
