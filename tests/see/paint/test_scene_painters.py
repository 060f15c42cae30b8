"""What paints scenes: the same scene as SVG and text, with all that is in it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings, strategies as st
from recordings import ring, training

from playground.see.paint import ARROW, BAR, BOX, KINDS, LANE, STYLES, TEXT, Drawing, Mark, Scene
from playground.see.paint.painters import to_svg, to_text
from playground.see.paint.timeline import lay_out

SVG = "{http://www.w3.org/2000/svg}"
marks = st.builds(
    Mark,
    kind=st.sampled_from(KINDS),
    x=st.floats(0, 600),
    y=st.floats(0, 300),
    w=st.floats(0, 100),
    h=st.floats(0, 100),
    style=st.sampled_from(sorted(STYLES)),
    text=st.text("abc <&>\"'\n", max_size=20),
    align=st.sampled_from(("start", "middle", "end")),
    title=st.text("t<&>\"'", max_size=5),
    meant=st.booleans(),
    event=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
scenes = st.builds(
    Scene, title=st.text("T<&", max_size=9), height=st.just(400.0), marks=st.lists(marks, max_size=8).map(tuple)
)


def by_class(svg: str, name: str) -> list[ElementTree.Element]:
    """The elements of this class."""
    return [each for each in ElementTree.fromstring(svg).iter() if name in each.get("class", "").split()]


@given(scenes)
def test_svg_has_every_mark_and_its_text_as_it_is(scene: Scene) -> None:
    svg = to_svg(scene)
    for kind in (BOX, BAR, LANE, ARROW):
        drawn = by_class(svg, kind)
        assert len(drawn) == sum(mark.kind == kind for mark in scene.marks)
        assert [("meant" in each.get("class", "").split()) for each in drawn] == [
            mark.meant for mark in scene.marks if mark.kind == kind
        ]
    written = [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")][1:]
    assert written == [line for mark in scene.marks if mark.text for line in mark.text.split("\n")]
    assert to_svg(scene) == svg


@given(scenes)
@settings(max_examples=20)
def test_every_scene_can_be_painted_as_text(scene: Scene) -> None:
    lines = to_text(scene).split("\n")[2:]
    assert all(len(line) <= 80 for line in lines)


def test_svg_is_for_light_and_dark_and_loads_nothing() -> None:
    svg = to_svg(lay_out(ring(4)))
    assert "prefers-color-scheme:dark" in svg
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "all_reduce -n 4"
    assert not list(root.iter(f"{SVG}script"))
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]


def test_text_shows_boxes_bars_and_arrows() -> None:
    drawing = Drawing("A title")
    drawing.add(BOX, 0, 0, 80, 48, text="rank 0")
    drawing.add(BAR, 160, 0, 80, 16, style="wait", text="wait")
    drawing.add(ARROW, 40, 48, 0, 32, style="message")
    drawing.add(ARROW, 160, 64, 80, 0, style="message", meant=True)
    drawing.add(TEXT, 0, 104, text="below", align="start")
    assert to_text(drawing.scene("A caption.")).split("\n") == [
        "A title", "",
        "+--------+          ww wait ww",
        "| rank 0 |",
        "+--------+",
        "     |",
        "     |              ··········>",
        "     v",
        "below",
        "", "", "A caption.", "",
    ]  # fmt: skip


def test_pictures_of_long_runs_stay_small() -> None:
    recording = training(4, steps=300)
    assert len(to_svg(lay_out(recording))) < 100_000
