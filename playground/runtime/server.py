"""Where ranks come from: a server process that has imported torch once and forks itself for each rank.

Where the system has no such thing, ranks are spawned, and each imports torch itself.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import popen_fork, process, reduction, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Any

from playground.runtime.working_folder import working_folder

if TYPE_CHECKING:
    from playground.runtime.fork_client import ForkServerClient

UNGUARDED = 97
"""Exit code of a rank that met a launch() while importing the user's script."""
LOST_BY_THE_SERVER = 255
"""Exit code of a rank whose fork server is gone, or stopped: nobody can tell how it ended."""
PRELOADED = ["torch.distributed", "playground.runtime.world"]
"""What the server imports, once for all ranks."""
CAN_FORK = "forkserver" in mp.get_all_start_methods()
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


def start(name: str, main: Callable[..., None], *args: Any) -> tuple[process.BaseProcess, Connection]:
    """A new process that runs `main(line, *args)`, and our end of that line.

    Returns when the process exists: the first time, when the server has done its imports. Raises `ForkServerFailed`
    if there can be no process.
    """
    ours, theirs = mp.Pipe()
    kind = ForkedProcess if CAN_FORK else mp.get_context("spawn").Process
    started = kind(target=main, args=(theirs, *args), name=name)
    try:
        with theirs:
            started.start()
    except BaseException:  # Ctrl-C too: the process may come to be all the same, and ends when it finds the line dead
        ours.close()
        raise
    return started, ours


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


def check_server() -> None:
    """Raise `ForkServerFailed` if the server is stopped: then nobody hears how its ranks end."""
    with _lock:
        for server in _server:
            server.check_not_stopped()


def running_server() -> ForkServerClient:
    """The fork server: a new one if there is none, none any more, or only that of the process we were forked from."""
    from playground.runtime.fork_client import ForkServerClient

    with _lock:
        if not (_server and _server[0].is_running()):
            while _server:
                _server.pop().end()
            _server.append(ForkServerClient(find_modules_as_here(), PRELOADED))
            atexit.unregister(release)
            atexit.register(release)
        return _server[0]


class ForkedPopen(popen_fork.Popen):
    """Behind a `ForkedProcess`: asks the server for it, and hears from the server how it ended."""

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
            reduction.dump(describe_program(process_obj.name), work)
            reduction.dump(process_obj, work)
        finally:
            set_spawning_popen(None)
        self.server = running_server()
        self.pid, self.sentinel, pipe = self.server.fork(self.fds)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
        # It may have been killed already: its sentinel says so.
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as to_rank:
            to_rank.write(work.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; None while there is none, without waiting for it if `flag` says so."""
        while self.returncode is None:
            if wait([self.sentinel], 0 if flag == os.WNOHANG else 1.0):
                self.returncode = self.server.read_exit_code(self.sentinel, LOST_BY_THE_SERVER)
            elif flag == os.WNOHANG:
                return None
            elif self.server.is_stopped():
                self.returncode = LOST_BY_THE_SERVER
        return self.returncode


class ForkedProcess(process.BaseProcess):
    """A process that the fork server forks: `multiprocessing.Process` in all else."""

    _start_method = "forkserver"

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
