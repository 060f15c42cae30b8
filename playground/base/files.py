"""Files in folders that others may write to: nothing is written through another user's link, and
only what is ours is removed. Files that appear whole or not at all, and are known by their
checksums."""

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
from stat import S_ISDIR
from typing import BinaryIO

from playground.base.errors import UsageError

CHECKSUMS = "SHA256SUMS"
"""A file that lists the checksums of those beside it, as `sha256sum` does."""
NO_LINK = os.O_NOFOLLOW
"""For `os.open`: refuse a symbolic link. In a folder that others can write to, it may lead to a
file of ours."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a file that cannot grow: the disk is full, or the user's quota is used up."""
LARGEST_PROGRAM = 2**18
"""Size in bytes above which a file is not taken for a program."""


class NoData(UsageError):
    """The data that was asked for cannot be had. One line: what, why, what to do; `why` alone says
    why."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


PREFIX = "playground-"
MARK = ".temporary"
"""The file that tells a temporary folder from others. Its process holds a lock on it, which the
kernel releases."""


def temporary_folder(purpose: str) -> contextlib.AbstractContextManager[Path]:
    """A new folder, removed at the end of the block. Those of processes that were killed are
    removed before."""
    return passing_folder(Path(tempfile.gettempdir()), PREFIX, f"{purpose}-")


@contextlib.contextmanager
def passing_folder(place: Path, family: str, purpose: str = "") -> Iterator[Path]:
    """As `temporary_folder`, in `place`. Names begin with `family`. Raises `OSError` if it cannot
    be made."""
    for mark in place.glob(f"{family}*/{MARK}"):
        with contextlib.suppress(OSError):  # it is in use, or another process was faster
            remove_unused(mark)
    with tempfile.TemporaryDirectory(
        prefix=f"{family}{purpose}", dir=place, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        with open(create(folder / f"{MARK}.new"), "rb") as lock:
            with contextlib.suppress(OSError):  # this disk has no locks: the folder has no mark
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / f"{MARK}.new").rename(folder / MARK)  # which nobody has seen unlocked
            yield folder


@contextlib.contextmanager
def common_folder(name: str) -> Iterator[Path]:
    """The temporary folder of this name, for several processes of this user that know the name. The
    last one that leaves the block removes it. Raises `OSError` if it cannot be made, is another
    user's, or is on a disk without locks."""
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))
    with open(os.open(folder / MARK, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # another process is in the block
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def remove_unused(mark: Path) -> None:
    """Remove the temporary folder with this mark. Raises `OSError` if it is another user's, or in
    use."""
    if {mark.parent.lstat().st_uid, mark.lstat().st_uid} != {os.geteuid()}:
        raise PermissionError(errno.EPERM, "another user's", str(mark))
    with open(os.open(mark, os.O_RDWR | os.O_NONBLOCK | NO_LINK), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(mark.parent)


def create(file: Path) -> int:
    """A descriptor of a new file, in the place of the one of this name. Raises `OSError`."""
    file.unlink(missing_ok=True)
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # not through a link


@contextlib.contextmanager
def replacing(file: Path, beside: str) -> Iterator[int]:
    """A descriptor, of a file that is called `beside` until the end of the block and then takes the
    place of `file`: that is whole or as it was, also if the block raises or the process is killed.
    Raises `OSError`."""
    unfinished = file.with_name(beside)
    descriptor = create(unfinished)
    try:
        yield descriptor
        os.rename(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    finally:
        os.close(descriptor)


def follow_own_links(file: Path) -> Path:
    """The file that is written when this one is. Raises `OSError` for another user's link, as Linux
    does by default in folders like /tmp.

    Source: https://docs.kernel.org/admin-guide/sysctl/fs.html#protected-symlinks
    """
    if not file.is_symlink():
        return file
    if file.lstat().st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EACCES, "it is another user's link", str(file))
    return file.resolve()


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, if they are not there. Raises `OSError`, also if it
    is another user's link."""
    follow_own_links(folder).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def writing(file: Path, *, append: bool = False) -> Iterator[BinaryIO]:
    """A file to write to: what was in it is gone, unless `append`. It is opened through no link but
    the user's own. An `OSError` of the block, such as that of a full disk, names the file."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC) | NO_LINK
    try:
        with open(os.open(follow_own_links(file), flags, 0o666), "wb") as opened:
            yield opened
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def write_file(file: Path, content: bytes) -> None:
    """Write a file, through no link but the user's own. Raises `OSError`, which names the file."""
    with writing(file) as opened:
        opened.write(content)


def belongs_to_another(folder: Path, own: int) -> bool:
    """Whether `folder` is another user's, who may have put links in it that lead to files of ours.
    Root is trusted. `own`: the owner of the files that we make there, which on a network's disk
    need not be this user."""
    return not {folder.lstat().st_uid, folder.stat().st_uid} <= {0, own}


def cache_folder() -> Path:
    """Our folder in the user's cache. Raises `RuntimeError` if the user has no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "playground"


@contextlib.contextmanager
def lock_directory(folder: Path, called: str, variable: str) -> Iterator[None]:
    """Make `folder` and keep other processes out of it. Raises `NoData`, in which it is `called` so
    and another is chosen by the environment `variable`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | NO_LINK, 0o644)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise NoData(f"{called} {folder}: {why}; choose another with {variable}") from None
    with open(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replace_files(
    raw: Path, variable: str, checksums: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A temporary folder whose files replace those in `raw` if all went well and they match
    `checksums`.

    Raises `NoData` where `raw` cannot be written to or has no room, which tells the environment
    `variable` that chooses another folder, `RuntimeError` for files that do not match.
    """
    with contextlib.ExitStack() as stack:
        try:
            raw.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(passing_folder(raw, ".unfinished-"))
        except OSError as error:
            why = f"{raw} cannot be written to ({error.strerror})"
            raise NoData(f"{why}: choose another folder with {variable}") from None
        if belongs_to_another(raw, own=folder.stat().st_uid):
            why = f"{raw} belongs to another user, whose links would lead to your files"
            raise NoData(f"{why}: choose a folder of your own with {variable}", why=why)
        try:
            yield folder
            if checksums and (wrong := find_damaged(folder, checksums)):
                raise RuntimeError(f"{', '.join(wrong)} unpacked damaged")
            files = (file for file in folder.iterdir() if file.name != MARK)
            for file in sorted(files, key=lambda file: file.name == CHECKSUMS):
                os.replace(file, raw / file.name)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            why = f"there is no room in {raw} ({error.strerror})"
            raise NoData(
                f"{why}: make room, or choose another folder with {variable}", why=why
            ) from None


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
    """The checksum that `folder`'s CHECKSUMS has for each of `names`: "", which nothing matches,
    where it has none."""
    try:
        words = (folder / CHECKSUMS).read_text().split()
    except (OSError, ValueError):
        words = []
    promised = dict(zip(words[1::2], words[::2], strict=False))
    return {name: promised.get(name, "") for name in names}
