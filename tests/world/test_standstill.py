"""A run that stands still is told of, and goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_programs import collective, receive, run

from playground import launch
from playground.base.process_status import process_status
from playground.explain.hang import Doing, Kind, standstill
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.wording import Diagnosis

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


@pytest.mark.parametrize(("question", "is_due"), [(None, True), ("Name? ", False)])
def test_a_rank_that_asks_a_person_is_waited_for(question: str | None, is_due: bool) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        rank: Any = SimpleNamespace(
            done=False, vanished=False, box=SimpleNamespace(calls=(1, 0, 0), waits=True),
            question=question, pid=process.pid,
        )  # fmt: skip
        while process_status(process.pid)[:1] != [b"S"]:
            time.sleep(0.01)
        stands = standstill.StandstillWatch([rank])
        looks = []
        for _ in range(3):
            looks.append(stands.look())
            stands.since -= 100
        process.kill()
    assert looks == [False, False, is_due]


def test_a_rank_that_has_computed_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it sleeps whenever the launcher looks."""
    ticks = iter([[0], [10**6], [10**6], [10**6]])
    monkeypatch.setattr(standstill.StandstillWatch, "count_ticks", lambda _: next(ticks))
    with subprocess.Popen(["sleep", "100"]) as process:
        box = SimpleNamespace(calls=(1, 0, 0), waits=True)
        rank: Any = SimpleNamespace(
            done=False, vanished=False, box=box, question=None, pid=process.pid
        )
        while process_status(process.pid)[:1] != [b"S"]:
            time.sleep(0.01)
        stands, looks = standstill.StandstillWatch([rank]), []
        for _ in range(5):
            looks.append(stands.look())
            stands.since -= 100
        process.kill()
    assert looks == [False, False, False, False, True]


def test_what_is_told_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stands = standstill.StandstillWatch([])
    first, second = (diagnose(run([receive(peer, 3)], [], [])) for peer in (1, 2))
    assert first
    assert second
    told = [replace(each, proved=False, unknown="what a thread does") for each in (first, second)]
    for each in (*told, *told):
        stands.tell(each)
    assert [each.sentence in caplog.text for each in told] == [True, True]
    assert len(caplog.records) == 2


def test_where_calls_have_differed_before_no_patience_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits, straggler = run([receive(1, 2)], [])
    found = diagnose([waits, replace(straggler, doing=Doing.IN_PROGRAM)])
    assert found
    told = "rank 0 has called new_group"
    differs = replace(found, kind=Kind.RUNNING, difference=told)
    stands = standstill.StandstillWatch([])
    for silent in (replace(differs, difference=""), replace(differs, kind=Kind.STRAGGLER)):
        stands.tell(silent)
    assert caplog.text == ""
    stands.tell(differs)
    assert f"before that: {told}" in caplog.text


def told_of(found: Diagnosis, caplog: pytest.LogCaptureFixture) -> str:
    """All that was told when this is told of ranks that have stood still for long."""
    standstill.StandstillWatch([], was_patient=True).tell(found)
    return " ".join(caplog.text.split())


def test_of_a_rank_that_waits_for_a_worker_it_is_told_how_to_find_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits, straggler = run([receive(1, 2)], [])
    worker = "a DataLoader worker (process 12), which sleeps"
    where = replace(straggler, doing=Doing.IN_PROGRAM, line="train.py:9 in step", worker=worker)
    found = diagnose([waits, where])
    assert found
    said = told_of(found, caplog)
    assert f"rank 1 waits for {worker} (train.py:9) while rank 0 is in recv from rank 1" in said
    assert said.endswith(": py-spy dump --pid 12 (pip install py-spy) shows the line of the worker")
    heard = diagnose([waits, replace(where, worker_line="data.py:16 in __getitem__")])
    assert heard
    said = told_of(heard, caplog)
    assert f"rank 1 waits for {worker} at data.py:16 (its loop: train.py:9) while rank 0" in said
    assert said.endswith(": look at what the worker does there: the others wait for its rank")


