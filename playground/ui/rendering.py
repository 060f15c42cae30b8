"""From prose, tables and chapters to lines of text, by rich. Imported when the first line is
printed, for `--help` has none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from playground.base.untrusted import printable
from playground.ui.tables import GAP, CellText, Table, fit
from playground.ui.text import Prose, Styled

WORD = re.compile(r"python -m playground .*|\S+\s*")
"""What stays in one line: a word, and a command at the end of a line, which is to be pasted."""
WIDER = 100_000
"""Columns: no line is as long."""
WIDEST = 80
"""Columns: longer lines are hard to read."""
PROSE = (
    "paragraph_open",
    "heading_open",
    "blockquote_open",
    "bullet_list_open",
    "ordered_list_open",
    "hr",
)
"""Elements of Markdown that are not as wide as the terminal, as code and tables are."""


def render(
    texts: Iterable[str | Prose | Table],
    width: int,
    *,
    wide: bool = False,
    colour: bool | None = False,
) -> str:
    """The texts as lines, none wider than `width` unless a single word is, or a table with `wide`.
    `colour` None leaves it to the environment and to what stdout is."""
    console = new_console(WIDER if wide else width, colour)
    with console.capture() as captured:
        for text in texts:
            parts = (
                render_table(text, width, wide)
                if isinstance(text, Table)
                else wrap(to_text(text), width)
            )
            for part in parts:
                console.print(part, soft_wrap=isinstance(part, Text))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def new_console(width: int | None, colour: bool | None) -> Console:
    """A console of rich's on stdout that takes text as it is. NO_COLOR turns off bold too."""
    plain = colour is False or (colour is None and bool(os.environ.get("NO_COLOR")))
    return Console(
        width=width,
        force_terminal=colour or None,
        force_jupyter=False,  # it is text there, too
        color_system=None if plain else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


def to_text(text: str | Prose) -> Text:
    joined = Text()
    for part in text.parts if isinstance(text, Prose) else (text,):
        joined.append_text(to_cell(part))
    return joined


def to_cell(cell: CellText) -> Text:
    """Names of hosts and what files say are others' text: no escape sequence of theirs reaches the
    terminal."""
    text, style = (cell.text, cell.style) if isinstance(cell, Styled) else (cell, "")
    return Text(printable(text, lines=True), style)


def wrap(text: Text, width: int) -> Iterator[Text]:
    """Each line of `text` as lines of at most `width`, cut between words, all as far indented as
    the first."""
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip())
        pieces = line.divide(line_starts(line.plain, width, indent))
        for number, piece in enumerate(pieces):
            piece.rstrip()
            yield Text(" " * indent if number else "") + piece


def line_starts(line: str, width: int, indent: int) -> list[int]:
    """Where to cut a line: before each word that does not fit any more. A word is never cut: it may
    be a path."""
    starts, used = [], indent
    for word in WORD.finditer(line):
        if used > indent and used + cell_len(word.group().rstrip()) > width:
            starts.append(word.start())
            used = indent
        used += cell_len(word.group())
    return starts


def render_table(table: Table, width: int, wide: bool) -> Iterator[RenderableType]:
    """The columns, as many beside each other as fit, and a line that names those left out: below,
    or above where rows are yet to come."""
    natural = natural_widths(table)
    streamed = all(column.width for column in table.columns)
    every = [*range(len(natural))]
    blocks = [every] if wide else fit(table, natural, width)[: 1 if streamed else None]
    left_out = [table.columns[i].name for i in every if not any(i in shown for shown in blocks)]
    more = (
        wrap(Text(f"  more columns with --wide: {', '.join(left_out)}"), width) if left_out else ()
    )
    if streamed and table.headed:
        yield from more
    for shown in blocks:
        yield Padding(render_columns(table, shown, natural), (0, 0, 0, GAP), expand=False)
    if not streamed:
        yield from more


def render_columns(table: Table, shown: Sequence[int], natural: Sequence[int]) -> RichTable:
    """These columns of the table."""
    rich_table = RichTable(
        box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=table.headed
    )
    widest = max(shown, key=natural.__getitem__)
    may_wrap = [i for i in shown if table.columns[i].wraps] or [widest]
    for i in shown:
        column = table.columns[i]
        rich_table.add_column(
            Text("\n".join(column.lines)),
            header_style="bold",
            style=column.style,
            width=None if i in may_wrap else natural[i],
            min_width=column.width,
            justify="right" if column.right else "left",
            overflow="fold",
        )
    for row in table.rows:
        rich_table.add_row(*(to_cell(row[i]) for i in shown))
    return rich_table


def natural_widths(table: Table) -> list[int]:
    """Width of each column with which no cell of it wraps."""
    widths = []
    for i, column in enumerate(table.columns):
        lines = [line for row in table.rows for line in to_cell(row[i]).plain.split("\n")]
        widths.append(max(column.width, *map(cell_len, [*column.lines, *lines])))
    return widths


def keep_words(table: RichTable, console: Console, options: ConsoleOptions) -> None:
    """Make the widest columns narrower until the table fits, but none narrower than its longest
    word."""
    cells = [[to_plain(cell) for cell in (each.header, *each.cells)] for each in table.columns]
    widths = [max(map(cell_len, column)) for column in cells]
    least = [
        max((cell_len(word) for cell in column for word in cell.split()), default=0)
        for column in cells
    ]
    between = console.measure(table, options=options.update(width=WIDER)).maximum - sum(widths)
    room = options.max_width - between
    for column in table.columns:
        column.overflow = "fold"
    if sum(widths) <= room or sum(least) > room:
        return
    while sum(widths) > room:
        narrower = [place for place, width in enumerate(widths) if width > least[place]]
        widths[max(narrower, key=widths.__getitem__)] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


def to_plain(cell: RenderableType) -> str:
    """The text of a cell of Markdown, which is one line."""
    return cell.plain if isinstance(cell, Text) else str(cell)


def render_markdown(text: str, width: int) -> str:
    """Markdown as lines of at most `width` columns; of prose, of `WIDEST`. In a table that is too
    narrow for its words, those that are wider than their column go on in the next line."""
    from rich.markdown import Markdown, TableElement

    class FoldedTable(TableElement):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for table in super().__rich_console__(console, options):
                if isinstance(table, RichTable):
                    keep_words(table, console, options)
                yield table

    def narrow(kind: Any) -> Any:
        class Narrow(kind):
            def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
                limited = options.update(width=min(WIDEST, options.max_width))
                for part in super().__rich_console__(console, limited):
                    yield from (
                        [part] if isinstance(part, Segment) else console.render(part, limited)
                    )

        return Narrow

    class FoldedMarkdown(Markdown):
        elements: ClassVar = {
            **Markdown.elements,
            **{name: narrow(Markdown.elements[name]) for name in PROSE},
            "table_open": FoldedTable,
        }

    console = new_console(width, None)
    with console.capture() as captured:
        console.print(FoldedMarkdown(text, code_theme="ansi_dark", hyperlinks=False))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
