"""MultiNLI: 393,000 pairs of a premise and a hypothesis from ten genres, each labelled by people.

Source: Williams et al., A Broad-Coverage Challenge Corpus for Sentence Understanding through Inference, 2018, arXiv
1704.05426; https://cims.nyu.edu/~sbowman/multinli/ has the archive, huggingface.co/datasets/nyu-mll/multi_nli the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from playground.runtime.files import NoData
from playground.runtime.untrusted import parse_json, printable
from playground.training.hub import load_split

Pair = tuple[str, str, int]
"""Premise, hypothesis, label."""

SPLITS = ("train", "test")
FILES = {"train": "multinli_1.0_train.jsonl", "test": "multinli_1.0_dev_matched.jsonl"}
"""Checksum of the archive. Its test labels were never published: the matched development set is the test set."""
LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}
MAX_LINE = 2**20
"""Bytes: those of the archive have up to 10,000."""
NO_AGREEMENT = "-"
"""The label of a pair that people did not agree on; it is left out."""
HUB_NAME = "nyu-mll/multi_nli"
HUB_SPLITS = {"train": "train", "test": "validation_matched"}


def find_multinli(data_dir: Path) -> Path | None:
    """The folder with the two files: `data_dir` or the one in it that the archive unpacks to; None if neither is one.

    Raises `NoData` for a folder that has only one of the files.
    """
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
    for row in load_split(HUB_NAME, HUB_SPLITS[split]):
        if row["label"] in LABELS.values():
            yield row["premise"], row["hypothesis"], row["label"]
