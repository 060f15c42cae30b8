"""One collective at one size: its results checked once, its trials taken pass by pass, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.distributed as dist

from playground.measurement.interleave import percentile
from playground.measurement.units import format_bytes
from playground.runtime import device, report
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.results import Figures, Row, SizeResult, WireRow
from playground.tools.bench.settings import DTYPES, BenchSettings
from playground.tools.bench.trials import Trials, prepare_trials, run_trials, warm_up
from playground.tools.bench.wire import Wire
from playground.tools.bench.workload import Workload


class Point:
    """One collective at one size: a row per algorithm, and the wire's if there is one, all timed in turns."""

    def __init__(
        self, settings: BenchSettings, collective: str, nbytes: int, rank: int, size: int, wire: Wire | None
    ) -> None:
        self.settings, self.spec, self.rank, self.size, self.wire = settings, COLLECTIVES[collective], rank, size, wire
        self.count = settings.count(collective, nbytes, size)
        self.nbytes = self.count * DTYPES[settings.dtype] * (1 if self.spec.in_place else size)
        self.algorithms = settings.algorithms_of(collective)
        self.wrong: dict[str, int] = {}
        self.trials: list[Trials] = []
        """One per algorithm, and one for the wire."""

    def __str__(self) -> str:
        return f"{self.spec.name}, {format_bytes(self.nbytes)}"

    def measure(self, iterations: int, order: Random) -> None:
        """Take further trials; before the first ones, check the results and warm up. All ranks must call this.

        Buffers last for one pass: those of all sizes together might not fit into memory.
        """
        workload = Workload(self.settings, self.spec.name, self.count, self.rank, self.size)
        calls = {algorithm: workload.call(algorithm) for algorithm in self.algorithms}
        if not self.trials:
            self.wrong = {algorithm: count_wrong_on_all_ranks(workload, call) for algorithm, call in calls.items()}
        workload.buffers.clear()
        candidates = [*calls.values(), *([self.wire.transfer(self.nbytes)] if self.wire else [])]
        if not self.trials:
            self.trials = prepare_trials(candidates, self.settings.warmup, self.size)
        else:
            warm_up(candidates, min(1, self.settings.warmup))
        run_trials(candidates, self.trials, iterations, order)

    def result(self, complete: bool) -> SizeResult:
        """What all trials so far come to."""
        wire = None
        if self.wire:
            wire = WireRow(collective=self.spec.name, **vars(figures(self.nbytes, self.trials[-1], 1.0)))
        rows = [
            self.row(algorithm, trials, wire) for algorithm, trials in zip(self.algorithms, self.trials, strict=False)
        ]
        return SizeResult(collective=self.spec.name, size=self.nbytes, rows=rows, wire=wire, complete=complete)

    def row(self, algorithm: str, trials: Trials, wire: WireRow | None) -> Row:
        its_figures = figures(self.nbytes, trials, self.spec.factor(self.size))
        slowest_rank, share = trials.slowest_rank
        return Row(
            collective=self.spec.name, count=self.count, type=self.settings.dtype,
            redop=self.settings.op if self.spec.reduces else "none", root=self.spec.root, algorithm=algorithm,
            **vars(its_figures), wrong=self.wrong[algorithm],
            slowest_rank=slowest_rank, slowest_percent=100 * share, rank_us=trials.rank_us,
            limit_percent=100 * its_figures.busbw / wire.busbw if wire else None,
        )  # fmt: skip


def count_wrong_on_all_ranks(workload: Workload, call: Callable[[], object]) -> int:
    """How many elements of the result are wrong, on all ranks together. All must call this."""
    report(checking=True)
    total = torch.tensor(workload.count_wrong(call), device=device())
    dist.all_reduce(total)
    return int(total.item())


def figures(nbytes: int, trials: Trials, factor: float) -> Figures:
    """What the trials of calls on `nbytes` bytes come to; `factor` is busbw / algbw."""
    times_us = trials.slowest_us
    p50, p95, p99 = (percentile(times_us, percent) for percent in (50, 95, 99))
    algbw = nbytes / p50 / 1000
    return Figures(
        size=nbytes, time_us=p50, algbw=algbw, busbw=algbw * factor, p50_us=p50, p95_us=p95, p99_us=p99,
        trials=len(times_us), calls=trials.calls, times_us=times_us,
    )  # fmt: skip
