"""What belongs to one process is closed in those that are forked from it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import weakref
from pathlib import Path

from processes import ENOUGH, links

from playground.base.forks import close_in_children


def in_a_fork(name: str, path: Path) -> None:
    """Write how many descriptors of this process lead to the socket of that name."""
    path.write_text(str([*links(Path("/proc/self/fd"))].count(name)))


def count_in_a_fork(file: socket.socket, path: Path) -> int:
    name = os.readlink(f"/proc/self/fd/{file.fileno()}")
    child = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(name, path))
    child.start()
    child.join(ENOUGH)
    assert child.exitcode == 0
    return int(path.read_text())


def test_a_child_has_nothing_of_what_is_its_parent_s(tmp_path: Path) -> None:
    with socket.socket() as ours, socket.socket() as everybody_s:
        assert count_in_a_fork(ours, tmp_path / "count") == 1
        close_in_children(ours)
        assert count_in_a_fork(ours, tmp_path / "count") == 0
        assert count_in_a_fork(everybody_s, tmp_path / "count") == 1
        assert ours.fileno() >= 0  # here it stays open


class Gone:
    """Something that has been closed."""

    def close(self) -> None:
        raise OSError(errno.EBADF, "it is closed already")


def test_what_is_gone_by_then_is_no_obstacle(tmp_path: Path) -> None:
    gone = [Gone() for _ in range(20)]
    close_in_children(*gone)
    with socket.socket() as ours:
        close_in_children(ours)
        assert count_in_a_fork(ours, tmp_path / "count") == 0


def test_nothing_lives_on_because_it_is_to_be_closed() -> None:
    forgotten = Gone()
    close_in_children(forgotten)
    seen = weakref.ref(forgotten)
    del forgotten
    assert seen() is None
