"""Sentences in lines of a terminal's width."""

from __future__ import annotations

import textwrap

WIDTH = 80
"""Columns of a text."""
PREFIX = "playground: "
"""What most often stands before a sentence in its line."""


def wrap_sentence(sentence: str) -> str:
    """Lines of `WIDTH` columns; the first leaves room for `PREFIX`."""
    return textwrap.fill(sentence, WIDTH, initial_indent=PREFIX).removeprefix(PREFIX)
