"""What the launcher makes of the boxes of its ranks, and of what they say of themselves."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from playground.explain.hang import RECEIVE, UNASKED, Doing, Kind, Operation, RankState
from playground.explain.hang.activity import Activity
from playground.explain.hang.box import Box, View
from playground.explain.hang.box_format import MAIN, Description
from playground.explain.hang.states import SEND
from playground.explain.hang.wording import Diagnosis
from playground.world import PeerDisconnected, RankFailed
from playground.world.launcher import watch
from playground.world.launcher.examiner import Examiner, find_failed, line_of
from playground.world.launcher.receiving import ignore_report
from playground.world.rank.preemption import PreemptionNotice


def begin_box() -> Box:
    box = Box(0, 2, "a world")
    box.begin_program()
    return box


def rank_with(box: Box, **more: Any) -> Any:
    """What the launcher knows of a rank that this process is."""
    known = {
        "number": 0, "box": View(os.getpid(), box.file), "assigned": 1, "activity": None,
        "failure": None,
        "result": None, "done": False, "vanished": False, "is_stopped": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**known | more)


def test_a_rank_that_has_not_begun_its_next_program_has_not_finished_that() -> None:
    box = begin_box()
    box.end_program()
    for assigned, doing in ((1, Doing.FINISHED), (2, Doing.IN_PROGRAM)):
        (state,) = Examiner([rank_with(box, assigned=assigned)]).states()
        assert state.doing == doing


def test_what_may_act_is_what_the_rank_has_said_last() -> None:
    said = Activity(
        may_act="what thread Timer does",
        in_flight=False,
        runnable=frozenset(),
        transferred=(),
        ticks=(),
    )
    for activity, may_act in ((said, said.may_act), (None, UNASKED)):
        (state,) = Examiner([rank_with(begin_box(), activity=activity)]).states()
        assert state.may_act == may_act


def test_a_doubt_ends_when_no_deadlock_is_found_any_more() -> None:
    """The rank waits for one that is not seen."""
    box = begin_box()
    box.words[MAIN] = box.call(
        box.describe("send", Description(SEND, SEND, (0, 1), "float32", 1, 7)), 1, False
    )
    examiner = Examiner([rank_with(box)])
    examiner.judge.doubts = 3
    for _ in range(100):  # this process goes on in some
        examiner.next_look = 0.0
        assert examiner.find_deadlock() is None
    assert examiner.judge.doubts == 0


def test_a_rank_that_goes_on_is_in_no_deadlock() -> None:
    """At each look it receives from a rank that has finished, every time another message."""
    box, finished = begin_box(), Box(1, 2, "a world")
    finished.begin_program()
    finished.end_program()
    ranks = [rank_with(box), rank_with(finished, number=1, result=b"", done=True)]
    examiner = Examiner(ranks)
    known = box.describe("receive", Description(RECEIVE, RECEIVE, (0, 1), "float32", 1, 7))

    def look() -> Diagnosis | None:
        examiner.next_look = 0.0
        return examiner.find_deadlock()

    for _ in range(10):
        box.words[MAIN] = box.call(known, 1, False)
        assert look() is None
    found = next(filter(None, (look() for _ in range(100))))  # this process goes on in some
    assert (found.kind, found.proved) == (Kind.ENDED, True)


def test_a_rank_has_failed_in_what_it_called_before_it_raised() -> None:
    """A collective in its `finally` is none that has failed."""
    one, other = (
        Operation(kind=SEND, name="send", index=index, group=(0, 1), peer=1, raised=raised)
        for index, raised in enumerate(("", "RuntimeError"))
    )
    state = RankState(rank=0, doing=Doing.DEAD, operations=(one, other))
    assert find_failed(PeerDisconnected(0, 2, "failed: Connection closed by peer"), state) == one
    assert find_failed(RankFailed(0, 2, "failed: ValueError: no"), state) is None


def test_the_line_of_a_stack_is_the_program_s() -> None:
    frames = (
        ("/home/me/main.py", 30, "main"),
        ("/home/me/train.py", 12, "step"),
        ("/v/site-packages/x.py", 3, "sum"),
    )
    stack = "".join(
        f'  File "{path}", line {line}, in {name}\n    call()\n' for path, line, name in frames
    )
    assert line_of(stack) == "train.py:12 in step"
    assert line_of("") == ""


def test_a_rank_that_failed_is_named_before_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though word of these has come first."""
    monkeypatch.setattr(watch, "AFTERMATH", 0.0)
    failures = (
        PeerDisconnected(0, 2, "failed: Connection closed by peer"),
        RankFailed(1, 2, "failed: ValueError: no"),
    )
    ranks: Any = [
        SimpleNamespace(
            died=False, failure=each, failed_at=float(each.rank), is_ending=lambda: False
        )
        for each in failures
    ]
    world = watch.WorldWatch(ranks, 1.0, ignore_report, PreemptionNotice(0.0))
    assert world.first_failure() is failures[1]
