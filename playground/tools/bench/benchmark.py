"""A rank's part of a benchmark: check every call, and time them, size by size, pass by pass.

The patterns and `Workload`: a collective, and the result it must leave. `Measurement`: the times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from random import Random
from statistics import median

import torch
import torch.distributed as dist

from playground.algorithms import BACKEND, load_algorithm
from playground.algorithms.operation import ADDS, Op
from playground.base.host import host_id
from playground.measurement import environment
from playground.measurement.interleave import Heartbeat, interleave, percentile, slowest, timed
from playground.tools.bench.results import Row
from playground.tools.bench.settings import (
    COLLECTIVES,
    DTYPES,
    MEMORY,
    OPS,
    REDUCTION,
    BenchSettings,
)
from playground.training.replicas import all_gather_stacked
from playground.ui.units import format_bytes
from playground.world import UsageError, device, report
from playground.world.rendezvous.agreement import all_gather_object, require_same_on_all_ranks

PASSES = 4
WARM_UP = 5
"""Calls of each algorithm before the first trial of a size."""
TRIAL = 0.006
"""Seconds a trial is to take."""
MAX_CALLS = 200
"""Calls in one trial, at most."""
SAMPLE = 3
"""Calls from which the number of calls per trial is worked out."""

PERIOD = 10007
"""Elements of a pattern."""
MAX_VALUE = 64
"""No value is larger, and no sum."""
SENTINEL = 100
"""In place of every result before the call: no rank gives it and no reduction makes it."""
MAX_FACTORS = 4
"""Ranks that multiply by more than 1, at any one position: 3 to the 4th fits into every type."""


def input_pattern(rank: int, size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """The input of `rank` of `size` where `op` (None: nothing) reduces it: `PERIOD` whole numbers,
    on the CPU."""
    random = torch.Generator().manual_seed(rank)
    if op == Op.SUM:
        # The largest number up to which the type holds every whole one.
        exact = (
            round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        )
        largest = max(1, min(MAX_VALUE, exact) // size)
        return torch.randint(0, largest + 1, (PERIOD,), generator=random)
    if op == Op.PRODUCT:
        takes_part = (torch.arange(PERIOD) + rank) % size < MAX_FACTORS
        return torch.where(takes_part, torch.randint(1, 4, (PERIOD,), generator=random), 1)
    return torch.randint(0, MAX_VALUE, (PERIOD,), generator=random)


def reduction_pattern(size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """The right result of a reduction of all ranks' inputs."""
    patterns = (input_pattern(rank, size, dtype, op) for rank in range(size))
    return reduce(ADDS[op], patterns)


