"""Flight recorders: what is proved, what is not, and who can read them.

Hangs have a timeout far above what a proof takes, so that what ends is what was proved.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Fork, Worlds
from joined_rank import cross
from processes import ENOUGH, by_hand, free_port
from programs import SCRIPT
from torch.nn.parallel import DistributedDataParallel

from playground import Deadlock, RankFailed
from playground.runtime.event_log import USED
from playground.runtime.flight_recorder import BACKWARD, NEW_GROUP, SEND, Doing, RankState
from playground.runtime.flight_recorder.activity import Activity, compare, look
from playground.runtime.flight_recorder.box import (
    CAPACITY,
    FORMAT,
    MAIN,
    MOST_RAISED,
    NAME,
    Box,
    Known,
    View,
    find_boxes,
    open_box,
)
from playground.runtime.flight_recorder.hooks import hooks
from playground.tools.failures.page import list_family

FOREVER = 300.0
STILL = 0.75
"""Seconds that a rank stands still: three looks of the launcher's."""


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
        dist.init_process_group("gloo", timeout=limit)
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


DESCRIPTION = (SEND, SEND, (0, 1), "float32", 1, 7, 0, ())


HOLDER = """
import signal
from playground.runtime.flight_recorder.box import Box
box = Box(0, 2, "a world")
box.begin_program()
for _ in range(3):
    known = box.describe("send", ("send", "send", (0, 1), "float32", 1, 7, 0, ()))
    number = box.call(known, 1, False, (3,))
box.end(number - 1)
print(flush=True)
signal.pause()
"""


