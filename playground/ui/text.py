"""Pieces of text with a meaning that has a colour: headings, ranks, verdicts. Nothing in a text is
read as markup.

session.say(prose("4 ranks agree; ", good("all replicas are bit-identical"), "."))
"""

from __future__ import annotations

from dataclasses import dataclass

RANK = "magenta"


@dataclass(frozen=True)
class Styled:
    """A piece of text, and the style (as rich names it) in which a terminal shows it."""

    text: str
    style: str


@dataclass(frozen=True)
class Prose:
    """Text that wraps at the terminal's width. Each of its lines keeps its own indentation in the
    lines it wraps to."""

    parts: tuple[str | Styled, ...]


def prose(*parts: str | Styled) -> Prose:
    return Prose(parts)


def heading(text: str) -> Styled:
    return Styled(text, "bold cyan")


def good(text: str) -> Styled:
    """A verdict: as it must be."""
    return Styled(text, "green")


def bad(text: str) -> Styled:
    """A verdict: not as it must be."""
    return Styled(text, "bold red")
