"""Right programs drawn from a seed, out of all that torch.distributed and its process groups offer.

A program is a few steps, which all ranks take in the same order. A step is right by itself: who is
to take part in it does, checks what comes of it, and leaves nothing behind but asynchronous calls,
which are waited for by the program's end, by each rank in an order of its own. What ranks do
together is drawn from the seed, how long each dawdles and how it waits by the rank alone.

`DOUBTFUL` steps make the flight recorder doubt all that a rank calls later: they are drawn in runs
of their own, so that in the others an accusation can come at any moment. What gloo itself cannot do
is not drawn, see the comments.
"""

from __future__ import annotations

import _thread
import contextlib
import inspect
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing import get_context
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of this torch."""
MOST_DAWDLING = 0.004
"""Seconds: some looks of an eager launcher's."""
WORLD_LIMIT = 60.0
"""Seconds that a call may take in the world of these programs."""
LIMITS = timedelta(seconds=WORLD_LIMIT / 2), timedelta(seconds=2 * WORLD_LIMIT)
"""Timeouts that no call needs: one that ends before the world's, and one that does not."""
SHORT = timedelta(seconds=0.02)
"""One that passes."""
HAS_SET_TIMEOUT = hasattr(distributed_c10d, "set_timeout")
"""Whether a group's timeout is set by a function, too (torch 2.14)."""
MOST_GROUPS = 6
INTEGERS = "int64", "int32", "uint8", "int8"
FLOATS = "float32", "float32", "float64", "float16", "bfloat16"
REDUCE: dict[str, Callable[[Sequence[int]], float]] = {
    "SUM": sum, "PRODUCT": math.prod, "MIN": min, "MAX": max,
    "AVG": lambda values: sum(values) / len(values),
    "BAND": lambda values: values[0] & math.prod(values[1:]) if len(values) == 2 else fold(values,
    int.__and__),
    "BOR": lambda values: fold(values, int.__or__), "BXOR": lambda values: fold(values,
    int.__xor__),
}  # fmt: skip


def fold(values: Sequence[int], combine: Callable[[int, int], int]) -> int:
    result, *rest = values
    for value in rest:
        result = combine(result, value)
    return result


@dataclass(frozen=True)
class Group:
    """A process group; `handle` is None on a rank that is none of its `members`, which are ranks of
    the world."""

    handle: Any
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def number(self) -> int:
        """This rank's in the group."""
        return self.members.index(dist.get_rank())


