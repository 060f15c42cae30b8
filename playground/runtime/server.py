"""Where ranks come from: a server process that has imported torch once and forks itself for each rank.

Where the system has no such thing, ranks are spawned, and each imports torch itself.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import popen_fork, process, reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

from playground.runtime.forks import call_in_children, close_in_children
from playground.runtime.output import Redirection, redirect
from playground.runtime.working_folder import working_folder

if TYPE_CHECKING:
    from playground.runtime.fork_client import ForkServerClient


def has_pidfds() -> bool:
    """Whether the system has descriptors of processes (Linux from 5.3 on). A rank is not this process's child, and by
    its number alone a signal might reach whoever has got that number since."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


UNGUARDED = 97
"""Exit code of a rank that met a launch() while importing the user's script."""
LOST_BY_THE_SERVER = 256
"""In the place of the exit code of a rank whose fork server is gone, or stopped: it is not known how it ended."""
PRELOADED = ["torch.distributed", "playground.runtime.world"]
"""What the server imports, once for all ranks."""
CAN_FORK = "forkserver" in mp.get_all_start_methods() and has_pidfds()
_server: list[ForkServerClient] = []
"""The one that runs, if one does."""
_lock = threading.Lock()


def preload(*modules: str) -> None:
    """Add to what the server imports. Counts until this process starts its first rank."""
    PRELOADED.extend(modules)


def warm_up() -> None:
    """Let the server begin with its imports, if it has not: this returns at once."""
    if CAN_FORK:
        running_server()


def start(
    name: str, main: Callable[..., None], *args: Any, streams: Sequence[Connection] = ()
) -> tuple[process.BaseProcess, Connection]:
    """A new process that runs `main(line, *args)`, and our end of that line. Its stdout and stderr go into `streams`.

    Returns when the process exists: the first time, when the server has done its imports. Raises `ForkServerFailed`
    if there can be no process.
    """
    ours, theirs = mp.Pipe()
    close_in_children(ours)
    started: process.BaseProcess
    if CAN_FORK:
        started = ForkedProcess(target=main, args=(theirs, *args), name=name)
        started.streams = streams
    else:
        started = mp.get_context("spawn").Process(target=run_redirected, args=(streams, main, theirs, *args), name=name)
    try:
        with theirs:
            started.start()
    except BaseException:  # Ctrl-C too: the process may come to be all the same, and ends when it finds the line dead
        ours.close()
        raise
    return started, ours


def run_redirected(streams: Sequence[Connection], main: Callable[..., None], *args: Any) -> None:
    """In a spawned process: run `main(*args)`. (What its import of the script has printed was not redirected.)"""
    if streams:
        redirect(*streams)
    main(*args)


def leave_if_imported() -> None:
    """End this process if it is a rank that is importing, unguarded, the very script that started it.

    It would start ranks that start ranks. The launcher recognises the exit code and explains, once.
    """
    if getattr(process.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def release() -> None:
    """End the server now. (The system ends it when this process ends, however that happens.)"""
    with _lock:
        while _server:
            _server.pop().end()


# Once, and before anybody can register what asks ranks to leave: at the exit that comes first, being the later one.
atexit.register(release)
call_in_children(_server.clear)


def running_server() -> ForkServerClient:
    """The fork server: a new one if there is none, none any more, or one that is stopped for good."""
    from playground.runtime.fork_client import ForkServerClient

    with _lock:
        if not (_server and _server[0].can_be_asked()):
            while _server:
                _server.pop().end()
            _server.append(ForkServerClient(find_modules_as_here(), PRELOADED))
        return _server[0]


class ForkedPopen(popen_fork.Popen):
    """Behind a `ForkedProcess`: asks the server for it, and hears from the server how it ended. Signals, and whether it
    has ended, need no server, which may be stopped or dead."""

    method = "forkserver"

    def __init__(self, process_obj: process.BaseProcess) -> None:
        self.fds: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, index: int) -> Any:  # noqa: N802 (its name in multiprocessing)
        from playground.runtime.fork_server import InheritedFd

        return InheritedFd(index)

    def _launch(self, process_obj: process.BaseProcess) -> None:
        work = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            program = describe_program(process_obj.name)
            if isinstance(process_obj, ForkedProcess) and process_obj.streams:  # also while it imports the program
                program["streams"] = Redirection(*process_obj.streams)
            reduction.dump(program, work)
            reduction.dump(process_obj, work)
        finally:
            set_spawning_popen(None)
        self.server = running_server()
        self.pid, pidfd, self.sentinel, pipe = self.server.fork(self.fds)
        self.pidfd, self.status = Connection(pidfd, writable=False), Connection(self.sentinel, writable=False)
        close_in_children(self.pidfd, self.status)
        # It may have been killed already: its sentinel says so.
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as to_rank:
            to_rank.write(work.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; None while there is none, without waiting for it if `flag` says so. When there is one, the
        process has ended."""
        while self.returncode is None:
            has_ended = bool(wait([self.pidfd], 0))
            if wait([self.status], 0):
                code = self.server.read_exit_code(self.sentinel)
                self.returncode = self.end_orphan() if code is None else code
            elif has_ended and self.server.is_stopped():
                self.returncode = LOST_BY_THE_SERVER
            elif flag == os.WNOHANG:
                return None
            else:
                wait([self.status] if has_ended else [self.status, self.pidfd], 1.0)
        return self.returncode

    def end_orphan(self) -> int:
        """End the process, whose server is gone: it may be stopped, or hold the GIL, and notice nothing. Its code."""
        self.kill()
        wait([self.pidfd])
        return LOST_BY_THE_SERVER

    def _send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the server has waited for it
            signal.pidfd_send_signal(self.pidfd.fileno(), sig)

    def close(self) -> None:
        self.pidfd.close()
        self.status.close()


class ForkedProcess(process.BaseProcess):
    """A process that the fork server forks: `multiprocessing.Process` in all else."""

    _start_method = "forkserver"
    streams: Sequence[Connection] = ()

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> ForkedPopen:  # noqa: N802 (its name in multiprocessing)
        return ForkedPopen(process_obj)


def find_modules_as_here() -> list[str]:
    """This process's `sys.path`, as it means the same in another working folder. The first folder Python looks into
    may be the working folder ("") of the time it started."""
    start = process.ORIGINAL_DIR  # type: ignore[attr-defined]
    return [folder or start for folder in sys.path if folder or start]


def describe_program(name: str) -> dict[str, Any]:
    """What `multiprocessing.spawn` needs in a new process to find this program's modules, the script among them."""
    program: dict[str, Any] = {
        "name": name,
        "authkey": process.current_process().authkey,
        "sys_path": find_modules_as_here(),
        "sys_argv": sys.argv,
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        "start_method": mp.get_start_method(),
    }
    if folder := working_folder():  # otherwise the rank stays where it is
        program["dir"] = folder
    script = sys.modules["__main__"]
    if script.__spec__ is not None:
        program["init_main_from_name"] = script.__spec__.name
    elif os.path.isfile(path := os.path.join(program["orig_dir"] or "", getattr(script, "__file__", None) or "")):
        program["init_main_from_path"] = os.path.normpath(path)  # not so: a notebook, a prompt, a script on stdin
    return program
