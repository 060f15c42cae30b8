"""The grammar's pairs in two splits. No hypothesis to test on is one of those to train on."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from itertools import islice

from playground.training.sentence_pairs import grammar

COUNTS = {"train": 30_000, "test": 2_000}
"""How many pairs a split has."""
SEEDS = {"train": 1, "test": 2}
HELD_OUT = 8
"""Of so many hypotheses, one is tested on and not trained on."""


def generate_pairs(split: str) -> Iterator[tuple[str, str, int]]:
    """`COUNTS[split]` pairs: (premise, hypothesis, label), the same at every call.

    Cut by the hypothesis, both splits keep what the grammar promises: it says nothing about the label. Were only the
    pairs kept apart, the test split would be short of neutral ones, of which a hypothesis has the fewest.
    """
    drawn = grammar.generate(sys.maxsize, SEEDS[split])  # as many as are asked for
    wanted = (pair for pair in drawn if is_held_out(pair[1]) == (split == "test"))
    return islice(wanted, COUNTS[split])


def is_held_out(hypothesis: str) -> bool:
    """Whether a hypothesis belongs to the test split: the same ones in every run, one in `HELD_OUT`."""
    return zlib.crc32(hypothesis.encode()) % HELD_OUT == 0
