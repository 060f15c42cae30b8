"""A program to be repaired. A seed draws its fault, the names in it, and the data that the judge
gives it. Does not import torch.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from playground.exercises.changes import Change, patch, read_changes

SEED = re.compile(r"^SEED = (\d+)$", re.MULTILINE)
CULPRIT = re.compile(r"^RANK = (.*)$", re.MULTILINE)
"""The learner's answer: the rank at fault."""
NAMES = re.compile(r"^# names: (.+)$", re.MULTILINE)
"""In `faults.diff`, names in the program, and those that may take their place:
total/amount/result."""
SEEDS = 10_000
SEEDS_APART = 24
"""The text of a program repeats after so many seeds, or fewer: a fault and names are drawn."""
MOST_CHANGED = 6
"""Lines of a program that a repair may take away and add."""
PerFault = TypeVar("PerFault")


def of_fault(seed: int, by_fault: Sequence[PerFault]) -> PerFault:
    """The one of these that goes with the fault of this seed. They are in the order of
    `faults.diff`."""
    return by_fault[seed % len(by_fault)]


def new_seed() -> int:
    """The seed of a program that is handed out."""
    return 1 + secrets.randbelow(SEEDS)


def seed_of(text: str) -> int | None:
    """The seed that a program names; None if it names none."""
    found = SEED.search(text)
    return int(found[1][:9]) if found else None


def with_answer_of(text: str, program: str) -> str:
    """A program with the answer that is in the text, if there is one."""
    answer = CULPRIT.search(text)
    return CULPRIT.sub(answer[0], program) if answer else program


@dataclass(frozen=True)
class Repair:
    """A program to be repaired, with one seed."""

    written: str
    """The repaired program, as its author has written it."""
    faults: str
    """The text of `faults.diff`."""
    seed: int

    @property
    def fault(self) -> Change:
        """The change that breaks it."""
        return of_fault(self.seed, read_changes(self.faults))

    @property
    def broken(self) -> str:
        """The program with its fault, and without an answer."""
        return self.draw_names(CULPRIT.sub("RANK = None", patch(self.written, self.fault.lines)))

    def draw_names(self, text: str) -> str:
        """A version of the program with its seed, and the names that go with the seed: a repair of
        another program has other lines."""
        head, quotes, body = text.rpartition('"""')
        for group in " ".join(NAMES.findall(self.faults)).split():
            names = group.split("/")
            body = re.sub(rf"\b{names[0]}\b", names[self.seed // 2 % len(names)], body)
        return SEED.sub(f"SEED = {self.seed}", f"{head}{quotes}{body}")

    def is_of_another_seed(self, text: str) -> bool:
        """Whether this text has far fewer changes of the program of another seed."""
        changed = len(self.find_changes(text))
        others = (replace(self, seed=seed) for seed in range(SEEDS_APART))
        return any(
            2 * len(each.find_changes(SEED.sub(f"SEED = {each.seed}", text))) < changed
            for each in others
        )

    def find_changes(self, text: str) -> list[str]:
        """Lines that a repair takes away (-) and adds (+), but for the answer, comments and empty
        lines."""
        before, after = (
            [line.rstrip() for line in CULPRIT.sub("", each).splitlines()]
            for each in (self.broken, text)
        )
        return [
            line
            for line in difflib.ndiff(before, after)
            if line[0] in "-+" and line[1:].strip() and not line[1:].strip().startswith("#")
        ]
