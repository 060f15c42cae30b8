"""How a process ended, asked by one that is not its parent, and a process that ends with its parent (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from pathlib import Path

from playground.runtime.signals import describe_signal

PIDFD_GET_INFO, INFO_EXIT = 0xC040FF0B, 1 << 3
"""Source: include/uapi/linux/pidfd.h"""
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int, libc: ctypes.CDLL) -> None:
    """In a new process: get this signal when `parent`, which has started it, ends. `libc` was loaded before the fork.

    Source: PR_SET_PDEATHSIG in https://man7.org/linux/man-pages/man2/prctl.2.html
    """
    libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), number)


def describe_end(pidfd: int, pid: int) -> str:
    """How a process ended."""
    status = exit_status(pidfd, pid)
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        return f"killed by {describe_signal(os.WTERMSIG(status))}"
    code = os.WEXITSTATUS(status)
    if code - 128 in [*signal.Signals]:  # it has handled that one, and left
        return f"ended by {describe_signal(code - 128)}"
    return f"exited with code {code}"


def exit_status(pidfd: int, pid: int) -> int | None:
    """The status that the parent of the process gets from wait(). Linux before 6.15 forgets it when the parent has
    asked: None."""
    import fcntl

    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info := bytearray(INFO_EXIT.to_bytes(64, sys.byteorder)))
        mask, _, *_, status = struct.unpack("QQ11Ii", info)
        if mask & INFO_EXIT:
            return status
    except OSError:
        pass
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
        signal.pidfd_send_signal(pidfd, 0)  # which is refused if the number may be somebody else's by now
        return status
    except (OSError, ValueError):
        return None
