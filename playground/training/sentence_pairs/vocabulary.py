"""Where a WordPiece vocabulary comes from: the folder of a pretrained model, or the sentences to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, parse_json
from playground.training.sentence_pairs.wordpiece import LONGEST_WORD, WordPiece, split_words

WORDS = 30_000
"""Number of the training sentences' most frequent words that are in the vocabulary whole."""


def read_wordpiece(folder: Path) -> WordPiece:
    """The tokenizer of a pretrained model, from vocab.txt or tokenizer.json, and tokenizer_config.json if it is there.

    Raises `UsageError` where there is none, where it is damaged, and for a tokenizer that is not BERT's.
    """
    config, tokenizer = read_json(folder / "tokenizer_config.json"), read_json(folder / "tokenizer.json")
    normalizer, model = (read_part(folder, tokenizer, name) for name in ("normalizer", "model"))
    said = [config.get("do_lower_case"), normalizer.get("lowercase"), True]  # the last is the default of transformers
    lower_case = bool(next(each for each in said if each is not None))
    check_normalizer(folder, {"handle_chinese_chars": config.get("tokenize_chinese_chars"), **config}, lower_case)
    check_normalizer(folder, normalizer, lower_case)
    try:
        return WordPiece(read_vocabulary(folder, model), lower_case)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None


def read_part(folder: Path, tokenizer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of tokenizer.json: nothing where there is none. Raises `UsageError` for what is none."""
    try:
        return expect_dict(tokenizer.get(name) or {})
    except ValueError as error:
        raise UsageError(f"{folder}: the {name} in tokenizer.json cannot be read ({error})") from None


def read_vocabulary(folder: Path, model: Mapping[str, Any]) -> list[str]:
    """The tokens in the order of their ids, from vocab.txt, or from what tokenizer.json calls its model."""
    try:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        return lines[: -1 if lines[-1] == "" else None]
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"vocab.txt cannot be read ({error})") from None
    ids = model.get("vocab")
    if not isinstance(ids, dict) or model.get("type", "WordPiece") != "WordPiece":
        raise UsageError("no WordPiece vocabulary there: it needs vocab.txt, or a tokenizer.json of type WordPiece")
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise UsageError(f"the {len(ids):,} tokens of tokenizer.json must have the ids from 0 to {len(ids) - 1:,}")
    return sorted(ids, key=lambda token: ids[token])


def check_normalizer(folder: Path, settings: Mapping[str, Any], lower_case: bool) -> None:
    """Raise `UsageError` for settings that our tokenizer does not have."""
    accents, chinese = settings.get("strip_accents"), settings.get("handle_chinese_chars")
    if accents is not None and accents != lower_case:
        rule = "ours strips accents where it lower-cases, and nowhere else"
        raise UsageError(f"{folder}: a tokenizer with strip_accents {accents} and do_lower_case {lower_case}: {rule}")
    if chinese is False:
        raise UsageError(f"{folder}: a tokenizer that does not split Chinese characters: ours always does")


def read_json(file: Path) -> Mapping[str, Any]:
    """The contents of a file of settings; empty where there is none. Raises `UsageError` for a damaged one."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} cannot be read (it holds no JSON object)")
    return content


def build_wordpiece(texts: Iterable[str]) -> WordPiece:
    """A tokenizer made for these texts, in lower case: their most frequent words, and letters to spell the others."""
    spaced = Counter(word for text in texts for word in text.split())
    words: Counter[str] = Counter()
    for text, count in spaced.items():
        for word in split_words(text, lower_case=True):
            words[word[:LONGEST_WORD]] += count
    letters = sorted({letter for word in words for letter in word})
    frequent = [word for word, _ in words.most_common(WORDS) if len(word) > 1]
    return WordPiece.of_words([*letters, *(f"##{letter}" for letter in letters), *frequent], lower_case=True)
