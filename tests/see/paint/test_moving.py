"""The picture that moves, in a real browser: at any moment it shows the marks of that moment, where they are then."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import MISSING, browser
from recordings import ring

from playground.see.paint import BOX, Evidence
from playground.see.paint.collectives import moving
from playground.see.paint.painters import TITLE_HEIGHT, to_svg

SHOWN = """
document.getAnimations().forEach(each => { each.pause(); each.currentTime = arguments[0] * 1000; });
const opacity = box => getComputedStyle(box.closest("[class^=c]") || box).opacity;
return [...document.querySelectorAll("rect.box")].filter(box => opacity(box) > 0.5)
    .map(box => box.getBoundingClientRect()).map(place => [place.x, place.y].map(Math.round));
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_marks_are_there_in_their_time_and_travel(tmp_path: Path) -> None:
    scene = moving(Evidence(results=[], recording=ring(4)))
    boxes = [mark for mark in scene.marks if mark.kind == BOX]
    file = tmp_path / "moving.svg"
    file.write_text(to_svg(scene))
    with browser() as window:
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
        assert len(window.ask(SHOWN, 0)) == len([mark for mark in scene.at_end if mark.kind == BOX]) == 16
        assert window.complaints() == []
