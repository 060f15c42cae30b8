"""A function named without importing its module: what is said of it without torch, and what a wrong
name gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from playground.base import remote as module
from playground.base.remote import docstrings, remote
from playground.world import UsageError

TEXT = '''"""A module."""

import not_installed_anywhere


def step(rank, size, more=1):
    """Do the first thing,
    and the second.

    Then rest.
    """


def helper(size, rank): ...


def with_another(rank, size, fn): ...


class Kind:
    """A kind."""
'''


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two packages of "ours", one of which is not valid Python."""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    module.parse_module.cache_clear()
    for name, text in (("right", TEXT), ("wrong", "def step(:\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lesson.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    module.parse_module.cache_clear()


def test_a_summary_needs_no_import() -> None:
    found = remote("right.lesson:step")
    assert found.summary == "Do the first thing, and the second."
    assert remote("right.lesson:nothing").summary == ""
    assert docstrings("right.lesson")[""] == "A module."
    assert docstrings("right.lesson")["Kind"] == "A kind."
    assert "right.lesson" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        found(0, 1)


def test_a_call_is_the_function_s(root: Path) -> None:
    (root / "right" / "sum.py").write_text("def add(one, other=2):\n    return one + other\n")
    found = remote("right.sum:add")
    assert (found(1), found(1, other=5), found.load().__name__) == (3, 6, "add")


@pytest.mark.parametrize("reference", ["right.lesson", "right.lesson:", "right.other:step", ":x"])
def test_a_name_that_leads_nowhere_is_refused_at_once(reference: str) -> None:
    with pytest.raises(ValueError, match=r"use package\.module:function"):
        remote(reference)


def test_a_syntax_error_is_told_in_one_line() -> None:
    for ask in (remote("wrong.lesson:step").load, lambda: docstrings("wrong.lesson")):
        with pytest.raises(UsageError, match=r"lesson\.py, line 1: .*; correct it") as caught:
            ask()
        assert "\n" not in str(caught.value)
