"""Chapters in the terminal: `python -m playground read NAME`. Does not import rich before it prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from playground.console import terminal

WIDEST = 80
"""Columns: longer lines are hard to read."""
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*\n\|[-| :]+\|\n(?:\|.*\n)+", re.MULTILINE)
FIGURE, LINK_INSIDE = re.compile(r"!\[(.*?)\]\((.*?)\)"), re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
FOLDED, FOLD_ENDS = re.compile(r"<details><summary>(.*?)</summary>"), re.compile(r" *</details>")


def read_command(name: str, purpose: str, chapters: Mapping[str, Path]) -> click.Command:
    """The command that shows one of these files, found by its name."""

    @click.command(name, short_help=purpose)
    @click.argument("chapter", metavar="NAME", type=click.Choice([*chapters]))
    def command(chapter: str) -> None:
        text = render(chapters[chapter])
        if sys.stdout.isatty():
            click.echo_via_pager(text)
        else:
            click.echo(text, nl=False)

    command.help = f"Show a chapter, in a pager where there is a terminal. NAME is one of {', '.join(chapters)}."
    return command


def render(file: Path) -> str:
    """A chapter as lines of the terminal's width, of `WIDEST` columns at most."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import Syntax

    from playground.console.rendering import new_console

    class Block(CodeBlock):
        """Without the margins of rich's own: what is `WIDEST` wide is not broken."""

        def __rich_console__(self, *_: object) -> Iterator[Syntax]:
            text = str(self.text).rstrip()
            yield Syntax(text, self.lexer_name, theme="ansi_dark", word_wrap=True, background_color="default")

    class Chapter(Markdown):
        elements = Markdown.elements | {"fence": Block, "code_block": Block}

    console = new_console(min(WIDEST, terminal.width()), None)
    with console.capture() as captured:
        console.print(Chapter(to_plain(file.read_text(encoding="utf-8"), file.parent), hyperlinks=False))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def to_plain(text: str, folder: Path) -> str:
    """Replace all that only a browser can show: a figure by its description and file, a link within the repository by
    its text, a folded part by its title and text, a table that is too wide by a list."""
    parts = FENCE.split(text)
    for place in range(0, len(parts), 2):
        part = FIGURE.sub(lambda figure: f"{figure[1]}: {folder / figure[2]}", parts[place])
        part = FOLD_ENDS.sub("", FOLDED.sub(r"*\1:*", LINK_INSIDE.sub(r"\1", part)))
        parts[place] = TABLE.sub(lambda table: to_list(table[0]), part)
    return "".join(parts)


def to_list(table: str) -> str:
    """A table of Markdown as it is if it fits, or else a list: of more than two columns, with their names."""
    lines = table.splitlines()
    if max(map(len, lines)) <= WIDEST:
        return table
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    if len(head) == 2:
        return "".join(f"- {first}: {second}\n" for first, second in rows)
    return "".join(
        f"{first}\n\n" + "".join(f"- *{name}:* {cell}\n" for name, cell in zip(head[1:], others, strict=False)) + "\n"
        for first, *others in rows
    )
