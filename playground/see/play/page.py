"""The page: a template, a style sheet, a script and the data of a recording, all in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from string import Template

from playground.see.paint.paint import write
from playground.see.paint.palette import INK, PAPER, STYLES
from playground.see.play.columns import to_columns
from playground.see.record.recording import Recording

SCRIPTS = ("run", "format", "stage", "timeline", "ranks", "source", "waits", "player")
"""The parts of the script, in the order in which they define what the others use."""


def write_page(recording: Recording, file: Path, *, other: Recording | None = None) -> None:
    """Write the page that plays this recording, or two of them on one clock.

    Raises `UsageError` if the file cannot be written.
    """
    write(render_page(recording) if other is None else render_page(recording, other), file)


def render_page(*recordings: Recording) -> str:
    """The whole file. It loads nothing, and the browser is told to let it load nothing."""
    style = colours() + read("page.css")
    script = '"use strict";\n' + "".join(read(f"script/{name}.js") for name in SCRIPTS)
    return Template(read("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(" | ".join(" ".join(recording.command) for recording in recordings)),
        style=style, script=script, data=to_json([to_columns(recording) for recording in recordings]),
    )  # fmt: skip


def to_json(data: object) -> str:
    """As it may stand in a script element: nothing in it can end that, or begin a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def digest(text: str) -> str:
    """What allows exactly this style sheet or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def colours() -> str:
    """The palette of the figures as variables of CSS: `--wait` is what fills the bar of a wait."""
    palette = {"paper": PAPER, "ink": INK, **STYLES}
    light, dark = (
        "".join(f"--{name.replace(' ', '-')}:{getattr(colour, surroundings)};" for name, colour in palette.items())
        for surroundings in ("light", "dark")
    )
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
