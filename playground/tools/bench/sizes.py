"""Sizes as people write them, 4K or 64M, and a geometric row of them."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
PATTERN = re.compile(r"(\d{1,18})([KMG]?)", re.ASCII | re.IGNORECASE)


def parse(text: str) -> int:
    """The number of bytes that `text` stands for. Raises `ValueError` if it is no size."""
    match = PATTERN.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} is no size: write a whole number of bytes above 0, or one with K, M or G, as 64K")
    return int(match[1]) * UNITS[match[2].upper()]


def to_text(size: int) -> str:
    """The shortest text that `parse` reads as `size`."""
    unit = max((name for name in UNITS if size % UNITS[name] == 0), key=lambda name: UNITS[name])
    return f"{size // UNITS[unit]}{unit}"


def geometric_range(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """`begin`, then `factor` times the one before, as long as that is not beyond `end`."""
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    return tuple(sizes)
