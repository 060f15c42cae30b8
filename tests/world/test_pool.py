"""Worlds that are kept: one process for several launches, and nothing to be noticed of it."""

from __future__ import annotations

import contextlib
import decimal
import gc
import importlib
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import is_alive
from programs import Outcome

from playground import RankFailed, launch
from playground.world.launcher import pool


@pytest.fixture(autouse=True)
def _worlds_are_kept() -> Iterator[None]:
    """Those of one test are there in the next, which ends them if it is to begin without."""
    wanted = pool.are_kept()
    pool.keep_worlds()
    yield
    if wanted:
        pool.keep_worlds()
    else:
        pool.end_worlds()


@pytest.fixture
def no_worlds() -> None:
    pool.end_worlds()
    pool.keep_worlds()


def pid(rank: int, size: int) -> int:
    return os.getpid()


def test_the_next_launch_runs_in_the_same_processes() -> None:
    first = launch(pid, 3)
    assert launch(pid, 3) == first
    assert set(launch(pid, 3, fresh=True)).isdisjoint(first)
    assert launch(pid, 3) == first


def leave_a_message(rank: int, size: int) -> None:
    if rank == 0:
        dist.isend(torch.tensor([13.0]), 1)


def pass_a_message(rank: int, size: int) -> float:
    tensor = torch.tensor([42.0])
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor.zero_(), 0)
    return tensor.item()


def test_no_message_of_one_launch_is_received_in_the_next() -> None:
    launch(leave_a_message, 2)
    assert launch(pass_a_message, 2) == [42.0, 42.0]


def draw(rank: int, size: int) -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


def seed_and_draw(rank: int, size: int) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    return draw(rank, size)


def test_every_function_draws_other_numbers_on_every_rank_as_in_new_processes() -> None:
    before = launch(pid, 2)
    seeded = launch(seed_and_draw, 2)
    drawn = [numbers for _ in range(2) for numbers in launch(draw, 2)]
    drawn += launch(draw, 2, fresh=True) + seeded
    assert launch(seed_and_draw, 2) == seeded
    assert launch(pid, 2) == before
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


def test_a_module_that_seeds_at_its_import_seeds_every_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seeds_itself.py").write_text(
        "import torch\ntorch.manual_seed(0)\ndef draw(rank, size): return torch.rand(1).item()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seeds_itself = importlib.import_module("seeds_itself")
    first = launch(seeds_itself.draw, 2)
    assert first[0] == first[1]
    assert launch(seeds_itself.draw, 2) == first


CHANGES: list[Callable[[], object]] = [
    lambda: os.environ.update(LEFT_BEHIND="1"),
    lambda: torch.set_default_dtype(torch.float64),
    lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
    lambda: os.fork() or os._exit(0),
    lambda: os.chdir("/"),
    lambda: sys.stdout.close(),
    lambda: os.umask(0o077 ^ os.umask(0)),
    gc.disable,
    lambda: gc.set_threshold(1),
    lambda: socket.setdefaulttimeout(1),
    lambda: setattr(torch.backends.mkldnn, "enabled", False),
    lambda: torch.set_flush_denormal(True),
    lambda: warnings.simplefilter("ignore"),
    lambda: logging.getLogger().setLevel(logging.DEBUG),
    lambda: logging.getLogger().addHandler(logging.NullHandler()),
    lambda: logging.disable(logging.CRITICAL),
    lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    lambda: os.nice(1),
    lambda: setattr(decimal.getcontext(), "prec", 3),
    lambda: np.seterr(all="raise"),
    lambda: np.set_printoptions(precision=2),
    lambda: torch.set_printoptions(precision=2),
    lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    lambda: setattr(dist, "all_reduce", print),
    lambda: setattr(torch, "rand", print),
    lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
    lambda: signal.setitimer(signal.ITIMER_REAL, 1000, 1000),
]


def find_unnoticed(rank: int, size: int) -> list[int]:
    """The changes that are not noticed, each in a child of the rank."""
    from playground.world.rank.generators import seed_generators
    from playground.world.rank.process_state import ProcessState

    found = []
    for number, change in enumerate(CHANGES):
        if (child := os.fork()) == 0:
            seed_generators()
            state = ProcessState()
            state.begin()
            new = not state.find_changes()
            change()
            os._exit(new and bool(state.find_changes()))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1:
            found.append(number)
    return found


