"""The parts of data parallelism: which of them a script has, and the lines that it lacks. Does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from playground.tools.doctor.data_parallel.edits import Edit, apply_edits


class Status(StrEnum):
    """Whether a part is there, is missing, is not needed, or the text does not tell."""

    THERE, MISSING, NOT_NEEDED, UNKNOWN = "there", "missing", "not needed", "unknown"


@dataclass(frozen=True)
class Part:
    """A part of data parallelism."""

    name: str
    status: Status
    saw: str
    """What was seen, and why it has to change."""
    edits: Sequence[Edit] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """What a script has, and what it lacks."""

    source: str
    parts: Sequence[Part]

    @property
    def edits(self) -> list[Edit]:
        return [edit for part in self.parts for edit in part.edits]

    @property
    def after(self) -> str:
        """The script with all changes."""
        return apply_edits(self.source, self.edits)

    @property
    def lacks(self) -> list[str]:
        """The names of the parts that are missing, or unknown."""
        return [each.name for each in self.parts if each.status in (Status.MISSING, Status.UNKNOWN)]
