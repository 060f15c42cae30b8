"""Programs on nccl that stand still, and right ones of the same shapes. A program is a function of
(rank, size), in a world whose groups are NCCL's.

In a wrong one, `# told` marks the lines that are to be named, and the host of a rank may stand
elsewhere."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from playground.explain.hang import Kind

LATE = 0.6
"""Seconds by which a rank is late: looks of the launcher's that would prove a deadlock pass."""
Program = Callable[[int, int], None]


def ones(*shape: int, **more: Any) -> torch.Tensor:
    return torch.ones(*shape or (4,), device="cuda", **more)


def late(condition: bool) -> None:
    time.sleep(LATE * condition)


def make_model(*layers: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), *layers).cuda())


def step(model: nn.Module) -> None:
    model(ones(3, 4)).sum().backward()


def last_is_one_more(rank: int, size: int) -> None:
    dist.all_reduce(ones())
    if rank == 0:
        dist.all_reduce(ones())  # told
    torch.cuda.synchronize()


def one_more_among_many(rank: int, size: int) -> None:
    for _ in range(5):
        dist.all_reduce(ones())
    if rank == size - 1:
        dist.all_reduce(ones())  # told
    for _ in range(5):
        dist.all_reduce(ones())
    ones().sum().item()


def runs_ahead(rank: int, size: int) -> None:
    if rank:
        dist.broadcast(ones(), 0)  # told
    for _ in range(300):
        dist.all_reduce(ones())  # told
    torch.cuda.synchronize()


def both_receive(rank: int, size: int) -> None:
    value = ones()
    dist.recv(value, (rank + 1) % size)  # told
    dist.send(value, (rank - 1) % size)
    value.cpu()


def both_send(rank: int, size: int) -> None:
    value = ones()
    dist.send(value, (rank + 1) % size)  # told
    dist.recv(value, (rank - 1) % size)
    value.tolist()


def sends_unlike_batch(rank: int, size: int) -> None:
    if rank == 0:
        dist.isend(ones(), 1).wait()  # told
        dist.irecv(ones(), 1).wait()
    elif rank == 1:
        dist.isend(ones(), 0).wait()  # told
        dist.irecv(ones(), 0).wait()
    torch.cuda.synchronize()


def batch_without_receive(rank: int, size: int) -> None:
    ops = [dist.P2POp(dist.isend, ones(), (rank + 1) % size)]  # told
    if rank:
        ops.append(dist.P2POp(dist.irecv, ones(), (rank - 1) % size))
    for work in dist.batch_isend_irecv(ops):  # told
        work.wait()
    torch.cuda.synchronize()


def groups_in_opposite_order(rank: int, size: int) -> None:
    groups = [dist.new_group(range(size)), dist.new_group(range(size))]
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(ones(), group=group)  # told
    torch.cuda.synchronize()


def groups_that_cross(rank: int, size: int) -> None:
    part = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(ones(), group=part)  # told
    dist.all_reduce(ones())  # told
    if rank == 1:
        dist.all_reduce(ones(), group=part)
    torch.cuda.synchronize()


def sizes(rank: int, size: int) -> None:
    dist.all_reduce(ones(2 + rank))  # told
    dist.all_reduce(ones())
    torch.cuda.synchronize()


def dtypes(rank: int, size: int) -> None:
    dtype = torch.int32 if rank == 0 else torch.float32
    dist.all_reduce(ones(4, dtype=dtype))  # told
    torch.cuda.synchronize()


def ops(rank: int, size: int) -> None:
    op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
    dist.all_reduce(ones(), op=op)  # told
    torch.cuda.synchronize()


def roots(rank: int, size: int) -> None:
    dist.broadcast(ones(), rank % 2)  # told
    torch.cuda.synchronize()


def kinds(rank: int, size: int) -> None:
    if rank == 0:
        dist.broadcast(ones(), 0)  # told
    else:
        dist.all_reduce(ones())  # told
    torch.cuda.synchronize()


