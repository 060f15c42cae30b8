"""Sizes as they are written and read, and how they grow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from playground.tools.bench import settings


@given(st.integers(1, 2**50))
def test_a_size_that_is_written_is_read(size: int) -> None:
    assert settings.parse(settings.to_text(size)) == size


@given(st.integers(1, 10**6), st.sampled_from("KMG"))
def test_units_are_powers_of_1024(number: int, unit: str) -> None:
    assert settings.parse(f"{number}{unit}") == settings.parse(f"{number}{unit.lower()}")
    assert settings.parse(f"{number}{unit}") == number * 1024 ** (1 + "KMG".index(unit))


@given(st.text(max_size=5).filter(lambda text: not text.strip()[:1].isdigit()))
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        settings.parse(text)


@given(st.integers(1, 1000), st.integers(1, 10**9))
def test_sizes_grow_by_the_factor_up_to_the_end(begin: int, end: int) -> None:
    row = settings.geometric_range(begin, end)
    assert (row[0] == begin) if row else end < begin
    assert all(larger == settings.FACTOR * smaller for smaller, larger in itertools.pairwise(row))
    assert not row or row[-1] <= end < row[-1] * settings.FACTOR
