"""The tokenizer: the ids that transformers gives, from every kind of folder it writes."""

from __future__ import annotations

import functools
import json
import string
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from playground.runtime.errors import UsageError
from playground.training.sentence_pairs.wordpiece import (
    SPECIAL,
    WordPiece,
    build_wordpiece,
    read_wordpiece,
    split_words,
)

LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, *"ßéàñüσαж日本かカ한"]
PIECES = [
    "the",
    "an",
    "un",
    "##aff",
    "##able",
    "##ff",
    "##abl",
    "bird",
    "##s",
    "##ing",
    "E",
    "##É",
    "The",
    "i",
    "##\u0131",
]
TAILS = [f"##{letter}" for letter in LETTERS if letter not in "xq"]
VOCABULARY = [*dict.fromkeys([*SPECIAL, "[MASK]", *LETTERS, *TAILS, *PIECES])]


def category_is_old(character: str) -> bool:
    """Whether its category has not changed since Unicode 3.2: later ones are not the same in every library."""
    return unicodedata.category(character) == unicodedata.ucd_3_2_0.category(character) != "Cn"


CHARACTERS = st.one_of(
    st.sampled_from([*LETTERS, *" \t\n\r\x0b\x0c\x1c\x85\u00a0\u200b\u2028\0\ufffd\u0301\u0130\u03a3\uf900$"]),
    st.characters(codec="utf-8").filter(category_is_old),
)
TEXTS = st.one_of(
    st.lists(st.one_of(st.sampled_from(["unaffable", "Birds", "ÉTÉ", " "]), CHARACTERS), max_size=30).map("".join),
    st.integers(95, 105).map("a".__mul__),
)


@functools.cache
def their_tokenizer(folder: Path, lower_case: bool) -> Callable[[str], list[int]]:
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    tokenizer = transformers.BertTokenizer.from_pretrained(str(folder), do_lower_case=lower_case)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    return encode


@pytest.fixture(scope="session")
def vocabulary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("lower_case", [True, False])
@settings(max_examples=60)
@given(text=TEXTS)
def test_ids_are_those_of_transformers(lower_case: bool, text: str, vocabulary_folder: Path) -> None:
    assert WordPiece(VOCABULARY, lower_case).encode(text) == their_tokenizer(vocabulary_folder, lower_case)(text)


def test_words_become_the_longest_pieces() -> None:
    tokenizer = WordPiece([*SPECIAL, "an", "un", "##aff", "##able", "##a", "!"], lower_case=True)
    tokens = [tokenizer.vocabulary[i] for i in tokenizer.encode("An unaffable poodle! Ün-an")]
    assert tokens == ["an", "un", "##aff", "##able", "[UNK]", "!", "un", "[UNK]", "an"]
    assert tokenizer.encode("a" * 101) == [tokenizer.unk]
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep) == (0, 1, 2, 3)


def test_the_fingerprint_tells_tokenizers_apart() -> None:
    one = WordPiece.of_words(["a", "b"])
    assert one.fingerprint == WordPiece([*SPECIAL, "a", "b"], lower_case=False).fingerprint
    others = [WordPiece.of_words(["b", "a"]), WordPiece.of_words(["a", "b"], lower_case=True), WordPiece.of_words("a")]
    assert len({tokenizer.fingerprint for tokenizer in (one, *others)}) == 4


def write_folder(folder: Path, form: str) -> None:
    """A tokenizer as folders on the hub hold it: new ones, old ones, and those without a second file."""
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    normalizer = {"type": "BertNormalizer", "lowercase": False, "strip_accents": None, "handle_chinese_chars": True}
    tokenizer = {"normalizer": normalizer, "model": {"type": "WordPiece", "vocab": vocabulary}}
    if "vocab.txt" in form:
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    if "tokenizer.json" in form:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if "config" in form:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "strip_accents": None}))


@pytest.mark.parametrize(
    ("form", "lower_case"),
    [("vocab.txt", True), ("vocab.txt config", False), ("tokenizer.json", False), ("vocab.txt tokenizer.json", False)],
)
def test_a_tokenizer_is_read_from_every_form_of_folder(form: str, lower_case: bool, tmp_path: Path) -> None:
    write_folder(tmp_path, form)
    tokenizer = read_wordpiece(tmp_path)
    assert tokenizer.vocabulary == tuple(VOCABULARY)
    assert tokenizer.lower_case is lower_case


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"it needs vocab.txt, or a tokenizer.json"),
        ({"vocab.txt": "[PAD]\n[UNK]\n[CLS]\na\n"}, r"4 tokens without \[SEP\]"),
        ({"vocab.txt": "\udcff"}, r"vocab.txt cannot be read"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}}}'}, "of type WordPiece"),
        ({"tokenizer.json": '{"model": {"vocab": {"a": 0, "b": "2"}}}'}, "ids from 0 to 1"),
        ({"tokenizer.json": "{"}, r"tokenizer.json cannot be read \(Expecting"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config.json cannot be read \(it holds no JSON object"),
        ({"tokenizer_config.json": '{"do_lower_case": true, "strip_accents": false}'}, "strip_accents False"),
        ({"tokenizer_config.json": '{"tokenize_chinese_chars": false}'}, "Chinese"),
        ({"tokenizer.json": '{"normalizer": {"handle_chinese_chars": false}}'}, "Chinese"),
    ],
)
def test_a_folder_without_our_tokenizer_is_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message) as caught:
        read_wordpiece(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_made_for_texts_spells_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.training.sentence_pairs.wordpiece.WORDS", 2)
    texts = ["The dog, the cat; the DOG", "a rare 日 word"]
    tokenizer = build_wordpiece(texts)
    assert tokenizer.vocabulary[-2:] == ("the", "dog"), "the most frequent words come whole"
    assert tokenizer.unk not in tokenizer.encode(" ".join(texts))
    spelled = [tokenizer.vocabulary[i] for i in tokenizer.encode("cat")]
    assert spelled == ["c", "##a", "##t"]


@settings(max_examples=30)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_no_word_of_the_texts_is_unknown(texts: list[str]) -> None:
    words: list[Any] = [word for text in texts for word in split_words(text, lower_case=True) if len(word) <= 100]
    tokenizer = build_wordpiece(texts)
    assert tokenizer.unk not in tokenizer.encode(" ".join(words))
