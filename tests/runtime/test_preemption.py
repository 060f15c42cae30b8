"""launch(grace=…): SIGTERM and SIGUSR1 give the ranks time to store where they are. A second one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch.distributed as dist
from processes import ENOUGH, by_hand, free_port, wait_until_begun
from programs import ForkedProgram
from ranks import misbehave

from playground import Preempted, RankFailed, launch, preempted, report
from playground.runtime.rank.preemption import PreemptionNotice

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
HOURS = 3600.0
quietly = partial(launch, timeout=20, on_restart=lambda failure, count: None)


def send(number: int) -> Callable[[int, dict[str, Any]], None]:
    """An `on_report` that sends this process a signal for each report."""
    return lambda rank, event: os.kill(os.getpid(), number)


def wait_until_asked(rank: int) -> signal.Signals:
    if rank == 0:
        report(ready=True)
    while not (number := preempted()):
        time.sleep(0.002)
    return number


def store_and_leave(rank: int, size: int) -> None:
    raise Preempted(wait_until_asked(rank).name, 12)


def return_early(rank: int, size: int) -> tuple[int, str]:
    return os.getpid(), wait_until_asked(rank).name


def answer(rank: int, size: int) -> tuple[int, object]:
    return os.getpid(), preempted()


@SIGNALS
def test_the_ranks_leave_in_order(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as caught:
        quietly(store_and_leave, 3, grace=HOURS, restarts=2, on_report=send(number))
    assert (caught.value.signal, caught.value.step, caught.value.exit_code) == (number.name, 12, os.EX_TEMPFAIL)
    assert str(caught.value) == f"preempted by {number.name} after step 12"
    assert signal.getsignal(number) == before


@SIGNALS
def test_a_function_that_returns_early_has_returned(number: signal.Signals) -> None:
    results = quietly(return_early, 2, grace=HOURS, on_report=send(number))
    assert [name for _, name in results] == [number.name] * 2
    assert launch(answer, 2) == [(pid, None) for pid, _ in results], "the next one is not asked"


def test_a_signal_may_come_before_there_are_ranks() -> None:
    handler = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    try:
        results = quietly(return_early, 2, grace=HOURS, fresh=True)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert [name for _, name in results] == ["SIGTERM"] * 2


def report_and_go_on(rank: int, size: int) -> None:
    for _ in range(2):
        report(begun=True)
        wait_until_asked(1)
        dist.barrier()
    time.sleep(HOURS)


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_a_second_signal_ends_it(first: int, second: int) -> None:
    numbers = iter([first, second, second, second])
    with pytest.raises(SystemExit) as caught:
        quietly(report_and_go_on, 1, grace=HOURS, on_report=lambda rank, event: os.kill(os.getpid(), next(numbers)))
    assert caught.value.code == 128 + second


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
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as caught:
        quietly(hang, 2, grace=0.2, on_report=send_once, restarts=3)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert [record.getMessage() for record in caplog.records] == ["SIGUSR1: no end within 0.2 s"]


def die_when_asked(rank: int, size: int) -> None:
    wait_until_asked(rank)
    if rank == 1:
        misbehave("kill")
    dist.barrier()


def test_there_is_no_restart_any_more() -> None:
    told: list[object] = []
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        launch(
            die_when_asked, 2, grace=HOURS, restarts=3, on_report=send(signal.SIGTERM),
            on_restart=lambda failure, count: told.append(failure),
        )  # fmt: skip
    assert told == []


def signal_all(rank: int, size: int) -> object:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        os.kill(os.getppid(), number)
    dist.barrier()
    return preempted()


def test_ranks_leave_to_the_launcher_what_all_processes_of_a_job_get() -> None:
    assert launch(signal_all, 2, grace=HOURS, timeout=20) == [None, None]


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


@pytest.mark.parametrize(
    ("number", "grace"), [(signal.SIGTERM, HOURS), (signal.SIGUSR1, HOURS), (signal.SIGUSR1, None)]
)
def test_ranks_leave_them_to_the_launcher_from_start_to_end(number: int, grace: float | None) -> None:
    args = (KillingWhenLoaded(number),)
    assert launch(pass_on, 2, args=args, grace=grace, timeout=20, fresh=True) == [number] * 2


def test_sigusr1_does_not_end_a_command_without_snapshots(start_cli: Callable[..., subprocess.Popen[str]]) -> None:
    process = start_cli("hello", "-n", 2, "--json")
    wait_until_begun(process)
    os.killpg(process.pid, signal.SIGUSR1)
    _, err = process.communicate(timeout=ENOUGH)
    assert (process.returncode, err) == (0, "playground: SIGUSR1: no snapshots are taken here, going on\n")


def start_two(what: str, fork_program: Callable[..., ForkedProgram]) -> list[ForkedProgram]:
    """A world that is joined by two ranks, the second of which is ready to be asked."""
    port = free_port()
    ranks = [fork_program("preempted_rank", what, **by_hand(rank, 2, port)) for rank in range(2)]
    assert ranks[1].stdout.readline() == "ready\n"
    return ranks


@SIGNALS
def test_all_ranks_end_where_one_of_them_is_asked(
    number: signal.Signals, fork_program: Callable[..., ForkedProgram]
) -> None:
    """As where one machine of many is taken back."""
    ranks = start_two("store", fork_program)
    for _ in range(2):  # torchrun passes on what all processes of a job may have got
        ranks[1].send_signal(number)
    errors = [program.communicate(timeout=ENOUGH)[1] for program in ranks]
    assert [program.returncode for program in ranks] == [os.EX_TEMPFAIL] * 2
    assert errors == [f"preempted by {number.name} after step 3\n"] * 2


def test_a_rank_that_cannot_agree_is_ended(fork_program: Callable[..., ForkedProgram]) -> None:
    """It waits in gloo for a rank that does not come."""
    _, waiting = start_two("hang", fork_program)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.communicate(timeout=ENOUGH) == ("", "")
    assert waiting.returncode == 128 + signal.SIGTERM


def test_a_signal_to_a_child_of_the_launcher_is_no_notice() -> None:
    with PreemptionNotice(HOURS) as notice:
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
        assert wait(notice.ears, 0) == []
    for descriptor in (ready, begun):
        os.close(descriptor)