def test_every_change_of_a_process_is_noticed() -> None:
    assert launch(find_unnoticed, 1) == [[]]


def change_timeout(rank: int, size: int) -> None:
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(milliseconds=1))


def wait_for_a_key(rank: int, size: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        time.sleep(0.1)
        store.set("a key", "there")
    return store.get("a key").decode()


def test_a_store_has_its_timeout_again() -> None:
    before = launch(pid, 2)
    launch(change_timeout, 2)
    assert launch(wait_for_a_key, 2) == ["there"] * 2
    assert launch(pid, 2) == before


def fail(rank: int, size: int) -> None:
    raise ValueError("this rank has had enough")


def read_mask(rank: int, size: int) -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def change_folder(rank: int, size: int) -> None:
    os.chdir("/")


@pytest.mark.parametrize("fn", [fail, change_folder])
def test_a_world_that_failed_or_was_changed_is_not_kept(fn: Callable[[int, int], None]) -> None:
    before = launch(pid, 2)
    with contextlib.suppress(RankFailed):
        launch(fn, 2)
    assert set(launch(pid, 2)).isdisjoint(before)


def test_why_a_world_is_not_kept_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    launch(pid, 2)
    with caplog.at_level(logging.DEBUG, "playground"):
        launch(change_folder, 2)
    assert "the world is not kept: rank 0 of 2 has changed: working folder" in caplog.messages


def test_a_world_is_kept_for_a_caller_who_is_as_before() -> None:
    before = launch(pid, 2)
    mask = os.umask(0o077)
    try:
        assert set(launch(pid, 2)).isdisjoint(before)
        assert launch(read_mask, 2) == [0o077] * 2
    finally:
        os.umask(mask)
    assert launch(pid, 2) == before
    assert launch(read_mask, 2) == [mask] * 2


def test_a_world_that_died_while_it_waited_is_replaced() -> None:
    before = launch(pid, 2)
    os.kill(before[1], signal.SIGKILL)
    while is_alive(before[1]):
        time.sleep(0.01)
    assert set(launch(pid, 2)).isdisjoint(before)
    assert not is_alive(before[0])


def test_a_program_that_has_kept_a_world_ends_without_a_word(
    run_script: Callable[[str], Outcome],
) -> None:
    done = run_script(
        """
        from playground import launch
        from playground.world.launcher.pool import keep_worlds
        from playground.lessons.p2p.lesson import blocking

        if __name__ == "__main__":
            keep_worlds()
            print([tensor.item() for tensor in launch(blocking, 2)])
        """
    )
    assert (done.code, done.out, done.err) == (0, "[1.0, 1.0]\n", "")


def test_a_child_of_the_launcher_leaves_a_world_that_is_kept_alone() -> None:
    before = launch(pid, 2)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            pool.end_worlds()  # as at its exit
        os._exit(0)
    os.waitpid(child, 0)
    assert launch(pid, 2) == before


def test_worlds_end_when_they_are_to_end() -> None:
    processes = [*launch(pid, 1), *launch(pid, 3)]
    assert all(map(is_alive, processes))
    pool.end_worlds()
    assert not any(map(is_alive, processes))
    assert launch(pid, 1) != launch(pid, 1)


@pytest.mark.usefixtures("no_worlds")
def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_RANKS_KEPT", 4)
    one, three = launch(pid, 1), launch(pid, 3)
    assert launch(pid, 1) == one, "1 and 3 are 4"
    two = launch(pid, 2)
    assert launch(pid, 2) == two
    assert not any(map(is_alive, three)), "3 had waited longest"
    assert launch(pid, 1) == one


def test_worlds_are_kept_in_a_context_and_end_with_the_outermost() -> None:
    pool.end_worlds()
    with pool.keeping_worlds():
        first = launch(pid, 2)
        with pool.keeping_worlds():
            assert launch(pid, 2) == first
        assert launch(pid, 2) == first
    assert not pool.are_kept()
    assert not any(map(is_alive, first))
