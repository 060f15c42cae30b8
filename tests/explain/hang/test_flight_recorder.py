"""Flight recorders: what is proved, what is not, and who can read them.

Hangs have a timeout far above what a proof takes, so that what ends is what was proved.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fixtures import Fork, Worlds
from joined_rank import cross
from processes import ENOUGH, by_hand, free_port
from torch.nn.parallel import DistributedDataParallel

from playground import Deadlock, RankFailed

FOREVER = 300.0
STILL = 0.3
"""Seconds that a rank stands still: six looks of the launcher's, two of which would prove a
deadlock 0.1 s later."""
TO_FORM = timedelta(seconds=0.75)
"""A time limit in which a group is formed on a busy machine."""


def line_of(fn: Callable[..., object], offset: int) -> str:
    return f"test_flight_recorder.py:{fn.__code__.co_firstlineno + offset} in {fn.__name__}"


def one_batch_more(rank: int, size: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2 + (rank == 1)):
        model(torch.ones(1, 2)).sum().backward()


def two_of_three(rank: int, size: int) -> None:
    """Two wait for each other, while the third goes on."""
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    time.sleep(FOREVER)


def another_group(rank: int, size: int) -> None:
    """Both groups are of the same ranks."""
    group = dist.new_group(each for each in range(size))
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0, group)


@pytest.mark.parametrize(
    ("fn", "size", "kind", "culprits", "line"),
    [
        (one_batch_more, 2, "a rank that has finished", (0,), line_of(one_batch_more, 3)),
        (two_of_three, 3, "receive against receive", (0, 1), line_of(two_of_three, 3)),
        (another_group, 2, "different groups", (0, 1), line_of(another_group, 4)),
    ],
)
def test_a_deadlock_is_proved(
    fn: Callable[..., None],
    size: int,
    kind: str,
    culprits: tuple[int, ...],
    line: str,
    world: Worlds,
) -> None:
    with pytest.raises(Deadlock) as caught:
        world(size, timeout=FOREVER).run(fn)
    found = caught.value.diagnosis
    assert (found.kind, found.culprits, found.line, found.proved) == (kind, culprits, line, True)
    first, *_ = str(caught.value).splitlines()
    assert len(first) <= 80
    assert first.startswith("deadlock: rank")


def comes_late(rank: int, size: int) -> float:
    if rank == 1:
        time.sleep(STILL)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def wait_for_a_message(limit: timedelta) -> None:
    work = dist.irecv(torch.ones(1), 1)
    assert work is not None
    work.wait(limit)


def wait_in_a_group_of_its_own(limit: timedelta) -> None:
    dist.all_reduce(torch.ones(1))


def gives_up(rank: int, size: int, wait: Callable[[timedelta], None]) -> str:
    """Waits in vain, with a time limit of its own, and goes on."""
    limit = timedelta(seconds=STILL)
    if wait is wait_in_a_group_of_its_own:
        dist.init_process_group("gloo", timeout=TO_FORM)
    if rank > 0:
        return "returned"
    with pytest.raises(RuntimeError):
        wait(limit)
    return "gave up"


@pytest.mark.parametrize("wait", [wait_for_a_message, wait_in_a_group_of_its_own])
def test_a_time_limit_of_the_programs_own_is_no_deadlock(
    wait: Callable[[timedelta], None], world: Worlds
) -> None:
    assert world(2, timeout=FOREVER).run(gives_up, wait) == ["gave up", "returned"]


def has_sent_before(rank: int, size: int) -> float:
    """Two messages are under way before either is received, and the tags are received in another
    order."""
    tensors = [torch.full((1,), 10.0 * tag) for tag in (1, 2)]
    if rank == 0:
        works = [dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
        time.sleep(STILL)
        for work in works:
            assert work is not None
            work.wait()
        return 0.0
    for tag in (1, 0):
        dist.recv(tensors[tag], 0, tag=tag)
    return tensors[1].item()


def is_continued(rank: int, size: int) -> float:
    if rank == 1:
        child = subprocess.Popen(["sh", "-c", f"sleep {STILL}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        child.wait()
    return comes_late(0, size)


@pytest.mark.parametrize(
    ("fn", "results"),
    [
        (has_sent_before, [0.0, 20.0]),
        (is_continued, [2.0, 2.0]),
    ],
)
def test_what_may_go_on_is_no_deadlock(
    fn: Callable[..., object], results: list[object], world: Worlds
) -> None:
    assert world(2, timeout=FOREVER).run(fn) == results


def another_dtype(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if rank else torch.float32))


def test_a_silent_error_is_told_in_the_end(world: Worlds, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "playground"):
        world(2).run(another_dtype)
    assert "all_reduce of float32" in caplog.text
    assert "all_reduce of int32" in caplog.text


def test_in_a_world_that_is_joined_a_deadlock_is_proved(fork_program: Fork) -> None:
    port = free_port()
    programs = [fork_program("joined_rank", "cross", **by_hand(rank, 2, port)) for rank in range(2)]
    first, second = (program.communicate(timeout=ENOUGH)[1] for program in programs)
    where = f"joined_rank.py:{cross.__code__.co_firstlineno + 2}"
    assert f"deadlock: rank 0 is in all_reduce ({where}) where rank 1 is in" in " ".join(
        first.split()
    )
    assert second.endswith("rank 1 of 2 ends with the others\n")
    assert "deadlock" not in second


def is_killed(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_alone(world: Worlds) -> None:
    """Though the other waits for it."""
    with pytest.raises(RankFailed) as caught:
        world(2).run(is_killed)
    assert str(caught.value) == "rank 1 of 2 was killed by SIGKILL"


def aborts(rank: int, size: int) -> None:
    """gloo aborts a process that receives more than it expects."""
    if rank == 0:
        dist.recv(torch.ones(1), 1)
    else:
        dist.send(torch.ones(1000), 0)


def test_what_a_rank_did_before_gloo_aborted_it_is_known(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="rank 0 of 2 was killed by SIGABRT") as caught:
        world(2, fresh=True).run(aborts)
    found = caught.value.diagnosis
    assert found is not None
    assert (found.kind, found.culprits, found.line) == (
        "different sizes",
        (0, 1),
        line_of(aborts, 3),
    )
