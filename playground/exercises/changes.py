"""Changes of a reference, as `mistakes.diff` and `faults.diff` have them. Does not import torch."""

from __future__ import annotations

import re
from typing import NamedTuple

CHANGE = re.compile(r"^# (.+?)(?: \((\w+)\))?\n(?:# (.+)\n)?((?:[-+ @].*\n)+)", re.MULTILINE)


class Change(NamedTuple):
    """A change of the reference that makes it wrong."""

    name: str
    status: str
    """How a check of it ends; empty where nothing is said."""
    says: str
    """One sentence on what goes wrong; may be empty."""
    lines: str
    """What `patch` takes."""


def read_changes(text: str) -> list[Change]:
    """The changes in a file, in their order."""
    return [Change(*found) for found in CHANGE.findall(text)]


def patch(source: str, changes: str) -> str:
    """The source after changes: lines that go (-), come (+) or stay ( ), in their order; @@ between
    places. Raises `ValueError` if it lacks a place."""
    done = ""
    for change in changes.split("@@\n"):
        lines = change.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] for line in lines if line[0] in kinds) for kinds in ("- ", "+ ")
        )
        before, found, source = source.partition(old)
        if not found:
            raise ValueError(f"the reference has no {old!r}")
        done += before + new
    return done + source
