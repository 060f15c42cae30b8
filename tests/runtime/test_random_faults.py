"""A signal to a process of a run at a random moment, its start above all: nothing stays, one line says why."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import pytest
from injections import LAUNCHER, SERVER, Injection, campaign, draw
from processes import ENOUGH

IN_SUITE = [Injection("hello", LAUNCHER, SIGKILL, 0.5, False), Injection("hello", SERVER, SIGKILL, 0.1, False)]
"""While ranks start, and while the server imports torch."""
MANY = 200


def check(injections: list[Injection], folder: Path) -> None:
    """All of them at the moments that are drawn; on a busy machine a process may take long to end."""
    ran = [(str(injection), marks) for injection, marks in campaign(iter(injections), folder, left=ENOUGH)]
    assert len(ran) > 1, "no run was long enough"
    assert [(injection, marks) for injection, marks in ran if marks] == []


def test_a_signal_at_some_moment(tmp_path: Path) -> None:
    check(IN_SUITE, tmp_path)


@pytest.mark.stress
def test_signals_at_random_moments(tmp_path: Path) -> None:
    check([*draw(12, 5, ("hello", "p2p", "torchrun hello"))], tmp_path)


@pytest.mark.stress
def test_many_signals_at_random_moments(tmp_path: Path) -> None:
    check([*draw(MANY, 6, ("hello",))], tmp_path)
