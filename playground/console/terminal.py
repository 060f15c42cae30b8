"""The terminal: how wide it is, and how text gets there. Does not import rich before it prints.

| environment           | what follows                                                      |
|-----------------------|-------------------------------------------------------------------|
| COLUMNS               | the width; else the terminal's; 80 where there is none            |
| NO_COLOR              | no colour, no bold: not one escape sequence                       |
| FORCE_COLOR           | colour in a pipe too                                              |
| TERM=dumb, a pipe     | no colour and no bars                                             |
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.console.tables import Table
    from playground.console.text import Prose

NARROWEST = 40
"""Columns: no terminal is taken to be narrower, because nothing would be legible."""


def width() -> int:
    """Columns that text may take."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def say(*texts: str | Prose | Table, wide: bool = False) -> None:
    """Print each on lines of its own to stdout: prose wrapped at the terminal's width, tables within it unless `wide`.

    While a bar is shown, it appears above the bar: it is written to `sys.stdout`, which the bar has in its hands.
    """
    from playground.console.rendering import render

    sys.stdout.write(render(texts, width(), wide=wide, colour=None))
    sys.stdout.flush()


def has_bars() -> bool:
    """Whether stderr is a terminal on which a bar can be drawn."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def is_same_terminal() -> bool:
    """Whether stdout and stderr are one terminal, so that a bar on the one would run into the text on the other."""
    try:
        return sys.stdout.isatty() and os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def replace_unencodable() -> None:
    """Have characters that stdout's encoding lacks replaced by a question mark, where printing them would raise."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
