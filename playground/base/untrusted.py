"""Untrusted input: text that is to be shown, JSON whose values are to be used, pickles, numbers in
the environment. Does not import torch.

Whoever reads a file of somebody's takes its text through `printable`: escape sequences would reach
the terminal, and control characters would make no SVG of an SVG. The `expect_…` functions return a
value of JSON that is what it must be; they raise `ValueError`, in words, for any other.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from typing import Any

from playground.base.errors import UsageError

HIDDEN = "\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
"""Control characters beyond ASCII's, what changes the direction of a line, and what neither UTF-8
nor XML has."""
IN_A_LINE, IN_LINES = f"[\x00-\x1f{HIDDEN}]", f"[\x00-\x08\x0b-\x1f{HIDDEN}]"
INT64 = 2**63


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes in the place of what is not to reach a terminal or a picture. With
    `lines`, line breaks and tabs stay.

    >>> print(printable("\x1b[31mred"))
    \x1b[31mred
    """
    return text if text.isprintable() else re.sub(IN_LINES if lines else IN_A_LINE, escape, text)


def escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def parse_json(content: str | bytes) -> object:
    """The parsed value. Raises `ValueError` for what is not JSON, and for what is nested too
    deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def expect_text(value: object, *, lines: bool = False) -> str:
    """A text that can be shown in one line; with `lines`, in its own."""
    if not isinstance(value, str):
        raise ValueError(f"{show(value)} is no text")
    return printable(value, lines=lines)


def expect_int(value: object, least: int = -INT64, most: int = INT64 - 1) -> int:
    """A whole number between these, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{show(value)} is no number from {least} to {most}")
    return value


def expect_float(value: object, least: float, most: float) -> float:
    """A number between these, both included."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{show(value)} is no number from {least:g} to {most:g}")
    return float(value)


def expect_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{show(value)} is no list")
    return value


def expect_dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{show(value)} is no JSON object")
    return value


def show(value: object) -> str:
    """The beginning of a value, as an error quotes it."""
    kind = type(value).__name__
    if isinstance(value, (dict, list)):
        return f"a {kind}"
    if isinstance(value, int) and abs(value) >= INT64:
        return "a number of many digits"
    text = repr(value)
    return printable(text if len(text) <= 40 else f"{text[:40]}…")


def unpickle(content: bytes, *classes: type) -> Any:
    """An object of these classes and of plain data. Raises `UnpicklingError` for a pickle that
    names anything else: to make that would run code.

    Source: https://docs.python.org/3/library/pickle.html#restricting-globals
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type:
            for kind in classes:
                if (kind.__module__, kind.__qualname__) == (module, name):
                    return kind
            raise pickle.UnpicklingError(f"{module}.{name} is not expected here")

    return Unpickler(io.BytesIO(content)).load()


def read_integer(name: str, environ: Mapping[str, str], low: int, stop: int) -> int:
    """The environment's whole number `name`, in [low, stop). Raises `UsageError` for any other."""
    try:
        value = int(environ[name])
    except ValueError:
        raise UsageError(f"{name}={environ[name]!r} is not a whole number") from None
    if not low <= value < stop:
        raise UsageError(f"{name}={value} is outside [{low}, {stop})")
    return value
