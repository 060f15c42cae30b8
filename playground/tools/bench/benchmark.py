"""What a rank does in a benchmark: try every call once, then check and time them, size by size."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from playground.algorithms.operation import check
from playground.measurement import environment
from playground.measurement.interleave import percentile
from playground.runtime import UsageError, device, report
from playground.runtime.agreement import all_gather_object, require_same_on_all_ranks
from playground.runtime.backends import refusal
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.results import BenchStart, Figures, Row, SizeResult, WireRow
from playground.tools.bench.settings import DTYPES, OPS, BenchSettings
from playground.tools.bench.trials import Trials, run_trials
from playground.tools.bench.wire import Wire, open_wire
from playground.tools.bench.workload import Workload


def run(rank: int, size: int, settings: BenchSettings) -> None:
    """Measure what the settings ask for. Rank 0 reports a `BenchStart`, then a `SizeResult` as soon as it is known.

    Raises `UsageError` if the backend cannot do it, or the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.document)
    settings.check_world(size)
    check_operation(settings)
    hosts = set(all_gather_object(host_id()))
    check_gpu_memory(settings, size, len(hosts))
    order = Random(settings.seed)
    with open_wire(rank, size, hosts) if settings.limit else contextlib.nullcontext() as wire:
        for collective in settings.collectives:
            call_once(settings, collective, rank, size)
        if rank == 0:
            report(start=BenchStart(environment=environment.describe(), wire=wire.description if wire else None))
        for collective in settings.collectives:
            for nbytes in settings.sizes:
                measured = measure(settings, collective, nbytes, rank, size, wire, order)
                if rank == 0:
                    report(measured=measured)


def host_id() -> str:
    """What tells this host from others, even from one of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def check_operation(settings: BenchSettings) -> None:
    """Raise `UsageError` for a reduction that is not defined for tensors of this type."""
    if not any(COLLECTIVES[collective].reduces for collective in settings.collectives):
        return
    try:
        check(getattr(torch, settings.dtype), getattr(dist.ReduceOp, OPS[settings.op]))
    except ValueError as error:
        raise UsageError(f"--op {settings.op} --dtype {settings.dtype}: {error}") from None


def check_gpu_memory(settings: BenchSettings, size: int, hosts: int) -> None:
    """Raise `UsageError` for sizes that this rank's GPU cannot hold. (The launcher checks the memory of the host.)"""
    if device().type != "cuda":
        return
    sharing = math.ceil(size / hosts / torch.cuda.device_count())
    needed, free = settings.memory(sharing, size), torch.cuda.mem_get_info()[0]
    if needed > free:
        raise UsageError(f"this needs about {needed:,} bytes of GPU memory and {free:,} are free: use a smaller --end")


def call_once(settings: BenchSettings, collective: str, rank: int, size: int) -> None:
    """Raise `UsageError` if the backend cannot do this with tensors of this type, or not this operation."""
    for algorithm in settings.algorithms_of(collective):
        try:
            Workload(settings, collective, 1, rank, size).call(algorithm)()
        except (RuntimeError, ValueError) as error:
            if not (words := refusal(error)):
                raise
            what = f"{collective} of {settings.dtype}" + f" with {settings.op}" * COLLECTIVES[collective].reduces
            raise UsageError(
                f"{dist.get_backend()} cannot do {what} by {algorithm} ({words}): ask for another"
            ) from None


def measure(
    settings: BenchSettings, collective: str, nbytes: int, rank: int, size: int, wire: Wire | None, order: Random
) -> SizeResult:
    """One size: a row per algorithm, and the wire's if there is one, all timed in turns."""
    spec, count = COLLECTIVES[collective], settings.count(collective, nbytes, size)
    workload = Workload(settings, collective, count, rank, size)
    nbytes = count * DTYPES[settings.dtype] * (1 if spec.in_place else size)
    calls = {algorithm: workload.call(algorithm) for algorithm in settings.algorithms_of(collective)}
    wrong = {algorithm: count_wrong_on_all_ranks(workload, call) for algorithm, call in calls.items()}
    workload.buffers.clear()
    candidates = [*calls.values(), *([wire.transfer(nbytes)] if wire else [])]
    trials = run_trials(candidates, settings.iterations, settings.warmup, order)
    of_wire = WireRow(collective=collective, **vars(figures(nbytes, trials.pop(), 1.0))) if wire else None
    rows = []
    for algorithm, its_trials in zip(calls, trials, strict=True):
        its_figures = figures(nbytes, its_trials, spec.factor(size))
        row = Row(
            collective=collective, count=count, type=settings.dtype, redop=settings.op if spec.reduces else "none",
            root=spec.root, algorithm=algorithm, **vars(its_figures), wrong=wrong[algorithm],
            limit_percent=100 * its_figures.busbw / of_wire.busbw if of_wire else None,
        )  # fmt: skip
        rows.append(row)
    return SizeResult(rows=rows, wire=of_wire)


def count_wrong_on_all_ranks(workload: Workload, call: Callable[[], object]) -> int:
    """How many elements of the result are wrong, on all ranks together. All must call this."""
    report(checking=True)
    total = torch.tensor(workload.count_wrong(call), device=device())
    dist.all_reduce(total)
    return int(total.item())


def figures(nbytes: int, trials: Trials, factor: float) -> Figures:
    """What the trials of calls on `nbytes` bytes come to; `factor` is busbw / algbw."""
    p50, p95, p99 = (percentile(trials.times_us, percent) for percent in (50, 95, 99))
    algbw = nbytes / p50 / 1000
    return Figures(
        size=nbytes, time_us=p50, algbw=algbw, busbw=algbw * factor, p50_us=p50, p95_us=p95, p99_us=p99,
        calls=trials.calls, times_us=trials.times_us,
    )  # fmt: skip
