"""What a search finds, and lists first where a reader types what goes wrong. Does not import
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.base.errors import PlaygroundError

SYMPTOMS = {
    "hang stuck stand deadlock freez frozen timeout": (
        ("failures.html#where-to-look-first", "no progress"),
        ("why.html#why-ask-a-run-that-hangs", ""),
        ("break.html#break-programs-that-go-wrong-and-how-to-fix-them", "A distributed program"),
        ("failures.html#which-line-is-it", ""),
    ),
    "slow straggler": (
        ("failures.html#it-may-only-be-slow", ""),
        ("see.html#see-look-at-a-run", "A training is slower"),
        ("break-straggler.html", ""),
    ),
    "nan": (
        ("failures.html#exercise-not-a-number", "all return NaN"),
        ("break-nan.html", ""),
    ),
    "diverg wrong": (
        ("failures.html#where-to-look-first", "ranks differ"),
        ("failures.html#which-line-is-it", ""),
        ("failures.html#failures-it-stands-still-or-it-is-wrong", ""),
    ),
    "memory oom outofmemory": (
        ("memory.html#memory-where-the-bytes-of-a-step-are", "a model that does not fit"),
        ("zero.html#when-it-pays", ""),
        ("memory.html#activations-computed-again", ""),
    ),
}
"""What a reader sees go wrong, by words for it without their endings, and the sections that help,
each with the words at which its answer begins: a search lists them first."""


@dataclass
class Section:
    """A section of a page, as a search knows it."""

    address: str
    title: str
    words: str = ""


def place_symptoms(sections: Sequence[Section]) -> list[tuple[list[str], list[tuple[int, int]]]]:
    """For each of `SYMPTOMS` its words, and for each answer the number of its section among these,
    and where in its text it begins. Raises `PlaygroundError` if there is none."""
    numbers = {section.address: number for number, section in enumerate(sections)}

    def place(address: str, beginning: str) -> tuple[int, int]:
        number = numbers.get(address, -1)
        if number < 0 or beginning not in sections[number].words:
            what = f"words {beginning!r} in it" if number >= 0 else "section"
            raise PlaygroundError(f"a search would lead to {address}: no such {what}")
        return number, sections[number].words.index(beginning)

    return [
        (words.split(), [place(*answer) for answer in answers])
        for words, answers in SYMPTOMS.items()
    ]
