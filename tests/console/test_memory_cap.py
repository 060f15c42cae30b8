"""Amounts of memory, as people write them."""

from __future__ import annotations

import click
import pytest
from hypothesis import given, strategies as st

from playground.console.options import UNITS, MemorySize


def read(text: str) -> int:
    return MemorySize().convert(text, None, None)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", "B", "iB", "b"]), st.booleans())
def test_units_are_binary(number: int, unit: str, end: str, lower: bool) -> None:
    text = f"{number}{unit}{end}"
    assert read(text.lower() if lower else text) == number * UNITS[unit]


def test_fractions_and_a_space() -> None:
    assert read(" 1.5 GiB ") == 3 * 2**29


@pytest.mark.parametrize("text", ["", "0", "0.0000001K", "-1", "64 Mega", "1e9", "nan", "9" * 5000, "٣", "64TiB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no amount of memory: write bytes, or a number and KiB"):
        read(text)
