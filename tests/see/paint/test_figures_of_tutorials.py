"""The figures of tutorials: each from a run, with what it must mark; the chapters' pictures are as a run draws them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from playground.lessons.ladder.page import candidates
from playground.lessons.parameter_server.page import MODES
from playground.lessons.pipeline.page import SCHEDULES
from playground.runtime.remote import ROOT
from playground.see.analyse import ref_of
from playground.see.command import ALL, FIGURES, RUNS, all_files, chapter_files
from playground.see.paint import ARROW, BOX, STYLES, Evidence, Mark, Scene
from playground.see.paint.painters import to_svg
from playground.see.paint.ranks import SIX
from playground.see.paint.training import steps_of_attempts
from playground.see.record import BUCKET, COLLECTIVE, COMPUTE, MOVE

QUICK = (
    "send",
    "ring",
    "reduce-broadcast",
    "all-to-all",
    "collectives",
    "sgd",
    "sgd on three",
    "hello",
    "reduce-scatter",
    "rpc",
)
"""Runs of a few milliseconds."""


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run gave; each is made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def make(run: str) -> Evidence:
        return RUNS[run].make(run, folder)

    return make


def scene_of(name: str, evidence: Any) -> Scene:
    return ALL[name].draw(evidence(ALL[name].run))


def of_kind(scene: Scene, kind: str) -> list[Mark]:
    return [mark for mark in scene.marks if mark.kind == kind]


def by_speed(names: Any) -> list[Any]:
    """Figures as parameters, those of longer runs for `make stress`."""
    return [pytest.param(name, marks=[pytest.mark.stress] * (ALL[name].run not in QUICK)) for name in sorted(names)]


def test_there_are_21_and_every_run_is_used() -> None:
    assert [*FIGURES] == [f"F{number}" for number in range(1, 22)]
    assert {figure.run for figure in ALL.values()} == RUNS.keys()
    assert all(figure.draw.__doc__ == f"{name}: {figure.shows}." for name, figure in ALL.items())
    assert len({*all_files(Path())}) == len({figure.path for figure in FIGURES.values()}) == 21


def test_reduce_then_broadcast_goes_through_the_root(evidence: Any) -> None:
    scene = scene_of("F7", evidence)
    arrows = of_kind(scene, ARROW)
    assert len(arrows) == 6
    assert not any(mark.meant for mark in arrows)
    assert all(mark.event is not None for mark in arrows)
    assert "Rank 0 receives 48 B and sends 48 B" in scene.caption[0]


def test_a_chunk_goes_round_in_six_hops(evidence: Any) -> None:
    hops = of_kind(scene_of("F9", evidence), ARROW)
    assert [hop.text for hop in hops] == ["1: 1", "2: 4", "3: 9", "4: 16", "5: 16", "6: 16"]
    ways = [re.findall(r"rank (\d)", hop.title) for hop in hops]
    assert ways == [["0", "1"], ["1", "2"], ["2", "3"], ["3", "0"], ["0", "1"], ["1", "2"]]
    svg = to_svg(scene_of("F9", evidence))
    assert re.findall(r'class="arrow (\w+) turn turn-(\d)"', svg) == [
        *(("chunk", str(turn)) for turn in range(3)), *(("message", str(turn)) for turn in range(3, 6)),
    ]  # fmt: skip
    assert "prefers-reduced-motion:no-preference" in svg
    assert [hop.style for hop in hops] == ["chunk"] * 3 + ["message"] * 3


def test_inside_a_backend_arrows_are_dashed_and_values_are_those_of_the_run(evidence: Any) -> None:
    scene = scene_of("F21", evidence)
    assert all(mark.meant for mark in of_kind(scene, ARROW))
    values = [mark.text.split("\n")[1] for mark in of_kind(scene, BOX)]
    assert values[:8] == ["1 2 3 4", "-", "-", "-", "1", "2", "3", "4"]
    assert [mark.text for mark in scene.marks if mark.text and "\n" not in mark.text] == [*SIX]
    assert "T = t0 + t1 + t2 + t3 = 10" in {mark.text for mark in scene_of("F6", evidence).marks}


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
    assert kinds == {MOVE, COMPUTE}


@pytest.mark.stress
def test_averaging_begins_in_backward_only_where_it_overlaps(evidence: Any) -> None:
    for name, overlaps in (("F12", False), ("F13", True)):
        for rank in evidence(ALL[name].run).last_step.ranks:
            backward_ends = max(event.end for event in rank.events if event.name == "backward")
            averaging_starts = min(event.start for event in rank.events if event.kind in (BUCKET, COLLECTIVE))
            assert (averaging_starts < backward_ends) is overlaps


TIMELINES = ("F12", "F13", "bert", "parameter-server")
"""Here what is drawn as a bar of its own, and which names have room, depends on how long it took; so does a wait."""


def outline(name: str, svg: str) -> object:
    """What of a picture is the same in every run: the classes of shapes, and texts with # for numbers."""
    found = []
    for element in ElementTree.fromstring(svg).iter():
        kind = element.get("class", "")
        text = re.sub(r" *[-+]?\d[\d.,]*", "#", element.text or "") if element.tag.endswith("text") else ""
        if text != "#" and "muted" not in kind.split():
            found.append((kind, text))
    if name not in TIMELINES:
        return found
    return {(kind, text) for kind, text in found if kind != "middle" and "wait" not in kind and text != "wait"}


