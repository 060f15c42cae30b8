"""Get the training data onto this machine, whole: found, downloaded, or drawn.

Meant to be called before any rank starts, and safe all the same if many processes call it at once:
whoever comes first holds a lock, the others find the work done. Files appear under their names only
when complete, and every file is checked against its checksum at each call.
"""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from playground.base.files import (
    NoData,
    cache_folder,
    find_damaged,
    lock_directory,
    read_checksums,
    replace_files,
    write_checksums,
)

MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The four files, uncompressed, and their SHA-256."""
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
"""Where torchvision looks for MNIST."""
MIRROR = "PLAYGROUND_MNIST_MIRROR"
"""Environment variable: a folder or an address to fetch MNIST from, in place of `MIRRORS`."""
DATA_DIR = "PLAYGROUND_DATA_DIR"
"""Environment variable: the folder in which data is kept."""
NETWORK_TIMEOUT = 10.0
"""Seconds without a byte from a server before it counts as out of reach."""
DATASETS = ("auto", "mnist", "digits")
UNFETCHED = OSError, RuntimeError, EOFError, ValueError, zlib.error, http.client.HTTPException
"""What is raised where a file cannot be fetched, or is not what was expected."""
Say = Callable[[str], None]
Settings = TypeVar("Settings", bound=Any)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The data, ready on this host."""

    name: str
    """mnist or digits."""
    folder: Path
    """Holds the four files."""
    why: str
    """How it was obtained, or why it is not the one asked for."""
    train: int
    """Samples to train on."""
    test: int
    kind: str = "images"

    def __str__(self) -> str:
        counts = f"{self.train:,} + {self.test:,}" if self.test else f"{self.train:,}"
        return f"{self.name} ({counts} {self.kind}; {self.why})"

    @property
    def torchvision_root(self) -> Path:
        """The folder for `torchvision.datasets.MNIST`, which finds the files below it."""
        return self.folder.parents[1]

    def settings(self, asked: Settings) -> Settings:
        """The settings `asked` for, on this data."""
        return replace(asked, folder=self.folder, dataset=self.name)

    @property
    def summary(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"name": self.name, "train": self.train, "test": self.test, "why": self.why}


def describe_data(name: str, folder: Path, why: str) -> PreparedData:
    """The data in `folder`: the numbers of samples are in the headers of the labels."""
    counts = {}
    for split in ("train", "t10k"):
        with open(folder / f"{split}-labels-idx1-ubyte", "rb") as stream:
            counts[split] = int.from_bytes(stream.read(8)[4:], "big")
    return PreparedData(
        name=name, folder=folder, why=why, train=counts["train"], test=counts["t10k"]
    )


def default_data_dir() -> Path:
    """Where data is kept: the folder that `DATA_DIR` names, or one in the user's cache. Raises
    `NoData` if it names none and the user has no home directory."""
    if folder := os.environ.get(DATA_DIR):
        return Path(folder)
    try:
        return cache_folder()
    except RuntimeError:
        raise NoData(
            f"there is no home directory to keep data in: choose a folder with {DATA_DIR}"
        ) from None


def prepare(
    dataset: str, data_dir: Path, mirror: str | None = None, say: Say = lambda line: None
) -> PreparedData:
    """The data `dataset` ("mnist", "digits", or "auto": MNIST if it can be had, else digits), ready
    in `data_dir`.

    `mirror` replaces the usual servers: a folder, or an http://, https:// or file:// address that
    holds the four .gz files. `say` is told what takes time. Raises `NoData`.
    """
    mnist, digits = raw_folder(data_dir, "mnist"), raw_folder(data_dir, "digits")
    if dataset != "digits" and not find_damaged(mnist, MNIST):
        return describe_data("mnist", mnist, f"found in {data_dir}")
    if dataset == "digits" and not find_damaged(digits, read_checksums(digits, MNIST)):
        return describe_data("digits", digits, "as asked")
    with lock_directory(data_dir, "data directory", DATA_DIR):
        if dataset == "digits":
            return find_or_draw_digits(data_dir, "as asked", say)
        try:
            return find_or_fetch_mnist(data_dir, mirror, say)
        except NoData as error:
            if dataset == "mnist":
                raise
            return find_or_draw_digits(data_dir, error.why, say)


def prepare_for_lessons(say: Say) -> PreparedData:
    """MNIST, or digits where it is out of reach, where the environment says. Raises `NoData`."""
    return prepare("auto", default_data_dir(), os.environ.get(MIRROR), say)


def raw_folder(data_dir: Path, name: str) -> Path:
    """Where a dataset's files are in `data_dir`: MNIST's where torchvision looks for them in
    `data_dir`, digits where it looks for MNIST in the folder `digits` of `data_dir`."""
    return data_dir / {"mnist": "MNIST", "digits": "digits/MNIST"}[name] / "raw"


def find_or_fetch_mnist(data_dir: Path, mirror: str | None, say: Say) -> PreparedData:
    """MNIST, found in `data_dir` or fetched into it."""
    raw = raw_folder(data_dir, "mnist")
    wrong = find_damaged(raw, MNIST)
    if not wrong:
        return describe_data("mnist", raw, f"found in {data_dir}")
    problems = [f"{name} in {raw} is damaged" for name in wrong if (raw / name).exists()]
    say("looking for MNIST")
    for address in [mirror] if mirror else MIRRORS:
        try:
            with replace_files(raw, DATA_DIR, MNIST) as folder:
                fetch(address, folder)
            return describe_data("mnist", raw, f"from {address}")
        except UNFETCHED as error:
            problems.append(f"{address}: {error}")
    raise NoData(
        f"MNIST is not in {data_dir} and could not be fetched ({'; '.join(problems)}): set "
        f"{MIRROR} to a folder or address that holds {', '.join(name + '.gz' for name in MNIST)}",
        why=f"MNIST could not be fetched: {problems[0]}",
    )


def fetch(address: str, folder: Path) -> None:
    """Unpack the four files from `address`, a folder's or a server's, into `folder`."""
    url = address if "://" in address else Path(address).absolute().as_uri()
    for name in MNIST:
        with (
            urlopen(f"{url.rstrip('/')}/{name}.gz", timeout=NETWORK_TIMEOUT) as packed,
            gzip.open(packed) as stream,
            open(folder / name, "wb") as file,
        ):
            shutil.copyfileobj(stream, file)


def find_or_draw_digits(
    data_dir: Path, why: str, say: Say, train: int = 60_000, test: int = 10_000
) -> PreparedData:
    """The generated digits, found in `data_dir` or drawn into it (`train` + `test` of them)."""
    raw = raw_folder(data_dir, "digits")
    if find_damaged(raw, read_checksums(raw, MNIST)):
        say(f"drawing {train + test:,} digits, once")
        from playground.training.digits import write_digits

        try:
            with replace_files(raw, DATA_DIR) as folder:
                write_digits(folder, train, test)
                write_checksums(folder, MNIST)
        except OSError as error:
            raise NoData(
                f"digits cannot be written to {raw} ({error.strerror}): choose another folder "
                f"with {DATA_DIR}"
            ) from None
    return describe_data("digits", raw, why)
