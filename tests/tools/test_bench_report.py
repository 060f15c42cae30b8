"""What the benchmark makes of its trials: passes, the slowest rank, columns; sizes in words."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from widths import too_wide

from playground.tools.bench import page, settings
from playground.tools.bench.benchmark import (
    PASSES,
    Measurement,
    reduction_pattern,
    split_into_passes,
)
from playground.tools.bench.results import Row
from playground.tools.bench.settings import ALGORITHMS, COLLECTIVES, BenchSettings
from playground.ui.option_types import Size
from playground.ui.rendering import render
from playground.ui.tables import Table

EVERYTHING = BenchSettings(
    collectives=tuple(COLLECTIVES), algorithms=ALGORITHMS, sizes=(64, 2**32), limit=True
)
ROW = Row(
    size=2**32,
    algbw=1234.5,
    busbw=0.000433,
    p50_us=9999999.9,
    p95_us=9999999.9,
    p99_us=9999999.9,
    trials=100000,
    calls=200,
    times_us=[],
    collective="reduce_scatter",
    count=2**30,
    type="bfloat16",
    redop="prod",
    root=-1,
    algorithm="recursive-doubling",
    wrong=999999,
    slowest_rank=127,
    slowest_percent=100.0,
    rank_us=[],
    limit_percent=1234.5,
)


@given(st.integers(1, 1000))
def test_passes_share_the_trials(iterations: int) -> None:
    passes = split_into_passes(iterations)
    assert sum(passes) == iterations
    assert len(passes) == min(PASSES, iterations)
    assert max(passes) - min(passes) <= 1


def test_a_trial_counts_as_on_its_slowest_rank_and_says_which() -> None:
    measured = Measurement(replace(EVERYTHING, limit=False), "reduce", 64, 0, 2)
    measured.wrong, trials = {"backend": 0}, [(1.0, 2.0), (5.0, 6.0), (3.0, 4.0), (9.0, 8.0)]
    measured.times_us["backend"] = [*trials]
    row = measured.row("backend", 1, None)
    assert (row.times_us, row.time_us, row.rank_us) == ([2, 6, 4, 9], 5, [4, 5])
    assert (row.slowest_rank, row.slowest_percent) == (1, 75)


def test_the_widest_row_fits_80_columns() -> None:
    shown = page.columns_of(EVERYTHING)
    lines = render([Table(*shown.values(), rows=[page.cells(ROW, shown)])], 80).splitlines()
    assert too_wide("\n".join(lines)) == []
    assert lines[-1].split() == [
        "recursive-doubling", "4294967296", "9999999.9", "0.000433", "999999", "127:", "100%",
        "1234.5"
    ]  # fmt: skip


def test_a_size_that_is_written_is_read() -> None:
    sizes = [Size().convert(text, None, None) for text in ("7", "7k", "7M", " 2G")]
    assert sizes == [7, 7 << 10, 7 << 20, 2 << 30]


@given(st.integers(1, 1000), st.integers(1, 10**9))
def test_sizes_grow_by_the_factor_up_to_the_end(begin: int, end: int) -> None:
    row = settings.geometric_range(begin, end)
    assert (row[0] == begin) if row else end < begin
    assert all(larger == settings.FACTOR * smaller for smaller, larger in pairwise(row))
    assert not row or row[-1] <= end < row[-1] * settings.FACTOR


def test_known_data_is_exact_in_every_type() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64)
    operations = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    for dtype, op, ranks in itertools.product(types, operations, (1, 2, 3, 8, 64)):
        result = reduction_pattern(ranks, dtype, op)
        assert torch.equal(result.to(dtype).to(result), result), (dtype, op, ranks)
        assert result.max() > result.min(), (dtype, op, ranks)
