"""A finding, and how sure it is. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How sure a finding is, the surest first, and how it is told."""

    SURE = "wrong"
    """No right program does this."""
    PROBABLE = "probably wrong"
    """Only rare programs do so on purpose."""
    HINT = "perhaps wrong"
    """A program may do so on purpose."""


SURE, PROBABLE, HINT = Level


@dataclass(frozen=True)
class Finding:
    """A silent mistake."""

    rule: str
    """The name of the rule that found it."""
    level: Level
    what: str
    ranks: tuple[int, ...]
    since: int
    """The number of the optimizer's step at which it was first seen, from 0 on."""
    where: str
    """The line; empty if there is none."""
    why: str
    fix: str
    equal_at: int = -1
    """Of replicas, the step at which they were last seen equal, if steps lie between that nobody
    has looked at; else -1."""

    @property
    def is_certain(self) -> bool:
        return self.level is SURE
