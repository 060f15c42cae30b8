"""What the benchmark makes of its trials: the slowest rank, columns; sizes in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from playground.console.rendering import render
from playground.console.tables import Table
from playground.tools.bench import page, settings
from playground.tools.bench.benchmark import Measurement
from playground.tools.bench.settings import ALGORITHMS, COLLECTIVES, BenchSettings

EVERYTHING = BenchSettings(collectives=tuple(COLLECTIVES), algorithms=ALGORITHMS, sizes=(64, 2**32), limit=True)
ROW = {
    "size": 2**32, "time_us": 9999999.9, "algbw": 1234.5, "busbw": 0.000433, "p50_us": 9999999.9, "p95_us": 9999999.9,
    "p99_us": 9999999.9, "trials": 100000, "calls": 200, "times_us": [], "collective": "reduce_scatter",
    "count": 2**30, "type": "bfloat16", "redop": "bxor", "root": -1, "algorithm": "recursive-doubling",
    "wrong": 999999, "slowest_rank": 127, "slowest_percent": 100.0, "rank_us": [], "limit_percent": 1234.5,
}  # fmt: skip


def test_a_trial_counts_as_on_its_slowest_rank_and_says_which() -> None:
    measured = Measurement(replace(EVERYTHING, limit=False), "reduce", 64, 0, 2)
    row = measured.row("backend", 1, 0, [(1.0, 2.0), (5.0, 6.0), (3.0, 4.0), (9.0, 8.0)])
    assert (row["times_us"], row["time_us"], row["rank_us"]) == ([2, 6, 4, 9], 5, [4, 5])
    assert (row["slowest_rank"], row["slowest_percent"]) == (1, 75)


def test_the_widest_row_fits_80_columns() -> None:
    shown = page.columns_of(EVERYTHING)
    lines = render([Table(*shown.values(), rows=[page.cells(ROW, shown)])], 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == [
        "recursive-doubling", "4294967296", "9999999.9", "0.000433", "999999", "127:", "100%", "1234.5"
    ]  # fmt: skip


def test_columns_are_explained_where_they_are_shown() -> None:
    shown = page.columns_of(EVERYTHING)
    narrow, wide = (page.explain(shown, wide) for wide in (False, True))
    assert [line.split(":")[0].strip() for line in narrow] == ["size", "time", "busbw", "#wrong", "slowest", "%limit"]
    assert set(narrow) < set(wide)
    assert page.MEANINGS.keys() <= shown.keys()


def test_sizes_in_words() -> None:
    for text, size in {"7": 7, "7k": 7 << 10, "64M": 64 << 20, "2G": 2 << 30, "1025": 1025}.items():
        assert settings.parse(text) == settings.parse(settings.to_text(size)) == size
    for text in ("", "0", "-1", "1.5M", "M", "1T"):
        with pytest.raises(ValueError, match="is no size"):
            settings.parse(text)


@pytest.mark.parametrize(("begin", "end", "sizes"), [(4, 64, (4, 16, 64)), (4, 63, (4, 16)), (5, 4, ())])
def test_sizes_grow_by_the_factor_up_to_the_end(begin: int, end: int, sizes: tuple[int, ...]) -> None:
    assert settings.geometric_range(begin, end) == sizes
