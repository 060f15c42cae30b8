"""A run that stands still is told of, and goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from playground import launch
from playground.runtime.launcher import standstill

FOREVER = 300.0
BEHIND = 8200
"""Tags, more than a flight recorder tells apart."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "SETTLED", 0.1)
    monkeypatch.setattr(standstill, "LIMIT", 0.5)
    monkeypatch.setattr(standstill, "PATIENCE", 1.0)


@contextlib.contextmanager
def goes_on_when_told(file: Path) -> Iterator[list[str]]:
    """In this block, `file` is made when something is told: ranks wait for that. What was told."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(" ".join(record.getMessage().split()))
            file.touch()

    logger, handler = logging.getLogger("playground"), Handler()
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def await_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def thread_that_sends_later(rank: int, size: int, file: Path) -> None:
    def send() -> None:
        await_file(file)
        dist.send(torch.ones(1), 0)

    if rank == 1:
        threading.Thread(target=send, name="sends later").start()
    else:
        dist.recv(torch.ones(1), 1)


def in_its_own_code(rank: int, size: int, file: Path) -> None:
    if rank == 0:
        await_file(file)
    dist.barrier()


def send_that_nobody_keeps(rank: int, size: int, file: Path) -> None:
    """The receiver comes when the Work has gone, and with it the message."""
    if rank == 0:
        dist.isend(torch.ones(10**6), 1)
    dist.barrier()
    if rank == 1:
        work = dist.irecv(torch.zeros(10**6), 0)
        assert work
        with contextlib.suppress(RuntimeError):  # rank 0 has ended by then
            work.wait()


def too_many_tags(rank: int, size: int, file: Path) -> None:
    for tag in range(BEHIND):
        if rank == 0:
            dist.send(torch.ones(1), 1, tag=tag)
        else:
            dist.recv(torch.ones(1), 0, tag=tag)

    def send() -> None:
        await_file(file)
        dist.send(torch.ones(1), 1)

    if rank == 0:
        threading.Thread(target=send, name="sends later").start()
        dist.barrier()
    else:
        dist.recv(torch.ones(1), 0)
        dist.barrier()


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (
            thread_that_sends_later,
            [
                "no rank has made progress", "the run goes on", "probably a deadlock: rank 1 has "
                "finished where rank 0 is in receive from rank 1 (test_standstill.py:",
                "not known: what thread sends later does (rank 1)",
            ],
        ),
        (
            in_its_own_code,
            ["rank 0 is in the program (test_standstill.py:", "while rank 1 is in barrier (:"],
        ),
        (too_many_tags, ["what it does on more than 8192 channels (ranks 0-1)"]),
    ],
)  # fmt: skip
def test_a_run_that_stands_still_is_told_of_and_goes_on(
    fn: Callable[[int, int, Path], None], told: list[str], tmp_path: Path
) -> None:
    with goes_on_when_told(tmp_path / "go on") as said:
        assert launch(fn, 2, args=(tmp_path / "go on",), timeout=FOREVER) == [None, None]
    assert len(said) == 1
    assert [words for words in told if words not in said[0]] == []


def computes(rank: int, size: int) -> None:
    """Rank 0 computes for longer than patience lasts, and needs more than a moment of a core."""
    begun = time.process_time()
    while rank == 0 and time.process_time() < begun + 2.0:
        pass
    dist.barrier()


def test_nothing_is_told_of_a_rank_that_computes(caplog: pytest.LogCaptureFixture) -> None:
    assert launch(computes, 2, timeout=FOREVER) == [None, None]
    assert caplog.records == []
