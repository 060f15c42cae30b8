"""Amounts as people read them."""

from __future__ import annotations

from math import inf, nan

from hypothesis import given, strategies as st

from playground.ui.units import format_bytes, format_digits, format_seconds, plural

BYTES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1 KiB",
    1536: "1.5 KiB",
    2**24: "16 MiB",
    2**40: "1024 GiB",
}
SECONDS = {5e-6: "5 us", 0.0123: "12.3 ms", 1.5: "1.5 s", 12345.0: "12345 s", 2e-10: "0.2 ns"}
DIGITS = {
    0: "0",
    0.000433: "0.000433",
    1.4321: "1.43",
    99.96: "100.0",
    12345.6: "12346",
    inf: "inf",
    nan: "nan",
}


def test_amounts() -> None:
    assert {value: format_bytes(value) for value in BYTES} == BYTES
    assert {value: format_seconds(value) for value in SECONDS} == SECONDS
    assert {value: format_digits(value) for value in DIGITS} == DIGITS


@given(st.floats(1e-6, 1e9))
def test_digits_are_read_as_nearly_the_same_number(value: float) -> None:
    text = format_digits(value)
    assert "e" not in text
    assert abs(float(text) / value - 1) <= 0.005


def test_a_noun_follows_its_number() -> None:
    assert [plural(number, "rank") for number in (0, 1, 2, 1000)] == [
        "0 ranks", "1 rank", "2 ranks", "1,000 ranks",
    ]  # fmt: skip