def message_sizes(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(ones(4), 1)  # told
    elif rank == 1:
        dist.recv(ones(5), 0)  # told
    torch.cuda.synchronize()


def one_batch_more(rank: int, size: int) -> None:
    model = make_model()
    for _ in range(4 + (rank == 1)):
        model(ones(3, 4)).sum().backward()  # told
    torch.cuda.synchronize()


def one_batch_more_with_buffers(rank: int, size: int) -> None:
    model = make_model(nn.BatchNorm1d(4))
    for _ in range(3):
        step(model)
    if rank == 0:
        model(ones(3, 4))  # told
    ones().max().item()


def first_rank_evaluates(rank: int, size: int) -> None:
    model = make_model()
    step(model)
    if rank == 0:
        dist.all_reduce(ones(1))  # told
    model(ones(3, 4)).sum().backward()  # told
    torch.cuda.synchronize()


def barrier_of_one(rank: int, size: int) -> None:
    dist.all_reduce(ones())
    if rank == size - 1:
        dist.barrier()  # told


def batch_without_end(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    if rank == 0:
        group._start_coalescing(torch.device("cuda", rank))
    dist.all_reduce(ones())  # told
    torch.cuda.synchronize()


def communicator_of_one(rank: int, size: int) -> None:
    group = dist.new_group(range(size))
    if rank == 0:
        dist.all_reduce(ones(), group=group)  # told


def waits_on_a_side_stream(rank: int, size: int) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        if rank == 0:
            dist.all_reduce(ones())  # told
    torch.cuda.current_stream().wait_stream(side)
    ones().cpu()


def asynchronous(rank: int, size: int) -> None:
    if rank == 0:
        work = dist.all_reduce(ones(), async_op=True)  # told
        work.wait()
    torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Mistake:
    """A program that stands still, and what is to be said of it."""

    program: Program
    kind: Kind
    size: int = 2

    @property
    def lines(self) -> set[int]:
        """The numbers of the lines that may be named, one of which is."""
        lines, first = inspect.getsourcelines(self.program)
        return {first + at for at, line in enumerate(lines) if line.rstrip().endswith("# told")}


MISTAKES = [
    Mistake(last_is_one_more, Kind.ENDED),
    Mistake(last_is_one_more, Kind.ENDED, 3),
    Mistake(one_more_among_many, Kind.ENDED, 3),
    Mistake(runs_ahead, Kind.COLLECTIVES),
    Mistake(runs_ahead, Kind.COLLECTIVES, 3),
    Mistake(both_receive, Kind.RECEIVES),
    Mistake(both_receive, Kind.RECEIVES, 3),
    Mistake(both_send, Kind.SENDS),
    Mistake(both_send, Kind.SENDS, 3),
    Mistake(sends_unlike_batch, Kind.SENDS, 3),
    Mistake(batch_without_receive, Kind.ENDED),
    Mistake(groups_in_opposite_order, Kind.GROUPS),
    Mistake(groups_in_opposite_order, Kind.GROUPS, 3),
    Mistake(groups_that_cross, Kind.GROUPS, 3),
    Mistake(sizes, Kind.SHAPES),
    Mistake(sizes, Kind.SHAPES, 3),
    Mistake(dtypes, Kind.DTYPES, 3),
    Mistake(ops, Kind.OPS, 3),
    Mistake(roots, Kind.ROOTS),
    Mistake(kinds, Kind.COLLECTIVES, 3),
    Mistake(message_sizes, Kind.SIZES, 3),
    Mistake(one_batch_more, Kind.ENDED),
    Mistake(one_batch_more, Kind.ENDED, 3),
    Mistake(one_batch_more_with_buffers, Kind.ENDED),
    Mistake(first_rank_evaluates, Kind.BESIDE_DDP, 3),
    Mistake(barrier_of_one, Kind.ENDED, 3),
    Mistake(batch_without_end, Kind.OPEN),
    Mistake(communicator_of_one, Kind.ENDED),
    Mistake(waits_on_a_side_stream, Kind.ENDED),
    Mistake(asynchronous, Kind.ENDED, 3),
]


def hosts_run_ahead(rank: int, size: int) -> None:
    for _ in range(200):
        dist.all_reduce(ones())
    late(rank == 0)
    torch.cuda.synchronize()


def unequal_work(rank: int, size: int) -> None:
    late(rank == 1)
    value = ones()
    dist.all_reduce(value)
    assert value.tolist() == [size] * 4


def calls_before_a_wait(rank: int, size: int) -> None:
    work = dist.all_reduce(ones(), async_op=True)
    late(rank == 0)
    dist.broadcast(ones(), 0)
    work.wait()
    torch.cuda.synchronize()


def late_message(rank: int, size: int) -> None:
    value = ones()
    if rank == 0:
        late(True)
        dist.send(value, 1)
    elif rank == 1:
        dist.recv(value, 0)
    value.cpu()


def exchange_in_a_batch(rank: int, size: int) -> None:
    late(rank == 1)
    value, received = ones() * rank, ones()
    after, before = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.isend, value, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received.tolist() == [before] * 4


def everybody_in_a_batch(rank: int, size: int) -> None:
    others = [other for other in range(size) if other != rank]
    batch = [dist.P2POp(dist.isend, ones(), other) for other in others]
    batch += [dist.P2POp(dist.irecv, ones(), other) for other in others]
    late(rank == 0)
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    torch.cuda.synchronize()


def batches_of_collectives(rank: int, size: int) -> None:
    late(rank == 1)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for _ in range(3):
            dist.all_reduce(ones())
    manager.wait()
    torch.cuda.synchronize()


def pipeline_of_messages(rank: int, size: int) -> None:
    value = ones()
    late(rank == 0)
    if rank:
        dist.recv(value, rank - 1)
    if rank < size - 1:
        dist.send(value, rank + 1)
    assert value.sum().item() == 4


def groups_in_the_same_order(rank: int, size: int) -> None:
    groups = [dist.new_group(range(size)), dist.new_group(range(size))]
    late(rank == 0)
    for group in groups:
        dist.all_reduce(ones(), group=group)
    torch.cuda.synchronize()


def asynchronous_groups_in_opposite_order(rank: int, size: int) -> None:
    """Each communicator has a stream of its own."""
    groups = [dist.new_group(range(size)), dist.new_group(range(size))]
    for group in groups:
        dist.all_reduce(ones(), group=group)
    torch.cuda.synchronize()
    order = groups if rank else groups[::-1]
    works = [dist.all_reduce(ones(), group=group, async_op=True) for group in order]
    late(rank == 0)
    for work in works:
        work.wait()
    torch.cuda.synchronize()


def a_group_of_some(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        late(rank == 0)
        dist.all_reduce(ones(), group=group)
    dist.all_reduce(ones())
    torch.cuda.synchronize()


def uneven_batches_in_join(rank: int, size: int) -> None:
    model = make_model()
    with Join([model]):
        for _ in range(2 + rank):
            step(model)
    late(rank == 0)
    torch.cuda.synchronize()


def trains(rank: int, size: int) -> None:
    model = make_model(nn.BatchNorm1d(4))
    for _ in range(3):
        late(rank == 1)
        step(model)
    torch.cuda.synchronize()


def accumulates(rank: int, size: int) -> None:
    model = make_model()
    for number in range(4):
        if number % 2:
            step(model)
        else:
            with model.no_sync():
                step(model)
    late(rank == 0)
    ones().cpu()


def barriers(rank: int, size: int) -> None:
    late(rank == 1)
    dist.barrier()
    late(rank == 0)
    dist.barrier()


def objects(rank: int, size: int) -> None:
    late(rank == 0)
    told: list[Any] = [None] * size
    dist.all_gather_object(told, rank)
    assert told == [*range(size)]


def long_kernel(rank: int, size: int) -> None:
    value = torch.randn(600, 600, device="cuda")
    for _ in range(60 * (rank == 0)):
        value = (value @ value).clamp(-1, 1)
    dist.all_reduce(value)
    torch.cuda.synchronize()


def side_streams(rank: int, size: int) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        dist.all_reduce(ones())
        event.record()
    late(rank == 0)
    event.synchronize()
    event.wait()
    dist.all_reduce(ones())
    side.synchronize()
    torch.cuda.synchronize()


def waits_for_what_is_not_awaited(rank: int, size: int) -> None:
    """A host that waits for its own stream is not held by a message that it has only started."""
    group = dist.new_group(range(size))
    work = dist.irecv(ones(), 1) if rank == 0 else None
    late(rank == 0)
    ones().cpu()
    value = ones()
    dist.all_reduce(value, group=group)
    assert value.tolist() == [size] * 4
    if rank == 1:
        dist.send(value, 0)
    if work:
        work.wait()
    torch.cuda.synchronize()


def scatters_and_gathers(rank: int, size: int) -> None:
    late(rank == 0)
    parts = [ones() for _ in range(size)]
    dist.all_gather(parts, ones())
    dist.reduce_scatter(ones(), parts)
    dist.all_to_all([ones() for _ in range(size)], parts)
    dist.gather(ones(), parts if rank == 0 else None, 0)
    dist.scatter(ones(), parts if rank == 0 else None, 0)
    dist.reduce(ones(), 0, op=dist.ReduceOp.MAX)
    torch.cuda.synchronize()


def uneven_parts(rank: int, size: int) -> None:
    late(rank == 1)
    parts = [ones(1 + other) for other in range(size)]
    dist.all_gather(parts, ones(1 + rank))
    torch.cuda.synchronize()


def masks(rank: int, size: int) -> None:
    value = ones()
    late(rank == 0)
    dist.all_reduce(value)
    assert value[value > 0].numel() == 4


RIGHT: list[Program] = [
    hosts_run_ahead, unequal_work, calls_before_a_wait, late_message, exchange_in_a_batch,
    everybody_in_a_batch, batches_of_collectives, pipeline_of_messages, groups_in_the_same_order,
    asynchronous_groups_in_opposite_order, a_group_of_some, trains,
    accumulates, barriers, objects, long_kernel, side_streams, waits_for_what_is_not_awaited,
    scatters_and_gathers, uneven_parts, masks, uneven_batches_in_join,
]  # fmt: skip


def run_right(rank: int, size: int) -> None:
    for program in RIGHT:
        program(rank, size)
