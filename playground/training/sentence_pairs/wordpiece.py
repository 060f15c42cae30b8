"""BERT's tokenizer: text becomes the ids of words, and of pieces of words that the vocabulary does not hold whole.

    "An unaffable poodle!" → an un ##aff ##able poodle !

A piece that continues a word is written with "##" in front. Special tokens in a text ("[SEP]") are text like any other.
Sources: Wu et al., Google's Neural Machine Translation System, 2016, arXiv 1609.08144; Devlin et al., BERT, 2019, arXiv
1810.04805. `BertTokenizer` of transformers gives the same ids, with `split_special_tokens=True`, for every character
whose category in Unicode has not changed since version 8.
"""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, parse_json

PAD, UNK, CLS, SEP = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
"""Padding, a word that cannot be spelled, the start of a sequence, the end of a sentence."""
LONGEST_WORD = 100
"""In characters; a longer one is unknown."""
CONTROL_SEPARATORS = dict.fromkeys(map(ord, "\x0b\x0c\x1c\x1d\x1e\x1f\x85"))
"""Control characters at which `str.split` would split; BERT drops them, so that the words beside them become one."""
CJK = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f]"
)
"""Chinese characters, of which each is a word. (BERT calls them CJK, but Kana and Hangul are left as they are.)"""


class WordPiece:
    """`vocabulary[i]` is the token with id i. With `lower_case`, accents are stripped too, as "uncased" models want it.

    `pad`, `unk`, `cls` and `sep` are the ids of the special tokens. Raises `UsageError` for a vocabulary without them.
    """

    def __init__(self, vocabulary: Sequence[str], lower_case: bool) -> None:
        self.vocabulary, self.lower_case = tuple(vocabulary), lower_case
        self.ids = {token: i for i, token in enumerate(self.vocabulary)}
        if missing := [token for token in SPECIAL if token not in self.ids]:
            raise UsageError(f"a WordPiece vocabulary of {len(self.ids):,} tokens without {', '.join(missing)}")
        self.pad, self.unk, self.cls, self.sep = (self.ids[token] for token in SPECIAL)
        self.encoded: dict[str, list[int]] = {}
        """Cached pieces by word: most words of a text have come before."""

    @classmethod
    def of_words(cls, words: Iterable[str], lower_case: bool = False) -> WordPiece:
        """The special tokens, then these words."""
        return cls((*SPECIAL, *words), lower_case)

    @property
    def fingerprint(self) -> str:
        """A checksum: tokenizers that share it give every text the same ids."""
        text = "\n".join([str(self.lower_case), *self.vocabulary])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around them."""
        ids: list[int] = []
        for word in text.translate(CONTROL_SEPARATORS).split():
            if word not in self.encoded:
                parts = split_words(word, self.lower_case)
                self.encoded[word] = [piece for part in parts for piece in self.encode_word(part)]
            ids += self.encoded[word]
        return ids

    def encode_word(self, word: str) -> list[int]:
        """The longest piece that the vocabulary holds, then the longest one after it, and so on; else unknown."""
        if len(word) > LONGEST_WORD:
            return [self.unk]
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                piece = self.ids.get(prefix + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.unk]
            pieces.append(piece)
            start = end
        return pieces


def split_words(text: str, lower_case: bool) -> list[str]:
    """The words of a text, and its punctuation marks and Chinese characters one by one."""
    text = "".join(character for character in text if not is_dropped(character))
    if lower_case:  # a capital sigma first: at the end of a word `lower` makes another letter of it than BERT does
        text = strip_accents(text).replace("\u03a3", "\u03c3").lower()
    return "".join(f" {character} " if is_alone(character) else character for character in text).split()


def is_dropped(character: str) -> bool:
    """Whether it is invisible (control, format and private characters), or stands for what could not be read."""
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs")


def is_alone(character: str) -> bool:
    """Whether it is a word of its own: all of ASCII's symbols count as punctuation, "$" and "+" too."""
    is_punctuation = character in string.punctuation or unicodedata.category(character)[0] == "P"
    return is_punctuation or CJK.match(character) is not None


def strip_accents(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn")


WORDS = 30_000
"""Number of the training sentences' most frequent words that are in the vocabulary whole."""


def read_wordpiece(folder: Path) -> WordPiece:
    """The tokenizer of a pretrained model, from vocab.txt or tokenizer.json, and tokenizer_config.json if it is there.
    Raises `UsageError` where there is none, where it is damaged, and for a tokenizer that is not BERT's."""
    config, tokenizer = read_json(folder / "tokenizer_config.json"), read_json(folder / "tokenizer.json")
    parts = []
    for name in ("normalizer", "model"):
        try:
            parts.append(expect_dict(tokenizer.get(name) or {}))
        except ValueError as error:
            raise UsageError(f"{folder}: the {name} in tokenizer.json cannot be read ({error})") from None
    normalizer, model = parts
    said = [config.get("do_lower_case"), normalizer.get("lowercase"), True]  # the last is the default of transformers
    lower_case = bool(next(each for each in said if each is not None))
    check_normalizer(folder, {"handle_chinese_chars": config.get("tokenize_chinese_chars"), **config}, lower_case)
    check_normalizer(folder, normalizer, lower_case)
    try:
        return WordPiece(read_vocabulary(folder, model), lower_case)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None


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
