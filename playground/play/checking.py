"""Cells that train are checked for silent mistakes: what the ranks do in them is written down, and
compared when a cell has ended. Does not import torch: the ranks do.

A person at a prompt goes to work piece by piece, and changes one rank's weights, or steps one rank,
to see what becomes of it. So nothing is said of what happens between cells, nor of what a later
cell may answer:

- What is told is certain, and began within the cell: in its training loop, or in a model that was
  made and trained there.
- A cell of some ranks only, and one that ends by an error, a hang or Ctrl-C, makes the ranks
  unknown: what was wrapped before is not looked at any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from playground.base.files import temporary_folder
from playground.explain.right.calls import RULES_OF_CALLS
from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import Finding
from playground.explain.right.log import file_name
from playground.explain.right.reading import count_written, read_ranks
from playground.explain.right.rules import TOLD_AT_THE_END, find_mistakes
from playground.play import cells
from playground.play.cells import Outcome


class CellCheck:
    """What is known of the cells of a world of `size` ranks, in the notebook's process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.files = contextlib.ExitStack()
        self.folder: Path | None = None
        """Where the ranks' logs are; None without room for them: then nothing is known."""
        self.starts = 0
        """How often the ranks began to write down what they do."""
        self.is_unknown = True
        """Whether they are to begin anew."""
        self.steps: dict[int, int] = {}
        """How many steps each optimizer had made when the last cell ended."""
        self.models = 0
        """How many models were wrapped by then."""
        self.written: list[int] = []
        """How much the ranks had written by then."""
        self.seen: set[tuple[str, Collection[int], str]] = set()
        """What was found after earlier cells, told or not, by its rule, ranks and line."""
        with contextlib.suppress(OSError):
            self.folder = self.files.enter_context(temporary_folder("cells"))

    def close(self) -> None:
        self.files.close()

    def prepare(self, run: Callable[..., Outcome]) -> Callable[..., Outcome]:
        """What ranks are to call in the place of `run`, which runs a cell: if they are unknown,
        they begin anew."""
        if self.folder is None or not self.is_unknown:
            return run
        self.starts += 1
        self.steps = {}
        self.models = -1
        self.is_unknown = False
        return partial(cells.run_observed, run, self.folder / str(self.starts))

    def conclude(self, *, is_whole: bool) -> Sequence[Finding]:
        """After a cell: what is certainly wrong, began within it, and was not told before.
        `is_whole`: whether all ranks have run it to its end, in one process group."""
        self.is_unknown = not is_whole
        if self.folder is None:
            return []
        folder = self.folder / str(self.starts)
        written = [count_written(folder / file_name(rank)) for rank in range(self.size)]
        if written == self.written:
            return []
        self.written = written
        facts = read_ranks(folder, self.size)
        known = self.steps
        self.steps = count_steps(facts)
        stepped = [number for number, count in self.steps.items() if count != known.get(number)]
        before = max((known.get(number, 0) for number in stepped), default=0)
        models = self.models
        self.models = max(len(each.models) for each in facts)
        # the ranks began anew in this cell, or a model was wrapped in it
        is_made_here = self.models > models
        try:
            found = find_mistakes(facts) if is_whole else []
        except Exception:  # what a rule does not expect is no reason for a cell to fail
            self.folder = None
            return []
        certain = {
            (each.rule, each.ranks, each.where): each
            for each in found
            if each.is_certain and each.rule not in TOLD_AT_THE_END
        }
        seen = self.seen
        self.seen = self.seen | certain.keys()
        return [
            each
            for key, each in certain.items()
            if key not in seen
            and (
                each.since > before or (is_made_here and not before) or each.rule in RULES_OF_CALLS
            )
        ]


def count_steps(facts: Sequence[RankFacts]) -> dict[int, int]:
    """How many steps each optimizer has made, by its number: on the rank with the most."""
    found: dict[int, int] = {}
    for rank in facts:
        for number, clocks in rank.steps.items():
            found[number] = max(found.get(number, 0), len(clocks))
    return found
