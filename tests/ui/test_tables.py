"""Tables and prose as lines of text: what fits, what is left out, and that data is never read as
markup."""

from __future__ import annotations

import re

import pytest

from playground.ui.rendering import render
from playground.ui.tables import RANK_COLUMN, Column, Rows, Table, named_numbers, tabulate
from playground.ui.text import Prose, bad, good, heading, prose


def rendered(*texts: str | Prose | Table, width: int = 80, wide: bool = False) -> list[str]:
    return render(texts, width, wide=wide).splitlines()


def test_rows_stand_under_columns_with_units() -> None:
    columns = {
        "rank": RANK_COLUMN,
        **named_numbers(("sent", "sent", "bytes", ","), ("p95", "p95", "ms", ".2f", 1000)),
    }
    rows = [{"rank": 0, "sent": 1024, "p95": 0.0031, "held_by": [1, 2]}, {"rank": 1, "sent": 8}]
    assert rendered(tabulate(rows, columns)) == [
        "           sent   p95",
        "  rank  (bytes)  (ms)",
        "     0    1,024  3.10",
        "     1        8     -",
    ]


def test_columns_for_wide_are_named_and_shown_when_asked_for() -> None:
    table = Table(Column("rung"), Column("p95", "ms", wide=True), rows=[("flat", "3.1")])
    assert rendered(table) == ["  rung", "  flat", "  more columns with --wide: p95 (ms)"]
    assert rendered(table, wide=True) == ["        p95", "  rung  (ms)", "  flat  3.1"]


@pytest.mark.parametrize("width", [40, 57, 80])
def test_what_does_not_fit_follows_below(width: int) -> None:
    names = [f"figure {number}" for number in range(12)]
    table = Table(
        Column("name"), *(Column(name, right=True) for name in names), rows=[["x", *("1" * 12)]]
    )
    lines = rendered(table, width=width)
    assert max(map(len, lines)) <= width
    headings = [re.split("  +", line.strip()) for line in lines[::2]]
    assert {first for first, *_ in headings} == {"name"}
    assert [name for _, *shown in headings for name in shown] == names
    assert [line.split() for line in lines[1::2]] == [
        ["x", *("1" * len(shown))] for _, *shown in headings
    ]
    assert len(rendered(table, wide=True)) == 2


def test_the_second_column_follows_too_where_the_first_does_not_tell_rows_apart() -> None:
    rows = [["s" * 30, rank, "a", "b"] for rank in (0, 1)]
    table = Table(Column("step"), RANK_COLUMN, *map(Column, "ab"), rows=rows)
    lines = rendered(table, width=40)
    assert max(map(len, lines)) <= 40
    text = " ".join(" ".join(lines).split())
    assert text.count("rank") == 2
    assert ("a" in text, "b" in text) == (True, True)


def test_long_cells_wrap_where_they_may() -> None:
    values = [1000.0 * number for number in range(12)]
    table = Table(
        RANK_COLUMN,
        Column("before", wraps=True),
        Column("after", right=True),
        rows=[("0", str(values), "1")],
    )
    lines = rendered(table, width=50)
    assert max(map(len, lines)) <= 50
    cells = [lines[1][8:-5], *(line[8:] for line in lines[2:])]
    assert " ".join(" ".join(cells).split()) == str(values)
    assert str(values) in rendered(table, wide=True)[1]


def test_a_first_column_that_is_too_wide_alone_is_folded_and_not_cut() -> None:
    lines = rendered(Table(Column("name"), rows=[["x" * 100]]), width=40)
    assert max(map(len, lines)) <= 40
    assert "".join(line.strip() for line in lines[1:]) == "x" * 100


def test_prose_wraps_between_words_and_keeps_its_indentation() -> None:
    lines = rendered("  " + "word " * 40, width=50)
    assert max(map(len, lines)) <= 50
    assert all(line.startswith("  word") for line in lines)
    assert " ".join(lines).split() == ["word"] * 40


def test_a_word_that_is_too_long_stays_whole_on_a_line_of_its_own() -> None:
    path = "/folder" * 20
    assert rendered(f"found in {path} and elsewhere") == ["found in", path, "and elsewhere"]


@pytest.mark.parametrize(
    "data", ["[bold]x[/bold]", "[/nothing]", ":smile:", "[1.0, 2.0]", "\\[x]", "https://x.y"]
)
def test_data_is_never_read_as_markup(data: str) -> None:
    table = Table(Column("value"), rows=[[data]])
    assert rendered(data, prose(data), table) == [data, data, "  value", f"  {data}"]


def test_styles_are_colours_only_where_there_is_colour() -> None:
    text = prose(heading("ring"), ": ", good("equal"), " and ", bad("broken"))
    assert rendered(text) == ["ring: equal and broken"]
    coloured = render([text], 80, colour=True)
    assert "\033[" in coloured
    assert "\033[32mequal" in coloured


def test_rows_name_what_they_leave_out_before_they_come() -> None:
    said: list[str] = []
    rows = Rows(
        lambda table: said.extend(rendered(table)),
        Column("a", width=4),
        Column("b", width=4, wide=True),
    )
    rows.say("1", "2")
    rows.say("3", "4")
    assert said == ["  more columns with --wide: b", "  a", "  1", "  3"]


@pytest.mark.parametrize("widest", [29, 40])
def test_the_widest_columns_are_narrowed_alike(widest: int) -> None:
    columns = [Column("one", wraps=True), Column("two", wraps=True), Column("three")]
    table = Table(*columns, rows=[["a" * widest, "b" * 29, "c" * 9]])
    _, first, *_ = rendered(table, width=55)
    assert [first.count(letter) for letter in "abc"] == [20, 20, 9]
