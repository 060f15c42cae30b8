"""launch(grace=…): SIGTERM gives the ranks time to store where they are. A second one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from processes import ENOUGH, by_hand, free_port
from programs import ForkedProgram
from ranks import misbehave

from playground import Preempted, RankFailed, launch, preempted, report
from playground.base import signals
from playground.world.rank.preemption import (
    await_preemption,
    preempt_on_sigterm,
    request_preemption,
)

HOURS = 3600.0
PREEMPTED = "preempted by SIGTERM after step "
quietly = partial(launch, timeout=20, on_restart=lambda failure, count: None)


def send(rank: int, event: dict[str, Any]) -> None:
    """An `on_report` that sends this process a signal for each report."""
    os.kill(os.getpid(), signal.SIGTERM)


def wait_until_asked(rank: int) -> None:
    if rank == 0:
        report(ready=True)
    while not preempted():
        time.sleep(0.002)


def store_and_leave(rank: int, size: int) -> None:
    wait_until_asked(rank)
    raise Preempted(12)


def return_early(rank: int, size: int) -> int:
    wait_until_asked(rank)
    return os.getpid()


def answer(rank: int, size: int) -> tuple[int, object]:
    return os.getpid(), preempted()


def test_the_ranks_leave_in_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as caught:
        quietly(store_and_leave, 3, grace=HOURS, restarts=2, on_report=send)
    assert (caught.value.step, caught.value.exit_code) == (12, os.EX_TEMPFAIL)
    assert str(caught.value) == f"{PREEMPTED}12"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_function_that_returns_early_has_returned() -> None:
    pids = quietly(return_early, 2, grace=HOURS, on_report=send)
    assert launch(answer, 2) == [(pid, False) for pid in pids], "the next one is not asked"


def test_a_signal_may_come_before_there_are_ranks() -> None:
    before, sent = signal.getsignal(signal.SIGTERM), list[bool]()

    def send_if_heard(number: int, frame: object) -> None:
        # the next alarm may have gone off already
        if signal.getsignal(signal.SIGTERM) != before and not sent:
            sent.append(True)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.signal(signal.SIGALRM, send_if_heard)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        assert len(quietly(return_early, 2, grace=HOURS, fresh=True)) == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def report_and_go_on(rank: int, size: int) -> None:
    for _ in range(2):
        report(begun=True)
        wait_until_asked(1)
        dist.barrier()
    time.sleep(HOURS)


def test_a_second_signal_ends_it() -> None:
    with pytest.raises(SystemExit) as caught:
        quietly(report_and_go_on, 1, grace=HOURS, on_report=send)
    assert caught.value.code == 128 + signal.SIGTERM


def hang(rank: int, size: int) -> None:
    report(ready=True)
    if rank == 0:
        dist.barrier()
    time.sleep(HOURS)


def test_ranks_that_do_not_end_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[int] = []

    def send_once(rank: int, event: dict[str, Any]) -> None:
        if not sent:
            sent.append(rank)
            send(rank, event)

    with pytest.raises(SystemExit) as caught:
        quietly(hang, 2, grace=0.2, on_report=send_once, restarts=3)
    assert caught.value.code == 128 + signal.SIGTERM
    assert [record.getMessage() for record in caplog.records] == ["SIGTERM: no end within 0.2 s"]


def die_when_asked(rank: int, size: int) -> None:
    wait_until_asked(rank)
    if rank == 1:
        misbehave("kill")
    dist.barrier()


def test_there_is_no_restart_any_more() -> None:
    told: list[object] = []
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        launch(
            die_when_asked, 2, grace=HOURS, restarts=3, on_report=send,
            on_restart=lambda failure, count: told.append(failure),
        )  # fmt: skip
    assert told == []


def signal_all(rank: int, size: int) -> object:
    for pid in (os.getpid(), os.getppid()):
        os.kill(pid, signal.SIGTERM)
    dist.barrier()
    return preempted()


def test_ranks_leave_to_the_launcher_what_all_processes_of_a_job_get() -> None:
    assert launch(signal_all, 2, grace=HOURS, timeout=20) == [False, False]


def kill_this(number: int) -> int:
    os.kill(os.getpid(), number)
    return number


class KillingWhenLoaded:
    """Whoever unpickles it, a rank before it runs the function, gets this signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return kill_this, (self.number,)


