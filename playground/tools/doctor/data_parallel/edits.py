"""Changes of a text that know their places in it, so that several can be made together. Does not
import torch."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """What is between two places of a text, and what replaces it. Where both places are the same,
    something is added there. Lines count from 1, columns from 0, in bytes, as those of `ast`."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str
    order: int = 0
    """The lowest comes first, where several are added at one place."""


def replace_node(node: ast.expr | ast.keyword, text: str) -> Edit:
    end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return Edit((node.lineno, node.col_offset), end, text)


def add_before(line: int, indent: str, *lines: str) -> Edit:
    """Whole lines before this one."""
    return Edit((line, 0), (line, 0), "".join(f"{indent}{each}\n" for each in lines))


def add_after(statement: ast.stmt, indent: str, *lines: str) -> Edit:
    """Whole lines after the last line of a statement."""
    return add_before((statement.end_lineno or statement.lineno) + 1, indent, *lines)


def put_under(condition: str, first: int, last: int, indent: str) -> list[Edit]:
    """Put whole lines under `if condition:`, behind what else is added there."""
    moved = (Edit((line, 0), (line, 0), "    ", order=2) for line in range(first, last + 1))
    return [Edit((first, 0), (first, 0), f"{indent}if {condition}:\n", order=1), *moved]


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    """The text with these changes, none of which replaces what another does. Those of one place are
    made in their order."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = b"".join(lines)

    def offset(place: tuple[int, int]) -> int:
        return starts[min(place[0] - 1, len(lines))] + place[1]

    # which is stable
    found = sorted(dict.fromkeys(edits), key=lambda each: (offset(each.start), each.order))
    for each in reversed(found):
        text = text[: offset(each.start)] + each.text.encode() + text[offset(each.end) :]
    return text.decode()


def show_edits(source: str, edits: Iterable[Edit]) -> Iterator[str]:
    """The lines that change, with the numbers that they have before; where lines are only added,
    behind the last one before them that is not empty."""
    before, after = source.splitlines(), apply_edits(source, edits).splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    width = len(str(len(before)))
    for kind, first, last, start, end in matcher.get_opcodes():
        if kind == "equal":
            continue
        if first == last:
            kept = (number for number in range(first, 0, -1) if before[number - 1].strip())
            yield from (
                f"{number:{width}}   {before[number - 1]}".rstrip() for number in [*kept][:1]
            )
        yield from (f"{line + 1:{width}} - {before[line]}".rstrip() for line in range(first, last))
        yield from (f"{'':{width}} + {line}".rstrip() for line in after[start:end])
