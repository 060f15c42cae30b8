"""Start a program that inherits nothing of the launcher's; find and kill the children of a
process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from playground.base.errors import ForkServerFailed
from playground.world.launcher.fork_server import LAUNCHER_ONLY


def list_children(pid: int) -> list[int]:
    """The children of a process's main thread; none if it is gone."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill_all(pids: Sequence[int]) -> None:
    """Kill these processes; those of another user, and those that are gone, are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def spawn(words: list[str], stdin: int, kept: int) -> int:
    """Start a program that has nothing of ours open but standard streams and `kept`; its process
    id."""
    inherited = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed by now
            if descriptor > 2 and os.get_inheritable(descriptor):
                inherited.append(descriptor)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One that was opened before the limit was lowered is none to the C library.
    beyond = [descriptor for descriptor in inherited if descriptor >= limit]
    files: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_CLOSE, each) for each in inherited if each < limit
    ]
    files += [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, kept, kept)]
    try:
        for descriptor in beyond:
            os.set_inheritable(descriptor, False)
        return os.posix_spawn(
            words[0], words, os.environ, file_actions=files, setsigmask=LAUNCHER_ONLY
        )
    except OSError as error:
        option = {errno.EAGAIN: "-u", errno.ENOMEM: "-v", errno.EMFILE: "-n"}.get(error.errno or 0)
        way_out = f": raise the limit (ulimit {option})" if option else ""
        raise ForkServerFailed(f"cannot be started ({error.strerror}){way_out}") from error
    finally:
        for descriptor in beyond:
            os.set_inheritable(descriptor, True)
