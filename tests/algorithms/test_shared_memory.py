"""The all-reduce in memory that ranks share: what happens to those who wait there, and what is left
of a group."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.algorithms import load_all_reduce, shared_memory
from playground.algorithms.messages import segment_of
from playground.algorithms.segment import SLOT, Segment

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def all_reduce(tensor: torch.Tensor, group: Any = None, op: Any = SUM) -> None:
    load_all_reduce("shared-memory")(tensor, op, group)


def add_large(rank: int, size: int, numel: int) -> dict[str, bool]:
    """Sums of tensors of several slots, some under way at once."""
    given = [torch.arange(numel) % 1000 + each for each in range(size)]
    total = torch.stack(given).sum(0)
    first, second, small = given[rank].clone(), given[rank].clone(), torch.tensor([rank])
    start: Any = load_all_reduce("shared-memory")
    for work in [start(each, async_op=True) for each in (first, small, second)]:
        work.wait()
    return {
        "first": torch.equal(first, total),
        "second": torch.equal(second, total),
        "small": small.item() == sum(range(size)),
        "shared": isinstance(segment_of(dist.group.WORLD, torch.device("cpu")), Segment),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_many_slots(size: int, world: Worlds) -> None:
    results = world(size).run(add_large, 3 * SLOT // 8 + 7)
    assert results == [dict.fromkeys(["first", "second", "small", "shared"], True)] * size


CALLS: dict[str, Callable[[Any], None]] = {
    "sum of 4": lambda group: all_reduce(torch.ones(4), group),
    "double": lambda group: all_reduce(torch.ones(4, dtype=torch.float64), group, MAX),
    "max of 4": lambda group: all_reduce(torch.ones(4), group, MAX),
    "large": lambda group: all_reduce(torch.ones(SLOT), group),
}
DIFFERENT = {
    ("sum of 4", "double"): (
        "rank 0 called all_reduce(4 float32, SUM), rank 1 called all_reduce(4 float64, MAX)"
    ),
    ("sum of 4", "max of 4"): "rank 1 called all_reduce(4 float32, MAX)",
    ("sum of 4", "large"): "rank 1 called all_reduce(1048576 float32, SUM)",
}
"""The calls of two ranks, and what is said of them."""


def call_differently(rank: int, size: int) -> dict[tuple[str, str], str]:
    """The error of each pair of calls, in a group of its own."""
    said = {}
    for calls in DIFFERENT:
        with pytest.raises(RuntimeError) as error:
            CALLS[calls[rank]](dist.new_group())
        said[calls] = str(error.value)
    return said


def test_calls_that_differ_are_an_error_on_all(world: Worlds) -> None:
    for said in world(2, fresh=True).run(call_differently):
        assert said.keys() == DIFFERENT.keys()
        for calls, words in DIFFERENT.items():
            assert words in said[calls]
            assert "the ranks do not call the same collective" in said[calls]


LEFT = {
    "destroy": "rank 1 has destroyed the process group",
    "fail": (
        "rank 1 has left a call in the memory that the ranks of this host share: make a new "
        "process group"
    ),
}
"""How a rank leaves a group, and what the others are told."""


def leave_early(rank: int, size: int) -> dict[str, str]:
    """What the ranks say where rank 1 leaves the group while the others wait for it, by how it
    does: each time a group of its own."""
    said = {}
    for how in LEFT:
        said[how] = leave_group(rank, how, dist.new_group())
        dist.barrier()
    return said


def leave_group(rank: int, how: str, group: Any) -> str:
    all_reduce(torch.ones(1), group)
    if rank != 1:
        with pytest.raises(RuntimeError) as error:
            all_reduce(torch.ones(1), group)
        return str(error.value)
    time.sleep(0.1)
    if how == "destroy":
        dist.destroy_process_group(group)
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "agree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            all_reduce(torch.ones(1), group)
    return ""


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_those_who_wait_are_told_at_once(world: Worlds) -> None:
    results = world(3, fresh=True).run(leave_early)
    for how, words in LEFT.items():
        told = [said[how] for said in results]
        assert all(said.startswith(("Connection closed by peer", words)) for said in told[::2]), (
            told
        )
        assert any(words in said for said in told), told


def call_in_a_child(rank: int, size: int) -> str:
    """What a process says that is forked from a rank and calls the rank's collective."""
    all_reduce(torch.ones(1))
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            all_reduce(torch.ones(1))
        except Exception as error:
            theirs.send(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    all_reduce(torch.ones(1))
    return str(ours.recv()) if ours.poll() else "nothing"


def test_a_forked_child_has_no_part_in_it(world: Worlds) -> None:
    for said in world(2, fresh=True).run(call_in_a_child):
        assert "was forked from a rank" in said


def let_go(rank: int, size: int) -> bool:
    """Whether, after an asynchronous call, its tensor is gone, and then, with the group, its
    thread."""
    group: Any = dist.new_group(range(size))
    tensor = torch.ones(3)
    load_all_reduce("ring")(tensor, group=group, async_op=True).wait()  # type: ignore[attr-defined]
    seen = weakref.ref(tensor)
    del tensor
    comes_true(lambda: seen() is None)
    dist.destroy_process_group(group)
    del group
    comes_true(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "collective"]
    )
    return True


def comes_true(condition: Callable[[], bool]) -> None:
    """Wait for it; a test that waits for ever fails."""
    while not condition():
        gc.collect()
        time.sleep(0.001)


def test_an_asynchronous_call_keeps_neither_tensors_nor_threads(world: Worlds) -> None:
    assert world(2, fresh=True).run(let_go) == [True, True]


def leave_nothing(rank: int, size: int) -> tuple[int, int, set[str]]:
    """Mappings of shared memory with a group, and without; files in /dev/shm that are new."""
    before = set(os.listdir("/dev/shm"))
    group = dist.new_group(range(size))
    all_reduce(torch.ones(1), group)
    during = mappings()
    dist.destroy_process_group(group)
    del group
    dist.barrier()
    return during, mappings(), set(os.listdir("/dev/shm")) - before


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:playground")


def test_nothing_is_left_of_a_group(world: Worlds) -> None:
    assert world(2, fresh=True).run(leave_nothing) == [(1, 0, set())] * 2
