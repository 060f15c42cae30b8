"""How wide what is printed may be."""

from __future__ import annotations


def too_wide(text: str, width: int = 80) -> list[str]:
    """Lines that are wider, though they could have been broken: the name of somebody's folder
    cannot be."""
    return [line for line in text.splitlines() if len(line) > width and " " in line.strip()]
