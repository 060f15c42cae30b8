"""What tests ask of processes: who is left of a session, a free port, a place in a world set by hand."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path


def session_ends(session: int, within: float) -> bool:
    """Whether no process of that session is left, soon."""
    deadline = time.monotonic() + within
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


def is_first_epoch(line: str) -> bool:
    """Whether this is the row of the first epoch, in what a command that trains prints: its number, then its loss."""
    return bool(re.match(r" *1 +\d\.\d+ ", line))


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def by_hand(rank: int, size: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
