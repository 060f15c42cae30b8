"""launch(restarts=K): a world that failed is replaced by a new one, at most so often, and nothing
of it stays."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import ENOUGH, is_alive
from ranks import misbehave

import playground
from playground import PlaygroundError, RankFailed, UsageError, report
from playground.world import restart_count
from playground.world.launcher import fork_client

launch = partial(playground.launch, fresh=True)
KILLED = "was killed by SIGKILL"
STORE = "the process that serves the ranks' store"


class Restarts:
    """What `on_restart` was called with, and which processes there have been."""

    def __init__(self) -> None:
        self.headlines: list[str] = []
        self.counts: list[int] = []
        self.pids: list[int] = []

    def on_restart(self, failure: PlaygroundError, count: int) -> None:
        assert not any(map(is_alive, self.pids)), "what has failed is gone before it is told"
        self.headlines.append(failure.headline)
        self.counts.append(count)

    def on_report(self, rank: int, event: dict[str, Any]) -> None:
        self.pids.append(event["pid"])


def go_wrong_at_first(rank: int, size: int, how: str, culprits: list[int]) -> tuple[int, int]:
    """In each of the first worlds another culprit, or the same again, goes wrong while the others
    wait for it."""
    report(pid=os.getpid())
    dist.barrier()
    count = restart_count()
    if count < len(culprits) and rank == culprits[count]:
        misbehave(how)
    dist.barrier()
    return rank, count


@pytest.mark.parametrize(
    ("how", "culprit", "reason"),
    [
        ("kill", 0, KILLED),
        ("raise", 1, "failed: ValueError: this rank has had enough"),
    ],
)
def test_a_world_that_failed_is_replaced(how: str, culprit: int, reason: str) -> None:
    seen = Restarts()
    results = launch(
        go_wrong_at_first,
        2,
        args=(how, [culprit]),
        restarts=1,
        on_restart=seen.on_restart,
        on_report=seen.on_report,
    )
    assert results == [(0, 1), (1, 1)]
    assert (seen.headlines, seen.counts) == ([f"rank {culprit} of 2 {reason}"], [1])
    assert len(set(seen.pids)) == 4
    assert not any(map(is_alive, seen.pids))


def test_after_the_last_restart_the_last_failure_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those before it are logged, by default, a line each."""
    seen = Restarts()
    with pytest.raises(RankFailed, match=f"^rank 2 of 3 {KILLED}$") as caught:
        launch(
            go_wrong_at_first, 3, args=("kill", [0, 1, 2, 1]), restarts=2, on_report=seen.on_report
        )
    assert caught.value.__context__ is None, "the failures before it have been told"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"rank {culprit} of 3 {KILLED}; restart {culprit + 1}" for culprit in (0, 1)]
    assert not any(map(is_alive, seen.pids))


def test_a_world_that_hangs_is_replaced() -> None:
    seen = Restarts()
    results = launch(
        go_wrong_at_first, 2, args=("hang", [1]), timeout=1, restarts=50,
        on_restart=seen.on_restart, on_report=seen.on_report,
    )  # fmt: skip
    count = len(seen.headlines)  # more than one where the machine is too busy for this timeout
    assert count > 0
    assert results == [(0, count), (1, count)]
    assert all(line.startswith("no sign of life for 1 s from ranks 0") for line in seen.headlines)
    assert not any(map(is_alive, seen.pids))


def test_what_on_restart_raises_ends_the_launch() -> None:
    seen = Restarts()

    def enough(failure: PlaygroundError, count: int) -> None:
        raise failure

    with pytest.raises(RankFailed, match=KILLED):
        launch(
            go_wrong_at_first,
            2,
            args=("kill", [0]),
            restarts=9,
            on_restart=enough,
            on_report=seen.on_report,
        )
    assert len(seen.pids) == 2
    assert not any(map(is_alive, seen.pids))


def print_and_fail_once(rank: int, size: int, words: list[str]) -> list[str]:
    print(f"rank {rank} begins, restart {restart_count()}")
    report(pid=os.getpid())
    words.append("by a rank")
    dist.barrier()
    if rank == 0 and restart_count() == 0:
        print("a line without an end", end="", flush=True)
        misbehave("kill")
    dist.barrier()
    return words


def test_output_reports_and_arguments_are_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[int] = []
    words = ["as it was"]

    def on_report(rank: int, event: dict[str, Any]) -> None:
        reports.append(rank)
        words.append("by the launcher")

    def on_restart(failure: PlaygroundError, count: int) -> None:
        print("restart", flush=True)

    results = launch(
        print_and_fail_once,
        2,
        args=(words,),
        restarts=1,
        on_report=on_report,
        on_restart=on_restart,
    )
    assert results == [["as it was", "by a rank"]] * 2
    assert sorted(reports) == [0, 0, 1, 1]
    first, second = capfd.readouterr().out.split("restart\n")
    assert "a line without an end" in first
    for count, text in enumerate((first, second)):
        assert [f"rank {rank} begins, restart {count}" in text for rank in range(2)] == [True, True]


def refuse(rank: int, size: int) -> None:
    report(pid=os.getpid())
    raise UsageError("this cannot be done")


def test_the_impossible_is_not_tried_again() -> None:
    seen = Restarts()
    with pytest.raises(UsageError, match="this cannot be done"):
        launch(refuse, 2, restarts=3, on_restart=seen.on_restart, on_report=seen.on_report)
    assert (seen.counts, len(set(seen.pids))) == ([], len(seen.pids))
    assert not any(map(is_alive, seen.pids))


def pid_and_count(rank: int, size: int) -> tuple[int, int]:
    return os.getpid(), restart_count()


