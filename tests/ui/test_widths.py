"""No line of any command's text is wider than 80 columns where there is no terminal: what no README
runs.

Every command that a README shows is run, and its lines measured, by tests/test_readme.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from widths import too_wide

from playground.app import TOOLS
from playground.lessons import LESSONS

DIGITS = ("--dataset", "digits")
COMMANDS: list[tuple[Any, ...]] = [
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
