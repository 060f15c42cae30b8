"""The figures of tutorials: each from a run, with what it must mark; the chapters' pictures are as
a run draws them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

from playground.base.remote import ROOT
from playground.explain.replay.analyse.timeline import ref_of
from playground.explain.replay.record.recording import COMPUTE, MOVE, PHASE
from playground.explain.replay.render.scene import ARROW, BOX, STYLES, Mark, Scene
from playground.explain.replay.render.svg import to_svg
from playground.figures.catalogue import FIGURES, RUNS, TUTORIALS
from playground.figures.command import chapter_files
from playground.figures.figure import Evidence
from playground.figures.ranks import SIX
from playground.figures.training import VARIANTS, steps_of_attempts

QUICK = ("ring", "collectives", "sgd", "hello", "tensor", "context")
"""Runs of a few milliseconds."""


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run gave; each is made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def make(run: str) -> Evidence:
        return RUNS[run].make(folder)

    return make


def scene_of(name: str, evidence: Any) -> Scene:
    return FIGURES[name].draw(evidence(FIGURES[name].run.name))


def of_kind(scene: Scene, kind: str) -> list[Mark]:
    return [mark for mark in scene.marks if mark.kind == kind]


def by_speed(names: Any) -> list[Any]:
    """Figures as parameters, those of longer runs for `make stress`."""
    return [
        pytest.param(name, marks=[pytest.mark.stress] * (FIGURES[name].run.name not in QUICK))
        for name in sorted(names)
    ]


def test_there_are_21_and_no_two_share_a_file_nor_two_runs_a_name() -> None:
    assert [f"F{number}" for number in range(1, 22)] == TUTORIALS
    assert all(figure.run is RUNS[figure.run.name] for figure in FIGURES.values())
    assert len({figure.path for figure in FIGURES.values()}) == len(FIGURES) > len(TUTORIALS)


def test_all_ranks_take_the_same_step(evidence: Any) -> None:
    scene = scene_of("F10", evidence)
    steps = {mark.text for mark in of_kind(scene, BOX) if mark.style == "optimizer"}
    own = {mark.text for mark in of_kind(scene, BOX) if mark.style == "backward"}
    assert (len(steps), len(own)) == (1, 4)
    assert any("differ by 0 at most" in line for line in scene.caption)


@pytest.mark.stress
@pytest.mark.parametrize("name", ["F1", "F2", "F5", "F17"])
def test_what_moves_between_devices_was_recorded(name: str, evidence: Any) -> None:
    arrows = of_kind(scene_of(name, evidence), ARROW)
    assert len(arrows) >= 11
    assert all(mark.event is not None and not mark.meant for mark in arrows)
    recorded = {ref_of(event): event for event in evidence("data-parallel").recorded.events()}
    kinds = {recorded[mark.event].kind for mark in arrows if mark.event}
    assert kinds in ({MOVE, PHASE}, {MOVE, COMPUTE}), "copies, and what devices compute"


SAME = ("F6", "F7", "F8", "F9", "F20", "F21", "see", "moving", "context", "mesh")
"""In these nothing depends on times or on the machine, but for the order of their messages."""
TIMELINES = ("F12", "F13", "bert", "parameter-server", "server-loss")
"""Here what is drawn as a bar of its own, and which names have room, depends on how long it took;
so does a wait."""


def outline(name: str, svg: str) -> object:
    """What of a picture is the same in every run: the classes of shapes, and texts with # for
    numbers."""
    found = []
    for element in ElementTree.fromstring(svg).iter():
        kind = element.get("class", "")
        text = (
            re.sub(r" *[-+]?\d[\d.,]*", "#", element.text or "")
            if element.tag.endswith("text")
            else ""
        )
        if text != "#" and "muted" not in kind.split():
            found.append((kind, text))
    if name not in TIMELINES:
        return found
    return {
        (kind, text)
        for kind, text in found
        if kind != "middle" and "wait" not in kind and text != "wait"
    }


@pytest.mark.parametrize("name", by_speed(chapter_files()))
def test_the_picture_of_a_chapter_is_what_a_run_draws(name: str, evidence: Any) -> None:
    """If this fails because a figure has changed: python -m playground see --chapters."""
    there = chapter_files()[name].read_text(encoding="utf-8")
    drawn = to_svg(scene_of(name, evidence))
    if name in SAME:
        assert sorted(there.split("\n")) == sorted(drawn.split("\n"))
    else:
        assert outline(name, there) == outline(name, drawn)


NAMED = {
    "F14": VARIANTS,
    "F21": SIX,
    "parameter-server": ("synchronous", "asynchronous", "bounded"),
}
"""The variants, collectives and modes that a picture must show, and no other."""


@pytest.mark.parametrize("name", NAMED)
def test_a_picture_has_the_names_of_today(name: str) -> None:
    """If this fails, the picture is older than the code: python -m playground see --chapters."""
    texts = re.findall(
        r"<text[^>]*>([^<:]*)(?:: [\d,]+ ms)?<", chapter_files()[name].read_text(encoding="utf-8")
    )
    shown = {
        text.strip() for text in texts if re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9_-]*", text.strip())
    }
    assert shown - STYLES.keys() == {*NAMED[name]}


def test_every_picture_is_in_its_readme() -> None:
    assert {*chapter_files().values()} == {*ROOT.glob("playground/**/figures/*.svg")}
    for file in chapter_files().values():
        shown = rf"^!\[.{{20,}}\]\(figures/{file.name}\)$"
        pages = [page.read_text("utf-8") for page in file.parents[1].glob("*.md")]
        assert [page for page in pages if re.search(shown, page, re.MULTILINE)]


@pytest.mark.stress
def test_after_each_kill_the_training_goes_on_from_a_snapshot(evidence: Any) -> None:
    run = evidence("elastic")
    steps, starts, ends = steps_of_attempts(run)
    assert (steps, starts, ends) == (20, [0, 4, 8], [7, 11, 20])
