"""What tests ask of processes: whether a command has begun, who is left of a session, a free port,
a place in a world set by hand."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ENOUGH = 60.0
"""Seconds after which something is taken to hang: much longer than it takes on the busiest
machine."""


def session_ends(session: int, seconds: float = ENOUGH) -> bool:
    """Whether no process of that session is left, soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not session_members(session):
            return True
        time.sleep(0.05)
    return False


def session_members(session: int) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(entry)
    return found


def listening(pids: Iterable[int]) -> set[str]:
    """The local addresses on which these processes listen."""
    sockets = {link for pid in pids for link in links(Path(f"/proc/{pid}/fd"))}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


def links(folder: Path) -> Iterator[str]:
    """What the links in a folder point to, of those that are not deleted meanwhile."""
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, or one that nobody has waited for yet."""
    return Path(f"/proc/{pid}").exists()


def all_gone(pids: dict[int, int], expected: int) -> bool:
    """Whether so many ranks have told their process ids, and no such process is left."""
    assert len(pids) == expected
    return not any(map(is_alive, pids.values()))


def wait_until_begun(launcher: subprocess.Popen[str]) -> None:
    """Return when it has installed its handlers (before, Ctrl-C is Python's to explain), or has
    ended."""
    deadline = time.monotonic() + ENOUGH
    while launcher.poll() is None and not catches_signals(launcher.pid):
        assert time.monotonic() < deadline, "it has no handlers"
        time.sleep(0.01)


def catches_signals(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGHUP - 1))
    return False


def is_first_epoch(line: str) -> bool:
    """Whether this is what sgd prints after its first epoch."""
    return bool(re.match(r"Rank \d+, epoch 1: loss ", line))


handed_out: set[int] = set()


def free_port() -> str:
    """A port that nobody listens on, and that nobody else will get: the kernel hands out higher
    ones by itself (so do other workers' worlds get theirs), and here none is handed out twice."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in handed_out:
                handed_out.add(port)
                return str(port)


def by_hand(rank: int, size: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
