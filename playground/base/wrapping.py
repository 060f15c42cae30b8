"""Sentences in lines of a terminal's width."""

from __future__ import annotations

import textwrap

WIDTH = 80
"""Columns of a text."""
PREFIX = "playground: "
"""What most often stands before a sentence in its line."""


def wrap_sentence(sentence: str, width: int = WIDTH, *, at_spaces: bool = False) -> str:
    """Lines of so many columns; the first leaves room for `PREFIX`. `at_spaces`: paths and options
    stay whole."""
    return textwrap.fill(
        sentence,
        width,
        initial_indent=PREFIX,
        break_long_words=not at_spaces,
        break_on_hyphens=not at_spaces,
    ).removeprefix(PREFIX)