Way = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and its arguments, by name and in the order of its parameters."""
Made = tuple[list[Way], Callable[[], None]]
"""Ways to make a call, one of which is to be taken, and a check of what comes of it."""
COLLECTIVES: dict[str, Callable[[Player, Group], Made]] = {}
STEPS: dict[str, tuple[float, Callable[[Player], None]]] = {}
"""How often each is drawn, and what it does."""
DOUBTFUL: dict[str, Callable[[Player], None]] = {}


def collective(make: Callable[[Player, Group], Made]) -> Callable[[Player, Group], Made]:
    COLLECTIVES[make.__name__] = make
    return make


def step(weight: float) -> Callable[[Callable[[Player], None]], Callable[[Player], None]]:
    """A step; one of weight 0 is doubtful."""

    def keep(take: Callable[[Player], None]) -> Callable[[Player], None]:
        if weight:
            STEPS[take.__name__] = weight, take
        else:
            DOUBTFUL[take.__name__] = take
        return take

    return keep


@cache
def parameters(function: Any) -> list[str]:
    """Names of a function's parameters; none are known of C++'s, whose arguments are given in their
    order."""
    return (
        list(inspect.signature(function).parameters)
        if inspect.isfunction(inspect.unwrap(function))
        else []
    )


def run(
    rank: int, size: int, seeds: Sequence[int], doubtful: bool = False, own_world: str = ""
) -> int:
    """Run the programs of these seeds one after the other; return how many steps they had. In an
    `own_world` they run in one that this rank has formed itself, of that backend."""
    if own_world:
        dist.destroy_process_group()
        dist.init_process_group(
            own_world, rank=rank, world_size=size, timeout=timedelta(seconds=WORLD_LIMIT)
        )
    return Player(seeds[0], doubtful).play(seeds)


class Player:
    """Runs programs on this rank of a world."""

    def __init__(self, seed: int, doubtful: bool) -> None:
        self.rank, self.size, self.doubtful = dist.get_rank(), dist.get_world_size(), doubtful
        self.own = Random(f"{seed} of {self.rank}")
        """What is drawn from it, ranks draw differently."""
        self.draw = Random(seed)
        """What is drawn from it, all ranks draw, also those that then have no part in a step."""
        self.groups = [Group(dist.group.WORLD, tuple(range(self.size)))]
        self.beside = Group(dist.new_group(), tuple(range(self.size)))
        """A group for threads that call beside the main thread."""
        self.beside_before: threading.Thread | None = None
        self.unfinished: list[Callable[[], None]] = []
        self.place = ""
        self.steps = 0
        self.tag = 0
        """One that no message of another step nearby has."""

    def play(self, seeds: Sequence[int]) -> int:
        for seed in seeds:
            try:
                self.run(seed)
            except Exception as error:
                raise AssertionError(f"program {seed}, step {self.place}: {error}") from error
        return self.steps

    def run(self, seed: int) -> None:
        count = Random(seed).choice([1, 2, 3, 3, 4, 6])
        for number in range(count):
            self.draw = Random(f"{seed} {number}")
            self.tag = 10 + seed % 32 * 8 + number
            name = self.draw.choices([*STEPS], [weight for weight, _ in STEPS.values()])[0]
            take = STEPS[name][1]
            if self.doubtful and self.draw.random() < 0.3:
                name, take = self.draw.choice([*DOUBTFUL.items()])
            self.place = f"{number} ({name})"
            self.steps = self.steps + 1
            self.dawdle()
            take(self)
        self.place = "the end"
        self.finish()

    def finish(self) -> None:
        """Wait for what is under way, in an order of this rank's own."""
        unfinished, self.unfinished = self.unfinished, []
        self.own.shuffle(unfinished)
        for each in unfinished:
            each()

    def dawdle(self) -> None:
        if self.own.random() < 0.3:
            time.sleep(self.own.uniform(0, MOST_DAWDLING))

    def group(self) -> Group:
        return self.draw.choice(self.groups)

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call it by position, by keyword, or by both."""
        names = [*arguments]
        most, known = len(names), parameters(function)
        while known and names[:most] != known[:most]:
            most -= 1
        by_position = self.own.randint(0, most)
        rest = names[by_position:]
        self.own.shuffle(rest)
        return function(
            *[arguments[name] for name in names[:by_position]],
            **{name: arguments[name] for name in rest},
        )

    def tensor(self, value: float, dtype: str = "float32", length: int = 3) -> torch.Tensor:
        return torch.full((length,), value, dtype=getattr(torch, dtype))

    def length(self) -> int:
        return self.draw.choice([1, 3, 3, 100, 1000, 20_000])

    def await_later(self, work: Any, check: Callable[[], None], mode: Callable[[], Any]) -> None:
        """Wait for an asynchronous call in one of all ways, now or at the program's end, under the
        mode it was made in: gloo writes some results in `wait`."""

        def finish() -> None:
            self.dawdle()
            with mode():
                wait(work, self.own)
                check()

        if work is None:
            check()
        elif self.own.random() < 0.4:
            self.unfinished.append(finish)
        else:
            elsewhere(self.own, finish)


def wait(work: Any, own: Random) -> None:
    how = own.choice(["wait", "wait", "limit", "poll", "future", "then"])
    if not isinstance(work, dist.Work):  # a future, which has no limits
        how = "wait"
    # gloo's reduce-scatter is completed by `wait` alone
    for _ in range(own.randint(1, 10) * (how == "poll")):
        if not work.is_completed():
            time.sleep(0.0005)
    if how in ("future", "then"):
        with contextlib.suppress(RuntimeError):  # it has none
            future = work.get_future()
            (future.then(lambda done: done.value()) if how == "then" else future).wait()
    work.wait(*[own.choice(LIMITS)] * (how == "limit"))


def elsewhere(own: Random, act: Callable[[], None]) -> None:
    """Do it in this thread, most often, or in another, and wait for that."""
    how = own.choice([*["here"] * 6, "thread", "unknown thread", "pool"])
    done, errors = threading.Event(), list[BaseException]()

    def attempt() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)
        done.set()

    if how == "here":
        act()
    elif how == "pool":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(act).result()
    else:
        thread = threading.Thread(target=attempt)
        thread.start() if how == "thread" else _thread.start_new_thread(attempt, ())
        done.wait()
        if how == "thread":
            thread.join()
        for error in errors:
            raise error


def check_all(tensor: torch.Tensor, value: float) -> None:
    assert (tensor == value).all(), f"{tensor} is not {value}"


def check_rows(rows: torch.Tensor | Sequence[torch.Tensor], values: Sequence[float]) -> None:
    for row, value in zip(rows, values, strict=True):
        check_all(row, value)


def options(kind: str, **named: Any) -> Any:
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, value in named.items():
        setattr(made, name, value)
    return made


def reduction(player: Player) -> tuple[str, str, Any]:
    """A name, a dtype that it is defined for, and the operation."""
    name = player.draw.choice([*["SUM"] * 4, *REDUCE])
    dtype = player.draw.choice(
        INTEGERS if name[0] == "B" else FLOATS if name == "AVG" else FLOATS + INTEGERS
    )
    return name, dtype, getattr(dist.ReduceOp, name)


@collective
def all_reduce(player: Player, group: Group) -> Made:
    name, dtype, op = reduction(player)
    tensor, handle = player.tensor(group.number + 1, dtype, player.length()), group.handle
    value = REDUCE[name](range(1, group.size + 1))
    ways: list[Way] = [
        (dist.all_reduce, {"tensor": tensor, "op": op, "group": handle}),
        (handle.allreduce, {"tensors": [tensor], "opts": options("Allreduce", reduceOp=op)}),
        (
            handle.allreduce,
            {"tensors": [tensor], "opts": options("Allreduce", reduceOp=op, timeout=LIMITS[0])},
        ),
        (handle.allreduce, {"tensors": [tensor], "op": op, "timeout": LIMITS[1]}),
        (handle.allreduce, {"tensor": tensor, "op": op}),
    ]
    return ways, lambda: check_all(
        tensor, round(value, 1) if name != "AVG" else tensor.new_tensor(value).item()
    )


@collective
def all_reduce_coalesced(player: Player, group: Group) -> Made:
    tensors = [player.tensor(group.number + 1, length=length) for length in (2, player.length())]
    every = options("AllreduceCoalesced", reduceOp=dist.ReduceOp.SUM)
    ways: list[Way] = [
        (
            dist.all_reduce_coalesced,
            {"tensors": tensors, "op": dist.ReduceOp.SUM, "group": group.handle},
        ),
        (group.handle.allreduce_coalesced, {"tensors": tensors, "opts": every}),
    ]
    return ways, lambda: check_rows(tensors, [sum(range(1, group.size + 1))] * 2)


@collective
def manager(player: Player, group: Group) -> Made:
    tensors = [player.tensor(group.number + 1) for _ in range(3)]

    def coalesce(async_op: bool = False) -> Any:
        with dist._coalescing_manager(group.handle, async_ops=async_op) as made:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group.handle)
        return made if async_op else None

    return [(coalesce, {})], lambda: check_rows(tensors, [sum(range(1, group.size + 1))] * 3)


@collective
def broadcast(player: Player, group: Group) -> Made:
    root = player.draw.randrange(group.size)
    tensor = player.tensor(group.number + 1, length=player.length())
    handle, everywhere = group.handle, options("Broadcast", rootRank=root)
    ways: list[Way] = [
        (dist.broadcast, {"tensor": tensor, "src": group.members[root], "group": handle}),
        (dist.broadcast, {"tensor": tensor, "group": handle, "group_src": root}),
        (handle.broadcast, {"tensors": [tensor], "opts": everywhere}),
        (handle.broadcast, {"tensor": tensor, "root": root, "timeout": LIMITS[1]}),
    ]
    return ways, lambda: check_all(tensor, root + 1)


@collective
def reduce(player: Player, group: Group) -> Made:
    root, (name, dtype, op) = player.draw.randrange(group.size), reduction(player)
    if name == "AVG":  # which gloo divides on all ranks, or none
        name, op = "SUM", dist.ReduceOp.SUM
    tensor, handle = player.tensor(group.number + 1, dtype, player.length()), group.handle
    ways: list[Way] = [
        (dist.reduce, {"tensor": tensor, "dst": group.members[root], "op": op, "group": handle}),
        (dist.reduce, {"tensor": tensor, "op": op, "group": handle, "group_dst": root}),
        (
            handle.reduce,
            {"tensors": [tensor], "opts": options("Reduce", rootRank=root, reduceOp=op)},
        ),
        (handle.reduce, {"tensor": tensor, "root": root, "op": op}),
    ]
    value = REDUCE[name](range(1, group.size + 1))
    return ways, lambda: check_all(tensor, value) if group.number == root else None


@collective
def all_gather(player: Player, group: Group) -> Made:
    tensor, handle = player.tensor(group.number, length=player.length()), group.handle
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    ways: list[Way] = [
        (dist.all_gather, {"tensor_list": parts, "tensor": tensor, "group": handle}),
        (
            handle.allgather,
            {"output_tensors": [parts], "input_tensors": [tensor], "opts": options("Allgather")},
        ),
        (handle.allgather, {"output_tensors": parts, "input_tensor": tensor, "timeout": LIMITS[1]}),
    ]
    return ways, lambda: check_rows(parts, range(group.size))


@collective
def all_gather_into_tensor(player: Player, group: Group) -> Made:
    tensor, handle = player.tensor(group.number, length=player.length()), group.handle
    whole = tensor.new_empty(group.size * len(tensor))
    passed, more = {"output": whole, "input": tensor}, {"opts": options("Allgather")}
    named = {"output_tensor": whole, "input_tensor": tensor, "group": handle}
    ways: list[Way] = [
        (dist.all_gather_into_tensor, named),
        (handle._allgather_base, passed | more),
    ]
    ways += [(dist.all_gather_single, named)] if hasattr(dist, "all_gather_single") else []
    return ways, lambda: check_rows(whole.view(group.size, -1), range(group.size))


@collective
def all_gather_coalesced(player: Player, group: Group) -> Made:
    tensors = [player.tensor(group.number, length=length) for length in (1, 5)]
    handle = group.handle
    lists = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(group.size)]
    wholes = [tensor.new_empty(group.size * len(tensor)) for tensor in tensors]
    into_wholes = player.draw.random() < 0.5
    ways: list[Way] = [
        (
            dist.all_gather_coalesced,
            {"output_tensor_lists": lists, "input_tensor_list": tensors, "group": handle},
        ),
        (handle.allgather_coalesced, {"output_lists": lists, "input_list": tensors}),
    ]
    if into_wholes:
        ways = [(handle.allgather_into_tensor_coalesced, {"outputs": wholes, "inputs": tensors})]

    def check() -> None:
        for number, parts in enumerate(lists if not into_wholes else [[], []]):
            check_rows(parts, [number] * len(parts))
        for whole in wholes if into_wholes else []:
            check_rows(whole.view(group.size, -1), range(group.size))

    return ways, check


@collective
def gather(player: Player, group: Group) -> Made:
    root, handle = player.draw.randrange(group.size), group.handle
    tensor = player.tensor(group.number, length=player.length())
    parts = [torch.empty_like(tensor) for _ in range(group.size * (group.number == root))]
    lists = [parts] if parts else []
    ways: list[Way] = [
        (
            dist.gather,
            {
                "tensor": tensor,
                "gather_list": parts or None,
                "dst": group.members[root],
                "group": handle,
            },
        ),
        (
            dist.gather,
            {"tensor": tensor, "gather_list": parts or None, "group": handle, "group_dst": root},
        ),
        (
            handle.gather,
            {
                "output_tensors": lists,
                "input_tensors": [tensor],
                "opts": options("Gather", rootRank=root),
            },
        ),
        (handle.gather, {"output_tensors": parts, "input_tensor": tensor, "root": root}),
    ]
    if not parts:  # torch's short form of the method takes no empty list
        ways.pop()
    return ways, lambda: check_rows(parts, range(len(parts)))


@collective
def scatter(player: Player, group: Group) -> Made:
    root, handle, length = player.draw.randrange(group.size), group.handle, player.length()
    tensor, is_root = player.tensor(-1, length=length), group.number == root
    parts = [player.tensor(number, length=length) for number in range(group.size * is_root)]
    opts, top = options("Scatter", rootRank=root), group.members[root]
    ways: list[Way] = [
        (
            dist.scatter,
            {"tensor": tensor, "scatter_list": parts or None, "src": top, "group": handle},
        ),
        (
            dist.scatter,
            {"tensor": tensor, "scatter_list": parts or None, "group": handle, "group_src": root},
        ),
        (
            handle.scatter,
            {"output_tensors": [tensor], "input_tensors": [parts] if parts else [], "opts": opts},
        ),
    ]
    return ways, lambda: check_all(tensor, group.number)


@collective
def reduce_scatter(player: Player, group: Group) -> Made:
    length, handle, add = player.length(), group.handle, dist.ReduceOp.SUM
    output = player.tensor(-1, length=length)
    parts = [player.tensor(n + 1, length=length) for n in range(group.size)]
    opts = options("ReduceScatter", reduceOp=add)
    ways: list[Way] = [
        (dist.reduce_scatter, {"output": output, "input_list": parts, "op": add, "group": handle}),
        (
            handle.reduce_scatter,
            {"output_tensors": [output], "input_tensors": [parts], "opts": opts},
        ),
        (handle.reduce_scatter, {"output": output, "input": parts, "op": add}),
    ]
    return ways, lambda: check_all(output, group.size * (group.number + 1))


@collective
def reduce_scatter_tensor(player: Player, group: Group) -> Made:
    length, handle, add = player.length(), group.handle, dist.ReduceOp.SUM
    output = player.tensor(-1, length=length)
    whole = torch.cat([player.tensor(number + 1, length=length) for number in range(group.size)])
    opts = options("ReduceScatter", reduceOp=add)
    named = {"output": output, "input": whole, "op": add, "group": handle}
    ways: list[Way] = [
        (dist.reduce_scatter_tensor, named),
        (handle._reduce_scatter_base, {"outputTensor": output, "inputTensor": whole, "opts": opts}),
    ]
    ways += [(dist.reduce_scatter_single, named)] if hasattr(dist, "reduce_scatter_single") else []
    if player.draw.random() < 0.3:  # another algorithm
        ways = [
            (
                handle.reduce_scatter_tensor_coalesced,
                {"outputs": [output], "inputs": [whole], "opts": opts},
            )
        ]
    return ways, lambda: check_all(output, group.size * (group.number + 1))


@collective
def all_to_all(player: Player, group: Group) -> Made:
    length, handle = player.length(), group.handle
    inputs = [
        player.tensor(10 * group.number + number, length=length) for number in range(group.size)
    ]
    outputs = [torch.empty_like(each) for each in inputs]
    ways: list[Way] = [
        (
            dist.all_to_all,
            {"output_tensor_list": outputs, "input_tensor_list": inputs, "group": handle},
        ),
        (handle.alltoall, {"output_tensors": outputs, "input_tensors": inputs}),
    ]
    return ways, lambda: check_rows(
        outputs, [10 * number + group.number for number in range(group.size)]
    )


@collective
def all_to_all_single(player: Player, group: Group) -> Made:
    """The rank of number n sends n + 1 elements to each."""
    counts = [number + 1 for number in range(group.size)]
    handle = group.handle
    mine = group.number + 1
    output = player.tensor(-1, length=sum(counts))
    given = player.tensor(group.number, length=mine * group.size)
    got, gave = counts, [mine] * group.size
    passed = {
        "output": output,
        "input": given,
        "output_split_sizes": got,
        "input_split_sizes": gave,
    }
    ways: list[Way] = [
        (dist.all_to_all_single, passed | {"group": handle}), (handle.alltoall_base,
        passed | {"timeout": LIMITS[0]}),
    ]  # fmt: skip
    return ways, lambda: check_rows(output.split(counts), range(group.size))


@collective
def barrier(player: Player, group: Group) -> Made:
    handle, limit = group.handle, player.own.choice(LIMITS)
    ways: list[Way] = [
        (dist.barrier, {"group": handle}),
        (handle.barrier, {"opts": options("Barrier", timeout=limit)}),
        (handle.barrier, {"timeout": limit}),
    ]
    return ways, lambda: None


@step(30)
def call(player: Player) -> None:
    """A collective, at once or asynchronous, by one of its ways, under a mode."""
    group, draw, own = player.group(), player.draw, player.own
    make = COLLECTIVES[draw.choice([*COLLECTIVES])]
    if group.handle is None:
        return
    mode = own.choice(
        [contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode]
    )

    def begin() -> None:
        with mode():
            ways, check = make(player, group)
            function, arguments = own.choice(ways)
            asynchronous = own.random() < 0.5
            if arguments.get("group") is dist.group.WORLD and own.random() < 0.5:
                arguments["group"] = None
            if inspect.isfunction(function) and asynchronous:
                arguments["async_op"] = True
            work = player.call(function, arguments)
            if asynchronous:
                player.await_later(work, check, mode)
            else:
                if work is not None:
                    work.wait()
                check()

    elsewhere(own, begin)


@step(2)
def barrier_of_all(player: Player) -> None:
    group, limit = player.group(), player.own.choice(LIMITS)
    if group.handle is not None and player.draw.random() < 0.5:
        player.call(dist.barrier, {"group": group.handle, "timeout": limit})
    elif group.handle is not None:
        passed: dict[str, Any] = {"timeout": limit, "wait_all_ranks": player.own.random() < 0.5}
        if player.own.random() < 0.5:
            player.call(dist.monitored_barrier, {"group": group.handle} | passed)
        else:
            player.call(group.handle.monitored_barrier, passed)


@step(6)
def objects(player: Player) -> None:
    group, root = player.group(), player.draw.random()
    if (handle := group.handle) is None:
        return
    top = int(root * group.size)
    name = player.draw.choice("abcd")
    own = player.own
    mine = [group.number, "x" * group.number]
    is_root = None
    is_root = group.number == top
    target = {"dst": group.members[top], "group": handle}
    source = {"src": group.members[top], "group": handle}
    if own.random() < 0.5:
        target, source = {"group": handle, "group_dst": top}, {"group": handle, "group_src": top}
    every = [[number, "x" * number] for number in range(group.size)]
    found: list[Any] = [None] * group.size
    if name == "a":
        player.call(dist.all_gather_object, {"object_list": found, "obj": mine, "group": handle})
        assert found == every
    elif name == "b":
        player.call(
            dist.gather_object,
            {"obj": mine, "object_gather_list": found if is_root else None} | target,
        )
        assert not is_root or found == every
    elif name == "c":
        told = ["a", {2: 3}] if is_root else [None, None]
        player.call(dist.broadcast_object_list, {"object_list": told} | source)
        assert told == ["a", {2: 3}]
    else:
        passed: dict[str, Any] = {"scatter_object_output_list": (one := [None])}
        passed["scatter_object_input_list"] = every if is_root else None
        player.call(dist.scatter_object_list, passed | source)
        assert one == [every[group.number]]


def send(player: Player, group: Group, value: float, to: int, tag: int, length: int = 3) -> Any:
    """A message to a rank of the group, by a number in it; returns a work, or None if it has been
    sent."""
    tensor, handle, own = player.tensor(value, length=length), group.handle, player.own
    if own.random() < 0.3:
        return player.call(handle.send, {"tensors": [tensor], "dstRank": to, "tag": tag})
    address = {"dst": group.members[to], "group": handle, "tag": tag}
    if own.random() < 0.4:
        address = {"group": handle, "tag": tag, "group_dst": to}
    return player.call(own.choice([dist.send, dist.isend]), {"tensor": tensor} | address)


def receive(
    player: Player, group: Group, value: float, source: int | None, tag: int, length: int = 3
) -> None:
    """A message from a rank of the group, or from anyone."""
    tensor, handle, own = player.tensor(-1, length=length), group.handle, player.own
    how, known = own.random(), source is not None
    address = (
        {"src": group.members[source], "group": handle} if source is not None else {"group": handle}
    )
    if known and own.random() < 0.4:
        address = {"group": handle, "group_src": source}
    if how < 0.3 and known:
        player.call(handle.recv, {"tensors": [tensor], "srcRank": source, "tag": tag}).wait()
    elif how < 0.3:
        handle.recv_anysource([tensor], tag).wait()
    elif how < 0.6 and known:
        wait_for_message(player, dist.irecv(tensor, tag=tag, **address))
    else:
        passed = {"tensor": tensor} | address | {"tag": tag}
        if not known:
            passed = {"tensor": tensor, "src": None, "group": handle, "tag": tag}
        sender = player.call(dist.recv, passed)
        assert not known or sender == group.members[source or 0]
    check_all(tensor, value)


def wait_for_message(player: Player, work: Any) -> None:
    if work is not None:
        elsewhere(
            player.own,
            partial(work.wait, *[player.own.choice(LIMITS)] * (player.own.random() < 0.3)),
        )


@step(10)
def ring(player: Player) -> None:
    """Each receives from the rank before and sends to the one behind: even ranks send first."""
    group, length, tag = player.group(), player.length(), player.draw.randrange(3)
    if group.handle is None or group.size == 1:
        return
    number, size = group.number, group.size
    after, before = (number + 1) % size, (number - 1) % size
    work = (
        send(player, group, number, after, tag, length)
        if number % 2 == 0 and number + 1 < size
        else None
    )
    # the last of an odd number: the first has sent, and its peer receives
    if number % 2 == 0 and number + 1 == size:
        receive(player, group, before, before, tag, length)
        work = send(player, group, number, after, tag, length)
    else:
        receive(player, group, before, before, tag, length)
        if number % 2:
            work = send(player, group, number, after, tag, length)
    wait_for_message(player, work)


@step(6)
def chain(player: Player) -> None:
    """A message passes through all ranks, in some order."""
    group, tag, order = player.group(), player.draw.randrange(3), [*range(player.size)]
    player.draw.shuffle(order)
    if group.handle is None:
        return
    order = [number for number in order if number < group.size]
    at = order.index(group.number)
    if at:
        receive(player, group, at, order[at - 1], tag)
    player.dawdle()
    if at + 1 < group.size:
        wait_for_message(player, send(player, group, at + 1, order[at + 1], tag))


@step(6)
def from_anyone(player: Player) -> None:
    """One rank receives from any source, or from each, what all others send."""
    group, top, anyone = player.group(), player.draw.random(), player.draw.random() < 0.7
    if group.handle is None or group.size == 1:
        return
    root = int(top * group.size)
    if group.number != root:
        wait_for_message(player, send(player, group, 7, root, player.tag))
        return
    for number in player.own.sample(range(group.size), group.size):
        if number != root:
            receive(player, group, 7, None if anyone else number, player.tag)


@step(8)
def batch(player: Player) -> None:
    """Messages of several tags around the ring, in an order of each rank's own."""
    group, tags = player.group(), range(player.draw.choice([1, 2, 5]))
    if group.handle is None or group.size == 1:
        return
    number = group.number
    size = group.size
    handle = group.handle
    own = player.own
    after, before = (number + 1) % size, (number - 1) % size
    incoming = torch.full((len(tags), 3), -1.0)
    by_peer = own.random() < 0.5
    there = {"group_peer": after} if by_peer else {"peer": group.members[after]}
    here = {"group_peer": before} if by_peer else {"peer": group.members[before]}
    made = [
        dist.P2POp(dist.isend, player.tensor(tag), group=handle, tag=tag, **there) for tag in tags
    ]
    made += [dist.P2POp(dist.irecv, incoming[tag], group=handle, tag=tag, **here) for tag in tags]
    own.shuffle(made)
    if own.random() < 0.5:
        works = dist.batch_isend_irecv(made)
    else:
        works = [each.op(each.tensor, each.peer, each.group, each.tag) for each in made]
    player.dawdle()
    for work in own.sample(works, len(works)):
        work.wait()
    check_rows(incoming, tags)


