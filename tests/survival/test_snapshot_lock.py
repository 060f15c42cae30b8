"""A folder of snapshots belongs to one run at a time, never to one that is dead, and to one user."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.runtime import UsageError
from playground.survival import folder as under_test
from playground.survival.disk import make_folder, overwrite, remove_folders
from playground.survival.folder import FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from playground.survival.folder import FolderLock

held = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(flush=True)
sys.stdin.read(1)
if child:
    time.sleep(float(sys.argv[2]))
"""
"""A process that holds the lock until its input ends and for a while after that, and a child that outlives it."""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process that holds the lock of `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float = 0) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLD, str(tmp_path), str(seconds)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        process.stdout.readline()
        return process

    yield start
    for process in started:
        with process:  # its input is closed in the end, and with that its child ends
            process.kill()


def test_another_run_is_refused_by_name(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = hold()
    monkeypatch.setattr(under_test, "PATIENCE", 0.1)
    with pytest.raises(UsageError) as refused:
        FolderLock(tmp_path)
    assert str(refused.value) == (
        f"snapshots in {tmp_path}: process {holder.pid} on {socket.gethostname()} is writing its own there; "
        f"wait for its end, or choose another folder"
    )


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    """Not even if processes live on that it has forked, as those of a loader may for some seconds."""
    hold().kill()
    FolderLock(tmp_path).release()
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_run_that_is_ending_is_waited_for(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    holder = hold(0.2)
    assert holder.stdin
    holder.stdin.close()
    FolderLock(tmp_path).release()
    assert holder.wait() == 0


def test_a_lock_that_is_let_go_is_free(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    held = FolderLock(tmp_path)
    held.release()
    held.release()
    forgotten = FolderLock(tmp_path)
    del forgotten  # as by a run that has raised
    gc.collect()
    assert hold().poll() is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", fail)
    assert FolderLock(tmp_path).acquire()


def test_a_command_is_refused_in_one_line(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], run_cli: Callable[..., Any]
) -> None:
    holder = hold()
    shown = run_cli("snapshots", "measure", tmp_path, "-n", 2)
    assert shown.code == 2
    assert shown.err.startswith(f"playground: snapshots in {tmp_path}: process {holder.pid} on ")
    assert shown.err.count("\n") == 1


def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Neither by the lock, nor by what writes a rank's file."""
    theirs = tmp_path / "diary"
    theirs.write_text("dear diary")
    for name in (".lock", "rank-0.snapshot"):
        (tmp_path / name).symlink_to(theirs)
    with pytest.raises(UsageError, match=r"its \.lock is a link; choose another folder$"):
        FolderLock(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        overwrite(tmp_path / "rank-0.snapshot", b"head", memoryview(b"body"))
    assert theirs.read_text() == "dear diary"


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "snapshots"
    home.mkdir()
    folder.mkdir()
    (home / "diary").write_text("dear diary")
    for name in (".spare", ".removed-step-00000001"):
        (folder / name).symlink_to(home)
    remove_folders(folder, [".spare"])
    assert (home / "diary").read_text() == "dear diary"
    assert list(folder.iterdir()) == []


def test_a_lock_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UsageError, match=r"its \.lock cannot be opened \(Is a directory\); choose another folder$"):
        FolderLock(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("whose", ["folder", "link to it"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link to it"
    folder.mkdir()
    link.symlink_to(folder)
    make_folder(link)
    os.chown(tmp_path / whose, 12345, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"choose a folder of your own$"):
        make_folder(link)
    assert list(folder.iterdir()) == []


def test_a_folder_that_all_share_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UsageError, match="other users can put links there"):
        make_folder(tmp_path)
    make_folder(tmp_path / "mine")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