def test_what_a_killed_process_has_written_can_be_read(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        (view,) = find_boxes([process.pid])
        process.kill()
    state = view.read()
    assert view.world == ("a world", 2)
    assert [
        (each.index, each.shape, each.peer, each.tag, each.done > 0) for each in state.operations
    ] == [
        (0, (3,), 1, 7, False),
        (1, (3,), 1, 7, True),
        (2, (3,), 1, 7, False),
    ]
    assert state.counts == {(SEND, (0, 1), 1, 7, 0): 3}
    assert state.operations[0].line == "holder.py:8 in <module>"


def test_the_ring_keeps_the_latest_operations_and_all_counts() -> None:
    box = open_box(0, 2, "a world")
    assert box
    box.begin_program()
    known = box.describe("send", DESCRIPTION)
    for _ in range(5000):
        box.end(box.call(known, 1, False))
    state = View(os.getpid(), box.file).read(latest=10)
    assert [each.index for each in state.operations] == list(range(4990, 5000))
    assert state.counts == {(SEND, (0, 1), 1, 7, 0): 5000}
    box.end_program()
    assert View(os.getpid(), box.file).read().doing == Doing.FINISHED
    box.begin_program()
    assert View(os.getpid(), box.file).read().operations == ()


def test_more_than_fits_never_proves_anything() -> None:
    box = Box(0, 2, "a world")
    box.begin_program()
    for tag in range(10_000):
        box.call(box.describe(tag, (*DESCRIPTION[:5], tag, 0, ())), 1, False)
    state = View(os.getpid(), box.file).read()
    assert state.unnamed == "what it does on more than 8192 channels"
    assert len(box.known) < 10_000


def begin_box() -> tuple[Box, View, Known]:
    """A box in which a program has begun, and an operation that can be called."""
    box = Box(0, 2, "a world")
    box.begin_program()
    return box, View(os.getpid(), box.file), box.describe("send", DESCRIPTION)


def test_an_operation_that_ends_when_the_ring_has_lost_it_ends_no_other() -> None:
    box, view, known = begin_box()
    first, *_ = [box.call(known, 1, False) for _ in range(CAPACITY + 1)]
    box.end(first)
    assert not any(each.done for each in view.read().operations)


def test_the_operation_that_the_main_thread_is_in_is_found_behind_many_of_other_threads() -> None:
    box, view, known = begin_box()
    box.words[MAIN] = box.call(known, 1, False)
    for _ in range(20):
        box.call(known, 1, False)
    state = view.read(latest=10)
    assert state.doing == Doing.IN_OPERATION
    assert [each.index for each in state.operations] == [0, *range(11, 21)]


def test_an_operation_that_was_refused_is_none() -> None:
    box, view, known = begin_box()
    box.take_back(box.call(known, 1, False), known)
    state = view.read()
    assert (state.operations, state.counts) == ((), {(SEND, (0, 1), 1, 7, 0): 0})


def test_a_doubt_for_which_there_is_no_room_is_a_doubt() -> None:
    box, view, _ = begin_box()
    box.words[USED] = FORMAT.text
    box.doubt("what it has called elsewhere")
    assert view.read().unnamed


def test_only_so_many_sizes_and_classes_are_told_apart() -> None:
    box, view, known = begin_box()
    for number in range(MOST_RAISED + 2):
        try:
            raise type(f"Error{number}", (Exception,), {})
        except Exception:
            box.call(known, 1, False, (2,) * 8)
    state = view.read()
    assert {each.shape for each in state.operations} == {(2, 2, 2, 2, 2, 8)}
    assert [each.raised for each in state.operations][-3:] == [
        f"Error{MOST_RAISED - 1}",
        *["BaseException"] * 2,
    ]


def test_a_process_that_is_stopped_or_goes_on_is_none_that_stands_still() -> None:
    box, _, known = begin_box()
    box.words[MAIN] = box.call(known, 1, False)
    with subprocess.Popen(["sleep", "60"], pass_fds=[box.file]) as process:
        view = View(process.pid, box.file)
        before = view.progress
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = view.progress
        process.kill()
    assert stopped != before


def test_a_box_is_found_in_the_process_that_writes_to_it_alone() -> None:
    box, *_ = begin_box()
    with subprocess.Popen(["sleep", "60"], pass_fds=[box.file]) as process:
        found = [*find_boxes([process.pid])]
        process.kill()
    assert found == []


def test_data_is_under_way_if_either_look_has_seen_it() -> None:
    quiet = Activity(may_act="", in_flight=False, runnable=frozenset(), transferred=(), ticks=())
    for changed in ({"in_flight": True}, {"transferred": ([1, 2],)}):
        busy = replace(quiet, **changed)
        assert [compare(*looks) for looks in ((busy, quiet), (quiet, busy))] == [("", True)] * 2
    acts = replace(quiet, may_act="what it does")
    assert [compare(*looks) for looks in ((acts, quiet), (quiet, acts))] == [
        ("what it does", False)
    ] * 2
    assert compare(quiet, quiet) == ("", False)
    assert compare(quiet, replace(quiet, ticks=(b"1/0",))) == ("what its threads compute", False)
    assert compare(None, quiet)[1]
    assert compare(quiet, None)[1]


def read_own() -> RankState:
    (view,) = find_boxes([os.getpid()])
    return view.read()


def call_in_many_ways(rank: int, size: int) -> None:
    ones = torch.ones(1)
    dist.reduce_scatter(torch.ones(1), [ones, ones])
    assert read_own().operations[-1].dtype == "float32"
    dist.new_group([rank], use_local_synchronization=True)
    assert read_own().counts[NEW_GROUP, (rank,), None, 0, 0] == 1, "nobody else is waited for"
    dist.monitored_barrier()
    hooks.check_groups()
    with hooks.paused():
        dist.all_reduce(ones)
    hooks.check_groups()
    assert read_own().unnamed == "", "all is known"
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 1000)
        assert (found := look())
        signal.setitimer(timer, 0)
        assert found.may_act == "what it does when its timer goes off"


