"""The grammar's pairs: every label follows from what the two sentences say, and from neither
alone."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

from playground.lessons.bert import grammar
from playground.lessons.bert.grammar import (
    CONTRADICTION,
    ENTAILMENT,
    NEUTRAL,
    PARENT,
    generate,
    generate_pairs,
)

PAIRS = list(islice(generate(seed=5), 3000))
SLOTS = {
    "manner": list(chain(*grammar.MANNERS)),
    "noun": list(grammar.NOUNS),
    "verb": list(chain(*grammar.VERBS)),
    "place": list(grammar.PLACES),
    "time": list(grammar.TIMES),
}


def said(sentence: str) -> dict[str, str]:
    """What a sentence says of each slot; empty for nothing."""
    return {
        slot: next((phrase for phrase in phrases if f" {phrase} " in f"{sentence} "), "")
        for slot, phrases in SLOTS.items()
    }


def judge(premise: str, hypothesis: str) -> int:
    """The label, found without the generator: compare what is said, slot by slot; the strongest
    difference decides."""
    relations = {ENTAILMENT}
    for (slot, one), other in zip(said(premise).items(), said(hypothesis).values(), strict=True):
        if one == other or not other:
            relations.add(ENTAILMENT)
        elif not one:
            relations.add(NEUTRAL)
        elif slot == "noun" and PARENT.get(one) == other:
            relations.add(ENTAILMENT)
        elif slot == "noun" and PARENT.get(other) == one:
            relations.add(NEUTRAL)
        else:
            relations.add(CONTRADICTION)
    return max(relations, key=(ENTAILMENT, NEUTRAL, CONTRADICTION).index)


def test_every_label_is_what_the_sentences_say() -> None:
    assert [judge(premise, hypothesis) for premise, hypothesis, _ in PAIRS] == [
        label for *_, label in PAIRS
    ]
    exchanged = {
        judge(hypothesis, premise) for premise, hypothesis, label in PAIRS if label == ENTAILMENT
    }
    assert exchanged == {NEUTRAL}
    assert {word for *pair, _ in PAIRS for sentence in pair for word in sentence.split()} == {
        *grammar.WORDS
    }


def test_the_test_split_is_new_and_the_hypothesis_alone_says_nothing_about_the_label() -> None:
    """A naive Bayes classifier of its words, trained on the training split, is right in a third of
    the test split."""
    train, test = list(generate_pairs("train")), list(generate_pairs("test"))
    assert (len(train), len(test)) == tuple(grammar.COUNTS.values())
    assert not {pair[1] for pair in train} & {pair[1] for pair in test}
    words = Counter((word, pair[2]) for pair in train for word in pair[1].split())
    labels = Counter(label for *_, label in train)

    def likelihood(sentence: str, label: int) -> float:
        product = 1.0
        for word in sentence.split():
            product *= 3 * words[word, label] / labels[label]
        return product * labels[label]

    right = sum(
        max(range(3), key=lambda label: likelihood(pair[1], label)) == pair[2] for pair in test
    )
    assert abs(right / len(test) - 1 / 3) < 0.035  # three standard deviations of 2,000 guesses
