"""Sentence pairs from a small grammar, which stand in for MultiNLI where it cannot be had.

A sentence says who does what, and perhaps how, where and when: "the small poodle waits in the city
at night". A premise is its hypothesis with a few of these changed, and that decides the label:

| what the premise says          | for example                     | label         |
|--------------------------------|---------------------------------|---------------|
| the same, but in more detail   | poodle for dog; at night, added | entailment    |
| the same, but leaves some open | animal for dog; not when        | neutral       |
| something else                 | cat for dog; large for small    | contradiction |

The strongest change decides: contradiction before neutral before entailment. The hypothesis is
drawn before the label, and each label is possible for every hypothesis: so the hypothesis alone
says nothing about the label. The words of both sentences together do not decide it either: exchange
the two sentences, and an entailment becomes neutral. Source of the task: Williams et al., MultiNLI,
2018, arXiv 1704.05426; of such relations: MacCartney and Manning, Natural Logic for Textual
Inference, 2007
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import chain, islice
from random import Random
from typing import NamedTuple

ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
"""In the order in which MultiNLI numbers them."""

KINDS = {
    "animal": {
        "dog": ("poodle", "terrier"),
        "cat": ("siamese", "tabby"),
        "bird": ("sparrow", "eagle"),
    },
    "person": {
        "child": ("boy", "girl"),
        "worker": ("farmer", "baker"),
        "artist": ("renderer", "singer"),
    },
    "vehicle": {
        "car": ("taxi", "limousine"),
        "ship": ("ferry", "yacht"),
        "plane": ("jet", "glider"),
    },
}
"""The nouns, from the general to the particular."""
MANNERS = (("small", "large"), ("quiet", "loud"), ("clean", "dirty"), ("slow", "fast"))
VERBS = (("arrives", "leaves"), ("starts", "stops"), ("waits", "hurries"))
PLACES = ("in the city", "in the desert", "in the forest", "in the mountains")
TIMES = ("at dawn", "at noon", "at dusk", "at night")
WEAKER = 0.25
"""How often a premise has a second change, one that does not alter the label."""

PARENT = {
    **{kind: group for group, kinds in KINDS.items() for kind in kinds},
    **{name: kind for kinds in KINDS.values() for kind, names in kinds.items() for name in names},
}
"""The general noun of each particular one."""
NOUNS = (*KINDS, *PARENT)
LEVELS = [
    [noun for noun in NOUNS if noun not in PARENT],
    [noun for noun in NOUNS if PARENT.get(noun) in KINDS],
    [noun for noun in NOUNS if PARENT.get(noun, noun) not in KINDS],
]
"""The nouns, from the general to the particular."""
CHILDREN = {noun: [child for child, parent in PARENT.items() if parent == noun] for noun in NOUNS}
OPTIONAL = {"manner": tuple(chain(*MANNERS)), "place": PLACES, "time": TIMES}
"""Optional parts of a sentence."""
OPPOSITE = {word: other for pair in (*MANNERS, *VERBS) for word, other in (pair, pair[::-1])}


class Sentence(NamedTuple):
    """An empty word says nothing about that."""

    manner: str
    noun: str
    verb: str
    place: str
    time: str

    @property
    def text(self) -> str:
        return " ".join(word for word in ("the", *self) if word)


WORDS = tuple(
    dict.fromkeys(
        " ".join(("the", *chain(*MANNERS), *NOUNS, *chain(*VERBS), *PLACES, *TIMES)).split()
    )
)
"""Every word that a sentence can have."""


def generate(seed: int) -> Iterator[tuple[str, str, int]]:
    """Pairs without end: (premise, hypothesis, label). The same seed gives the same pairs."""
    random = Random(seed)
    while True:
        hypothesis = draw_sentence(random)
        label = random.randrange(3)
        yield draw_premise(hypothesis, label, random).text, hypothesis.text, label


def draw_sentence(random: Random) -> Sentence:
    """A sentence that can be said in more detail and in less."""
    while True:
        sentence = Sentence(
            manner=random.choice(("", random.choice(OPTIONAL["manner"]))),
            noun=random.choice(random.choice(LEVELS)),
            verb=random.choice(random.choice(VERBS)),
            place=random.choice(("", random.choice(PLACES))),
            time=random.choice(("", random.choice(TIMES))),
        )
        if all(CHANGES[label](sentence) for label in (ENTAILMENT, NEUTRAL)):
            return sentence


def draw_premise(hypothesis: Sentence, label: int, random: Random) -> Sentence:
    """The hypothesis with one change that makes the label; now and then with another change
    besides, of the same kind or weaker."""
    slot, word = random.choice(CHANGES[label](hypothesis))
    premise = hypothesis._replace(**{slot: word})
    if random.random() < WEAKER:
        weaker = [
            change for change in CHANGES[random.randint(0, label)](hypothesis) if change[0] != slot
        ]
        if weaker:
            slot, word = random.choice(weaker)
            premise = premise._replace(**{slot: word})
    return premise


Substitution = tuple[str, str]
"""A slot, and another word for it."""


def entailing(sentence: Sentence) -> list[Substitution]:
    """The changes that say more."""
    empty = [slot for slot in OPTIONAL if not getattr(sentence, slot)]
    return [
        *(("noun", child) for child in CHILDREN[sentence.noun]),
        *((slot, word) for slot in empty for word in OPTIONAL[slot]),
    ]


def opening(sentence: Sentence) -> list[Substitution]:
    """The changes that say less."""
    parent = [("noun", PARENT[sentence.noun])] if sentence.noun in PARENT else []
    return [*parent, *((slot, "") for slot in OPTIONAL if getattr(sentence, slot))]


def contradicting(sentence: Sentence) -> list[Substitution]:
    """The changes that say what cannot be at the same time."""
    manner, noun, verb, place, time = sentence
    siblings = CHILDREN[PARENT[noun]] if noun in PARENT else KINDS
    return [
        *(("noun", other) for other in siblings if other != noun),
        ("verb", OPPOSITE[verb]),
        *([("manner", OPPOSITE[manner])] if manner else []),
        *(("place", other) for other in PLACES if place and other != place),
        *(("time", other) for other in TIMES if time and other != time),
    ]


CHANGES = (entailing, opening, contradicting)
"""By label: what a premise may have in place of a word of its hypothesis."""


COUNTS = {"train": 30_000, "test": 2_000}
"""How many pairs a split has."""
SEEDS = {"train": 1, "test": 2}
HELD_OUT = 8
"""One in this many hypotheses is held out for the test, the same ones in every run."""


def generate_pairs(split: str) -> Iterator[tuple[str, str, int]]:
    """`COUNTS[split]` pairs: (premise, hypothesis, label), the same at every call.

    Cut by the hypothesis, both splits keep what the grammar promises: it says nothing about the
    label. Were only the pairs kept apart, the test split would be short of neutral ones, of which a
    hypothesis has the fewest.
    """
    held_out = split == "test"
    wanted = (
        pair
        for pair in generate(SEEDS[split])
        if (zlib.crc32(pair[1].encode()) % HELD_OUT == 0) == held_out
    )
    return islice(wanted, COUNTS[split])
