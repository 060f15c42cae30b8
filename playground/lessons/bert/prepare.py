"""Sentence pairs, tokenised once, as files that ranks map into memory: three flat arrays per split, and their sizes.

| file               | holds                                                                                  |
|--------------------|----------------------------------------------------------------------------------------|
| SPLIT-tokens.i32   | the ids of all premises and hypotheses in turn, without special tokens, and one padding |
| SPLIT-offsets.i64  | where each of them starts, and where the last ends: 2 per pair, and one                 |
| SPLIT-labels.u8    | one per pair                                                                           |
| sizes.json         | numbers of pairs, `train` and `test`, and tokens, `vocabulary`; ids `pad`, `cls`, `sep` |

The arrays are in the byte order of the machine. Meant to be called before any rank starts, and safe if many processes
call it at once. Pairs that were tokenised once are found again by the checksums of the data, the tokenizer and the
code.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from playground.lessons.bert import grammar, pretrained
from playground.lessons.bert.pretrained import Tokenizer
from playground.runtime.errors import UsageError
from playground.runtime.files import NoData, replace_files, sha256
from playground.training.prepare import PreparedData, Say, default_data_dir

DATASETS = ("generated", "multinli")
SPLITS = ("train", "test")
SIZES = "sizes.json"
FILES = (*(f"{split}-{name}" for split in SPLITS for name in ("tokens.i32", "offsets.i64", "labels.u8")), SIZES)
CHUNK = 1_000
"""Pairs that are tokenised at once."""


@dataclass(frozen=True, kw_only=True)
class PairsSource(PreparedData):
    """Tokenised pairs, ready on this host. `vocabulary`: word embeddings a model needs."""

    kind: str = "pairs"
    vocabulary: int


def prepare_pairs(
    dataset: str, data_dir: Path | None = None, tokenizer: Tokenizer | None = None, say: Say = lambda line: None
) -> PairsSource:
    """The pairs of `dataset`, tokenised, in `data_dir` (None: the default one). Without a `tokenizer`, ids stand for
    the words of the grammar. `say` is told what takes time. Raises `UsageError`."""
    if dataset == "multinli":
        if tokenizer is None:
            raise UsageError(f"--dataset multinli needs a tokenizer: add --weights, as in --weights {pretrained.BASE}")
        origin, checksum, read = pretrained.MULTINLI, pretrained.MULTINLI, pretrained.read_pairs
    else:
        origin, read = "from a small grammar", grammar.generate_pairs
        checksum = f"{grammar.COUNTS} {sha256(Path(grammar.__file__))}"
    tokenizer = tokenizer or new_word_tokenizer()
    parts = [checksum, tokenizer.fingerprint, sys.byteorder, sha256(Path(__file__))]
    name = f"{dataset}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"
    folder = (data_dir or default_data_dir()) / "pairs" / name
    if not all((folder / file).exists() for file in FILES):
        say(f"reading and tokenising sentence pairs ({dataset}), once")
        tokenise(read, tokenizer, folder)
    sizes = read_sizes(folder)
    train, test, vocabulary = (sizes[name] for name in ("train", "test", "vocabulary"))
    return PairsSource(name=dataset, why=origin, folder=folder, train=train, test=test, vocabulary=vocabulary)


def new_word_tokenizer() -> Tokenizer:
    """One whose tokens are the words of the grammar, and the special ones."""
    ids = {token: number for number, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *grammar.WORDS))}

    def encode(texts: list[str]) -> list[list[int]]:
        return [[ids[word] for word in text.split()] for text in texts]

    return Tokenizer(encode, len(ids), ids["[PAD]"], ids["[CLS]"], ids["[SEP]"], " ".join(ids))


def tokenise(read: Callable[[str], Iterator[tuple[str, str, int]]], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the pairs that `read` gives for a split into `folder` as arrays, all of them or none."""
    try:
        with replace_files(folder) as unfinished:
            counts = {split: write_split(unfinished, split, read(split), tokenizer) for split in SPLITS}
            ids = {name: getattr(tokenizer, name) for name in ("vocabulary", "pad", "cls", "sep")}
            (unfinished / SIZES).write_text(json.dumps({**counts, **ids}))
    except OSError as error:
        raise NoData(f"pairs cannot be written to {folder} ({error.strerror}): choose another --data-dir") from None


def write_split(folder: Path, split: str, pairs: Iterable[tuple[str, str, int]], tokenizer: Tokenizer) -> int:
    """Tokenise the pairs, (premise, hypothesis, label), into the arrays of `split`; returns how many they were."""
    tokens, offsets, labels, coming = array("i"), array("q", [0]), array("B"), iter(pairs)
    while chunk := list(islice(coming, CHUNK)):
        for ids in tokenizer.encode([text for pair in chunk for text in pair[:2]]):
            tokens.extend(ids)
            offsets.append(len(tokens))
        labels.extend(label for *_, label in chunk)
    tokens.append(tokenizer.pad)  # so that there is a token even where every text is empty
    for name, content in (("tokens.i32", tokens), ("offsets.i64", offsets), ("labels.u8", labels)):
        with open(folder / f"{split}-{name}", "wb") as stream:
            content.tofile(stream)
    return len(labels)


def read_sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = json.loads((folder / SIZES).read_text())
    return sizes