@step(2)
def lists_of_objects(player: Player) -> None:
    group, top = player.group(), player.draw.random()
    if group.handle is None or group.size == 1:
        return
    sender = int(top * group.size)
    receiver, found = (sender + 1) % group.size, [None, None]
    there = {"group": group.handle, "group_dst": receiver}
    here = {"src": group.members[sender], "group": group.handle}
    if group.number == sender:
        player.call(dist.send_object_list, {"object_list": ["a", {"b": 3}]} | there)
    if group.number == receiver:
        player.call(dist.recv_object_list, {"object_list": found} | here)
        assert found == ["a", {"b": 3}]


@step(1.5)
def make_group(player: Player) -> None:
    """A group made in some way is there for later steps."""
    world = [*range(player.size)]
    draw = player.draw
    own = player.own
    more = dict[str, Any]()
    how = draw.choice(
        [
            "new_group",
            "new_group",
            "local",
            "subgroups",
            "enumeration",
            "mesh",
            "plane",
            "split",
            "all",
        ]
    )
    members = draw.sample(world, draw.randint(1, player.size))
    if draw.random() < 0.3:
        more["timeout"] = draw.choice(LIMITS)
    if how in ("new_group", "local"):
        # one on each rank: torch counts the groups that a rank has made, and names the next by it
        if how == "local":
            cut, order = draw.randint(1, player.size), draw.sample(world, player.size)
            members = order[:cut] if player.rank in order[:cut] else order[cut:]
            more["use_local_synchronization"] = True
        ways: list[Any] = [members, members[::-1], tuple(members)]
        ways += [set(members), (each for each in members)] if how == "new_group" else []
        if draw.random() < 0.2 and "sort_ranks" in parameters(dist.new_group):
            more["sort_ranks"], ways = False, [members]
        handle = player.call(dist.new_group, {"ranks": own.choice(ways)} | more)
        made = [
            Group(handle, tuple(members if more.get("sort_ranks") is False else sorted(members)))
        ]
    elif how == "all":
        made = [Group(dist.new_group(group_desc="all", **more), tuple(world))]
    elif how == "subgroups":
        length = draw.choice([each for each in (1, 2, 3, 4) if player.size % each == 0])
        handle, _ = dist.new_subgroups(length, **more)
        made = [
            Group(
                handle,
                own_part(player, [world[at : at + length] for at in range(0, player.size, length)]),
            )
        ]
    elif how == "enumeration":
        cut = draw.randint(1, player.size)
        order = draw.sample(world, player.size)
        lists = [part for part in (order[:cut], order[cut:]) if part]
        handle, _ = dist.new_subgroups_by_enumeration(lists, **more)
        made = [Group(handle, tuple(sorted(own_part(player, lists))))]
    elif how == "split" and TORCH >= (2, 15):  # older ones split groups of a GPU's backend only
        lists = [sorted(world[: player.size // 2 + 1]), sorted(world[player.size // 2 + 1 :])]
        lists = [part for part in lists if part]
        handle = player.call(
            dist.split_group, {"parent_pg": dist.group.WORLD, "split_ranks": lists} | more
        )
        made = [Group(handle, own_part(player, lists))]
    elif how == "plane" and player.size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        row, column = divmod(player.rank, 2)
        made = [
            Group(mesh.get_group(1), (2 * row, 2 * row + 1)),
            Group(mesh["rows"].get_group(), (column, 2 + column)),
        ]
        made += [Group(mesh["rows", "columns"]._flatten("flat").get_group(), tuple(world))]
    elif draw.random() < 0.5:
        made = [Group(init_device_mesh("cpu", (player.size,)).get_group(), tuple(world))]
    else:
        made = [Group(DeviceMesh.from_group(dist.new_group(), "cpu").get_group(), tuple(world))]
    for group in made:
        is_member = player.rank in group.members
        player.groups.append(Group(group.handle if is_member else None, group.members))
    while len(player.groups) > MOST_GROUPS:
        player.groups.pop(1)  # it goes, or is kept by torch


def own_part(player: Player, lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return next((tuple(part) for part in lists if player.rank in part), ())


@step(0.7)
def destroy_group(player: Player) -> None:
    """Nobody is in a call of the group any more. (Where torch names a group by its ranks, the next
    of this name would find the addresses of the one that is gone.)"""
    player.finish()
    dist.barrier()
    if len(player.groups) > 1:
        group = player.groups.pop(player.draw.randrange(1, len(player.groups)))
        known = (
            group.handle in distributed_c10d._world.pg_map and group.handle is not dist.group.WORLD
        )
        if known and group.handle.group_name.isdecimal():
            dist.destroy_process_group(group.handle)


GIVE_UP: list[Callable[[Any], object]] = [
    lambda group: dist.barrier(group, timeout=SHORT),
    lambda group: group.allreduce([torch.ones(1)], options("Allreduce", timeout=SHORT)).wait(),
    lambda group: group.allreduce(
        opts=options("Allreduce", timeout=SHORT), tensors=[torch.ones(1)]
    ).wait(),
    lambda group: group.broadcast(
        tensor=torch.ones(1), root=group.size() - 1 - group.rank(), timeout=SHORT
    ).wait(),
    lambda group: group.allreduce([torch.ones(1)]).wait(timeout=SHORT),
    lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(SHORT),
    lambda group: dist.irecv(
        torch.ones(1), group=group, group_src=(group.rank() + 1) % group.size()
    ).wait(SHORT),
    lambda group: (group.set_timeout(SHORT), dist.all_reduce(torch.ones(1), group=group)),
]
if HAS_SET_TIMEOUT:
    GIVE_UP.append(
        lambda group: (
            dist.distributed_c10d.set_timeout(SHORT, group),
            dist.all_reduce(torch.ones(1), group=group),
        )
    )
"""Ways to wait for a while only. (A group's timeout is none of its messages', on gloo.)"""


@step(0.7)
def a_timeout_that_is_handled(player: Player) -> None:
    """One rank waits for others, which never come, in a group that is not used any more."""
    group = dist.new_group()
    dist.barrier()  # who gives up closes its sockets, to which another rank may still connect
    alone = player.draw.randrange(player.size)
    give_up = player.draw.choice(GIVE_UP)
    if player.rank == alone:
        try:
            give_up(group)
        except RuntimeError:
            return
        raise AssertionError("nobody else has called it")


@step(2)
def limits_of_groups(player: Player) -> None:
    """A limit that no call needs, and then one that ends no earlier than the world's: else nothing
    more is proved."""
    group, own = player.group(), player.own
    for limit in LIMITS if group.handle is not None else ():
        if own.random() < 0.5 and HAS_SET_TIMEOUT:
            player.call(distributed_c10d.set_timeout, {"timeout": limit, "group": group.handle})
        else:
            player.call(group.handle.set_timeout, {"timeout": limit})
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group.handle)
        check_all(tensor, group.size)


@step(4)
def beside_the_main_thread(player: Player) -> None:
    """Threads call in a group of their own while the main thread goes on."""
    player.beside_before.join() if player.beside_before else None
    beside, total, errors = player.beside, sum(range(1, player.size + 1)), list[BaseException]()
    message, tag = player.draw.random() < 0.5, player.tag
    first, second = player.draw.sample(range(player.size), 2)
    pause = player.own.uniform(0, MOST_DAWDLING)

    def act() -> None:
        try:
            time.sleep(pause)
            if not message:
                tensor = torch.full((3,), player.rank + 1.0)
                dist.all_reduce(tensor, group=beside.handle)
                check_all(tensor, total)
            elif player.rank == first:
                dist.send(torch.full((3,), 7.0), second, beside.handle, tag)
            elif player.rank == second:
                dist.recv(tensor := torch.zeros(3), first, beside.handle, tag)
                check_all(tensor, 7)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    player.beside_before = thread  # their calls have the same order on all ranks

    def join() -> None:
        thread.join()
        for error in errors:
            raise error

    player.unfinished.append(join)


@step(3)
def callback_that_sends(player: Player) -> None:
    """The callback of a rank's asynchronous call sends what another rank waits for first."""
    group, tag = player.groups[0], player.tag
    sender, receiver = player.draw.sample(range(player.size), 2)
    tensor, works = torch.full((3,), player.rank + 1.0), list[Any]()
    work = dist.all_reduce(tensor, async_op=True)
    done = None

    def act(future: Any) -> None:
        time.sleep(player.own.uniform(0, MOST_DAWDLING))
        works.append(dist.isend(torch.full((3,), 7.0), receiver, tag=tag))

    if player.rank == sender:
        done = work.get_future().then(act)
    if player.rank == receiver:
        receive(player, group, 7, sender, tag)
    work.wait()
    check_all(tensor, sum(range(1, player.size + 1)))
    if done:
        done.wait()
        works[0].wait()


@step(3)
def a_signal(player: Player) -> None:
    """A handler runs some time in the steps that follow, in no call of ours."""
    came = list[int]()
    former = signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
    signal.setitimer(signal.ITIMER_REAL, player.own.uniform(0.0001, MOST_DAWDLING))
    check_sum(player)
    if player.own.random() < 0.5:
        os.kill(os.getpid(), signal.SIGALRM)
    while not came:
        time.sleep(0.0005)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


def check_sum(player: Player) -> None:
    tensor = torch.full((3,), player.rank + 1.0)
    dist.all_reduce(tensor)
    check_all(tensor, sum(range(1, player.size + 1)))


@step(3)
def through_the_store(player: Player) -> None:
    """All but one wait in the store, or in a collective, for what that one does first."""
    store = dist.PrefixStore("drawn", distributed_c10d._get_default_store())
    key = f"{player.place} {player.steps}"
    first, members = player.draw.randrange(player.size), player.draw.random() < 0.5
    if player.rank == first:
        player.dawdle()
        store.set(key, "come")
    elif members:
        store.wait([key])
    check_sum(player)


@step(2)
def a_refused_call(player: Player) -> None:
    """Calls that torch refuses at once, on one rank or all, after which everything goes on."""
    wrong: list[Callable[[], object]] = [
        lambda: dist.send(torch.ones(1), player.rank), lambda: dist.all_reduce(["tensor"]),
        lambda: dist.group.WORLD.send([torch.ones(1)], 1), lambda: dist.broadcast(torch.ones(1),
        player.size),
        lambda: dist.all_gather([torch.ones(1)], torch.ones(1, dtype=torch.int64)),
    ]  # fmt: skip
    if player.own.random() < 0.5:
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            player.own.choice(wrong[:3])()
    check_sum(player)


def model_of(length: int = 1) -> nn.Module:
    model = nn.Linear(length, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


@step(2)
def distributed_data_parallel(player: Player) -> None:
    """Some steps of training, in which ranks dawdle; some passes average nothing."""
    draw, own, group = player.draw, player.own, player.group()
    how, steps, more = draw.random(), draw.choice([1, 2, 3]), dict[str, Any]()
    evaluates, accumulates, buffers = draw.random() < 0.3, draw.random() < 0.3, draw.random() < 0.3
    kind = draw.choice(["plain", "unused", "static", "view"])
    if how >= 0.8:
        group = player.groups[0]
    if (handle := group.handle) is None:
        return
    more |= {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}.get(
        kind, {}
    )
    more |= {"gradient_as_bucket_view": True} if kind == "view" else {}
    if how < 0.3 and handle is not dist.group.WORLD:
        more["device_mesh"] = DeviceMesh.from_group(handle, "cpu")
    elif how < 0.8 or handle is not dist.group.WORLD:
        more["process_group"] = handle
    whole = nn.Sequential(model_of(), *[nn.BatchNorm1d(1, affine=False, momentum=0.0)] * buffers)
    if buffers:
        whole[1].eval()
    model = DistributedDataParallel(whole, **more)
    mean = sum(range(1, group.size + 1)) / group.size
    for number in range(steps):
        player.dawdle()
        if accumulates and kind != "static" and number == 0:
            with model.no_sync():
                model(torch.zeros(1, 1)).sum().backward()
        if own.random() < 0.3 and not buffers:
            with torch.no_grad():
                model.module(torch.ones(1, 1))
        whole[0].train(not evaluates)
        model.zero_grad()
        model(torch.full((1, 1), group.number + 1.0)).sum().backward()
        scale = 1 / math.sqrt(1 + 1e-5) if buffers else 1
        assert abs(whole[0].weight.grad.item() - mean * scale) < 1e-4, whole[0].weight.grad


@step(0.4)
def joined(player: Player) -> None:
    """Ranks have unequal numbers of batches."""
    model = DistributedDataParallel(model_of())
    with model.join():
        for _ in range(1 + player.rank):
            model(torch.ones(1, 1)).sum().backward()
    check_sum(player)


@step(0.2)
def fully_sharded(player: Player) -> None:
    mesh = init_device_mesh("cpu", (player.size,))
    model = fully_shard(model_of(2 * player.size), mesh=mesh)
    for _ in range(player.draw.choice([1, 2])):
        player.dawdle()
        model.zero_grad()
        model(torch.full((1, 2 * player.size), player.rank + 1.0)).sum().backward()
    mean = sum(range(1, player.size + 1)) / player.size
    check_all(model.weight.grad.full_tensor(), mean)


@step(2)
def functional(player: Player) -> None:
    """Several at once, whose results are used later, and one that is gathered in another
    dimension."""
    group = player.group()
    if group.handle is not None:
        total = _functional_collectives.all_reduce(torch.ones(3), "sum", group.handle)
        row = torch.full((1, 1), group.number + 1.0)
        every = _functional_collectives.all_gather_single(row, 1, group.handle)
        player.dawdle()
        check_all(total * 1, group.size)
        assert every.flatten().tolist() == [number + 1 for number in range(group.size)]


QUEUES: tuple[Callable[[], Any], ...] = queue.Queue, queue.SimpleQueue, get_context("fork").Queue


@step(3)
def a_thread_that_is_woken(player: Player) -> None:
    """A rank waits for the answer to what a thread of its own sends, which only waits in a queue:
    another thread, or the main thread just before it waits, wakes it."""
    first, second = player.draw.sample(range(player.size), 2)
    way, made = (
        player.draw.choice(["main", "thread", "pool", "process"]),
        player.draw.choice(QUEUES),
    )
    tag, pause = player.tag, player.own.uniform(0, MOST_DAWDLING)
    beside = player.beside.handle
    player.beside_before.join() if player.beside_before else None
    if player.rank == second:
        dist.recv(got := torch.zeros(3), first, beside, tag)
        check_all(got, 7)
        player.dawdle()
        dist.send(torch.full((3,), 8.0), first, tag=tag)
    if player.rank != first:
        return
    waiting = made() if way != "process" else get_context("fork").Queue()
    pool = ThreadPoolExecutor(2)

    def act() -> None:
        assert waiting.get() == 7
        dist.send(torch.full((3,), 7.0), second, beside, tag)

    def wake() -> None:
        time.sleep(pause)
        waiting.put(7)

    pool.submit(int).result()  # its worker has nothing to do from then on
    acting = pool.submit(act)
    if way == "main":
        waiting.put(7)
    elif way == "pool":
        pool.submit(wake)
    elif way == "thread":
        threading.Thread(target=wake).start()
    else:
        child = get_context("fork").Process(target=wake)
        child.start()
    dist.recv(got := torch.zeros(3), second, tag=tag)
    check_all(got, 8)
    acting.result()
    if way == "process":
        child.join()
    if player.own.random() < 0.5:
        pool.shutdown()
    else:
        player.unfinished.append(pool.shutdown)  # meanwhile it is idle


@step(1)
def a_signal_that_is_waited_for(player: Player) -> None:
    """A thread sends what another rank waits for once a signal comes that all threads block."""
    first, second = player.draw.sample(range(player.size), 2)
    tag, pause = player.tag, player.own.uniform(0, MOST_DAWDLING)
    if player.rank == second:
        dist.recv(got := torch.zeros(3), first, tag=tag)
        check_all(got, 7)
    if player.rank == first:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

        def act() -> None:
            signal.sigwait({signal.SIGUSR2})
            dist.send(torch.full((3,), 7.0), second, tag=tag)

        thread = threading.Thread(target=act)
        thread.start()
        time.sleep(pause)
        signal.pthread_kill(thread.ident or 0, signal.SIGUSR2)
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@step(0.2)
def batches_of_workers(player: Player) -> None:
    """Some ranks have loaders with workers, which are slow now and then."""
    workers: dict[str, Any] = {}
    if player.own.random() < 0.5:
        workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    pause = player.own.uniform(0, MOST_DAWDLING)
    data: Any = range(3)
    for _ in DataLoader(data, collate_fn=partial(load, pause), **workers):
        check_sum(player)


def load(pause: float, batch: list[int]) -> int:
    time.sleep(pause)
    return batch[0]


@step(0)
def by_the_backend(player: Player) -> None:
    """Calls that pass no method of the group's, on some ranks alone."""
    world: Any = dist.group.WORLD
    backend, tensor = world._get_backend(torch.device("cpu")), torch.ones(3)
    if player.own.random() < 0.5:
        backend.allreduce([tensor]).wait()
    else:
        dist.all_reduce(tensor)
    check_all(tensor, player.size)
    first, second = player.draw.sample(range(player.size), 2)
    if player.rank == first:
        backend.send([torch.ones(1)], second, player.tag).wait()
    elif player.rank == second:
        player.dawdle()
        dist.recv(torch.ones(1), first, tag=player.tag)


@step(0)
def unregistered(player: Player) -> None:
    """A group that torch.distributed does not know of, in which ranks have other numbers."""
    name, backends = f"{player.place} {player.steps}", ProcessGroup.BackendType
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    number = (player.rank + 1) % player.size
    group: Any = ProcessGroup(store, number, player.size)
    made = dist.ProcessGroupGloo(store, number, player.size, LIMITS[1])
    group._register_backend(torch.device("cpu"), backends.GLOO, made)
    group._set_default_backend(backends.GLOO)
    group._set_group_name("of its own")
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    check_all(tensor, player.size)
