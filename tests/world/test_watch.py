"""The watch over a world: hangs are reported with every rank's place, and last words are heard."""

from __future__ import annotations

import datetime
import os
import threading
import time
from functools import partial
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from processes import all_gone
from ranks import add_up, go_wrong

import playground
from playground.world import RankFailed, RankTimeout, report
from playground.world.backends import BACKENDS
from playground.world.launcher import ending, examiner, receiving, watch
from playground.world.launcher.rank_handle import RankHandle
from playground.world.launcher.receiving import ignore_report
from playground.world.rank.preemption import PreemptionNotice

launch = partial(playground.launch, fresh=True)
"""Every test here is about the life of new processes."""


def report_and_vanish(rank: int, size: int) -> None:
    report(last="words")
    os._exit(7)


def test_the_last_words_of_a_rank_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if, while the launcher looks for what is ready, they come after it has looked at the
    line, and the end of the process before it looks at that: here it never looks at the line."""
    monkeypatch.setattr(
        receiving,
        "wait",
        lambda objects, seconds: wait([s for s in objects if type(s) is int], seconds),
    )
    heard: list[dict[str, Any]] = []
    with pytest.raises(RankFailed, match="rank 0 of 1 exited with code 7"):
        launch(report_and_vanish, 1, on_report=lambda rank, event: heard.append(event))
    assert heard == [{"last": "words"}]


def test_a_hang_is_reported_with_every_rank_s_place() -> None:
    pids: dict[int, int] = {}
    playground.launch(add_up, 2)  # so that ranks are there which need no time to meet
    with pytest.raises(RankTimeout) as caught:
        playground.launch(
            go_wrong, 2, args=("stop", 1), timeout=1,
            on_report=lambda rank, event: pids.update({rank: event["pid"]}),
        )  # fmt: skip
    assert "no sign of life for 1 s from rank 1 of 2: no answer: stopped, or" in str(caught.value)
    assert "dist.barrier()" in caught.value.stacks[0]
    assert "no answer" in caught.value.stacks[1]
    silent = str(RankTimeout(3, 1.0, {0: "  here", 1: "  there", 2: "  here"}))
    assert "from ranks 0-2 of 3: a hang, or" in silent
    assert silent.endswith("\nranks 0, 2 stand at:\n  here\nrank 1 stands at:\n  there")
    assert all_gone(pids, expected=2)


def wait_in_vain(rank: int, size: int) -> None:
    """Rank 0 waits, with a timeout of its own, for a rank that does not come."""
    dist.barrier()  # both are here: on a busy machine one begins seconds before the other
    if rank == 1:
        time.sleep(1000)
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=0.2))
    dist.barrier(group=group)


def test_who_waits_in_vain_is_shown_with_who_kept_it_waiting() -> None:
    with pytest.raises(RankFailed) as caught:
        launch(wait_in_vain, 2, timeout=20)
    assert caught.value.rank == 0
    assert "rank 1 stands at" in str(caught.value)
    assert "time.sleep(1000)" in str(caught.value)


def test_a_rank_that_reports_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes. Here no time passes: the silences are those that the launcher was
    ready to wait."""
    messages: list[bool] = []
    monkeypatch.setattr(examiner.Examiner, "seconds_left", 0.25)
    monkeypatch.setattr(watch, "receive", lambda *_: messages.pop())
    world = watch.WorldWatch([], 1.0, ignore_report, PreemptionNotice(0.0))

    def look(*received: bool) -> None:
        messages[:] = received
        while messages:
            world.look()

    look(*[False, False, True] * 20)
    with pytest.raises(RankTimeout, match="no sign of life for 1 s"):
        look(*[False] * 20)


def test_what_a_listener_raises_is_not_taken_for_a_rank_s_failure() -> None:
    def stdout_is_gone(rank: int, event: dict[str, Any]) -> None:
        raise BrokenPipeError("nobody reads any more")

    with pytest.raises(BrokenPipeError, match="nobody reads any more"):
        launch(go_wrong, 2, args=("hang", 1), on_report=stdout_is_gone)


