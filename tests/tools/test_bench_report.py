"""What the benchmark makes of its trials: passes, the slowest rank, columns, ticks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from playground.console.paths import check_writable
from playground.console.rendering import render
from playground.console.tables import Table
from playground.runtime import UsageError
from playground.testing import World
from playground.tools.bench import page
from playground.tools.bench.benchmark import PASSES, Trials, split_into_passes
from playground.tools.bench.results import BenchResult, Row
from playground.tools.bench.settings import ALGORITHMS, COLLECTIVES, BenchSettings
from playground.tools.doctor.machine import CHECKS

EVERYTHING = BenchSettings(collectives=tuple(COLLECTIVES), algorithms=ALGORITHMS, sizes=(64, 2**32), limit=True)
ROW = Row(
    size=2**32, time_us=9999999.9, algbw=1234.5, busbw=0.000433, p50_us=9999999.9, p95_us=9999999.9, p99_us=9999999.9,
    trials=100000, calls=200, times_us=[], collective="reduce_scatter", count=2**30, type="bfloat16", redop="bxor",
    root=-1, algorithm="recursive-doubling", wrong=999999, slowest_rank=127, slowest_percent=100.0, rank_us=[],
    limit_percent=1234.5,
)  # fmt: skip


@given(st.integers(1, 1000))
def test_passes_share_the_trials(iterations: int) -> None:
    passes = split_into_passes(iterations)
    assert sum(passes) == iterations
    assert len(passes) == min(PASSES, iterations)
    assert max(passes) - min(passes) <= 1


def slowest_of(rank: int, size: int) -> tuple[list[float], tuple[int, float], list[float]]:
    """Four trials in two passes, in three of which rank 1 is the slowest."""
    trials = Trials(calls=1, ranks=size)
    for seconds in ([[1e-6, 5e-6], [2e-6, 6e-6]][rank], [[3e-6, 9e-6], [4e-6, 8e-6]][rank]):
        trials.add(seconds)
    return trials.slowest_us, trials.slowest_rank, trials.rank_us


def test_a_trial_counts_as_on_its_slowest_rank_and_says_which(world: Callable[..., World]) -> None:
    for slowest_us, slowest_rank, rank_us in world(2).run(slowest_of):
        assert slowest_us == pytest.approx([2, 6, 4, 9])
        assert slowest_rank == (1, 0.75)
        assert rank_us == pytest.approx([4, 5])


def suspect(*rows: Row) -> list[str]:
    rows = tuple(replace(row, trials=5, root=-1) for row in rows)
    return BenchResult(settings=EVERYTHING, environment=None, rows=[*rows], error=None).suspicions


def test_a_suspicious_row_names_the_doctor_s_check() -> None:
    small, large = replace(ROW, size=4, times_us=[7.0, 9.0]), replace(ROW, size=16, times_us=[5.0, 6.0])
    [about_size] = suspect(large, small)
    assert about_size.startswith("reduce_scatter by recursive-doubling: 4 bytes take longer than 16, ")
    assert suspect(small, replace(large, times_us=[5.0, 8.0])) == []  # in some trials only
    assert suspect(small, replace(large, algorithm="ring")) == []
    rows = [replace(ROW, algorithm=name, size=size, times_us=[size]) for name in ("ring", "auto") for size in (1, 2)]
    [about_rank] = suspect(*rows)
    assert about_rank.startswith("Rank 127 is the last in every row, ")
    assert suspect(*rows[:3]) == suspect(*rows[1:], replace(rows[0], slowest_rank=1)) == []
    assert suspect(*(replace(row, slowest_percent=80.0) for row in rows)) == []
    named = re.findall(r"doctor --check ([\w,-]+)", f"{about_size} {about_rank}")
    assert {name for names in named for name in names.split(",")} <= {*CHECKS}


def lines_of(settings: BenchSettings, *, wide: bool) -> list[str]:
    """The table of one row, all of whose cells are as wide as they can be."""
    shown = page.row_columns(settings)
    return render(
        [Table(*(each.column for each in shown), rows=[[each.cell(ROW) for each in shown]])], 80, wide=wide
    ).splitlines()


def test_the_widest_row_fits_80_columns() -> None:
    lines = lines_of(EVERYTHING, wide=False)
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == [
        "recursive-doubling", "4294967296", "9999999.9", "0.000433", "999999", "127:", "100%", "1234.5"
    ]  # fmt: skip


def test_columns_are_explained_where_they_are_shown() -> None:
    shown = page.row_columns(EVERYTHING)
    narrow, wide = (page.explain(shown, wide) for wide in (False, True))
    assert [line.split(":")[0].strip() for line in narrow] == ["size", "time", "busbw", "#wrong", "slowest", "%limit"]
    assert set(narrow) < set(wide)


def test_ticks_are_sizes_that_were_measured() -> None:
    assert page.choose_ticks([64, 4096]) == [64, 4096]
    sizes = [4 << i for i in range(29)]
    ticks = page.choose_ticks(sizes)
    assert len(ticks) <= page.MAX_TICKS
    assert set(ticks) <= set(sizes)
    assert len({larger / smaller for smaller, larger in itertools.pairwise(ticks)}) == 1


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.svg"
    check_writable("-o", file)
    assert not file.exists()
    file.write_text("old")
    check_writable("-o", file)
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    ("file", "message"), [("/nowhere/rows.svg", "no such folder"), ("/", "Is a directory")], ids=str
)
def test_a_file_that_cannot_be_written_is_refused(file: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"-o {file}.*{message}"):
        check_writable("-o", Path(file))


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.console.paths.MIN_FREE", 2**80)
    with pytest.raises(UsageError, match=r"only [\d,]+ bytes are free"):
        check_writable("-o", tmp_path / "rows.svg")
