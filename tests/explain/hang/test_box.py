"""A rank's box: what can be read in it, by whom, and what happens when it is full."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.base.event_log import USED
from playground.base.process_status import is_ending
from playground.explain.hang import Doing
from playground.explain.hang.box import (
    MOST_RAISED,
    NAME,
    Box,
    Known,
    View,
    find_boxes,
    open_box,
)
from playground.explain.hang.box_format import (
    CAPACITY,
    FORMAT,
    MAIN,
    Description,
)
from playground.explain.hang.states import SEND

DESCRIPTION = Description(SEND, SEND, (0, 1), "float32", 1, 7)


HOLDER = """
import signal, time
from playground.explain.hang.box import Box, Description
box = Box(0, 2, "a world")
box.begin_program()
for _ in range(3):
    known = box.describe("send", Description("send", "send", (0, 1), "float32", 1, 7))
    number = box.call(known, 1, False, (3,))
box.end(number - 1)
print(flush=True); time.sleep(300)
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


@pytest.mark.parametrize(
    ("handler", "line"), [("signal.SIG_DFL", "holder.py:10 in <module>"), ("print", "")]
)
def test_a_process_says_where_it_is_unless_it_uses_that_signal_itself(
    tmp_path: Path, handler: str, line: str
) -> None:
    script = tmp_path / "holder.py"
    uses = f"import signal, time; signal.signal(signal.SIGURG, {handler})"
    script.write_text(HOLDER.replace("import signal, time", uses))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        (view,) = find_boxes([process.pid])
        answers = [view.ask_for_line() for _ in range(2)]
        process.kill()
    assert answers == [line, line]


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
    box.call(box.describe("send", DESCRIPTION), 1, False)
    assert [each.index for each in View(os.getpid(), box.file).read().operations] == [0]


def test_more_than_fits_never_proves_anything() -> None:
    box = Box(0, 2, "a world")
    box.begin_program()
    for tag in range(10_000):
        box.call(box.describe(tag, DESCRIPTION._replace(tag=tag)), 1, False)
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


def load(is_in_worker: bool) -> None:
    try:
        raise ValueError("sample 7: a truncated file")
    except ValueError as error:
        if is_in_worker:  # as a DataLoader hands on what its worker has raised
            lines = "".join(traceback.format_exception(error))
            raise ValueError(f"Caught ValueError in a worker.\nOriginal {lines}") from None
        raise


@pytest.mark.parametrize("is_in_worker", [False, True])
def test_what_had_been_raised_is_kept_with_its_line_and_traceback(is_in_worker: bool) -> None:
    box, view, known = begin_box()
    box.words[MAIN] = box.call(known, 1, False)
    assert (view.read().error, view.read().traceback) == ("", "")
    try:
        load(is_in_worker)
    except ValueError:
        box.words[MAIN] = box.call(known, 1, False)
    state, line = view.read(), load.__code__.co_firstlineno + 2
    assert state.error == f"ValueError: sample 7: a truncated file ({Path(__file__).name}:{line})"
    first, *_, last = state.traceback.splitlines()
    assert (first, last) == (
        "Traceback (most recent call last):", "ValueError: sample 7: a truncated file"
    )  # fmt: skip


def test_an_exception_that_calls_operations_when_it_is_printed_comes_before_the_call() -> None:
    box, view, known = begin_box()

    class Asking(Exception):
        def __str__(self) -> str:
            try:
                raise ValueError
            except ValueError:
                box.call(known, 1, False, (1,))
            return "it has asked"

    try:
        raise Asking
    except Asking:
        box.call(known, 1, False, (2,))
    *before, last = view.read().operations
    assert {one.shape for one in before} == {(1,)}
    assert (last.shape, last.raised) == ((2,), "Asking")


def test_a_box_is_found_in_the_process_that_writes_to_it_alone() -> None:
    box, *_ = begin_box()
    with subprocess.Popen(["sleep", "60"], pass_fds=[box.file]) as process:
        found = [*find_boxes([process.pid])]
        process.kill()
    assert found == []


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
        from playground.explain.hang.hooks import hooks

        os._exit(0 if hooks.box is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (view,) = find_boxes([os.getpid()])
    return len(view.read().operations)


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


def test_a_rank_that_has_gone_on_is_in_its_program() -> None:
    box, view, known = begin_box()
    box.words[MAIN] = box.call(known, 1, False)
    assert view.read().doing == Doing.IN_OPERATION
    assert view.read_since(progress="what it was before").doing == Doing.IN_PROGRAM


def test_a_rank_that_has_another_number_in_a_world_of_the_program_s_says_so() -> None:
    box, view, _ = begin_box()
    found = []
    for number in (0, 1, 0):
        box.begin_world(number)
        found.append((view.read().worlds, view.read().is_renumbered))
    assert found == [(1, False), (2, True), (3, False)]


def test_a_process_that_has_ended_or_is_gone_is_ending() -> None:
    assert not is_ending(os.getpid())
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(child.pid), "nobody has waited for it yet"
    child.wait()
    assert is_ending(child.pid)
