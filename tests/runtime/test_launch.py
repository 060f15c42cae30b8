"""launch(): results in rank order, failures explained, nothing left behind. Real ranks on gloo."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import is_alive, listening
from programs import Outcome
from ranks import go_wrong

import playground
from playground.lessons.sgd.lesson import Net
from playground.runtime import PeerDisconnected, RankFailed, RankTimeout, UsageError, report
from playground.runtime.errors import ForkServerFailed
from playground.runtime.host import cores
from playground.runtime.launcher import server, watch
from playground.runtime.launcher.launch import LaunchConfig, start_rank
from playground.runtime.rank.preemption import PreemptionNotice
from playground.runtime.rank.rank import failure
from playground.runtime.rendezvous.environment import RankEnv
from playground.runtime.rendezvous.rendezvous import Rendezvous

launch = partial(playground.launch, fresh=True)
"""Every test here is about the life of new processes."""


def add_up(rank: int, size: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_in_rank_order(size: int) -> None:
    assert launch(add_up, size) == [sum(range(size))] * size


def surroundings(rank: int, size: int) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "policy": os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else None,
        "backend": dist.get_backend(),
        "local_rank": dist.get_node_local_rank(),
        "listening": listening([os.getpid()]),
    }


def test_each_rank_gets_its_share_of_the_cores_and_listens_on_loopback_only() -> None:
    results = launch(surroundings, 3)
    assert [result["local_rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert result["threads"] == max(1, cores() // 3)
        assert result["backend"] == "gloo"
        assert result["policy"] == getattr(os, "SCHED_BATCH", None)
        assert result["listening"], "every rank of gloo listens somewhere"
        assert set(result["listening"]) <= {"0100007F", "00000000000000000000000001000000"}


def test_ranks_run_as_the_system_has_them_if_they_are_not_to_be_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAYGROUND_TUNING", "0")
    results = launch(surroundings, 2)
    assert [result["policy"] for result in results] == [os.sched_getscheduler(0)] * 2


@pytest.mark.parametrize(
    ("how", "culprit", "reason"),
    [
        ("raise", 0, "failed: ValueError: this rank has had enough"),
        ("exit", 2, "failed: SystemExit: 3"),
        ("vanish", 0, "exited with code 7 without a result"),
        ("segfault", 2, "was killed by SIGSEGV"),
    ],
)
def test_the_rank_that_failed_is_named(how: str, culprit: int, reason: str) -> None:
    pids: dict[int, int] = {}
    with pytest.raises(RankFailed) as caught:
        launch(
            go_wrong,
            3,
            args=(how, culprit),
            on_report=lambda rank, event: pids.update({rank: event["pid"]}),
        )
    assert str(caught.value).startswith(f"rank {culprit} of 3 {reason}")
    assert str(caught.value).count("Traceback") == (1 if how in ("raise", "exit") else 0)
    assert "go_wrong" in str(caught.value) or how not in ("raise", "exit")
    assert all_gone(pids, expected=3)


def report_and_vanish(rank: int, size: int) -> None:
    report(last="words")
    os._exit(7)


def test_the_last_words_of_a_rank_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if, while the launcher looks for what is ready, they come after it has looked at the
    line, and the end of the process before it looks at that: here it never looks at the line."""
    monkeypatch.setattr(
        watch,
        "wait",
        lambda objects, seconds: wait([s for s in objects if type(s) is int], seconds),
    )
    heard: list[dict[str, Any]] = []
    with pytest.raises(RankFailed, match="rank 0 of 1 exited with code 7"):
        launch(report_and_vanish, 1, on_report=lambda rank, event: heard.append(event))
    assert heard == [{"last": "words"}]


def all_gone(pids: dict[int, int], expected: int) -> bool:
    assert len(pids) == expected
    return not any(map(is_alive, pids.values()))


def fork_a_talker(rank: int, size: int) -> int:
    """A child of the rank reports, and comes back as if it were the rank: by a result or by an
    exception. It ends as a script does."""
    for comes_back in (True, False):
        child = os.fork()
        if child == 0:
            report(told_by="child")
            if comes_back:
                return -1
            raise ValueError("this is not the rank")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (not comes_back)
    report(told_by="rank")
    return rank


def test_a_child_of_a_rank_does_not_speak_for_it() -> None:
    heard: list[dict[str, Any]] = []
    assert launch(fork_a_talker, 2, on_report=lambda rank, event: heard.append(event)) == [0, 1]
    assert heard == [{"told_by": "rank"}] * 2


def open_files() -> set[str]:
    """What this process has open that another one has the other end of, or that stands for another
    one."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith(("socket:", "pipe:", "anon_inode:[pidfd]"))}


def test_a_child_of_the_launcher_has_nothing_open_that_belongs_to_ranks() -> None:
    before, left_open = open_files(), []

    def fork(rank: int, event: dict[str, Any]) -> None:
        ours, theirs = os.pipe()
        with open(ours) as reader, open(theirs, "w") as writer:
            child = os.fork()
            if child == 0:
                mine = {os.readlink(f"/proc/self/fd/{pipe}") for pipe in (ours, theirs)}
                print(*sorted(open_files() - before - mine), sep="\n", file=writer, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            writer.close()
            # libraries may open their own in a child
            left_open.append(open_files() & {*reader.read().split()})

    launch(fork_a_talker, 2, on_report=fork)
    assert left_open == [set(), set()]


def test_a_rank_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the error keeps where it was raised, and all that was there."""

    def refuse(*args: object, **more: object) -> None:
        raise ForkServerFailed("is away")

    monkeypatch.setattr(server, "start", refuse)
    env = RankEnv(rank=0, size=1, local_rank=0, local_size=1, rendezvous=Rendezvous())
    before = open_files()
    with pytest.raises(ForkServerFailed) as caught:
        start_rank(env, LaunchConfig(), None, None)
    assert open_files() == before
    assert caught.value.headline.endswith("is away")


