"""Get sentence pairs onto this machine, tokenised: found, fetched from the hub, or generated.

MultiNLI is 393,000 pairs of a premise and a hypothesis from ten genres, each labelled by people.
Source: Williams et al., A Broad-Coverage Challenge Corpus for Sentence Understanding through Inference, 2018, arXiv
1704.05426; https://cims.nyu.edu/~sbowman/multinli/ has the archive, huggingface.co/datasets/nyu-mll/multi_nli the same.

Meant to be called before any rank starts, and safe if many processes call it at once. Pairs that were tokenised
once are found again by the checksums of the data, the tokenizer and the code, and are whole or made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from playground.runtime.files import (
    CHECKSUMS,
    NoData,
    find_damaged,
    lock_directory,
    read_checksums,
    replace_files,
    sha256,
    write_checksums,
)
from playground.runtime.untrusted import parse_json, printable
from playground.training import hub
from playground.training.prepare import Say, default_data_dir
from playground.training.sentence_pairs import arrays, grammar, wordpiece
from playground.training.sentence_pairs.wordpiece import WordPiece, build_wordpiece

DATASETS = ("auto", "multinli", "generated")
Pair = tuple[str, str, int]
"""Premise, hypothesis, label."""
SPLITS = ("train", "test")
FILES = {"train": "multinli_1.0_train.jsonl", "test": "multinli_1.0_dev_matched.jsonl"}
"""Files of the archive. Its test labels were never published: the matched development set is the test set."""
LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}
MAX_LINE = 2**20
"""Bytes: those of the archive have up to 10,000."""
NO_AGREEMENT = "-"
"""The label of a pair that people did not agree on; it is left out."""
HUB_NAME = "nyu-mll/multi_nli"
HUB_SPLITS = {"train": "train", "test": "validation_matched"}


def find_multinli(data_dir: Path) -> Path | None:
    """The folder with the two files: `data_dir` or the one in it that the archive unpacks to; None if neither is one.
    Raises `NoData` for a folder that has only one of the files."""
    for folder in (data_dir, data_dir / "multinli_1.0"):
        missing = [name for name in FILES.values() if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(FILES):
            raise NoData(f"MultiNLI in {folder} lacks {', '.join(missing)}: unpack multinli_1.0.zip there whole")
    return None


def read_pairs(folder: Path, split: str) -> Iterator[Pair]:
    """The labelled pairs of "train" or "test". Raises `NoData` naming file and line where one cannot be read."""
    file = folder / FILES[split]
    try:
        with open(file, "rb") as stream:
            for number, line in enumerate(iter(partial(stream.readline, MAX_LINE), b""), 1):
                try:
                    pair = parse_line(line)
                except ValueError as error:
                    raise NoData(f"{file}, line {number:,}: {error}; unpack multinli_1.0.zip once more") from None
                if pair:
                    yield pair
    except OSError as error:
        raise NoData(f"{file} cannot be read ({error.strerror})") from None


def parse_line(line: bytes) -> Pair | None:
    """A line of the file; None for a pair without a label. Raises `ValueError`, in words, for what is no such line."""
    try:
        fields: Any = parse_json(line)
    except ValueError:
        raise ValueError("it is not JSON") from None
    for name in ("gold_label", "sentence1", "sentence2"):
        if not isinstance(fields, dict) or not isinstance(fields.get(name), str):
            raise ValueError(f'it has no text "{name}"')
    label = fields["gold_label"]
    if label == NO_AGREEMENT:
        return None
    if label not in LABELS:
        raise ValueError(f'its gold_label is "{printable(label[:40])}", none of {", ".join(LABELS)}, {NO_AGREEMENT}')
    return fields["sentence1"], fields["sentence2"], LABELS[label]


def read_hub_pairs(split: str) -> Iterator[Pair]:
    """The same pairs from the hub, through the package `datasets`. Raises `NoData`."""
    for row in hub.load_split(HUB_NAME, HUB_SPLITS[split]):
        if row["label"] in LABELS.values():
            yield row["premise"], row["hypothesis"], row["label"]


@dataclass(frozen=True)
class PairsSource:
    """Where tokenised pairs lie: `name` is multinli or generated, `why` tells how they came, the rest how many.
    `vocabulary` is how many word embeddings a model needs for them."""

    name: str
    folder: Path
    why: str
    train: int
    test: int
    vocabulary: int


@dataclass(frozen=True)
class Corpus:
    """Pairs before they are tokenised. `checksum` tells them from others; `read` gives those of a split."""

    name: str
    why: str
    checksum: str
    read: Callable[[str], Iterator[Pair]]

    def build_tokenizer(self) -> WordPiece:
        """One for a model from scratch."""
        if self.name == "generated":
            return WordPiece.of_words(grammar.WORDS)
        return build_wordpiece(chain.from_iterable(pair[:2] for pair in self.read("train")))


def prepare_pairs(
    dataset: str, data_dir: Path | None = None, tokenizer: WordPiece | None = None, say: Say = lambda line: None
) -> PairsSource:
    """The pairs of `dataset`, tokenised, in `data_dir` (None: the default one).

    "multinli" is the official folder if it is in `data_dir`, else the hub's; "auto" the same, else generated pairs.
    Without a `tokenizer` one is made for these pairs, for a model from scratch: it would learn little from MultiNLI, so
    for it "auto" does not ask the hub. `say` is told what takes time. Raises `NoData`.
    """
    where = data_dir or default_data_dir()
    if dataset == "generated":
        return find_or_tokenise(of_grammar("as asked"), tokenizer, [where], say)
    if folder := find_multinli(where):
        checksum = " ".join(sha256(folder / name) for name in FILES.values())
        archive = Corpus("multinli", f"found in {folder}", checksum, partial(read_pairs, folder))
        data_dirs = [where]
        with contextlib.suppress(NoData):  # where its pairs go if the archive's folder cannot be written to
            data_dirs.append(default_data_dir())
        return find_or_tokenise(archive, tokenizer, data_dirs, say)
    if dataset == "auto" and (tokenizer is None or not hub.is_installed("datasets")):
        missing = "the extra hub is not installed" if tokenizer else "a model from scratch does not ask the hub"
        why = f"no MultiNLI in {where}, and {missing}"
        return find_or_tokenise(of_grammar(why), tokenizer, [where], say)
    try:
        if not hub.is_installed("datasets"):
            raise NoData(f"the hub is asked through the package datasets, which is not installed: {hub.INSTALL}")
        # The hub's MultiNLI has not changed in years: its name is its checksum.
        published = Corpus("multinli", f"{HUB_NAME} from the hub", HUB_NAME, read_hub_pairs)
        return find_or_tokenise(published, tokenizer, [where], say)
    except NoData as error:
        if dataset == "multinli":
            raise NoData(f"{where} has no {' and no '.join(FILES.values())}, and {error}") from None
        return find_or_tokenise(of_grammar(f"no MultiNLI in {where}, and {error.why}"), tokenizer, [where], say)


def of_grammar(why: str) -> Corpus:
    """Pairs of the grammar, known by the code that generates them."""
    checksum = f"{grammar.COUNTS} {sha256(Path(grammar.__file__))}"
    return Corpus("generated", why, checksum, grammar.generate_pairs)


def find_or_tokenise(corpus: Corpus, tokenizer: WordPiece | None, data_dirs: list[Path], say: Say) -> PairsSource:
    """The corpus as arrays: found in one of `data_dirs`, else written into the first of them that can be."""
    folders = [data_dir / "pairs" / key(corpus, tokenizer) for data_dir in data_dirs]
    whole = [folder for folder in folders if not find_damaged(folder, read_checksums(folder, arrays.FILES))]
    folder = whole[0] if whole else choose_writable(folders)
    if not whole:
        tokenise(corpus, tokenizer, folder, say)
    sizes = arrays.read_sizes(folder)
    return PairsSource(corpus.name, folder, corpus.why, sizes.train, sizes.test, sizes.vocabulary)


def key(corpus: Corpus, tokenizer: WordPiece | None) -> str:
    """The name of the folder for these tokens: a checksum of all that decides what they are."""
    code = [sha256(Path(file)) for file in (arrays.__file__, __file__, wordpiece.__file__)]
    parts = [corpus.checksum, tokenizer.fingerprint if tokenizer else "its own words", sys.byteorder, *code]
    return f"{corpus.name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def choose_writable(folders: list[Path]) -> Path:
    """The first of `folders` that can be made and locked, else the last, which then says why not."""
    for folder in folders[:-1]:
        with contextlib.suppress(NoData), lock_directory(folder):
            return folder
    return folders[-1]


def tokenise(corpus: Corpus, tokenizer: WordPiece | None, folder: Path, say: Say) -> None:
    """Write the corpus into `folder` as arrays, all of them or none, unless another process just did."""
    with lock_directory(folder):
        damaged = find_damaged(folder, read_checksums(folder, arrays.FILES))
        if not damaged:
            return
        if (folder / CHECKSUMS).exists():
            say(f"{', '.join(damaged)} in {folder}: damaged, so they are made again")
        say(f"reading and tokenising sentence pairs ({corpus.name}), once")
        tokenizer = tokenizer or corpus.build_tokenizer()
        try:
            with replace_files(folder) as unfinished:
                counts = {
                    split: arrays.write_split(unfinished, split, corpus.read(split), tokenizer) for split in SPLITS
                }
                if not all(counts.values()):
                    raise NoData(f"{corpus.name}, {corpus.why}, has no pair with a label to train on or to test on")
                arrays.write_sizes(unfinished, counts, tokenizer)
                write_checksums(unfinished, arrays.FILES)
        except OSError as error:
            raise NoData(f"pairs cannot be written to {folder} ({error.strerror}): choose another --data-dir") from None
