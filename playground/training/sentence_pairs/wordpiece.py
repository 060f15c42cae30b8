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
from collections.abc import Iterable, Sequence

from playground.runtime.errors import UsageError

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
