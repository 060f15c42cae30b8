"""Code in pages, and whether it is the code of its file."""

from __future__ import annotations

import html
import json
import re
import textwrap
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from playground.base.errors import PlaygroundError
from playground.base.remote import ROOT
from playground.site.addresses import HERE

COLOURED = {*re.findall(r"\.(\w+)", (HERE / "site.css").read_text(encoding="utf-8"))}
"""The classes in the style sheet; those of code among them."""
EXCERPT = re.compile(r"\]\(([^)]+)\):\n\n( *)```python\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)
"""Code that a chapter shows of a file, which is named before it."""


def line_of(block: str, source: str) -> int:
    """The line at which `block` begins in `source`; 0 unless its lines are lines of `source`, in
    order: dedented, with a line `# …` for what is left out. Empty lines do not count: the formatter
    has rules of its own for those of a block."""
    lines = (re.escape(line) for line in block.splitlines() if line)
    parts = (
        r"(?:.*\n)*?" if line.endswith("\\#\\ …") else rf"\n*(?P=indent){line}\n" for line in lines
    )
    found = re.search(rf"^(?=(?P<indent> *)){''.join(parts)}", source, re.MULTILINE)
    if not found:
        return 0
    return source.count("\n", 0, found.end() - len(found[0].lstrip("\n"))) + 1


def read_text(file: Path) -> str:
    """A text as Markdown; of a notebook, its cells. Raises `PlaygroundError` if it shows code that
    its source lacks."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = (("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"])
        return "\n\n".join(
            f"```python\n{cell}\n```" if kind == "code" else cell for cell, kind in cells
        )
    for name, _, block in EXCERPT.findall(text):
        if not line_of(textwrap.dedent(block), (file.parent / name).read_text(encoding="utf-8")):
            raise PlaygroundError(
                f"{file.relative_to(ROOT)} shows code that {name} lacks: "
                f"{block.splitlines()[0].strip()}"
            )
    return text


def colour(text: str, language: str) -> str:
    """Code as HTML, with spans for the classes that the style sheet has: pygments makes one of
    every token, and most have no colour of their own."""
    code = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
    return re.sub(
        r'<span class="(\w+)">(.*?)</span>',
        lambda span: span[0] if span[1] in COLOURED else span[2],
        code,
    )


def show_code(
    text: str, language: str, file: Path | None = None, first: int = 1, name: str = ""
) -> str:
    """Code as HTML, named after its language or `name`: without either, commands. Its lines
    have numbers, from `first` on, and anchors, if its file is given."""
    if language in ("python", "diff"):
        code = colour(text, language)
        if file:
            lines = enumerate(code.splitlines(keepends=True), first)
            code = "".join(
                f'<span id="{file.name}-{at}" data-n="{at}">{line}</span>' for at, line in lines
            )
    else:
        code = re.sub(
            r"^\$ .*", r"<b>\g<0></b>", html.escape(text, quote=False), flags=re.MULTILINE
        )
    about = (
        f'class="lines" aria-label="{file.name}"'
        if file
        else f'aria-label="{name or language or "commands"}"'
    )
    pre = f'<pre tabindex="0" role="group" {about}><code>{code}</code></pre>'
    return f'<div class="code">{pre}</div>\n'
