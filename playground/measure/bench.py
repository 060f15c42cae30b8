"""What a rank does in a benchmark: try everything once, then check and time, size by size. Out come plain rows."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.measure import environment
from playground.measure.collectives import Task
from playground.measure.plan import ELEMENT, SHAPES, Plan
from playground.measure.timing import Contestant, percentile, race
from playground.measure.wire import Wire, wire
from playground.runtime import Impossible, device, report
from playground.runtime.agreement import check_agreed, everybodys
from playground.runtime.backends import refusal


def run(rank: int, size: int, plan: Plan) -> None:
    """Measure what is planned. Rank 0 reports the environment, then the rows of each size as soon as they are known.

    Raises `Impossible` if the backend cannot do it, or the ranks were not all asked for the same.
    """
    check_agreed(asdict(plan))
    hosts = set(everybodys(own_host()))
    check_gpu_memory(plan, size, len(hosts))
    order = random.Random(plan.seed)
    with wire(rank, size, hosts) if plan.limit else contextlib.nullcontext() as limit:
        for collective in plan.collectives:
            try_out(plan, collective, rank, size)
        if rank == 0:
            report(environment=environment.describe(), limit=limit.what if limit else None)
        for collective in plan.collectives:
            for nbytes in plan.sizes:
                measured = measure(plan, collective, nbytes, rank, size, limit, order)
                if rank == 0:
                    report(**measured)


def own_host() -> str:
    """What tells this host from others, namesakes too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def check_gpu_memory(plan: Plan, size: int, hosts: int) -> None:
    """Raise `Impossible` for sizes that this rank's GPU cannot hold. (Memory of the host is checked before a start.)"""
    if device().type != "cuda":
        return
    sharing = math.ceil(size / hosts / torch.cuda.device_count())
    needed, free = plan.memory(sharing, size), torch.cuda.mem_get_info()[0]
    if needed > free:
        raise Impossible(f"this needs about {needed:,} bytes of GPU memory and {free:,} are free: use a smaller --end")


def try_out(plan: Plan, collective: str, rank: int, size: int) -> None:
    """Raise `Impossible` if the backend cannot do this with tensors of this type, or not this operation."""
    for algorithm in plan.algorithms_of(collective):
        try:
            Task(plan, collective, 1, rank, size).call(algorithm)()
        except (RuntimeError, ValueError) as error:
            if not (words := refusal(error)):
                raise
            what = f"{collective} of {plan.dtype}" + f" with {plan.op}" * SHAPES[collective].reduces
            raise Impossible(
                f"{dist.get_backend()} cannot do {what} by {algorithm} ({words}): ask for another"
            ) from None


def measure(
    plan: Plan, collective: str, nbytes: int, rank: int, size: int, limit: Wire | None, order: random.Random
) -> dict[str, Any]:
    """The rows of one size, one for each algorithm, and the wire's if there is one."""
    shape, count = SHAPES[collective], plan.count(collective, nbytes, size)
    task = Task(plan, collective, count, rank, size)
    nbytes = count * ELEMENT[plan.dtype] * (size if shape.shared else 1)
    calls = {algorithm: task.call(algorithm) for algorithm in plan.algorithms_of(collective)}
    wrong = {algorithm: wrong_anywhere(task, call) for algorithm, call in calls.items()}
    task.memory.clear()
    wires = [Contestant(limit.carry(nbytes))] if limit else []
    contestants = {algorithm: Contestant(call) for algorithm, call in calls.items()}
    race([*contestants.values(), *wires], plan.iterations, plan.warmup, order)
    wire_rows = [{"collective": collective, **figures(nbytes, contestant, 1.0)} for contestant in wires]
    common = {
        "collective": collective, "count": count, "type": plan.dtype, "redop": plan.op if shape.reduces else "none",
        "root": shape.root,
    }  # fmt: skip
    rows = []
    for algorithm, contestant in contestants.items():
        row = {**common, "algorithm": algorithm, **figures(nbytes, contestant, shape.factor(size))}
        percent = 100 * row["busbw"] / wire_rows[0]["busbw"] if wire_rows else None
        rows.append({**row, "wrong": wrong[algorithm], "limit_percent": percent})
    return {"rows": rows, "wire": wire_rows}


def wrong_anywhere(task: Task, call: Callable[[], object]) -> int:
    """How many elements of the result are wrong, on all ranks together."""
    report(checking=True)
    total = torch.tensor(task.wrong(call), device=device())
    dist.all_reduce(total)
    return int(total.item())


def figures(nbytes: int, contestant: Contestant, factor: float) -> dict[str, Any]:
    """Time in µs and bandwidth in GB/s; `factor` makes the bus's out of the algorithm's."""
    times = contestant.times
    time = percentile(times, 50)
    algbw = nbytes / time / 1000
    tail = {f"p{percent}_us": percentile(times, percent) for percent in (50, 95, 99)}
    return {
        "size": nbytes, "time_us": time, "algbw": algbw, "busbw": algbw * factor, **tail,
        "calls": contestant.calls, "times_us": times,
    }  # fmt: skip
