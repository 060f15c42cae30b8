"""The page in a real browser: what it shows is what was recorded, at every step, and it needs
nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import MISSING, Browser
from recordings import Action, Begin, Call, Compute, End, Receive, Send, Wait, on_gpus, play, ring

from playground.algorithms import load_all_reduce
from playground.explain.replay.analyse.holdings import holdings_of
from playground.explain.replay.analyse.logical_time import to_logical_time
from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.analyse.timeline import Timeline, ref_of
from playground.explain.replay.files import render
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import COLLECTIVE, PHASE, Event, Recording
from playground.explain.replay.record.run import Recorded
from playground.explain.replay.render.scene import BOX
from playground.explain.replay.render.svg import TITLE_HEIGHT, to_svg
from playground.explain.replay.render.text_report import to_words
from playground.figures.collectives import moving
from playground.figures.figure import Evidence
from playground.testing import World

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
KEYS = {
    "right": "\ue014",
    "left": "\ue012",
    "home": "\ue011",
    "end": "\ue010",
    "tab": "\ue004",
    "enter": "\ue007",
}
READ = """
return [...document.querySelectorAll('tbody tr')].map((row) =>
  [...row.querySelectorAll('.values span')].map((cell) => Number(cell.dataset.value)));
"""
WALK = """
const shown = [], number = (arrow) => Number(arrow.dataset.arrow);
const press = (key) => document.dispatchEvent(new KeyboardEvent('keydown', {key}));
const look = () => shown.push({
  time: Number(document.querySelector('[name=position]').value),
  held: [...document.querySelectorAll('tbody tr')].map((row) =>
    [...row.querySelectorAll('.values span')].map((cell) => Number(cell.dataset.value))),
  lit: [...document.querySelectorAll('[data-arrow]')].map(number).sort((a, b) => a - b),
});
press('Home');
look();
for (const key of ['ArrowRight', 'ArrowLeft']) {
  for (let before = -1; before !== shown.at(-1).time;) {
    before = shown.at(-1).time; press(key); look();
  }
}
return shown;
"""
"""Step to the end and back. What is shown at every step."""


@pytest.fixture
def show(window: Browser, tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    """Opens the page of a recording; in the end nothing else may have been asked for, and nothing
    complained of."""
    page = tmp_path / "page.html"

    def open_page(recording: Recording, **media: Any) -> Browser:
        render(recording, page)
        window.open(page, **media)
        window.wait_for(".status", "of")
        return window

    yield open_page
    assert window.requests() == [page.as_uri()]
    assert window.complaints() == []


def states_at(recording: Recording, clock: str, time: float) -> tuple[list[list[float]], list[int]]:
    """What ranks hold, and which messages are under way, by the recording. Times are rounded as the
    page has them."""
    timed, unit = (recording, 1e-9) if clock == "real" else (to_logical_time(recording), 1.0)
    time += round(min(event.start for event in timed.events()) / unit)
    held: list[list[float]] = [[] for _ in timed.ranks]
    for rank in timed.ranks:
        for change in holdings_of(rank):
            if round(change.time / unit) <= time:
                held[rank.rank] = [*change.values]
    events = Timeline(timed).by_ref
    ways = [
        (events[ref_of(m.send)].start, events[ref_of(m.receive)].end)
        for m in match_messages(recording).matched
    ]
    return held, [
        number
        for number, (sent, arrived) in enumerate(ways)
        if round(sent / unit) <= time < round(arrived / unit)
    ]


def reduce_by_ring(rank: int, size: int) -> None:
    load_all_reduce("ring")(torch.full((size + 1,), 0.1 * 10.0**rank))


@pytest.fixture(scope="module")
def recorded(world: Callable[..., World], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("recorded")
    world(3).run(Recorded(reduce_by_ring, folder))
    return read_recording(folder / "0")


@pytest.mark.parametrize(("which", "clock"), [("by hand", "logical"), ("of a run", "real")])
def test_every_step_shows_what_was_recorded(
    which: str, clock: str, recorded: Recording, show: Callable[..., Browser]
) -> None:
    recording = ring(4, straggler=1) if which == "by hand" else recorded
    window = show(recording)
    if clock == "real":
        window.press("t")
    shown = window.ask(WALK)
    for each in shown:
        assert (each["held"], each["lit"]) == states_at(recording, clock, each["time"])
    times = [each["time"] for each in shown]
    there = times.index(max(times)) + 1
    assert times[:there] == sorted(set(times))
    assert [*dict.fromkeys(times[there:])] == times[:there][::-1]
    ends = [[*event.values] for event in recording.events(COLLECTIVE) if event.values is not None]
    assert shown[there - 1]["held"] == ends


def test_a_training_opens_on_its_first_step(show: Callable[..., Browser]) -> None:
    """That of the first way with a name, after the steps of a comparison; of all steps few are in
    sight."""
    steps: list[Action] = [Call("barrier", 0)] * 100
    for name in ("training step", "naive: training step", "naive: training step"):
        steps += [Begin(PHASE, name), Compute(1e-3, "forward"), Compute(1e-3, "step"), End()]
    window = show(play([steps] * 2))
    assert window.text(".status").startswith("Step 103 of 107. rank 0: forward; rank 1: forward")


def test_a_wait_leads_to_the_rank_and_the_line_that_caused_it(show: Callable[..., Browser]) -> None:
    """By keyboard alone: the longest wait, then from link to link of its chain."""
    window = show(ring(4, straggler=1))
    window.press("w", KEYS["tab"])
    last = window.ask("return document.querySelectorAll('.chain li').length") - 1
    assert last >= 1
    window.press(*[KEYS["tab"]] * last)
    window.press(KEYS["enter"])
    assert window.ask("return document.activeElement.textContent").startswith("rank 1 was busy for")
    assert window.text(".title:has(+ pre)") == "Rank 1: lesson.py:11 in run"
    assert window.ask("return document.querySelector('tr[aria-current] th').innerText") == "1"


def test_a_failure_is_told_in_words_and_on_the_page(show: Callable[..., Browser]) -> None:
    ended = "rank 1 of 4 failed: ValueError: bad (train.py:6 in <module>)"
    recording = replace(ring(4), ended=f"{ended}\nmore")
    assert show(recording).text(".warning") == f"It failed: {ended}"
    words = to_words(recording)
    assert f"It failed: {ended}" in " ".join(words.split())
    assert "more" in words


def test_why_there_are_no_waits(show: Callable[..., Browser]) -> None:
    assert (
        show(on_gpus(ring(4, straggler=1)))
        .text(".title:has(+ .waits)")
        .startswith("Waits cannot be told on GPUs")
    )


def test_everything_is_reached_by_keyboard(show: Callable[..., Browser]) -> None:
    window = show(ring(2))
    seen = []
    for _ in range(14):
        window.press(KEYS["tab"])
        seen.append(
            window.ask("return document.activeElement.name || document.activeElement.tagName")
        )
    controls = [
        "first",
        "back",
        "play",
        "forward",
        "last",
        "clock",
        "speed",
        "narrower",
        "wider",
        "whole",
        "position",
    ]
    assert seen[: len(controls)] == controls
    assert "BUTTON" in seen[len(controls) :]
    window.press(KEYS["end"])
    assert window.text(".status").startswith("Step")
    unnamed = (
        "return document.querySelectorAll('button:not([aria-label]):empty, "
        '[tabindex="1"]\').length'
    )
    assert window.ask(unnamed) == 0


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1600, "light")])
def test_both_widths_and_every_number_has_room_in_its_cell(
    width: int, scheme: str, show: Callable[..., Browser]
) -> None:
    """In light and dark; of a number as many digits are shown as there is room for."""

    def lengthen(event: Event) -> Event:
        return replace(
            event, values=event.values and tuple(-0.00681234 * value for value in event.values)
        )

    run = ring(2)
    ranks = (replace(rank, events=tuple(map(lengthen, rank.events))) for rank in run.ranks)
    window = show(replace(run, ranks=tuple(ranks)), width=width, color_scheme=scheme)
    assert window.ask("return document.documentElement.scrollWidth") <= width
    for control in ("first", "play", "last", "clock", "whole", "position"):
        left, right = window.ask(
            f"const b = document.querySelector('[name={control}]').getBoundingClientRect(); return "
            "[b.left, b.right]"
        )
        assert 0 <= left <= right <= width
    brightness = window.ask(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(brightness) > 384) == (scheme == "light")
    window.press(KEYS["end"])
    widths = window.ask(
        "return [...document.querySelectorAll('.cell')].map((cell) => [cell, cell.nextSibling])"
        ".map((pair) => pair.map((each) => each.getBoundingClientRect().width))"
    )
    assert len(widths) >= 2
    assert all(text <= cell for cell, text in widths)


def test_without_motion_playing_goes_from_step_to_step(show: Callable[..., Browser]) -> None:
    twice = play([[Send(1, 4), Wait()] * 2, [Receive(0, 4), Wait()] * 2])
    window = show(twice, reduced_motion="reduce")
    window.ask("document.querySelector('[name=speed]').value = '4'")
    begun = window.ask("return Number(document.querySelector('[name=position]').value)")
    window.press(" ")
    times = window.ask_later(
        "const found = new Set(), one = (name) => document.getElementsByName(name)[0];"
        "const [play, position] = ['play', 'position'].map(one);"
        "const look = (end) => { found.add(Number(position.value));"
        "if (play.textContent === 'Play') end([...found]); else requestAnimationFrame(() => "
        "look(end)); }; look(done);"
    )
    assert len(times) >= 2  # a busy browser draws few frames
    assert all((time - begun) % 1 == 0 for time in times[:-1])


SHOWN = """
document.getAnimations().forEach(each => { each.pause(); each.currentTime = arguments[0] * 1000; });
const opacity = box => getComputedStyle(box.closest("[class^=c]") || box).opacity;
return [...document.querySelectorAll("rect.box")].filter(box => opacity(box) > 0.5)
    .map(box => box.getBoundingClientRect()).map(place => [place.x, place.y].map(Math.round));
"""


def test_marks_of_a_moving_picture_are_there_in_their_time_and_travel(
    window: Browser, tmp_path: Path
) -> None:
    scene = moving.draw(Evidence(results=[], recording=ring(4)))
    boxes = [mark for mark in scene.marks if mark.kind == BOX]
    file = tmp_path / "moving.svg"
    file.write_text(to_svg(scene))
    window.open(file, reduced_motion="no-preference")
    for message in [mark for mark in boxes if any(mark.travels)][::5]:
        moment = (message.start + message.end) / 2
        expected = [
            (mark.x + mark.travels[0] * passed, mark.y + mark.travels[1] * passed + TITLE_HEIGHT)
            for mark in boxes
            if mark.start <= moment < mark.end
            for passed in [(moment - mark.start) / (mark.end - mark.start)]
        ]
        found = sorted(map(tuple, window.ask(SHOWN, moment)))
        assert found == [pytest.approx(place, abs=2) for place in sorted(expected)]
    window.open(file, reduced_motion="reduce")
    assert (
        len(window.ask(SHOWN, 0)) == len([mark for mark in boxes if mark.end >= scene.period]) == 16
    )
    assert window.complaints() == []
