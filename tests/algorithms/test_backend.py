"""The backend shm: what is added in memory that ranks share, and what happens to those who wait
there."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import agree, any_tensor, bits_of, data_for, few
from fixtures import Worlds
from hypothesis import given, strategies as st
from ranks import needs_shm
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce, shared_memory
from playground.algorithms.backend import INLINE
from playground.runtime.shared_memory import SLOT, Segment

collectives = st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
cases = st.lists(st.tuples(collectives, *any_tensor), min_size=60, max_size=60)


def compare_collectives(rank: int, size: int, cases: list[Any]) -> list[tuple[bool, bytes]]:
    """Each case by the backend: whether it is what follows from all ranks' tensors, and its
    bits."""
    outcomes = []
    for number, (collective, shape, layout, (dtype, name), seed) in enumerate(cases):
        shape = [size * 2, *shape]
        given = [data_for(each, shape, layout, dtype, seed) for each in range(size)]
        op = dist.ReduceOp.SUM if name == "AVG" else getattr(dist.ReduceOp, name)
        mine, total = given[rank].clone(), fold(given, name)
        asynchronous, root = number % 2 == 0, number % size
        if collective == "all_reduce":
            work, expected = dist.all_reduce(mine, op, async_op=asynchronous), total
        elif collective == "broadcast":
            work, expected = dist.broadcast(mine, root, async_op=asynchronous), given[root]
        elif collective == "reduce_scatter":
            shares = torch.stack(
                [part.contiguous() for part in total.reshape(-1).tensor_split(size)]
            )
            mine, whole = torch.empty_like(shares[rank]), given[rank].contiguous()
            work = dist.reduce_scatter_tensor(mine, whole.view(-1), op, async_op=asynchronous)
            expected = shares[rank]
        else:
            share = given[rank].contiguous().view(-1)
            mine = share.new_empty(size * share.numel())
            expected = torch.cat([each.reshape(-1) for each in given])
            work = dist.all_gather_into_tensor(mine, share, async_op=asynchronous)
        if work is not None:
            work.wait()
        outcomes.append((agree(mine, expected, dtype), bits_of(mine)))
    return outcomes


def fold(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """What the operation makes of them, in order."""
    by_name: dict[str, Any] = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = tensors[0]
    for tensor in tensors[1:]:
        total = by_name[name](total, tensor)
    return total


@needs_shm
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 2, 4, 5))]
)
def test_the_backend_is_right_for_every_tensor(size: int, world: Worlds) -> None:
    @few
    @given(cases)
    def compare(drawn: list[Any]) -> None:
        results = world(size, backend="shm").run(compare_collectives, drawn)
        for position, case in enumerate(drawn):
            outcomes = [rank[position] for rank in results]
            assert all(right for right, _ in outcomes), (size, case)
            if case[0] != "reduce_scatter":
                assert len({bits for _, bits in outcomes}) == 1, (size, case)

    compare()


def large(rank: int, size: int, numel: int) -> dict[str, bool]:
    """Each collective with tensors of several slots; some asynchronous ones under way at once."""
    given = [torch.arange(numel) % 1000 + each for each in range(size)]
    total = torch.stack(given).sum(0)
    first = given[rank].clone()
    second = given[rank].clone()
    small = torch.tensor([rank])
    root = given[rank].clone()
    works = [dist.all_reduce(each, async_op=True) for each in (first, small, second)]
    for work in works:
        work.wait()
    dist.broadcast(root, size - 1)
    share = torch.empty(numel // size, dtype=torch.int64)
    whole = torch.empty(numel, dtype=torch.int64)
    dist.reduce_scatter_tensor(share, given[rank][: share.numel() * size])
    dist.all_gather_into_tensor(whole[: share.numel() * size], share)
    return {
        "in order": torch.equal(first, total)
        and torch.equal(second, total)
        and small.item() == sum(range(size)),
        "broadcast": torch.equal(root, given[-1]),
        "halves": torch.equal(whole[: share.numel() * size], total[: share.numel() * size]),
        "shared": isinstance(dist.group.WORLD._get_backend(torch.device("cpu")).segment, Segment),
    }


@needs_shm
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_many_slots(size: int, world: Worlds) -> None:
    results = world(size, backend="shm").run(large, 3 * SLOT // 8 + 7)
    assert results == [dict.fromkeys(["in order", "broadcast", "halves", "shared"], True)] * size


DIFFERENT = {
    ("sum of 4", "double"): (
        "rank 0 called all_reduce(4 float32, SUM), rank 1 called all_reduce(4 float64, MAX)"
    ),
    ("sum of 4", "max of 4"): "rank 1 called all_reduce(4 float32, MAX)",
    ("from 0", "from 1"): "rank 1 called broadcast(4 float32, from rank 1)",
    ("sum of 4", "async"): "rank 1 called all_reduce(1048576 float32, SUM)",
}
"""The calls of two ranks, and what is said of them."""


def call_differently(rank: int, size: int) -> dict[tuple[str, str], str]:
    """The error of each pair of calls, in a group of its own."""
    said = {}
    for calls in DIFFERENT:
        with pytest.raises(RuntimeError) as error:
            make_call(calls[rank], dist.new_group())
        said[calls] = str(error.value)
    return said


def make_call(name: str, group: Any) -> None:
    reduce = partial(dist.all_reduce, group=group)
    made: dict[str, Callable[[], Any]] = {
        "sum of 4": lambda: reduce(torch.ones(4)),
        "double": lambda: reduce(torch.ones(4, dtype=torch.float64), dist.ReduceOp.MAX),
        "max of 4": lambda: reduce(torch.ones(4), dist.ReduceOp.MAX),
        "from 0": lambda: dist.broadcast(torch.ones(4), 0, group=group),
        "from 1": lambda: dist.broadcast(torch.ones(4), 1, group=group),
        "async": lambda: reduce(torch.ones(SLOT), async_op=True).wait(),
    }
    made[name]()


@needs_shm
def test_calls_that_differ_are_an_error_on_all(world: Worlds) -> None:
    for said in world(2, backend="shm", fresh=True).run(call_differently):
        assert said.keys() == DIFFERENT.keys()
        for calls, words in DIFFERENT.items():
            assert words in said[calls]
            assert "the ranks do not call the same collective" in said[calls]


def end_while_under_way(rank: int, size: int) -> list[float]:
    """Rank 0 leaves a group before rank 1 has come to any of the calls that rank 0 has begun."""
    group = dist.new_group()
    tensors = [torch.full((SLOT,), rank + 1.0 + number) for number in range(3)]
    if rank == 1:
        dist.barrier()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    if rank == 0:
        dist.destroy_process_group(group)
        dist.barrier()
    for work in works:
        work.wait()
    return [tensor[-1].item() for tensor in tensors]


def begin_large_and_small(rank: int, size: int) -> set[tuple[float, float]]:
    """Rank 0 has begun both before rank 1 comes, whose small one must wait for the large one,
    too."""
    sums = set()
    for _ in range(20):
        large, small = torch.full((INLINE,), rank + 1.0), torch.full((3,), rank + 1.0)
        if rank == 1:
            dist.recv(torch.empty(1), 0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (large, small)]
        if rank == 0:
            dist.send(torch.empty(1), 1)
        for work in works:
            work.wait()
        sums.add((large[-1].item(), small[-1].item()))
    return sums


@needs_shm
def test_small_calls_do_not_overtake_large_ones(world: Worlds) -> None:
    assert world(2, backend="shm").run(begin_large_and_small) == [{(3.0, 3.0)}] * 2


@needs_shm
def test_what_is_under_way_is_ended_before_a_group_is_left(world: Worlds) -> None:
    assert world(2, backend="shm").run(end_while_under_way) == [[3.0, 5.0, 7.0]] * 2


def overlap(rank: int, size: int) -> list[float]:
    """Asynchronous calls return before the others come: the first and later ones, small and large,
    of two groups."""
    groups = [dist.new_group(range(size)) for _ in range(2)]
    sums, letter = [], torch.zeros(1)
    for elements in (1, 1000, SLOT):
        tensors = [torch.full((elements,), rank + 1.0) for _ in range(2)]
        if rank == 0:
            works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in range(2)]
            dist.send(letter, 1)
        else:
            dist.recv(letter, 0)
            works = [
                dist.all_reduce(tensors[n], group=groups[n], async_op=True)
                for n in reversed(range(2))
            ]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)
        sums += [tensor[-1].item() for tensor in tensors]
    return sums


def call_back(rank: int, size: int) -> list[float]:
    """A callback calls the next collectives, in this thread or another; and so does PowerSGD's
    hook."""
    tensors = [torch.full((elements,), rank + 1.0) for elements in (SLOT, 1000, SLOT)]

    def again(future: Any) -> None:
        dist.all_reduce(tensors[1])
        dist.all_reduce(tensors[2], async_op=True).get_future().wait()

    dist.all_reduce(tensors[0], async_op=True).get_future().then(again).wait()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)))
    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    for _ in range(5):
        model(torch.randn(2, 100)).sum().backward()
    whole = torch.cat([param.grad.flatten() for param in model.parameters()])
    others = torch.empty(size * len(whole))
    dist.all_gather_into_tensor(others, whole)
    return [
        *(tensor[-1].item() for tensor in tensors),
        float((others.view(size, -1) != whole).sum()),
    ]


def expanded(rank: int, size: int) -> list[float]:
    """Expanded tensors, and one of inference mode in a thread."""
    one, row = torch.ones(1).expand(4), torch.full((2, 1), rank + 1.0).expand(2, 3)
    dist.all_reduce(one)
    dist.broadcast(row, 1)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        dist.reduce_scatter_tensor(torch.ones(1).expand(4), torch.ones(8))
    with torch.inference_mode():
        large = torch.ones(SLOT)
        dist.all_reduce(large, async_op=True).wait()
    return [*one.tolist(), *row.flatten().tolist(), *large[:2].tolist()]


@needs_shm
@pytest.mark.parametrize(
    ("fn", "results"),
    [(overlap, [3.0] * 6), (call_back, [3.0, 3.0, 3.0, 0.0]), (expanded, [2.0] * 12)],
)
def test_a_script_gets_what_it_gets_from_gloo(
    fn: Callable[..., Any], results: list[float], world: Worlds
) -> None:
    for backend in ("gloo", "shm"):
        assert world(2, backend=backend, timeout=60).run(fn) == [results] * 2


def leave_early(rank: int, size: int) -> dict[str, str]:
    """What the ranks say where rank 1 leaves the group while the others wait for it, by how it
    does: each time a group of its own."""
    said = {}
    for how in LEFT:
        said[how] = leave_group(rank, size, how)
        dist.barrier()
    return said


def leave_group(rank: int, size: int, how: str) -> str:
    group, lonely = dist.new_group(range(size)), dist.new_group([0, 2])
    dist.all_reduce(torch.ones(1), group=group)
    if rank != 1:
        dist.all_reduce(torch.ones(1), group=lonely)
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        return str(error.value)
    time.sleep(0.1)
    if how == "destroy":
        dist.destroy_process_group(group)
    elif how == "fail":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "agree", fail)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(1), group=group)
    else:
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    return ""


def fail(*_: Any) -> None:
    raise KeyboardInterrupt


LEFT = {
    "destroy": "rank 1 has destroyed the process group",
    "fail": (
        "rank 1 has left a call in the memory that the ranks of this host share: make a new "
        "process group"
    ),
    "differ": "rank 1 called all_reduce(2 float32, SUM)",
}
"""How a rank leaves a group, and what the others are told."""


@needs_shm
def test_those_who_wait_are_told_at_once(world: Worlds) -> None:
    results = world(3, backend="shm", fresh=True).run(leave_early)
    for how, words in LEFT.items():
        told = [said[how] for said in results]
        assert any(words in said for said in told), told
        assert all(
            said.startswith((words, "the ranks", "Connection closed by peer")) for said in told[::2]
        )


def in_a_child(rank: int, size: int) -> str:
    """What a process says that is forked from a rank and calls a collective of the rank's."""
    dist.all_reduce(torch.ones(1))
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            theirs.send(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    dist.all_reduce(torch.ones(1))
    return str(ours.recv()) if ours.poll() else "nothing"


@needs_shm
def test_a_forked_child_has_no_part_in_it(world: Worlds) -> None:
    assert all(
        "was forked from a rank" in said
        for said in world(2, backend="shm", fresh=True).run(in_a_child)
    )


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


def leave_nothing(rank: int, size: int) -> tuple[int, int, set[str], int]:
    """Mappings of shared memory with a group, and without; files in /dev/shm that are new;
    descriptors more."""
    before, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    group = dist.new_group(range(size))
    load_all_reduce("shared-memory")(torch.ones(1), group=group)
    during = mappings()
    dist.destroy_process_group(group)
    del group
    dist.barrier()
    return (
        during,
        mappings(),
        set(os.listdir("/dev/shm")) - before,
        len(os.listdir("/proc/self/fd")) - descriptors,
    )


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:playground")


def test_nothing_is_left_of_a_group(world: Worlds) -> None:
    for during, after, files, _ in world(2, fresh=True).run(leave_nothing):
        assert (during, after, files) == (1, 0, set())