def test_of_several_ranks_that_are_in_the_program_the_cure_speaks_of_several(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits, *stragglers = run([collective("barrier", 3)], [], [])
    states = [waits, *(replace(each, doing=Doing.IN_PROGRAM) for each in stragglers)]
    found = diagnose(states)
    assert found
    assert found.sentence == "ranks 1-2 are in the program while rank 0 is in barrier (train.py:1)"
    assert found.cure == "look at what those ranks do there: the others wait for them"
    assert "look at" not in told_of(found, caplog)


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


def send_that_nobody_keeps(rank: int, size: int) -> None:
    """The receiver comes when the Work has gone, and with it the message."""
    if rank == 0:
        dist.isend(torch.ones(10**6), 1)
    dist.barrier()
    if rank == 1:
        dist.recv(torch.zeros(10**6), 0)
    else:
        time.sleep(FOREVER)


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


class ToldError(Exception):
    """Ends a run that would stand still for ever."""


class Ends(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ToldError(" ".join(record.getMessage().split()))


def find_what_is_told(fn: Callable[..., None], *args: object) -> str:
    logger, handler = logging.getLogger("playground"), Ends()
    logger.addHandler(handler)
    try:
        with pytest.raises(ToldError) as told:
            launch(fn, 2, args=args, timeout=FOREVER)
    finally:
        logger.removeHandler(handler)
    return str(told.value)


def one_rank_too_many(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=3)


def one_rank_too_many_by_the_environment(rank: int, size: int) -> None:
    os.environ["WORLD_SIZE"] = "3"
    dist.init_process_group("gloo")


def one_rank_too_many_in_a_file(rank: int, size: int, path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)


def one_rank_too_many_in_a_file_by_position(rank: int, size: int, path: Path) -> None:
    dist.init_process_group("gloo", f"file://{path}", timedelta(minutes=30), 3, rank)


def ports_of_their_own(rank: int, size: int) -> None:
    """Each rank asks the system for a free one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    dist.init_process_group("gloo")


TOO_FEW = "ranks 0-1 are in init_process_group, which waits for rank 2 of 3: there are 2 (test_"


@pytest.mark.parametrize("fn", [one_rank_too_many, one_rank_too_many_by_the_environment])
def test_a_world_of_more_ranks_than_there_are_is_told(fn: Callable[[int, int], None]) -> None:
    assert TOO_FEW in find_what_is_told(fn)


@pytest.mark.parametrize(
    "fn", [one_rank_too_many_in_a_file, one_rank_too_many_in_a_file_by_position]
)
def test_a_world_in_a_file_of_more_ranks_than_there_are_is_told(
    fn: Callable[[int, int, Path], None], tmp_path: Path
) -> None:
    assert TOO_FEW in find_what_is_told(fn, tmp_path / "store")


def test_ranks_that_look_for_each_other_at_different_ports_are_told() -> None:
    told = find_what_is_told(ports_of_their_own)
    assert "probably a deadlock: rank" in told
    assert told.count("in init_process_group at 127.0.0.1:") == 2
    assert "whether other processes join that world" in told


def test_a_send_that_nobody_waits_for_is_told() -> None:
    assert "rank 0 has called send to rank 1 and not waited for it (test_" in find_what_is_told(
        send_that_nobody_keeps
    )


def computes(rank: int, size: int) -> None:
    """Rank 0 computes for longer than patience lasts, and needs more than a moment of a core."""
    begun = time.process_time()
    while rank == 0 and time.process_time() < begun + 2.0:
        pass
    dist.barrier()


def test_nothing_is_told_of_a_rank_that_computes(caplog: pytest.LogCaptureFixture) -> None:
    assert launch(computes, 2, timeout=FOREVER) == [None, None]
    assert caplog.records == []
