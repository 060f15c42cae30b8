"""The lessons do what their docstrings say: the tables there are what real ranks return."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import Worlds
from processes import free_port
from test_readme import fenced_blocks

from playground.base.remote import remote
from playground.lessons import LESSONS
from playground.site.texts import CHAPTERS
from playground.training.step_settings import StepSettings
from playground.world import UsageError


def docstring_table(lesson: str, step: str) -> list[dict[str, Any]]:
    """The rows of the table in a step's docstring, one per rank, without the rank itself."""
    text = getattr(importlib.import_module(LESSONS[lesson].module), step).__doc__
    rows = [
        line.strip().strip("|").split("|")
        for line in text.splitlines()
        if line.strip().startswith("|")
    ]
    names = [cell.strip() for cell in rows[0]]
    table = [
        dict(zip(names, (ast.literal_eval(cell.strip()) for cell in row), strict=True))
        for row in rows[2:]
    ]
    assert [row.pop("rank") for row in table] == list(range(len(table)))
    return table


SEEDED: dict[str, Any] = {
    "training.step_times": StepSettings(folder=Path()),
}
"""Settings of runs, by the module of the run."""


def with_own_seeds(rank: int, size: int) -> dict[str, str]:
    """What each run says where every rank is given another seed."""
    said = {}
    for name, settings in SEEDED.items():
        with pytest.raises(UsageError) as refused:
            remote(f"playground.{name}:run")(rank, size, replace(settings, seed=rank + 1))
        said[name] = str(refused.value)
    return said


def test_ranks_that_were_given_different_settings_are_stopped(world: Worlds) -> None:
    for said in world(2).run(with_own_seeds):
        assert said.keys() == SEEDED.keys()
        for name, message in said.items():
            assert "seed is 1 on rank 0 and 2 on rank 1" in message, name


def test_the_tutorial_s_program_runs_as_it_stands(run_script: Callable[..., Any]) -> None:
    """As the chapter hello shows it, with a port of its own: 29500 is taken where two tests run at
    once. And forked, for processes that are spawned import torch."""
    chapter = CHAPTERS["hello"].read_text(encoding="utf-8")
    [program] = [block for block in fenced_blocks(chapter, "python") if "mp.Process" in block]
    for written, instead in (('"29500"', f'"{free_port()}"'), ('"spawn"', '"fork", force=True')):
        assert program.count(written) == 1
        program = program.replace(written, instead)
    ran = run_script(program)
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["Rank 0 of 2", "Rank 1 of 2"]
