"""The whole experiment on every rank: the proof, then what breaks it."""

from __future__ import annotations

from playground.lessons.prove import failure_modes, lesson
from playground.lessons.prove.results import ProveResult
from playground.lessons.prove.settings import ProveSettings


def run(rank: int, size: int, settings: ProveSettings) -> ProveResult:
    """The proof and, where there is another rank to differ from, each failure mode. Every rank returns the same."""
    proof = lesson.run(rank, size, settings)
    return ProveResult(proof=proof, breaks=failure_modes.run(rank, size, settings) if size > 1 else {})
