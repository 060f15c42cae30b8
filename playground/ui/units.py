"""Amounts as text: with few digits, with their nouns. Does not import torch."""

from __future__ import annotations

from math import floor, isfinite, log10

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = next(((scale, unit) for scale, unit in SECONDS if seconds >= scale), SECONDS[-1])
    return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"


def format_bytes(nbytes: int) -> str:
    """Four digits and the largest binary unit of which there is at least one: 1536 is "1.5 KiB"."""
    scale, unit = next(((scale, unit) for scale, unit in BYTES if nbytes >= scale), BYTES[-1])
    return f"{nbytes / scale:.4g} {unit}"


def plural(number: int, noun: str, ending: str = "s") -> str:
    """The number, and the noun in its plural if need be: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{ending * (number != 1)}"


def format_digits(value: float) -> str:
    """Three significant digits without an exponent: 0.000433, 1.43, 12345. Others are "inf" or
    "nan"."""
    if value <= 0 or not isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - floor(log10(value)))}f}"
