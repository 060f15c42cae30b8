"""Sentence pairs: tokenised once and whole, cut to a greatest length, and given in padded
batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from playground.lessons.bert import grammar
from playground.lessons.bert.grammar import generate_pairs
from playground.lessons.bert.pairs import Pairs
from playground.lessons.bert.prepare import FILES, new_word_tokenizer, prepare_pairs

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *grammar.WORDS)


def test_generated_pairs_come_out_as_the_grammar_says_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COUNTS", {"train": 60, "test": 20})
    source = prepare_pairs("generated", tmp_path / "data")
    assert (source.name, source.train, source.test, source.vocabulary) == (
        "generated",
        60,
        20,
        len(VOCABULARY),
    )
    for split, count in (("train", 60), ("test", 20)):
        pairs, expected = Pairs(source.folder, split), [*generate_pairs(split)]
        assert len(pairs) == count
        batch = pairs.__getitems__(range(count))
        assert batch.labels.tolist() == [label for _, _, label in expected]
        for (premise, hypothesis, _), *row in zip(
            expected, *(each.tolist() for each in batch.inputs), strict=True
        ):
            ids, segments, mask = row
            assert (
                " ".join(VOCABULARY[i] for i in ids[: sum(mask)])
                == f"[CLS] {premise} [SEP] {hypothesis} [SEP]"
            )
            ones, padding = len(hypothesis.split()) + 1, len(ids) - sum(mask)
            assert segments == [0] * (sum(mask) - ones) + [1] * ones + [0] * padding
            assert (ids[sum(mask) :], mask) == (
                [0] * padding,
                [True] * sum(mask) + [False] * padding,
            )


def test_pairs_are_tokenised_once_for_each_tokenizer_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is made again, with the same content."""
    monkeypatch.setattr(grammar, "COUNTS", {"train": 6, "test": 2})
    said: list[str] = []
    tokenizer = new_word_tokenizer()
    other = tokenizer._replace(fingerprint="another")
    ask = partial(prepare_pairs, "generated", tmp_path, say=said.append)
    sources = [ask(tokenizer), ask(tokenizer), ask(other), ask(tokenizer, max_length=7)]
    assert len({source.folder for source in sources}) == len(said) == 3
    whole = {file: (sources[0].folder / file).read_bytes() for file in FILES}
    (sources[0].folder / "train-tokens.i32").unlink()
    assert ask(tokenizer) == sources[0]
    assert {file: (sources[0].folder / file).read_bytes() for file in FILES} == whole


def test_a_path_that_is_not_utf_8_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COUNTS", {"train": 6, "test": 2})
    folder = prepare_pairs("generated", tmp_path / "\udcff").folder
    assert [len(Pairs(folder, split)) for split in ("train", "test")] == [6, 2]


@pytest.mark.parametrize(
    ("max_length", "words"),
    [
        (32, "[CLS] the small poodle waits at night [SEP] the dog waits [SEP]"),
        (9, "[CLS] the small poodle [SEP] the dog waits [SEP]"),
        (7, "[CLS] the small [SEP] the dog [SEP]"),
    ],
)
def test_the_longer_sentence_is_cut_first(max_length: int, words: str) -> None:
    encode = new_word_tokenizer().encode
    [ids] = encode(["the small poodle waits at night"], ["the dog waits"], max_length)
    assert " ".join(VOCABULARY[i] for i in ids) == words
