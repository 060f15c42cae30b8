"""Files that appear whole or not at all, and are known by their checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from playground.runtime.errors import UsageError

CHECKSUMS = "SHA256SUMS"
"""A file that lists the checksums of those beside it, as `sha256sum` does."""
NO_LINK = os.O_NOFOLLOW
"""For `os.open`: refuse a symbolic link. In a folder that others can write to, it may lead to a file of ours."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a file that cannot grow: the disk is full, or the user's quota is used up."""


class NoData(UsageError):
    """The data that was asked for cannot be had. One line: what, why, what to do; `why` alone says why."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix=f"playground-{purpose}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def belongs_to_another(folder: Path, own: int) -> bool:
    """Whether `folder` is another user's, who may have put links in it that lead to files of ours. Root is trusted.
    `own`: the owner of the files that we make there, which on a network's disk need not be this user."""
    return not {folder.lstat().st_uid, folder.stat().st_uid} <= {0, own}


@contextlib.contextmanager
def lock_directory(data_dir: Path) -> Iterator[None]:
    """Make `data_dir` and keep other processes out of it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(data_dir / ".lock", os.O_CREAT | os.O_RDWR | NO_LINK, 0o644)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise NoData(f"data directory {data_dir}: {why}; choose another with --data-dir") from None
    with open(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replace_files(raw: Path, checksums: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A temporary folder whose files replace those in `raw` if all went well and they match `checksums`.

    Raises `NoData` where `raw` cannot be written to or has no room, `RuntimeError` for files that do not match.
    """
    try:
        raw.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=raw, prefix=".unfinished-"))
    except OSError as error:
        raise NoData(f"{raw} cannot be written to ({error.strerror}): choose another folder with --data-dir") from None
    try:
        if belongs_to_another(raw, own=folder.stat().st_uid):
            why = f"{raw} belongs to another user, whose links would lead to your files"
            raise NoData(f"{why}: choose a folder of your own with --data-dir", why=why)
        yield folder
        if checksums and (wrong := find_damaged(folder, checksums)):
            raise RuntimeError(f"{', '.join(wrong)} unpacked damaged")
        for file in sorted(folder.iterdir(), key=lambda file: file.name == CHECKSUMS):
            os.replace(file, raw / file.name)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        why = f"there is no room in {raw} ({error.strerror})"
        raise NoData(f"{why}: make room, or choose another folder with --data-dir", why=why) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_damaged(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """The names under which `folder` does not hold, whole, what `checksums` promise."""
    return [name for name, checksum in checksums.items() if sha256(folder / name) != checksum]


def sha256(file: Path) -> str:
    """Checksum of a file, "-" if it cannot be read or is no file (a FIFO would be waited for)."""
    digest = hashlib.sha256()
    if not file.is_file():
        return "-"
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError:
        return "-"
    return digest.hexdigest()


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    (folder / CHECKSUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in names))


def read_checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The checksum that `folder`'s CHECKSUMS has for each of `names`: "", which nothing matches, where it has none."""
    try:
        words = (folder / CHECKSUMS).read_text().split()
    except (OSError, ValueError):
        words = []
    promised = dict(zip(words[1::2], words[::2], strict=False))
    return {name: promised.get(name, "") for name in names}
