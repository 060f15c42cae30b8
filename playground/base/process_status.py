"""The state of a process, by what the kernel says of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PF_EXITING = 4
"""A flag of a process. Source: Linux's include/linux/sched.h"""


def process_status(pid: int, *thread: str) -> list[bytes]:
    """The state of a process or of one of its threads, and what follows; empty if it is gone.

    Source: proc_pid_stat(5)
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}", *thread, "stat").read_bytes().rpartition(b")")[2].split()
    return []


def list_processes() -> list[int]:
    """The processes that this one can see, ascending."""
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def read_wait(pid: int) -> str:
    """The function of the kernel in which the main thread of a process waits; empty where the
    system does not tell. Source: proc_pid_wchan(5)"""
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n")
    return ""


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped this process (SIGSTOP)."""
    return process_status(pid)[:1] == [b"T"]


def is_asleep(pid: int) -> bool:
    """Whether the main thread of this process neither runs nor would, if there were a core for it:
    it waits for something, has been stopped, or is gone."""
    return process_status(pid)[:1] not in ([b"R"], [b"D"])


def is_ending(pid: int) -> bool:
    """Whether this process has begun to end, as it does before its sockets are closed, or is
    gone."""
    status = process_status(pid)
    return not status or bool(int(status[6]) & PF_EXITING)
