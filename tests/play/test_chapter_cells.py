"""The cells that chapters of lessons give to try in `play` print what is shown below them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from playground.lessons import PATH
from playground.play.words import describe_end, describe_values
from playground.play.world import PlayWorld
from playground.runtime.remote import ROOT

SIZE = 4
SESSION = re.compile(
    rf"^```console\n\$ python -m playground play -n {SIZE}\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
CELL = re.compile(r"^\[0-3\] In \[\d+\]: (.*)\n((?:(?!\[0-3\] In ).*\n)*)", re.MULTILINE)
SESSIONS = [
    pytest.param(session, id=page.parent.name)
    for lesson in PATH
    for page in sorted((ROOT / lesson.path).glob("*.md"))
    for session in SESSION.findall(page.read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module")
def shared() -> Iterator[PlayWorld]:
    world = PlayWorld(SIZE)
    yield world
    world.close()


@pytest.fixture
def world(shared: PlayWorld, session: str) -> Iterator[PlayWorld]:
    """One for all, but for a session that ends ranks: what it says depends on the groups that there
    are."""
    world = PlayWorld(SIZE) if "SIGKILL" in session else shared
    yield world
    if world is not shared:
        world.close()


@pytest.mark.parametrize("session", SESSIONS)
def test_a_cell_prints_what_is_shown(session: str, world: PlayWorld) -> None:
    cells = CELL.findall(session)
    assert "".join(f"[0-3] In [{n}]: {cell}\n{shown}" for n, (cell, shown) in enumerate(cells, 1))
    assert session.count("In [") == len(cells) > 0
    for cell, shown in cells:
        run = world.run_cell(cell)
        told = [*describe_values(run, SIZE), *describe_end(run, SIZE)]
        assert told == shown.splitlines()
