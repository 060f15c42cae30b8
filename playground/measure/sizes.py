"""Sizes as people write them, 4K or 64M, and a row of them from the smallest to the largest."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
WRITTEN = re.compile(r"(\d{1,18})([KMG]?)", re.ASCII | re.IGNORECASE)


def parsed(text: str) -> int:
    """The number of bytes that `text` says. Raises `ValueError` if it says none."""
    match = WRITTEN.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} is no size: write a whole number of bytes above 0, or one with K, M or G, as 64K")
    return int(match[1]) * UNITS[match[2].upper()]


def written(size: int) -> str:
    """The shortest way to write `size` that `parsed` reads."""
    unit = max((name for name in UNITS if size % UNITS[name] == 0), key=lambda name: UNITS[name])
    return f"{size // UNITS[unit]}{unit}"


def between(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """`begin`, and `factor` times the last one as long as that is not beyond `end`."""
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    return tuple(sizes)