@pytest.mark.parametrize("name", by_speed(chapter_files()))
def test_the_picture_of_a_chapter_is_what_a_run_draws(name: str, evidence: Any) -> None:
    """If this fails because a figure has changed: python -m playground see --chapters."""
    file = chapter_files()[name]
    assert outline(name, file.read_text(encoding="utf-8")) == outline(name, to_svg(scene_of(name, evidence)))


NAMED = {
    "F14": tuple(candidates("net")),
    "F21": SIX,
    "pipeline": tuple(SCHEDULES),
    "parameter-server": tuple(MODES),
}
"""The rungs, collectives, schedules and modes that a picture must show, and no other."""


@pytest.mark.parametrize("name", NAMED)
def test_a_picture_has_the_names_of_today(name: str) -> None:
    """If this fails, the picture is older than the code: python -m playground see --chapters."""
    texts = re.findall(r"<text[^>]*>([^<:]*)(?:: [\d,]+ ms)?<", chapter_files()[name].read_text(encoding="utf-8"))
    shown = {text.strip() for text in texts if re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9_-]*", text.strip())}
    assert shown - STYLES.keys() == {*NAMED[name]}


def test_every_picture_is_in_its_readme() -> None:
    assert {*chapter_files().values()} == {*ROOT.glob("playground/**/figures/*")}
    for file in chapter_files().values():
        shown = rf"^!\[.{{20,}}\]\(figures/{file.name}\)$"
        assert re.search(shown, (file.parents[1] / "README.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.stress
def test_after_each_kill_the_training_goes_on_from_a_snapshot(evidence: Any) -> None:
    run = evidence("elastic")
    steps, starts, ends = steps_of_attempts(run)
    assert (steps, starts[0], ends) == (20, 0, [7, 14, 20])
    assert all(start % 4 == 0 and start <= end for start, end in zip(starts[1:], ends, strict=False))
    assert starts == sorted(starts)


def test_the_moving_picture_shows_every_message_on_its_way(evidence: Any) -> None:
    scene = scene_of("moving", evidence)
    messages = [mark for mark in scene.marks if mark.travels != (0.0, 0.0)]
    assert len(messages) == len(evidence("ring").messages) == 4 * 2 * 3
    for mark in messages:
        assert 0 <= mark.start < mark.end < scene.period
        there = [other.text for other in scene.marks if (other.x, other.y) == (mark.x, mark.y) and other is not mark]
        assert mark.text in there, "what is sent was there before"
    held = [mark.text for mark in scene.at_end if mark.kind == BOX]
    assert held == ["16"] * 16
    svg = to_svg(scene)
    assert "prefers-reduced-motion:no-preference" in svg
    assert (
        len(re.findall(r"@keyframes", svg)) == len({(mark.start, mark.end, mark.travels) for mark in scene.marks}) - 1
    )
