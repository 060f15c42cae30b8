"""What a player shows without scrolling, measured in a browser."""

from __future__ import annotations

from typing import Any

from browser import Browser

HIGHEST, TALLEST_ROW = 900, 160
"""Pixels: of a player in a wide window and in one as narrow as a telephone, and of a rank's row."""
TELEPHONE, WIDE = 400, 1400
"""Widths of such windows."""
MEASURE = """
scrollTo(0, 0);
const buttons = [...document.querySelectorAll('.begin-play')];
buttons.filter(each => each.checkVisibility()).forEach(each => each.click());
return [...document.querySelectorAll('.player')].map(player => {
  const place = selector => player.querySelector(selector).getBoundingClientRect();
  const [slider, timeline, picture, table, box] = ['[name=position]', '.timeline', '.run > figure',
    '.run > .scroll > table', '.run > .scroll'].map(place);
  return {height: Math.max(picture.bottom, box.bottom) - player.getBoundingClientRect().top,
    rows: [...player.querySelectorAll('tbody tr')].map(row => row.getBoundingClientRect().height),
    belowSlider: timeline.top - slider.bottom, areSideBySide: picture.right <= box.left
      && Math.abs(picture.top - box.top) < 2, isAllInSight: table.bottom <= box.bottom + 1,
    tooWide: Math.max(document.documentElement.scrollWidth - innerWidth, table.right - box.right)};
});
"""


def check_sizes(window: Browser, name: str, width: int) -> int:
    """Assert that each player of the page in a window of this width and 900 pixels shows its
    controls, its timeline, its picture and all its ranks. Returns the number of players."""
    players: list[dict[str, Any]] = window.ask(MEASURE)
    for each in players:
        assert 0 < max(each["rows"]) <= TALLEST_ROW, (name, width, each)
        assert each["tooWide"] <= 1, (name, width, each)
        assert 0 <= each["belowSlider"] < 30, (name, width, each)
        if width <= TELEPHONE or width >= WIDE:
            assert each["height"] <= HIGHEST, (name, width, each)
        if width >= WIDE:
            assert each["areSideBySide"], (name, width, each)
            assert each["isAllInSight"], (name, width, each)
    return len(players)
