"""The command `tensor`: its settings, the closed forms beside what is counted, and its text. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from playground.console.options import ALL, flags, select_names
from playground.console.session import Session
from playground.console.tables import Column, Texts, figures, tabulate
from playground.console.text import good, heading, prose
from playground.lessons import LESSONS
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_choice, check_flags, flag, like
from playground.training.settings import TrainingSettings

LESSON = LESSONS["tensor"]
EXPERIMENT = LESSON.remote("run", "experiment")
WAYS = {
    "tensor": "matrices are cut, tokens are not: two all_reduces forward and two backward for each block",
    "sequence": "and norms and sums share the tokens: a reduce_scatter and an all_gather in place of each all_reduce",
}
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 96, 12, 48, 48
"""Of the model, which every rank's part is cut from."""
EXACT_STEPS = 5
EXACT = 1e-12
"""How far losses and parameters in float64 may be from one process's: sums in another order round differently."""
CLOSE = 0.05
"""Fraction by which a count may differ from its closed form."""


@dataclass(frozen=True, kw_only=True)
class TensorSettings:
    """Raises `UsageError` if the model cannot be cut over the ranks."""

    size: int
    """Number of ranks."""
    ways: tuple[str, ...] = tuple(WAYS)
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch, which all ranks work on.", least=1)
    steps: int = flag(70, "Number of training steps, for each way.", least=1)
    link: float = like(TrainingSettings, "link")

    def __post_init__(self) -> None:
        check_flags(self)
        for way in self.ways:
            check_choice("way", way, WAYS)
        if HEADS % self.size:
            raise UsageError(f"{self.size} ranks for {HEADS} heads: each gets as many, so choose 1, 2, 3, 4, 6 or 12")


def closed_forms(way: str, settings: TensorSettings) -> Fields:
    """Of one rank and step, in bytes of float32: with L layers, width w, vocabulary V, N ranks, and A the bytes of
    [batch, length, w]."""
    size, layers, width = settings.size, LAYERS, WIDTH
    tokens = settings.batch_size * LENGTH
    hidden, whole = 4 * tokens * width, 4 * (LENGTH * width + (6 * layers + 2) * width)
    cut = 4 * (2 * VOCABULARY * width + layers * (12 * width**2 + 4 * width))
    ring = 2 * (size - 1) / size
    sent = ring * ((4 * layers + 2) * hidden + 3 * 4 * tokens)
    if way == "tensor":
        return {"parameters": whole + cut / size, "messages": 4 * layers + 5, "sent": sent}
    return {"parameters": whole + cut / size, "messages": 8 * layers + 8, "sent": sent + ring * whole}
