"""Markdown as HTML: tables that fit a telephone, and code."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.token import Token

from playground.site.code import show_code

MOST_LETTERS = 36
"""In the widest cells of all columns together, as many as a telephone has room for."""


def label_cells(tokens: list[Token]) -> None:
    """Mark the tables that are too wide for a telephone, which shows their cells one below another,
    each after the name of its column."""
    table = Token("", "", 0)
    names, widths, cells = list[str](), list[int](), list[Token]()
    for place, token in enumerate(tokens):
        if token.type == "table_open":
            table, names, widths, cells = token, [], [], []
        elif token.type in ("th_open", "td_open"):
            said = re.sub(r"\]\(.*?\)|<.*?>|[`*\[]", "", tokens[place + 1].content)
            if token.type == "th_open":
                names.append(said)
                widths.append(len(said))
            else:
                column = len(cells) % len(names)
                widths[column] = max(widths[column], len(said))
                cells.append(token)
        elif token.type == "table_close" and sum(widths) > MOST_LETTERS:
            table.meta["kind"] = "stack"
            for number, cell in enumerate(cells):
                if number % len(names) and names[number % len(names)]:
                    cell.attrSet("data-column", names[number % len(names)])


def new_markdown() -> MarkdownIt:
    """A parser of the Markdown of chapters, and its renderer."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    markdown.add_render_rule(
        "table_open",
        lambda _, tokens, at, *more: (
            f'<div class="scroll {tokens[at].meta.get("kind", "")}" tabindex="0"><table>\n'
        ),
    )
    markdown.add_render_rule(
        "code_block", lambda _, tokens, at, *more: show_code(tokens[at].content, "text")
    )
    markdown.add_render_rule(
        "fence", lambda _, tokens, at, *more: show_code(tokens[at].content, tokens[at].info)
    )
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return markdown