def call_inside_backward(rank: int, size: int) -> None:
    """The rank is in the backward pass before, and after, what that calls."""
    model, seen = DistributedDataParallel(torch.nn.Linear(1, 1)), list[Any]()

    def add_up(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(tensor, async_op=True)
        seen.append(read_own().waits_for)
        work.wait()
        seen.append(read_own().waits_for)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    model.register_comm_hook(None, lambda state, bucket: add_up(bucket.buffer()))
    model(torch.ones(1, 1)).sum().backward()
    assert [each.name for each in seen] == [BACKWARD] * 2
    assert read_own().waits_for is None


def send_by_the_group_and_by_its_backend(rank: int, size: int) -> None:
    """The same tensor: of the second message nothing else is seen."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = torch.ones(1)
    if rank == 0:
        dist.send(tensor, 1)
        backend.send([tensor], 1, 0).wait()
    else:
        dist.recv(tensor, 0)
        backend.recv([tensor], 0, 0).wait()
    assert read_own().unnamed == f"what it has called by {'recv' if rank else 'send'} of a backend"


@pytest.mark.parametrize(
    "fn", [call_in_many_ways, call_inside_backward, send_by_the_group_and_by_its_backend]
)
def test_what_a_rank_calls_is_what_its_box_says(fn: Callable[..., None], world: Worlds) -> None:
    world(2).run(fn)


def test_threads_that_call_at_the_same_time_are_all_counted() -> None:
    box = Box(0, 2, "a world")
    box.begin_program()
    known = box.describe("send", DESCRIPTION)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [
        threading.Thread(target=lambda: [box.call(known, 1, False) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    state = View(os.getpid(), box.file).read()
    assert state.counts == {(SEND, (0, 1), 1, 7, 0): 20_000}
    assert len({each.index for each in state.operations}) == len(state.operations)
    # a thread held up in a call writes over a later one's
    assert 2048 - len(threads) < len(state.operations) <= 2048


def test_a_box_cannot_write_to_a_terminal() -> None:
    box = Box(0, 2, "a \x1b[2Jworld")
    box.begin_program()
    view = View(os.getpid(), box.file)
    assert view.world == (r"a \x1b[2Jworld", 2)


def make_file(content: bytes) -> int:
    file = os.memfd_create(NAME)
    os.ftruncate(file, FORMAT.size)
    os.pwrite(file, content, 0)
    return file


def test_a_box_of_another_version_and_half_a_box_are_told_apart() -> None:
    with pytest.raises(ValueError, match="another version"):
        View(os.getpid(), make_file(b"PLAYBOX0"))
    # of five operations none is there
    sizes = FORMAT.capacity, FORMAT.words, FORMAT.text
    log = struct.pack("<8s6q", FORMAT.title, *sizes, 5, 0, 100)
    half = make_file(log + struct.pack("<6q", os.getpid(), 0, 2, 1, 0, 4))
    state = View(os.getpid(), half).read()
    assert (state.operations, state.counts) == ((), {})


def test_a_process_forked_from_a_rank_does_not_write_to_its_box(world: Worlds) -> None:
    assert world(2).run(forks) == [1, 1]


def forks(rank: int, size: int) -> int:
    dist.all_reduce(torch.ones(1))
    if not (child := os.fork()):
        from playground.runtime.flight_recorder.hooks import hooks

        os._exit(0 if hooks.box is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (view,) = find_boxes([os.getpid()])
    return len(view.read().operations)


STANDS_STILL = """
import os, time, torch, torch.distributed as dist
from playground import launch

def run(rank, size):
    dist.barrier()
    if rank == 0:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    launch(run, 3, timeout=300)
"""


def wait_for_ranks_in(operation: str, pid: int, count: int) -> None:
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        states = [box.read() for box in find_boxes(list_family(pid)) if box.world]
        waits = (
            state.waits_for
            for state in states
            if state.doing == Doing.IN_OPERATION and state.since > 0.3
        )
        if sum(wait is not None and wait.name == operation for wait in waits) == count:
            return
        time.sleep(0.1)
    raise AssertionError("the ranks never came to the operation")


def test_a_run_is_asked_why_it_stands_still(
    run_cli: Callable[..., Any], fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{SCRIPT}.py").write_text(STANDS_STILL)
    monkeypatch.syspath_prepend(tmp_path)
    program = fork_program(SCRIPT)
    wait_for_ranks_in("all_reduce", program.pid, 2)
    told = run_cli("why", program.pid).out
    assert told.startswith(
        f"rank 0 is in the program while ranks 1-2 are in all_reduce ({SCRIPT}.py:9)\n"
    )


def test_a_process_that_is_none_of_ours_is_refused_in_a_line(run_cli: Callable[..., Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        result = run_cli("why", process.pid)
        process.kill()
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "has started no ranks" in result.err


def test_in_a_world_that_is_joined_a_deadlock_is_proved(fork_program: Fork) -> None:
    port = free_port()
    programs = [fork_program("joined_rank", "cross", **by_hand(rank, 2, port)) for rank in range(2)]
    first, second = (program.communicate(timeout=ENOUGH)[1] for program in programs)
    where = f"joined_rank.py:{cross.__code__.co_firstlineno + 2}"
    assert f"deadlock: rank 0 is in all_reduce ({where}) where rank 1 is in" in first
    assert "rank 1 of 2 ends with the others: " in second


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