def test_a_world_that_replaced_another_is_kept_and_counts_anew() -> None:
    before = [pid for pid, _ in playground.launch(pid_and_count, 2)]
    seen = Restarts()
    playground.launch(
        go_wrong_at_first,
        2,
        args=("kill", [1]),
        restarts=1,
        on_restart=seen.on_restart,
        on_report=seen.on_report,
    )
    assert set(seen.pids[:2]) == set(before), "a kept world may be the one that fails"
    after = playground.launch(pid_and_count, 2)
    assert sorted(after) == sorted((pid, 0) for pid in seen.pids[2:])


def children_of_the_server() -> set[int]:
    client = fork_client.running_server()
    client.meet()
    pid = client.pid
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Killer:
    """Kills ranks of this process's worlds, at random moments, until it is told to stop. A context
    manager."""

    def __init__(self, longest_pause: float, seed: int) -> None:
        self.longest_pause, self.random = longest_pause, random.Random(seed)
        self.spared = children_of_the_server()
        self.kills = 0
        self.told_to_stop = threading.Event()
        self.thread = threading.Thread(target=self.kill_until_told)

    def kill_until_told(self) -> None:
        while not self.told_to_stop.wait(self.random.uniform(0, self.longest_pause)):
            if victims := sorted(children_of_the_server() - self.spared):
                # one that has just ended waits to be asked for
                os.kill(self.random.choice(victims), signal.SIGKILL)
                self.kills += 1

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.told_to_stop.set()
        self.thread.join()


def work_until_calm(rank: int, size: int, calm: Path) -> int:
    flag = torch.zeros(1)
    while not flag:
        flag += rank == 0 and calm.exists()
        dist.all_reduce(flag)
    return restart_count()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.stress)])
def test_any_rank_may_be_killed_at_any_moment(kills: int, tmp_path: Path) -> None:
    """While it starts, while it meets the others, while they work, while they are being ended
    because of another."""
    seen = Restarts()
    calm = tmp_path / "calm"

    def on_restart(failure: PlaygroundError, count: int) -> None:
        seen.on_restart(failure, count)
        if count >= kills:
            killer.told_to_stop.set()
            calm.touch()

    with Killer(longest_pause=0.4, seed=kills) as killer:
        results = launch(
            work_until_calm, 3, args=(calm,), restarts=kills + 1, on_restart=on_restart
        )
    assert results == [len(seen.counts)] * 3
    assert killer.kills >= len(seen.counts) >= kills
    victims = re.compile(f"(rank [012] of 3|{STORE}) {KILLED}")
    assert [line for line in seen.headlines if not victims.fullmatch(line)] == []
    assert soon(lambda: children_of_the_server() <= killer.spared)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(25))
def test_a_rank_may_be_killed_while_it_leaves(seed: int) -> None:
    seen = Restarts()

    def on_restart(failure: PlaygroundError, count: int) -> None:
        seen.on_restart(failure, count)
        if count == 3:
            killer.told_to_stop.set()  # on a busy machine it would be faster than any world

    with Killer(longest_pause=0.3, seed=seed) as killer:
        results = launch(pid_and_count, 3, restarts=4, on_restart=on_restart)
    assert [count for _, count in results] == [len(seen.counts)] * 3
    assert [line for line in seen.headlines if KILLED not in line] == []
    assert soon(lambda: children_of_the_server() <= killer.spared)


def form_a_group_without_the_store(rank: int, size: int) -> list[int]:
    report(pid=os.getpid())
    if restart_count() == 0:
        time.sleep(1000)
    ranks = [*range(size)]
    return dist.get_process_group_ranks(dist.new_group(ranks))


def test_a_store_that_was_killed_is_named_and_replaced() -> None:
    seen, spared = Restarts(), children_of_the_server()
    killed: set[int] = set()

    def on_report(rank: int, event: dict[str, Any]) -> None:
        seen.on_report(rank, event)
        if len(seen.pids) == 2:
            killed.update(children_of_the_server() - spared - {*seen.pids})
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    results = launch(
        form_a_group_without_the_store, 2,
        restarts=1, on_restart=seen.on_restart, on_report=on_report,
    )  # fmt: skip
    assert (results, len(killed)) == ([[0, 1]] * 2, 1)
    assert seen.headlines == [f"{STORE} {KILLED}"]


def kill_the_server_once(rank: int, size: int) -> int:
    dist.barrier()
    if rank == 0 and restart_count() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(7)
    dist.barrier()
    return restart_count()


@pytest.mark.stress
def test_a_fork_server_that_was_killed_is_replaced_too() -> None:
    seen = Restarts()
    fork_client.end_servers()
    try:
        assert launch(kill_the_server_once, 2, restarts=1, on_restart=seen.on_restart) == [1, 1]
    finally:
        fork_client.end_servers()
    assert len(seen.headlines) == 1
    assert "fork server" in seen.headlines[0]


def fail_once_then_wait(rank: int, size: int) -> None:
    if restart_count():
        time.sleep(1000)
    report(pid=os.getpid())
    dist.barrier()
    if rank == 0:
        misbehave("kill")
    time.sleep(1000)


# It may come just after a socket is made, and before anything will close that: then it is collected
# as garbage.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "delay", [0.04, *(pytest.param(i / 1000, marks=pytest.mark.stress) for i in (1, 100, 300))]
)
def test_ctrl_c_ends_a_restart(delay: float) -> None:
    """While a world that failed is being ended, while another starts, and when it has begun to
    work."""
    before = children_of_the_server()

    def on_report(rank: int, event: dict[str, Any]) -> None:
        signal.setitimer(signal.ITIMER_REAL, delay)

    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(
                fail_once_then_wait,
                3,
                restarts=5,
                on_report=on_report,
                on_restart=lambda *failure: None,
            )
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert soon(lambda: children_of_the_server() <= before)