def repeat(pattern: torch.Tensor, like: torch.Tensor, start: int = 0) -> torch.Tensor:
    """As many elements as `like` has of the repeated pattern, from position `start` on."""
    period = pattern.to(like.device).roll(-(start % PERIOD))
    return period.repeat(like.numel() // PERIOD + 1)[: like.numel()]


def count_wrong(tensor: torch.Tensor, pattern: torch.Tensor, start: int = 0) -> int:
    """Count the elements of `tensor` that are not those of the repeated pattern from position
    `start` on."""
    return int((tensor != repeat(pattern.to(tensor.dtype), tensor, start)).sum())


# Names that torch 2.14 introduced, or those from before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Workload:
    """A collective on pieces of `count` elements. Where it works in place, input and output are the
    same tensor."""

    def __init__(
        self, settings: BenchSettings, collective: str, count: int, size: int, rank: int
    ) -> None:
        self.spec = COLLECTIVES[collective]
        self.count = count
        self.rank = rank
        self.size = size
        self.op = getattr(dist.ReduceOp, OPS[settings.op])
        self.data_for = self.op if self.spec.reduces else None
        self.dtype = getattr(torch, settings.dtype)
        self.expected = self.spec.pieces_expected(rank, size)
        self.input = torch.zeros(
            self.spec.pieces_given(rank, size) * count, dtype=self.dtype, device=device()
        )
        self.output = (
            self.input if self.spec.in_place else self.input.new_zeros(len(self.expected) * count)
        )
        self.input_pieces = list(self.input.split(count)) if self.input.numel() else []
        """Pieces of `count` elements; none on a rank that gives nothing."""
        self.output_pieces = list(self.output.split(count)) if self.output.numel() else []

    def call(self, algorithm: str) -> Callable[[], object]:
        """A call that does it once; of the memory, one that copies the tensors."""
        if algorithm == MEMORY:
            source = torch.zeros(
                max(self.input.nbytes, self.output.nbytes), dtype=torch.uint8, device=device()
            )
            return partial(torch.zeros_like(source).copy_, source)
        if algorithm == BACKEND:
            return partial(BACKEND_CALLS[self.spec.name], self)
        ours = load_algorithm(self.spec.name, algorithm)
        if not self.spec.in_place:
            ours = partial(ours, self.output)
        return partial(ours, self.input, **({"op": self.op} if self.spec.reduces else {}))

    def count_wrong(self, call: Callable[[], object]) -> int:
        """Compare every element that this rank ends with, and count those that are wrong."""
        self.output.fill_(SENTINEL)
        self.input.copy_(repeat(self.pattern(self.rank).to(self.dtype), self.input))
        call()
        # Where nothing is expected of a rank, what its buffers hold is not defined.
        found = zip(self.output_pieces, self.expected, strict=False)
        return sum(
            count_wrong(piece, self.pattern(source), index * self.count)
            for piece, (source, index) in found
        )

    def pattern(self, source: int) -> torch.Tensor:
        """The input of the rank `source`, or the right result of the `REDUCTION`."""
        if source == REDUCTION:
            return reduction_pattern(self.size, self.dtype, self.data_for)
        return input_pattern(source, self.size, self.dtype, self.data_for)


BACKEND_CALLS: dict[str, Callable[[Workload], object]] = {
    "all_reduce": lambda work: dist.all_reduce(work.input, op=work.op),
    "broadcast": lambda work: dist.broadcast(work.input, src=0),
    "reduce": lambda work: dist.reduce(work.input, dst=0, op=work.op),
    "all_gather": lambda work: all_gather_single(work.output, work.input),
    "reduce_scatter": lambda work: reduce_scatter_single(work.output, work.input, op=work.op),
    "all_to_all": lambda work: dist.all_to_all_single(work.output, work.input),
    "gather": lambda work: dist.gather(work.input, work.output_pieces or None, dst=0),
    "scatter": lambda work: dist.scatter(work.output, work.input_pieces or None, src=0),
}
"""The backend's own call of each collective."""


def split_into_passes(iterations: int) -> list[int]:
    """How many trials each pass takes: as equal as can be, none empty."""
    passes = min(PASSES, iterations)
    return [iterations // passes + (number < iterations % passes) for number in range(passes)]


class Measurement:
    """One collective at one size: a row per algorithm, all timed in turns."""

    def __init__(
        self, settings: BenchSettings, collective: str, nbytes: int, rank: int, size: int
    ) -> None:
        self.settings = settings
        self.spec = COLLECTIVES[collective]
        self.rank = rank
        self.size = size
        self.count = settings.count(collective, nbytes, size)
        self.nbytes = self.count * DTYPES[settings.dtype] * (1 if self.spec.in_place else size)
        self.algorithms = settings.algorithms_of(collective)
        if settings.limit:
            self.algorithms = (*self.algorithms, MEMORY)
        self.wrong: dict[str, int] = {}
        """Wrong elements of each algorithm's results, on all ranks together."""
        self.calls: list[int] = []
        """Calls in a row, per trial, of each algorithm."""
        self.times_us: dict[str, list[tuple[float, ...]]] = {name: [] for name in self.algorithms}
        """Time per call of each algorithm, in µs, the same on every rank: [trial][rank]."""

    def __str__(self) -> str:
        return f"{self.spec.name}, {format_bytes(self.nbytes)}"

    def measure(self, iterations: int, order: Random) -> None:
        """Take further trials; before the first ones, check the results and warm up. Buffers last
        for one pass: those of all sizes together might not fit into memory. All ranks must call
        this."""
        workload = Workload(self.settings, self.spec.name, self.count, self.size, self.rank)
        calls = {algorithm: workload.call(algorithm) for algorithm in self.algorithms}
        if not self.calls:
            for algorithm, call in calls.items():
                report(checking=True)
                total = torch.tensor(
                    0 if algorithm == MEMORY else workload.count_wrong(call), device=device()
                )
                dist.all_reduce(total)
                self.wrong[algorithm] = int(total.item())
        # zeros, for none becomes infinite, nor too small for its type
        for buffer in (workload.input, workload.output):
            buffer.zero_()
        candidates = list(calls.values())
        heartbeat = Heartbeat()
        for candidate, _ in product(candidates, range(1 if self.calls else WARM_UP)):
            heartbeat.beat()
            candidate()
        if not self.calls:  # find how many calls of each candidate fill a trial
            seconds_per_call = slowest([timed(call, SAMPLE)() for call in candidates])
            self.calls = [
                max(1, min(MAX_CALLS, round(TRIAL / seconds))) for seconds in seconds_per_call
            ]
        timers = [timed(call, times) for call, times in zip(candidates, self.calls, strict=True)]
        outcomes = interleave(timers, range(iterations), order)
        for algorithm, seconds in zip(self.algorithms, outcomes, strict=True):
            own = torch.tensor(seconds, dtype=torch.float64, device=device())
            self.times_us[algorithm] += zip(*(1e6 * all_gather_stacked(own)).tolist(), strict=True)

    def rows(self) -> list[Row]:
        """The figures of all trials, one row per algorithm."""
        memory = [max(times) for times in self.times_us.get(MEMORY, ())]
        limit_us = median(memory) if memory else None
        return [self.row(*each, limit_us) for each in zip(self.algorithms, self.calls, strict=True)]

    def row(self, algorithm: str, calls: int, limit_us: float | None) -> Row:
        """The figures of one algorithm, whose trials each had so many calls. `limit_us`:
        microseconds that moving the bytes in memory takes."""
        trials = self.times_us[algorithm]
        times_us = [max(times) for times in trials]
        p50, p95, p99 = (percentile(times_us, percent) for percent in (50, 95, 99))
        slowest_ranks = Counter(times.index(max(times)) for times in trials)
        [(slowest_rank, often)] = slowest_ranks.most_common(1)
        algbw = self.nbytes / p50 / 1000
        return Row(
            collective=self.spec.name,
            algorithm=algorithm,
            size=self.nbytes,
            count=self.count,
            type=self.settings.dtype,
            redop=self.settings.op if self.spec.reduces else "none",
            root=self.spec.root,
            algbw=algbw,
            busbw=algbw * self.spec.factor(self.size),
            p50_us=p50,
            p95_us=p95,
            p99_us=p99,
            trials=len(trials),
            calls=calls,
            times_us=times_us,
            wrong=self.wrong[algorithm],
            slowest_rank=slowest_rank,
            slowest_percent=100 * often / len(trials),
            rank_us=[median(times) for times in zip(*trials, strict=True)],
            limit_percent=limit_us and 100 * limit_us / p50,
        )


def run(rank: int, size: int, settings: BenchSettings) -> None:
    """Measure what the settings ask for. Rank 0 reports its environment, then, in the last pass,
    the rows `measured` of each size. Raises `UsageError` if the ranks were not all given the same
    settings."""
    require_same_on_all_ranks(settings.document)
    settings.check_world(size)
    hosts = len(set(all_gather_object(host_id())))
    if settings.limit and hosts > 1:
        raise UsageError(
            f"--limit on {hosts} hosts: it measures the memory that all ranks share, leave it out"
        )
    order = Random(0)  # the same on all ranks
    if rank == 0:
        report(start=environment.describe())
    what = product(settings.collectives, settings.sizes)
    measurements = [
        Measurement(settings, collective, nbytes, rank, size) for collective, nbytes in what
    ]
    passes = split_into_passes(settings.iterations)
    for number, trials in enumerate(passes, 1):
        for done, each in enumerate(measurements, len(measurements) * (number - 1)):
            if rank == 0:
                steps = len(passes) * len(measurements)
                report(phase=f"pass {number} of {len(passes)}: {each}", step=done, steps=steps)
            each.measure(trials, order)
            if rank == 0 and number == len(passes):
                report(measured=each.rows())
