"""Scenes as SVG, with all that is in them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings, strategies as st
from recordings import ring

from playground.explain.replay.render.scene import ARROW, BAR, BOX, LANE, STYLES, TEXT, Mark, Scene
from playground.explain.replay.render.svg import to_svg
from playground.explain.replay.render.timeline import lay_out

SVG = "{http://www.w3.org/2000/svg}"
marks = st.builds(
    Mark,
    kind=st.sampled_from((ARROW, BAR, BOX, LANE, TEXT)),
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
scenes = st.builds(Scene, title=st.text("T<&", max_size=9), marks=st.lists(marks, max_size=8))


@given(scenes)
@settings(max_examples=25)
def test_svg_has_every_mark_and_its_text_as_it_is(scene: Scene) -> None:
    svg = to_svg(scene)
    elements = [*ElementTree.fromstring(svg).iter()]
    for kind in (BOX, BAR, LANE, ARROW):
        classes = [
            classes for each in elements if kind in (classes := each.get("class", "").split())
        ]
        assert ["meant" in each for each in classes] == [
            mark.meant for mark in scene.marks if mark.kind == kind
        ]
    written = [each.text or "" for each in elements if each.tag == f"{SVG}text"][1:]
    assert written == [line for mark in scene.marks if mark.text for line in mark.text.split("\n")]
    assert to_svg(scene) == svg


def test_svg_is_for_light_and_dark_and_loads_nothing() -> None:
    svg = to_svg(lay_out(ring(4)))
    assert "prefers-color-scheme:dark" in svg
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "all_reduce -n 4"
    assert not list(root.iter(f"{SVG}script"))
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
