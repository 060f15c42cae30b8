"""The command `read`: a chapter or a page, as text for a terminal. Does not import torch."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from playground.base.errors import UsageError
from playground.base.flags import flag
from playground.base.remote import ROOT
from playground.site import READ
from playground.site.texts import FOLDERS, GROUPS, NAMES, PAGES
from playground.ui import terminal
from playground.ui.commands import Command
from playground.ui.option_types import OneOf
from playground.ui.options import flags
from playground.ui.rendering import render_markdown

HELP_WIDTH = 76
"""Columns of a line that help does not wrap."""
CODE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")
"""A link that leads to a file here; its text, and the file."""
OUTCOME = re.compile(
    r"^( *)<details><summary>(Outcome|Answer)</summary>$(.*?)^ *</details>$",
    re.DOTALL | re.MULTILINE,
)


ANSWERED = "*Outcome:*", "*Answer:*"
"""What stands before the outcomes and answers that are shown."""
NEXT = re.compile(r"^(?:Previous: .* · )?Next: \[[^]]*\]\(([^)]*)\)$", re.MULTILINE)
"""The last line of a chapter, with the folder of the next one."""


def chapter_text(chapter: str, answers: bool = False) -> str:
    """A chapter as Markdown for a terminal: links say what to type, and the outcomes of what to try
    are left out unless `answers`."""
    text = OUTCOME.sub(
        r"\n\1*\2:*\3" if answers else f"\\1(\\2: `python -m playground read {chapter} --answers`)",
        PAGES[chapter].read_text(encoding="utf-8"),
    )
    text = NEXT.sub(partial(next_text, PAGES[chapter].parent), text)
    parts = CODE.split(text)
    parts[::2] = (LINK.sub(partial(link_text, PAGES[chapter]), part) for part in parts[::2])
    return "".join(parts)


def next_text(folder: Path, line: re.Match[str]) -> str:
    """The command that shows the next chapter."""
    return f"Next: `python -m playground read {NAMES[(folder / line[1]).resolve()]}`"


def link_text(chapter: Path, link: re.Match[str]) -> str:
    """The text of a link, and the page that it leads to or, for other files, their path; unless the
    text names them, or it explains a word."""
    text, target = link.groups()
    file = (chapter.parent / target).resolve()
    name = NAMES.get(file / "README.md" if file.is_dir() else file, "")
    if name == "glossary" or file in (chapter, chapter.parent) or text.strip("`") in (name, target):
        return text
    where = f"`read {name}`" if name else f"`{file.relative_to(ROOT)}`"
    return f"{text} ({where})"


def has_outcomes(text: str) -> bool:
    return any(word in text for word in ANSWERED)


def keep_outcomes(text: str) -> str:
    """The sections of a chapter that say what comes of what there is to try."""
    title, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [each for each in sections if has_outcomes(each)]
    return "".join([title.partition("\n")[0] + "\n\n", *kept])


def wrap_names(group: str, names: Iterable[str]) -> str:
    """A group of names in lines, which end at no hyphen."""
    listed = f"{group}: {', '.join(names)}."
    return textwrap.fill(listed, HELP_WIDTH, break_on_hyphens=False, subsequent_indent="  ")


@dataclass(frozen=True)
class ReadOptions:
    """The options of `read`."""

    answers: bool = flag(False, "Show the outcomes of what there is to try, and nothing else.")


@click.command(
    READ.name,
    cls=Command,
    short_help=READ.purpose,
    help="Show a chapter, in a pager where there is a terminal. NAME is one of these, or its "
    "folder, such as all_reduce.\n\n"
    + "\n\n".join(f"\b\n{wrap_names(group, names)}" for group, names in GROUPS.items()),
)
@click.argument("chapter", metavar="NAME", type=OneOf([*PAGES], FOLDERS))
@flags(ReadOptions)
def command(chapter: str, answers: bool) -> None:
    markdown = chapter_text(chapter, answers)
    if answers:
        if not has_outcomes(markdown):
            raise UsageError(f"--answers: {chapter} has no outcomes: leave it out")
        markdown = keep_outcomes(markdown)
    text = render_markdown(markdown, terminal.width())
    program = PAGES[chapter].with_name("lesson.py")
    if program.is_file() and PAGES[chapter].name == "README.md":
        text = f"lesson.py: {os.path.relpath(program)}\n{text}"
    if sys.stdout.isatty():
        click.echo_via_pager(text)
    else:
        click.echo(text, nl=False)