def test_a_rank_that_is_about_to_die_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its peers make of what they get when its sockets are closed."""
    raised = RankFailed(0, 2, "failed: ValueError: no data")
    killed = RankFailed(1, 2, "was killed by SIGKILL")
    first = SimpleNamespace(died=False, failure=raised, failed_at=0.0, is_ending=lambda: False)
    other = SimpleNamespace(died=False, failure=None, failed_at=1.0, is_ending=lambda: True)

    def receive(*_: object) -> None:
        other.died, other.failure = True, killed

    monkeypatch.setattr(receiving, "receive", receive)
    ranks: Any = [first, other]
    world = watch.WorldWatch(ranks, 1.0, ignore_report, PreemptionNotice(0.0))
    assert world.first_failure() is killed
    other.died, other.failure, other.is_ending = False, None, lambda: False
    assert world.first_failure() is raised


def test_nothing_is_said_of_ranks_of_which_one_asks_a_person(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may begin to ask while the launcher looks at them."""
    nothing: Any = None
    rank = RankHandle(0, 1, nothing, nothing, [], BACKENDS["gloo"])
    world, judged = watch.WorldWatch([rank], 1.0, ignore_report, PreemptionNotice(0.0)), []
    monkeypatch.setattr(watch, "ask_for_stacks", lambda *_: None)
    monkeypatch.setattr(world.examiner, "confirm", lambda *_: judged.append(rank.question))
    monkeypatch.setattr(world.examiner, "find_reason", lambda *_: None)
    for rank.question in ("Name? ", None):
        world.judge(stands=True)
    assert judged == [None]


def stay(rank: int, size: int) -> None:
    if rank == 1:
        dist.destroy_process_group = threading.Event().wait


def test_a_rank_that_does_not_leave_is_told_where_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "LEAVE_LIMIT", 1.0)
    monkeypatch.setattr(ending, "LOOK_INTERVAL", 0.1)
    with pytest.raises(RankFailed, match=r"not leave cleanly: still\sthere after 2 s") as caught:
        launch(stay, 2, timeout=2)
    assert "threading.py" in caught.value.others[1]


def test_a_rank_that_has_told_its_failure_is_sent_no_signal_while_it_ends() -> None:
    """It would cut short what its exit functions write."""
    asked: list[int] = []

    def rank(number: int, has_told_failure: bool) -> Any:
        process = SimpleNamespace(
            terminate=lambda: asked.append(number), kill=lambda: None, exitcode=1
        )
        return SimpleNamespace(
            up=True, has_told_failure=has_told_failure, process=process,
            is_stopped=lambda: False, line=SimpleNamespace(close=lambda: None),
            relay_output=lambda: None, close=lambda: None,
        )  # fmt: skip

    ending.stop([rank(0, True), rank(1, False)])
    assert asked == [1]


@pytest.mark.parametrize("prints", [True, False])
def test_a_rank_that_prints_while_it_leaves_is_waited_for(
    prints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no time passes: it leaves after two hundred looks, of a second each."""
    process, seconds = SimpleNamespace(exitcode=None), iter(range(200))
    rank: Any = SimpleNamespace(
        process=process, vanished=False, failure=None, order=lambda order: None,
        unclean_exit=lambda how: RankFailed(0, 1, how),
    )  # fmt: skip
    now = 0.0

    def receive(ranks: list[Any], pause: float) -> bool:
        nonlocal now
        now += pause
        if next(seconds, None) is None:
            process.exitcode = 0
        return prints

    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ending, "receive", receive)
    monkeypatch.setattr(ending, "ask_for_stacks", lambda ranks: {0: "in train.py"})
    if prints:
        ending.dismiss([rank], timeout=60.0)
        assert now > 200
    else:
        with pytest.raises(RankFailed, match="still there after 60 s"):
            ending.dismiss([rank], timeout=60.0)
