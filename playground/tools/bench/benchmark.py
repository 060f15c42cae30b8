"""What a rank does in a benchmark: try every call once, then check and time them, size by size, pass by pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from random import Random

import torch
import torch.distributed as dist

from playground.algorithms.operation import check
from playground.measurement import environment
from playground.runtime import UsageError, device, report
from playground.runtime.agreement import all_gather_object, require_same_on_all_ranks
from playground.runtime.backends import refusal
from playground.runtime.host import host_id
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.point import Point
from playground.tools.bench.results import BenchStart
from playground.tools.bench.settings import OPS, BenchSettings
from playground.tools.bench.trials import split_into_passes
from playground.tools.bench.wire import open_wire
from playground.tools.bench.workload import Workload


def run(rank: int, size: int, settings: BenchSettings) -> None:
    """Measure what the settings ask for. Rank 0 reports a `BenchStart`, then in every pass a `SizeResult` per size.

    Raises `UsageError` if the backend cannot do it, or the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.document)
    settings.check_world(size)
    check_operation(settings)
    hosts = all_gather_object(host_id())
    check_gpu_memory(settings, size, len(set(hosts)))
    order = Random(settings.seed)
    with open_wire(rank, size, hosts) if settings.limit else contextlib.nullcontext() as wire:
        for collective in settings.collectives:
            call_once(settings, collective, rank, size)
        if rank == 0:
            report(start=BenchStart(environment=environment.describe(), wire=wire.description if wire else None))
        points = [
            Point(settings, collective, nbytes, rank, size, wire)
            for collective in settings.collectives for nbytes in settings.sizes
        ]  # fmt: skip
        measure_in_passes(points, settings.iterations, order, is_main=rank == 0)


def measure_in_passes(points: Sequence[Point], iterations: int, order: Random, is_main: bool) -> None:
    """All points, again and again until each has its trials; after every one `is_main` reports what it has so far."""
    passes = split_into_passes(iterations)
    for number, trials in enumerate(passes):
        for done, point in enumerate(points):
            if is_main:
                phase = f"pass {number + 1} of {len(passes)}: {point}"
                report(phase=phase, step=number * len(points) + done, steps=len(passes) * len(points))
            point.measure(trials, order)
            if is_main:
                report(measured=point.result(complete=number + 1 == len(passes)))


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
