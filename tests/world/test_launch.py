"""launch(): results in rank order, failures explained, nothing left behind. Real ranks on gloo."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import all_gone, listening
from programs import Outcome
from ranks import add_up, fork_a_talker, go_wrong

import playground
from playground.base.errors import ForkServerFailed
from playground.base.host import cores
from playground.lessons.mnist import Net
from playground.world import RankFailed, UsageError
from playground.world.launcher import forked_process
from playground.world.launcher.launch import LaunchConfig, start_rank
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.rendezvous import MAX_RANKS, Rendezvous

launch = partial(playground.launch, fresh=True)
"""Every test here is about the life of new processes."""


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

    monkeypatch.setattr(forked_process, "start", refuse)
    env = RankEnv(rank=0, size=1, local_rank=0, local_size=1, rendezvous=Rendezvous())
    before = open_files()
    with pytest.raises(ForkServerFailed) as caught:
        start_rank(env, LaunchConfig(), None)
    assert open_files() == before
    assert caught.value.headline.endswith("is away")


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


def test_as_many_ranks_as_one_host_takes_are_not_refused() -> None:
    LaunchConfig().check(MAX_RANKS)
    with pytest.raises(UsageError, match=f"one host takes 1 to {MAX_RANKS}"):
        LaunchConfig().check(MAX_RANKS + 1)


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
