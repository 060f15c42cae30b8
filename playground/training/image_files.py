"""The training images as files, one PNG each: for datasets of paths, as most data outside of tutorials is.

They are written from the dataset's own files into a folder beside them, a folder for every thousand, and only as many
as are asked for:

    png/00000/00000-5.png    image 0, a five
    png/00000/SHA256SUMS     the checksums of these thousand, and of the file they were written from
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import PlaygroundError
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

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
PER_FOLDER = 1_000
SIDE = 28
IMAGES_HEADER, LABELS_HEADER = 16, 8
"""Bytes before the first image, and before the first label, of an IDX file."""


class UnreadableImage(PlaygroundError):
    """An image file is gone or damaged. One line that names it, also where a loader worker met it: then torch makes
    this error again from the whole traceback, of which the message is the end."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rstrip().rpartition(f"{UnreadableImage.__name__}: ")[2])


def list_image_files(raw: Path, limit: int | None = None) -> list[tuple[str, int]]:
    """(path, label) of each training image, in the order of the IDX files in `raw`; of the first `limit`."""
    folder = raw.parent / "png"
    labels = (raw / LABELS).read_bytes()[LABELS_HEADER:][:limit]
    return [
        (f"{folder}/{number // PER_FOLDER * PER_FOLDER:05}/{number:05}-{label}.png", label)
        for number, label in enumerate(labels)
    ]


def prepare_image_files(raw: Path, limit: int | None = None, say: Callable[[str], None] = lambda line: None) -> None:
    """Let every file that `list_image_files(raw, limit)` lists be there, whole: what is missing or damaged is written.

    Meant to be called before any rank starts. `say` is told what takes time, and what was damaged. Raises `NoData`
    where the files cannot be written.
    """
    source, paths = sha256(raw / IMAGES), [Path(path) for path, _ in list_image_files(raw)]
    folders = [  # all but the very last of the dataset are full
        ImageFolder(paths[first].parent, first, [path.name for path in paths[first : first + PER_FOLDER]])
        for first in range(0, len(paths) if limit is None else limit, PER_FOLDER)
    ]
    if not any(folder.find_missing(source) for folder in folders):
        return
    with lock_directory(raw.parents[1]):
        missing = {folder: names for folder in folders if (names := folder.find_missing(source))}
        for folder, names in missing.items():
            if names != folder.names:
                say(f"{folder.path / names[0]} is damaged or missing: its folder is written again")
        if missing:
            say(f"writing {sum(len(folder.names) for folder in missing):,} PNG files, once")
        for folder in missing:
            folder.write(raw / IMAGES, source)


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Up to `PER_FOLDER` images."""

    path: Path
    first: int
    """The number of its first image."""
    names: list[str]

    def find_missing(self, source: str) -> list[str]:
        """The names of files that are missing or damaged: all, if they are not from the images of this checksum."""
        promised = read_checksums(self.path, [*self.names, f"../../raw/{IMAGES}"])
        if promised.pop(f"../../raw/{IMAGES}") != source:
            return self.names
        return find_damaged(self.path, promised)

    def write(self, images: Path, source: str) -> None:
        """Write all of its files again. `source` is the checksum of the file `images`."""
        from PIL import Image

        with open(images, "rb") as stream:
            stream.seek(IMAGES_HEADER + self.first * SIDE**2)
            pixels = [stream.read(SIDE**2) for _ in self.names]
        try:
            with replace_files(self.path) as folder:
                for name, image in zip(self.names, pixels, strict=True):
                    picture = Image.frombytes("L", (SIDE, SIDE), image)
                    picture.save(folder / name, compress_level=1)  # the fastest; each takes a whole block on disk
                write_checksums(folder, self.names)
                with open(folder / CHECKSUMS, "a") as checksums:
                    checksums.write(f"{source}  ../../raw/{IMAGES}\n")
        except OSError as error:
            why = error.strerror or error
            raise NoData(f"PNG files cannot be written to {self.path} ({why}): choose another --data-dir") from None