class KillingWhenPickled(KillingWhenLoaded):
    """So does whoever pickles it, a rank after it has run the function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (kill_this(self.number),)


def pass_on(rank: int, size: int, number: int) -> KillingWhenPickled:
    return KillingWhenPickled(kill_this(number))


def test_ranks_leave_it_to_the_launcher_from_start_to_end() -> None:
    args = (KillingWhenLoaded(signal.SIGTERM),)
    assert (
        launch(pass_on, 2, args=args, grace=HOURS, timeout=20, fresh=True) == [signal.SIGTERM] * 2
    )


def start_two(what: str, fork_program: Callable[..., ForkedProgram]) -> list[ForkedProgram]:
    """A world that is joined by two ranks, the second of which is ready to be asked."""
    port = free_port()
    ranks = [fork_program("joined_rank", what, **by_hand(rank, 2, port)) for rank in range(2)]
    assert ranks[1].stdout.readline() == "ready\n"
    return ranks


def test_all_ranks_end_where_one_of_them_is_asked(
    fork_program: Callable[..., ForkedProgram],
) -> None:
    """As where one machine of many is taken back."""
    ranks = start_two("store", fork_program)
    ranks[1].send_signal(signal.SIGTERM)
    errors = [program.communicate(timeout=ENOUGH)[1] for program in ranks]
    assert [program.returncode for program in ranks] == [os.EX_TEMPFAIL] * 2
    assert errors == [f"playground: {PREEMPTED}3\n"] * 2


UNSEEN = """
import os, signal, sys, time
from playground.base import signals
from playground.world.rank.preemption import preempt_on_sigterm, preempted
signals.exit_after(0.01)
sys.setswitchinterval(1000)  # no turn for the thread that reads signals, until this one sleeps
with preempt_on_sigterm(60):
    os.kill(os.getpid(), signal.SIGTERM)
    assert preempted()
sys.setswitchinterval(0.005)
time.sleep(0.5)
print("has left")
"""


def test_a_signal_that_no_thread_has_seen_yet_is_postponed_as_well() -> None:
    ran = subprocess.run([sys.executable, "-c", UNSEEN], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "has left\n"), ran.stderr


def test_a_rank_that_cannot_agree_is_ended(fork_program: Callable[..., ForkedProgram]) -> None:
    """It waits in gloo for a rank that does not come."""
    _, waiting = start_two("wait", fork_program)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.communicate(timeout=ENOUGH) == ("", "")
    assert waiting.returncode == 128 + signal.SIGTERM


def test_a_handler_of_the_program_s_own_stays() -> None:
    own = signal.signal(signal.SIGTERM, signals.do_nothing)
    try:
        with await_preemption(HOURS):
            assert signal.getsignal(signal.SIGTERM) is signals.do_nothing
    finally:
        signal.signal(signal.SIGTERM, own)


def await_in_a_thread() -> bool:
    with await_preemption(HOURS) as notice:
        return notice.take()


def test_a_thread_that_launches_hears_no_signal_and_is_none_the_worse() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(await_in_a_thread).result() is False


def test_a_rank_of_a_world_that_is_joined_begins_unasked_and_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request_preemption()
    with preempt_on_sigterm(HOURS):
        assert not preempted()
        assert signals.postponed == {signal.SIGTERM: HOURS}
    assert signals.postponed == {}
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_to_a_child_of_the_launcher_is_no_notice() -> None:
    with await_preemption(HOURS) as notice:
        ready, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(begun, b"!")
                time.sleep(ENOUGH)
            except SystemExit as error:
                os._exit(int(error.code or 0))
            finally:
                os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
        assert not notice.has_come
    for descriptor in (ready, begun):
        os.close(descriptor)
