"""The files of chapters, and the command `read`. Does not import torch."""

from __future__ import annotations

import sys

import click

from playground.console import terminal
from playground.console.rendering import render_markdown
from playground.figures import SEE
from playground.lessons import PATH
from playground.runtime.remote import ROOT
from playground.site import READ
from playground.tools import TOOLS

CHAPTERS = {lesson.name: ROOT / lesson.path / "README.md" for lesson in PATH}
CHAPTERS |= {
    tool.name: ROOT.joinpath(*tool.command.module.split(".")[:-1], "README.md")
    for tool in TOOLS.values()
}
CHAPTERS[SEE.name] = ROOT / "playground/trace/README.md"
CHAPTERS |= {
    page.stem: page for lesson in PATH for page in sorted((ROOT / lesson.path).glob("[!R]*.md"))
}
CHAPTERS |= {
    each: ROOT / "playground/lessons" / f"{each}.md"
    for each in ("map", "running", "tutorials", "glossary")
}
"""By the names that `read` takes."""


@click.command(
    READ.name,
    short_help=READ.purpose,
    help="Show a chapter, in a pager where there is a terminal. NAME is one of "
    f"{', '.join(CHAPTERS)}.",
)
@click.argument("chapter", metavar="NAME", type=click.Choice([*CHAPTERS]))
def command(chapter: str) -> None:
    text = render_markdown(CHAPTERS[chapter].read_text(encoding="utf-8"), terminal.width())
    if sys.stdout.isatty():
        click.echo_via_pager(text)
    else:
        click.echo(text, nl=False)
