"""Sentence pairs: tokenised once and whole, and the batches that transformers would make of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from playground.lessons.bert import grammar, prepare
from playground.lessons.bert.grammar import generate_pairs
from playground.lessons.bert.pairs import PairBatch, Pairs
from playground.lessons.bert.prepare import PairsSource, prepare_pairs
from playground.lessons.bert.pretrained import Tokenizer

LETTERS = "abcdefghij"
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS)


def encode(texts: list[str]) -> list[list[int]]:
    return [[VOCABULARY.index(letter) for letter in text.split()] for text in texts]


TOKENIZER = Tokenizer(encode, len(VOCABULARY), pad=0, cls=2, sep=3, fingerprint="letters")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COUNTS", {"train": 60, "test": 20})


@pytest.fixture
def source(tmp_path: Path, few: None) -> PairsSource:
    return prepare_pairs("generated", tmp_path / "data")


def texts_of(batch: PairBatch, vocabulary: tuple[str, ...]) -> list[str]:
    return [" ".join(vocabulary[i] for i in ids) for ids in batch.input_ids.tolist()]


def test_generated_pairs_come_out_as_the_grammar_says_them(source: PairsSource) -> None:
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *grammar.WORDS)
    assert (source.name, source.train, source.test) == ("generated", 60, 20)
    assert source.vocabulary == len(vocabulary)
    for split, count in (("train", 60), ("test", 20)):
        pairs = Pairs(source.folder, split, max_length=64)
        assert len(pairs) == count
        batch = pairs.__getitems__(range(count))
        expected = [*generate_pairs(split)]
        assert batch.labels.tolist() == [label for _, _, label in expected]
        said = [f"[CLS] {premise} [SEP] {hypothesis} [SEP]" for premise, hypothesis, _ in expected]
        assert [text.split(" [PAD]")[0] for text in texts_of(batch, vocabulary)] == said


PAIR = st.tuples(st.text(LETTERS, max_size=12), st.text(LETTERS, max_size=12), st.integers(0, 2))


@functools.cache
def their_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return transformers.BertTokenizer.from_pretrained(str(folder), do_lower_case=False)


@settings(max_examples=30)
@given(st.lists(PAIR, min_size=1, max_size=6), st.integers(5, 30))
def test_batches_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str, int]], max_length: int
) -> None:
    """Letters are words here: `" ".join` makes them a sentence. Every length meets every other, and every limit."""
    folder = tmp_path_factory.getbasetemp() / "pairs"
    folder.mkdir(exist_ok=True)
    spaced = [(" ".join(premise), " ".join(hypothesis), label) for premise, hypothesis, label in pairs]
    assert prepare.write_split(folder, "train", spaced, TOKENIZER) == len(pairs)
    (folder / prepare.SIZES).write_text(json.dumps({"pad": 0, "cls": 2, "sep": 3}))
    batch = Pairs(folder, "train", max_length).__getitems__(range(len(pairs)))
    premises, hypotheses, labels = map(list, zip(*spaced, strict=True))
    theirs = their_tokenizer(folder)(
        premises, hypotheses, truncation=True, max_length=max_length, padding=True, return_tensors="pt"
    )
    assert torch.equal(batch.input_ids, theirs["input_ids"])
    assert torch.equal(batch.token_type_ids, theirs["token_type_ids"])
    assert torch.equal(batch.attention_mask, theirs["attention_mask"].bool())
    assert batch.labels.tolist() == labels
