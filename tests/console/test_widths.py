"""No line of any command's text is wider than 80 columns where there is no terminal: what no README
runs.

Every command that a README shows is run, and its lines measured, by tests/test_readme.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from widths import too_wide

from playground.app import TOOLS
from playground.lessons import LESSONS

DIGITS = ("--dataset", "digits")
COMMANDS: list[tuple[Any, ...]] = [
    ("rpc", "-n", 8),
    ("scale", "--alpha", "2e-5", "--beta", "1e-9"),
]


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(str, words)))
def test_no_line_is_wider_than_80_columns(
    words: tuple[Any, ...], run_cli: Callable[..., Any]
) -> None:
    shown = run_cli(*words)
    assert shown.code == 0, shown.err
    assert shown.out.startswith(words[0])
    assert too_wide(shown.out) == []


@pytest.mark.parametrize("name", [*LESSONS, *TOOLS, ""])
def test_no_line_of_help_is_wider_than_80_columns(name: str, run_cli: Callable[..., Any]) -> None:
    assert too_wide(run_cli(*filter(None, [name]), "--help").out) == []


def test_wide_shows_every_column(run_cli: Callable[..., Any], data_dir: Path) -> None:
    words = ("ddp", "-n", 3, "--epochs", 1, "--limit", 128, *DIGITS, "--data-dir", data_dir)
    narrow, wide = run_cli(*words).out, run_cli(*words, "--wide").out
    assert too_wide(narrow) == []
    assert "more columns with --wide: train loss of each rank" in narrow
    assert "more columns" not in wide
    [(number, row)] = [
        (n, row) for n, row in enumerate(wide.splitlines()) if row.startswith("      1 ")
    ]
    lines = [
        row.split(maxsplit=6)[-1],
        *(line.strip() for line in wide.splitlines()[number + 1 : number + 3]),
    ]
    assert [line[:-6] for line in lines] == [f"Rank {rank}, epoch 1: " for rank in range(3)]


def test_a_narrow_terminal_shows_all_that_a_wide_one_does(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("memory", "-n", 2, "--only", "account")
    wide = run_cli(*words).out
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run_cli(*words).out
    assert too_wide(narrow, 40) == []
    assert {*wide.split()} <= {*narrow.split()}
    assert "more columns" not in narrow
