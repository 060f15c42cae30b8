"""A folder of snapshots belongs to one run at a time. Does not import torch."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import weakref
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.files import NO_LINK

PATIENCE = 2.0
"""Seconds for which a run waits for another one to let go: the kernel does that for a process that was killed."""
IN_USE = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Held by the process of rank 0 until it ends, however it ends.

    The lock is one of POSIX: unlike that of `flock`, processes that rank 0 forks (those of its loader) do not go on
    holding it. Where the file system has no locks, or the system no `fcntl`, it does nothing. Raises `UsageError`
    if another process holds it, and where its file cannot be opened or is a symbolic link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise UsageError(f"snapshots in {folder}: its .lock {why}; choose another folder") from None
        self.release = weakref.finalize(self, os.close, self.descriptor)
        """Lets others have the folder. A second call does nothing."""
        deadline = time.monotonic() + PATIENCE
        while not self.acquire():
            if time.monotonic() > deadline:
                said = os.read(self.descriptor, 300).decode(errors="replace").strip()
                who = said if said and said.isprintable() else "another process"
                self.release()
                raise UsageError(
                    f"snapshots in {folder}: {who} is writing its own there; wait for its end, or choose another folder"
                )
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # it is only for the message
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def acquire(self) -> bool:
        """Take the lock; False if another process holds it."""
        try:
            import fcntl

            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return True
        except OSError as error:
            return error.errno not in IN_USE
        return True