class Odd:
    """Can be made from its pickle in a rank only, and fails in the launcher as a lost connection
    does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return make_odd, (self.pid,)


def make_odd(pid: int) -> Odd:
    if os.getpid() != pid:
        raise EOFError("only there")
    return Odd(pid)


class Unwilling:
    def __reduce__(self) -> Any:
        raise OSError("the disk that this lies on is gone")


def report_unwillingly(rank: int, size: int) -> None:
    report(what=Unwilling())


def test_a_report_that_cannot_be_sent_is_not_taken_for_a_lost_launcher() -> None:
    with pytest.raises(
        RankFailed, match=r"^rank 0 of 1 failed: OSError: the disk that this lies on is gone"
    ):
        launch(report_unwillingly, 1)


def report_odd(rank: int, size: int) -> None:
    report(odd=Odd(os.getpid()))
    time.sleep(1000)


def test_a_report_that_cannot_be_read_is_not_taken_for_a_lost_rank() -> None:
    with pytest.raises(
        RankFailed, match=r"^rank 0 of 1 sent what cannot be read here \(EOFError: only there"
    ):
        launch(report_odd, 1)


def test_a_connection_of_the_user_s_is_no_peer() -> None:
    words = "Connection reset by peer"
    assert type(failure(ConnectionResetError(104, words), 0, 1)) is RankFailed
    assert type(failure(RuntimeError(words), 0, 1)) is PeerDisconnected


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
    assert "from ranks 0, 1 of 2: a hang, or" in str(RankTimeout(2, 1.0, {0: "here", 1: "there"}))
    assert all_gone(pids, expected=2)


def wait_in_vain(rank: int, size: int) -> None:
    """Rank 0 waits, with a timeout of its own, for a rank that does not come."""
    dist.barrier()  # both are here: on a busy machine one begins seconds before the other
    if rank == 1:
        time.sleep(1000)
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=1))
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
    monkeypatch.setattr(watch, "receive", lambda *_: messages.pop())
    world = watch.WorldWatch([], 1.0, watch.ignore_report, PreemptionNotice(0.0))

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


def nothing_to_send(rank: int, size: int) -> Any:
    return lambda: None


def test_a_result_that_does_not_pickle_is_explained() -> None:
    with pytest.raises(RankFailed, match="returned what cannot be sent to the launcher"):
        launch(nothing_to_send, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "one host takes 1 to"),
        ({"size": 1_000_000}, "one host takes 1 to"),
        ({"size": 2, "timeout": float("nan")}, "timeout"),
        ({"size": 2, "timeout": 1e7}, "timeout"),
        ({"size": 2, "restarts": -1}, "-1 restarts: use a whole number, 0 or more"),
        ({"size": 2, "backend": "smoke signals"}, "unknown"),
        ({"size": 2, "args": (lambda: None,)}, "cannot be sent to another process"),
    ],
)
def test_the_impossible_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        launch(add_up, **arguments)


def stay(rank: int, size: int) -> None:
    if rank == 1:
        dist.destroy_process_group = threading.Event().wait


def test_a_rank_that_does_not_leave_is_told_where_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "LEAVE_LIMIT", 0.2)
    monkeypatch.setattr(watch, "LOOK_INTERVAL", 0.1)
    with pytest.raises(RankFailed, match="did not leave cleanly: still there") as caught:
        launch(stay, 2)
    assert "threading.py" in caught.value.others[1]


def test_a_script_without_a_guard_is_told_so_once(run_script: Callable[[str], Outcome]) -> None:
    done = run_script(
        """
        from playground import launch

        def who(rank, size):
            return rank

        try:
            print(launch(who, 2))
        except Exception as error:
            print(error)
        """,
    )
    assert done.out.count("put its launch() under if __name__ == '__main__':") == 1
    assert done.err == ""


def test_a_function_from_a_prompt_is_refused_with_the_way_out() -> None:
    text = "from playground import launch\ndef f(rank, size): pass\nlaunch(f, 2)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert "%%writefile" in done.stderr.splitlines()[-1]


@pytest.mark.stress
def test_threads_of_one_program_may_launch_at_once() -> None:
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(lambda size: launch(add_up, size), [2] * 60)] == [[1.0, 1.0]] * 60


def page_faults(rank: int, size: int) -> float:
    """How many there are in a step of training, once memory has grown to what it needs."""
    model, images = Net().to(memory_format=torch.channels_last), torch.rand(64, 1, 28, 28)

    def step() -> None:
        model.zero_grad()
        model(images).sum().backward()

    for _ in range(20):
        step()
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(20):
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return median(after - before for before, after in pairwise(faults))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_ranks_use_freed_memory_again() -> None:
    """The kernel would have to find and clear hundreds of pages in every step."""
    assert max(playground.launch(page_faults, 2)) < 20


def add_up_on_the_cpu(rank: int, size: int) -> float:
    tensor = torch.ones(1, device="cpu")
    dist.all_reduce(tensor)
    return tensor.item()


def set_default_device(rank: int, size: int) -> float:
    torch.set_default_device("meta")
    return add_up_on_the_cpu(rank, size)


def test_a_default_device_of_the_program_s_is_none_of_ours() -> None:
    assert playground.launch(set_default_device, 2) == [2.0] * 2
    assert playground.launch(add_up_on_the_cpu, 2) == [2.0] * 2
