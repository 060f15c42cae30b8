"""What a search finds, and lists first where a reader types what goes wrong. Does not import
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.base.errors import PlaygroundError

SYMPTOMS = {
    "hang stuck stand deadlock freez frozen timeout": (
        "failures.html#where-to-look-first",
        "break.html#ask-a-run-that-hangs",
        "break.html#break-programs-that-go-wrong-and-how-to-fix-them",
        "failures.html#which-line-is-it",
    ),
    "slow straggler": (
        "failures.html#it-may-only-be-slow",
        "see.html#see-look-at-a-run",
        "break-straggler.html",
    ),
    "nan diverg wrong": (
        "failures.html#failures-it-stands-still-or-it-is-wrong",
        "break-nan.html",
        "doctor.html#doctor-is-this-machine-are-these-hosts-fit-for-distributed-training",
    ),
    "memory oom outofmemory": (
        "memory.html#memory-where-the-bytes-of-a-step-are",
        "zero.html#when-it-pays",
        "memory.html#activations-computed-again",
    ),
}
"""What a reader sees go wrong, by the beginnings of words for it, and the sections that help: a
search lists them first."""


@dataclass
class Section:
    """A section of a page, as a search knows it."""

    address: str
    title: str
    words: str = ""


def place_symptoms(sections: Sequence[Section]) -> list[list[list[str] | list[int]]]:
    """For each of `SYMPTOMS` its words, and the numbers of its sections among these. Raises
    `PlaygroundError` if there is no such section."""
    numbers = {section.address: number for number, section in enumerate(sections)}
    named = [address for addresses in SYMPTOMS.values() for address in addresses]
    if missing := [address for address in named if address not in numbers]:
        raise PlaygroundError(f"a search would lead to {', '.join(missing)}: no such section")
    return [
        [words.split(), [numbers[address] for address in addresses]]
        for words, addresses in SYMPTOMS.items()
    ]
