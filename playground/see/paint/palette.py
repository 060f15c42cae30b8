"""The colours of a scene, by what they stand for: in light and in dark surroundings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """What fills, or for lines and texts draws, a mark of some style."""

    light: str
    dark: str
    letter: str
    """What fills a bar of this style where there are only letters."""


PAPER, INK = Colour("#ffffff", "#0d1117", " "), Colour("#1f2328", "#e6edf3", " ")
"""The background, and whatever is written."""
STYLES = {
    "plain": Colour("#f0f3f6", "#262c36", " "),
    "muted": Colour("#59636e", "#9198a1", "."),
    "forward": Colour("#a8d4ff", "#0b4a8f", "f"),
    "backward": Colour("#ffc680", "#8a4b08", "b"),
    "optimizer": Colour("#aceebb", "#1a6b34", "s"),
    "compute": Colour("#b6e3e9", "#14555f", "c"),
    "communication": Colour("#dcc4ff", "#55299b", "m"),
    "wait": Colour("#ffc9c5", "#8e1f19", "w"),
    "phase": Colour("#e6eaef", "#31363f", "-"),
    "value": Colour("#fff1a8", "#655300", " "),
    "message": Colour("#8250df", "#bc8cff", " "),
    "chunk": Colour("#cf222e", "#ff7b72", " "),
    "idle": Colour("#fafbfc", "#161b22", " "),
    "bucket 0": Colour("#a8d4ff", "#0b4a8f", "0"),
    "bucket 1": Colour("#ffc680", "#8a4b08", "1"),
    "bucket 2": Colour("#aceebb", "#1a6b34", "2"),
    "bucket 3": Colour("#dcc4ff", "#55299b", "3"),
}
BUCKETS = 4
"""Buckets with a colour of their own; those after them begin anew."""


def bucket_style(number: int) -> str:
    return f"bucket {number % BUCKETS}"
