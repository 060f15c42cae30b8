"""Tokenised pairs as files: three flat arrays per split, and their sizes.

| file               | holds                                                                                  |
|--------------------|----------------------------------------------------------------------------------------|
| SPLIT-tokens.i32   | the ids of all premises and hypotheses in turn, without special tokens, and one padding |
| SPLIT-offsets.i64  | where each of them starts, and where the last ends: 2 per pair, and one                 |
| SPLIT-labels.u8    | one per pair                                                                           |
| sizes.json         | `Sizes`                                                                                |

The arrays are in the byte order of the machine.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.training.sentence_pairs.wordpiece import WordPiece

SIZES = "sizes.json"
FILES = (*(f"{s}-{a}" for s in ("train", "test") for a in ("tokens.i32", "offsets.i64", "labels.u8")), SIZES)


@dataclass(frozen=True)
class Sizes:
    """How many pairs there are, how many tokens the vocabulary has, and the ids of the special ones."""

    train: int
    test: int
    vocabulary: int
    pad: int
    cls: int
    sep: int


def write_split(folder: Path, split: str, pairs: Iterable[tuple[str, str, int]], tokenizer: WordPiece) -> int:
    """Tokenise the pairs into the arrays of `split`; returns how many they were."""
    tokens, offsets, labels = array("i"), array("q", [0]), array("B")
    for premise, hypothesis, label in pairs:
        for text in (premise, hypothesis):
            tokens.extend(tokenizer.encode(text))
            offsets.append(len(tokens))
        labels.append(label)
    tokens.append(tokenizer.pad)  # so that there is a token even where every text is empty
    for name, content in (("tokens.i32", tokens), ("offsets.i64", offsets), ("labels.u8", labels)):
        with open(folder / f"{split}-{name}", "wb") as stream:
            content.tofile(stream)
    return len(labels)


def write_sizes(folder: Path, counts: dict[str, int], tokenizer: WordPiece) -> None:
    sizes = Sizes(
        **counts, vocabulary=len(tokenizer.vocabulary), pad=tokenizer.pad, cls=tokenizer.cls, sep=tokenizer.sep
    )
    (folder / SIZES).write_text(json.dumps(asdict(sizes)))


def read_sizes(folder: Path) -> Sizes:
    return Sizes(**json.loads((folder / SIZES).read_text()))
