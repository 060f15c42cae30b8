"""What others wrote is shown without escapes, and is what it must be, or refused in words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, strategies as st

from playground.base.untrusted import (
    expect_dict,
    expect_float,
    expect_int,
    expect_list,
    expect_text,
    parse_json,
    printable,
    unpickle,
)


@given(st.text(st.characters()))
def test_what_is_printed_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert not any(ord(each) < 32 or 0x7F <= ord(each) < 0xA0 for each in shown)
    assert not {*"\u2028\u202e\u2066\ufeff\ud800"} & {*shown} - {"\ufeff"}
    shown.encode()


def test_lines_stay_where_they_are_wanted() -> None:
    text = "one\n\ttwo\x1b[31m\u202e\r"
    assert printable(text, lines=True) == "one\n\ttwo\\x1b[31m\\u202e\\r"
    assert printable(text) == "one\\n\\ttwo\\x1b[31m\\u202e\\r"
    assert printable("Größe, 幅 …") == "Größe, 幅 …"


RATIO = partial(expect_float, least=0.0, most=1.0)


@pytest.mark.parametrize(
    ("expect", "content", "value"),
    [
        (expect_text, '"\\u001b"', "\\x1b"),
        (expect_int, "-9223372036854775808", -(2**63)),
        (partial(expect_int, least=1, most=3), "3", 3),
        (RATIO, "1", 1.0),
        (expect_list, "[1]", [1]),
        (expect_dict, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_that_is_what_it_must_be_is_returned(
    expect: Callable[[object], object], content: str, value: object
) -> None:
    found = expect(parse_json(content))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("expect", "content", "words"),
    [
        (expect_text, "1", "1 is no text"),
        (expect_int, "true", "True is no number"),
        (expect_int, "1.0", "1.0 is no number"),
        (expect_int, "9223372036854775808", "a number of many digits is no number"),
        (partial(expect_int, least=1, most=3), "4", "4 is no number from 1 to 3"),
        (partial(expect_int, least=1, most=3), "0", "0 is no number from 1 to 3"),
        (RATIO, "NaN", "nan is no number from 0 to 1"),
        (RATIO, "1.1", "1.1 is no number from 0 to 1"),
        (RATIO, "false", "False is no number"),
        (expect_list, "{}", "a dict is no list"),
        (expect_dict, "[[]]", "a list is no JSON object"),
        (expect_dict, f'"{"x" * 99}"', "…  is no JSON object".replace("  ", " ")),
    ],
)
def test_any_other_value_is_refused_in_words(
    expect: Callable[[object], object], content: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        expect(parse_json(content))


def test_what_is_nested_too_deeply_is_not_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 1_000_000)


@dataclass
class Known:
    value: int


@dataclass
class Unknown:
    value: int


def test_a_pickle_makes_what_is_expected_and_nothing_else() -> None:
    known = {"a": [Known(1), (2.5, None)]}
    assert unpickle(pickle.dumps(known), Known) == known
    for other in (Unknown(1), print):
        with pytest.raises(pickle.UnpicklingError, match="is not expected here"):
            unpickle(pickle.dumps([other]), Known)
