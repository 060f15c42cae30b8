"""Sentence pairs, tokenised once, as files that ranks map into memory: three flat arrays per split,
and their sizes.

| file              | holds                                                                        |
|-------------------|------------------------------------------------------------------------------|
| SPLIT-tokens.i32  | the ids of all pairs in turn, each as [CLS] premise [SEP] hypothesis [SEP]   |
| SPLIT-offsets.i64 | where each pair starts, and where the last one ends                          |
| SPLIT-labels.u8   | one per pair                                                                 |
| sizes.json        | numbers of pairs, `train`, `test`, of tokens, `vocabulary`; ids `pad`, `sep` |

The arrays are in the byte order of the machine. Meant to be called before any rank starts, and safe
if many processes call it at once. Pairs that were tokenised once are found again by the checksums
of the data, the tokenizer and the code, and by their greatest length.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterator
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
FILES = (
    *(f"{split}-{name}" for split in SPLITS for name in ("tokens.i32", "offsets.i64", "labels.u8")),
    SIZES,
)
MAX_LENGTH = 32
"""Tokens that a pair may have, by default."""
CHUNK = 1_000
"""Pairs that are tokenised at once."""


@dataclass(frozen=True, kw_only=True)
class PairsSource(PreparedData):
    """Tokenised pairs, ready on this host. `vocabulary`: word embeddings a model needs."""

    kind: str = "pairs"
    vocabulary: int


def prepare_pairs(
    dataset: str,
    data_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    say: Say = lambda line: None,
    max_length: int = MAX_LENGTH,
) -> PairsSource:
    """The pairs of `dataset`, tokenised, in `data_dir` (None: the default one). Without a
    `tokenizer`, ids stand for the words of the grammar. A pair of more than `max_length` tokens
    loses the ends of its sentences, the longer one's first. `say` is told what takes time. Raises
    `UsageError`."""
    if dataset == "multinli":
        if tokenizer is None:
            raise UsageError(
                "--dataset multinli needs a tokenizer: add --weights, as in --weights "
                f"{pretrained.BASE}"
            )
        origin, checksum, read = pretrained.MULTINLI, pretrained.MULTINLI, pretrained.read_pairs
    else:
        origin, read = "from a small grammar", grammar.generate_pairs
        checksum = f"{grammar.COUNTS} {sha256(Path(grammar.__file__))}"
    tokenizer = tokenizer or new_word_tokenizer()
    parts = [
        checksum,
        tokenizer.fingerprint,
        str(max_length),
        sys.byteorder,
        sha256(Path(__file__)),
    ]
    name = f"{dataset}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"
    folder = (data_dir or default_data_dir()) / "pairs" / name
    if not all((folder / file).exists() for file in FILES):
        say(f"reading and tokenising sentence pairs ({dataset}), once")
        tokenise(read, tokenizer, max_length, folder)
    sizes = read_sizes(folder)
    train, test, vocabulary = (sizes[name] for name in ("train", "test", "vocabulary"))
    return PairsSource(
        name=dataset, why=origin, folder=folder, train=train, test=test, vocabulary=vocabulary
    )


def new_word_tokenizer() -> Tokenizer:
    """One whose tokens are the words of the grammar, and the special ones."""
    ids = {
        token: number
        for number, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *grammar.WORDS))
    }

    def encode(premises: list[str], hypotheses: list[str], max_length: int) -> list[list[int]]:
        return [encode_pair(*pair, max_length) for pair in zip(premises, hypotheses, strict=True)]

    def encode_pair(premise: str, hypothesis: str, max_length: int) -> list[int]:
        first, second = premise.split(), hypothesis.split()
        while len(first) + len(second) > max_length - 3:
            (first if len(first) > len(second) else second).pop()
        return [ids[token] for token in ("[CLS]", *first, "[SEP]", *second, "[SEP]")]

    return Tokenizer(encode, len(ids), ids["[PAD]"], ids["[SEP]"], " ".join(ids))


def tokenise(
    read: Callable[[str], Iterator[tuple[str, str, int]]],
    tokenizer: Tokenizer,
    max_length: int,
    folder: Path,
) -> None:
    """Write the pairs that `read` gives for a split into `folder` as arrays, all of them or
    none."""
    try:
        with replace_files(folder) as unfinished:
            sizes = {name: getattr(tokenizer, name) for name in ("vocabulary", "pad", "sep")}
            for split in SPLITS:
                tokens = array("i")
                offsets = array("q", [0])
                labels = array("B")
                coming = read(split)
                while chunk := list(islice(coming, CHUNK)):
                    premises, hypotheses, classes = map(list, zip(*chunk, strict=True))
                    labels.extend(classes)
                    for ids in tokenizer.encode(premises, hypotheses, max_length):
                        tokens.extend(ids)
                        offsets.append(len(tokens))
                for name, content in (
                    ("tokens.i32", tokens),
                    ("offsets.i64", offsets),
                    ("labels.u8", labels),
                ):
                    with open(unfinished / f"{split}-{name}", "wb") as stream:
                        content.tofile(stream)
                sizes[split] = len(labels)
            (unfinished / SIZES).write_text(json.dumps(sizes))
    except OSError as error:
        raise NoData(
            f"pairs cannot be written to {folder} ({error.strerror}): choose another folder "
            "with PLAYGROUND_DATA_DIR"
        ) from None


def read_sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = json.loads((folder / SIZES).read_text())
    return sizes
