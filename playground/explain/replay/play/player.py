"""The page that plays a recording: a template, a style sheet, a script and the recording, all in
one file.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from playground.explain.replay.play.columns import to_columns
from playground.explain.replay.record.recording import Recording
from playground.explain.replay.render.scene import INK, PAPER, STYLES
from playground.explain.replay.render.svg import css_name

SCRIPTS = (
    "constants", "run", "format", "stage", "timeline", "ranks", "source", "waits", "player"
)  # fmt: skip
"""Parts of the script, each after those it uses."""


def render_page(recording: Recording) -> str:
    """The page as a file. It loads nothing, and its policy forbids the browser to load anything."""
    style, script = read_style() + read("page.css"), read_script()
    return Template(read("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(" ".join(recording.command)),
        style=style,
        script=script,
        player=render_player(recording),
    )


def render_player(
    recording: Recording, pages: Mapping[str, str] | None = None, opens: int | None = None
) -> str:
    """A player of the recording, for a page with its style and script. In a `<figure>` it leaves
    the keys of the page to the others. `pages`: for a file of the program the beginning of the
    addresses of its lines. `opens`: the place of the event to begin with."""
    return Template(read("player.html")).substitute(
        data=to_json(to_columns(recording) | {"pages": pages or {}, "opens": opens})
    )


def read_style() -> str:
    """The style sheet of players, and the colours of pictures as variables, for light and for dark
    surroundings, as the page's `color-scheme` is."""
    colours = {"paper": PAPER, "ink": INK, **STYLES}
    variables = "".join(
        f"--{css_name(name)}:light-dark({','.join(pair)});" for name, pair in colours.items()
    )
    return f":root{{color-scheme:light dark;{variables}}}\n{read('player.css')}"


def read_script() -> str:
    return '"use strict";\n' + "".join(read(f"script/{name}.js") for name in SCRIPTS)


def to_json(data: object) -> str:
    """JSON for a script element: nothing in it can end the element, or begin a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace(
        "<", "\\u003c"
    )


def digest(text: str) -> str:
    """The source expression that allows exactly this style sheet or script in a content security
    policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
