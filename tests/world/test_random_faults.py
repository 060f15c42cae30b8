"""A signal to a process of a run at a random moment, its start above all: nothing stays, one line
says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from injections import COMMANDS, Injection, campaign, draw
from processes import ENOUGH

MANY = 200


def check(injections: list[Injection], folder: Path) -> None:
    """All of them at the moments that are drawn; on a busy machine a process may take long to
    end."""
    ran = [
        (str(injection), marks)
        for injection, marks in campaign(iter(injections), folder, left=ENOUGH)
    ]
    assert len(ran) > 1, "no run was long enough"
    assert [(injection, marks) for injection, marks in ran if marks] == []


@pytest.mark.stress
def test_signals_at_random_moments(tmp_path: Path) -> None:
    check([*draw(12, 5, ("hello", "p2p", "torchrun hello"))], tmp_path)


@pytest.mark.stress
def test_many_signals_at_random_moments(tmp_path: Path) -> None:
    check([*draw(MANY, 6, ("hello",))], tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(10))
def test_signals_at_random_moments_of_every_command(seed: int, tmp_path: Path) -> None:
    check([*draw(50, 100 + seed, [*COMMANDS])], tmp_path)
