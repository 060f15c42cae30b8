"""Where ranks come from: a server process that has imported torch once and forks itself for each rank.

The standard library's (`multiprocessing`'s forkserver). Where the system has none, ranks are spawned, and each imports
torch itself.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

UNGUARDED = 97
"""Exit code of a rank that met a launch() while importing the user's script."""
PRELOADED = ["torch.distributed", "playground.runtime.world"]
"""What the server imports, once for all ranks."""


def preload(*modules: str) -> None:
    """Add to what the server imports. Counts until this process starts its first rank."""
    PRELOADED.extend(modules)


def warm_up() -> Any:
    """Let the server begin with its imports, if it has not: this returns at once. The `multiprocessing` context."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    mp.set_forkserver_preload([*PRELOADED, "playground.runtime.freeze"])
    # Ctrl-C reaches every process of the terminal's group. The server is started with SIGINT blocked, and what it
    # forks inherits that: only the launcher hears it, and decides. (The tracker first: its start unblocks signals.)
    resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return mp.get_context("forkserver")


def start(name: str, main: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A new process that runs `main(line, *args)`, and our end of that line.

    Returns when the process exists: the first time, when the server has done its imports.
    """
    ours, theirs = mp.Pipe()
    process = warm_up().Process(target=main, args=(theirs, *args), name=name)
    try:
        with theirs:
            process.start()
    except BaseException:  # Ctrl-C too: the process may come to be all the same, and ends when it finds the line dead
        ours.close()
        raise
    return process, ours


def leave_if_imported() -> None:
    """End this process if it is a rank that is importing, unguarded, the very script that started it.

    It would start ranks that start ranks. The launcher recognises the exit code and explains, once.
    """
    if getattr(mp.process.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def release() -> None:
    """End the server at once. It ends by itself when it finds this process gone, but in the midst of its imports it
    would find that late."""
    if "forkserver" not in mp.get_all_start_methods():
        return
    from multiprocessing import forkserver

    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server:  # a child nobody has waited for: the number cannot be anybody else's
        os.kill(server, signal.SIGTERM)
