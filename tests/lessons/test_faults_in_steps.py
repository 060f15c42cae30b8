"""A rank that is killed, hangs or calls something else inside a lesson is named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from ranks import misbehave

from playground.base.errors import PlaygroundError
from playground.lessons.bytes import lesson as bytes_lesson
from playground.lessons.checkpoint import lesson
from playground.tap import Call, Observer, observing

checkpoint: Any = lesson


def save_rows(rank: int, size: int) -> None:
    """Each rank's files are in a folder of its own: nobody reads them."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), {"w": checkpoint.cut(torch.ones(8, 4), (size, 1), rank)})


def compress_all(rank: int, size: int) -> None:
    program: Any = bytes_lesson
    for method in (program.data_parallel, program.top_k, program.power_sgd):
        program.measure(method, rank, size)


LESSONS = {
    "checkpoint": save_rows,
    "bytes": compress_all,
}
"""By lesson, a part of it in which the ranks communicate at least twice."""


class Fault(Observer):
    """Before its second call of torch.distributed, the rank misbehaves or makes another one."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def begun(self, call: Call) -> None:
        self.calls += 1
        if self.calls != 2:
            return
        if self.how == "mismatch":
            dist.all_reduce(torch.zeros(7))
        else:
            misbehave(self.how)


def go_wrong(rank: int, size: int, part: Callable[..., Any], how: str) -> None:
    if rank == 1:
        with observing(Fault(how)):
            part(rank, size)
    else:
        part(rank, size)


FAULTS = (
    ("kill", 60, r"^rank 1 of 2 was killed by SIGKILL"),
    ("hang", 4, r"rank 1 is in the program"),
    ("mismatch", 60, r"rank 1 (has\s+called|is\s+in)\s+all_reduce"),
)
"""What rank 1 does, the seconds after which it counts as hung, and what is said of it."""
OFTEN = {("checkpoint", "kill"), ("bytes", "mismatch")}


@pytest.mark.parametrize(
    ("lesson", "how", "timeout", "message"),
    [
        pytest.param(
            lesson, *fault, marks=[] if (lesson, fault[0]) in OFTEN else pytest.mark.stress
        )
        for lesson in LESSONS
        for fault in FAULTS
    ],
)
def test_a_rank_that_fails_inside_a_lesson_is_named(
    lesson: str, how: str, timeout: int, message: str, world: Worlds
) -> None:
    with pytest.raises(PlaygroundError, match=message):
        world(2, timeout=timeout).run(go_wrong, LESSONS[lesson], how)
