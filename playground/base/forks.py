"""Resources that belong to one process, and must not live on in processes that it starts, nor be in
the way of its program.

A child that `os.fork` makes, or multiprocessing with its method "fork", has copies of all
descriptors. With a copy of the launcher's it would keep ranks alive whose launcher is gone, and
with a copy of a rank's it would speak as the rank. A program that a rank starts inherits what is
not close-on-exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import weakref
from typing import Any

HIGH = 512
"""The lowest number of a descriptor of ours in a rank, if the limit of descriptors (ulimit -n) is
twice as high or more. A program that closes all it may have opened, by number, begins at 3."""
MARK = signal.SIGIO
"""The signal that marks an epoll instance which was inheritable. It is a property of the open file,
and ends with it. No signal is sent: epoll does not support O_ASYNC. Source: fcntl(2), F_SETSIG"""


class Descriptor:
    """One of ours, which the program may close, and then have another file of this number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.file = os.fstat(number).st_ino

    def close(self) -> None:
        """Close it, if it is still there. Raises `OSError` if the program has closed it."""
        if os.fstat(self.number).st_ino == self.file:
            os.close(self.number)


_own: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(*things: Any) -> None:
    """In each process that is forked from this one, close these things, if they still exist."""
    _own.update(things)


def leave_behind() -> None:
    """In a forked process: let go of what is its parent's."""
    for thing in list(_own):
        with contextlib.suppress(OSError):  # closed by now
            thing.close()
    _own.clear()


def receive_fds(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int]:
    """A message of at most `size` bytes, the descriptors that come with it, at most `most`, and the
    message's flags. No program that this process starts inherits the descriptors.

    `socket.recv_fds` takes MSG_CMSG_CLOEXEC, and ignores it (Python 3.11 to 3.14).
    """
    message, descriptors, flags, _ = socket.recv_fds(connection, size, most)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return message, descriptors, flags


def keep_from_programs() -> None:
    """Have no program that this process starts inherit what is open now, but standard streams.
    (gloo leaves its sockets inheritable.)"""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # it was the folder's
                if is_inheritable_epoll(descriptor):
                    fcntl.fcntl(descriptor, fcntl.F_SETSIG, MARK)
                os.set_inheritable(descriptor, False)


def is_inheritable_epoll(descriptor: int) -> bool:
    """Whether it is an epoll instance that programs inherit, or inherited until
    `keep_from_programs` was called. Raises `OSError` if it is closed."""
    is_epoll = os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]"
    return is_epoll and (
        os.get_inheritable(descriptor) or fcntl.fcntl(descriptor, fcntl.F_GETSIG) == MARK
    )


def move_up(descriptor: int) -> int:
    """The descriptor's new number: one above those that a program's own files get. Without room
    there, it keeps its number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = HIGH if limit == resource.RLIM_INFINITY else min(HIGH, limit // 2)
    if descriptor >= least:
        return descriptor
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved


os.register_at_fork(after_in_child=leave_behind)
