"""Start the ranks, watch them, stop them; results in rank order.

Ranks are forked from a server process that has imported torch once, so eight ranks cost what one does. The server
is the standard library's (`multiprocessing`'s forkserver); where there is none, ranks are spawned.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from playground.runtime import devices, rank as rank_process, rendezvous
from playground.runtime.errors import Impossible, LostPeer, PlaygroundError, RankFailed, RanksHung
from playground.runtime.rank import Progress
from playground.runtime.rendezvous import DEFAULT_TIMEOUT

MOST_RANKS = 256
"""On one host: beyond it the sockets of a full mesh, size² of them, meet the limits of common machines."""
START_LIMIT = 300.0
"""Seconds a new process may take to come up (a cold disk reads torch slowly; spawned ranks read it each)."""
AFTERMATH = 0.25
"""Seconds in which, after a first failure, word of another rank's sudden death may still arrive and outrank it."""
GRACE = 1.0
"""Seconds a rank has to leave by itself once told to, before the next sterner means."""
LEAVE_LIMIT = 10.0
"""Seconds a rank has to destroy its process group, all results being in."""
UNGUARDED = 97
"""Exit code of a rank that met a launch() while importing the user's script."""
PRELOADED = ["torch.distributed", "playground.runtime.world"]
UNHEARD = "  (no answer: stopped, or inside C code that holds the interpreter lock)"
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout|failed to pass monitoredBarrier")


@dataclass(eq=False)
class Rank:
    """The launcher's end of the line to one rank, and what is known of it."""

    number: int
    size: int
    process: Any
    line: Connection
    up: bool = False
    result: bytes | None = None
    stack: str = UNHEARD
    failure: PlaygroundError | None = None
    failed_at: float = 0.0
    vanished: bool = False

    def hear(self) -> dict[str, Any] | None:
        """Take in one message; return the event if it is a report."""
        kind, *content = self.line.recv()
        if kind == "up":
            self.up = True
        elif kind == "report":
            return content[0]
        elif kind == "result":
            self.result = content[0]
        elif kind == "stack":
            self.stack = content[0]
        elif kind == "failed":
            self.fail(content[0])
        return None

    def fail(self, error: PlaygroundError) -> None:
        self.failure, self.failed_at = error, time.monotonic()

    def vanish(self) -> None:
        """The process has ended without being told to."""
        self.vanished = True
        self.process.join()
        code = self.process.exitcode
        if code == UNGUARDED:
            self.fail(
                Impossible(
                    "this script starts ranks while they import it: put launch() under if __name__ == '__main__':"
                )
            )
        elif code < 0:
            self.fail(RankFailed(self.number, self.size, f"was killed by {signal.Signals(-code).name}"))
        else:
            self.fail(RankFailed(self.number, self.size, f"exited with code {code} without a result"))

    def order(self, word: str) -> None:
        with contextlib.suppress(OSError):  # it is gone: its sentinel says so
            self.line.send(word)


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    backend: str = "gloo",
    args: tuple[Any, ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    on_report: Progress | None = None,
) -> list[Any]:
    """Run `fn(rank, size, *args)` on `size` ranks of one new world; return what each returned, in rank order.

    `fn` must be importable by name (a function at the top of a module) and its results must pickle. `timeout`, in
    seconds, bounds every operation of the process group and the time for which no rank gives a sign of life;
    `report()` in a rank is one, and arrives at `on_report(rank, event)`.

    Raises `Impossible` before anything is started; `RankFailed` for the first rank that raised or died;
    `RanksHung`, with every unfinished rank's Python stack, when the timeout passes. However it ends, Ctrl-C
    included, no rank outlives the call; if this process is killed, they end by themselves.
    """
    check(size, backend, timeout)
    work = pickled(fn, args)
    meeting, listener = rendezvous.arrange(init_method)
    ranks: list[Rank] = []
    try:
        with listener or socket.socket():
            for number in range(size):
                ranks.append(start(number, size, backend, work, meeting, listener if number == 0 else None, timeout))
        watch(ranks, timeout, on_report or (lambda rank, event: None))
        dismiss(ranks)
        return [pickle.loads(rank.result or b"") for rank in ranks]
    finally:
        stop(ranks)


def check(size: int, backend: str, timeout: float) -> None:
    """Raise `Impossible` for a world that cannot be, before anything is started."""
    if not 1 <= size <= MOST_RANKS:
        raise Impossible(f"a world of {size} ranks: one host takes 1 to {MOST_RANKS}; torchrun takes more on several")
    if not 0 < timeout < 1e6:
        raise Impossible(f"a timeout of {timeout} s: use a number of seconds above 0 and below a million")
    devices.check_backend(backend, size)


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The work, ready to travel. Raises `Impossible` if a new process could not find the function."""
    import __main__

    if getattr(mp.process.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a rank is importing the script that started it: the launcher explains, once

    if getattr(fn, "__module__", None) == "__main__" and not hasattr(__main__, "__file__"):
        raise Impossible(
            f"{fn.__qualname__} was defined in a notebook or at a prompt, where the ranks, being new processes, "
            f"cannot see it: write it to a file (%%writefile ranks.py) and import it"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise Impossible(
            f"{fn!r} or its arguments cannot be sent to another process ({error}): "
            f"use a function at the top of a module, and plain data"
        ) from None


def context() -> Any:
    """Where ranks come from: the fork server, started on first use and kept for this process's life."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    preload()
    # Ctrl-C reaches every process of the terminal's group. The server is started with SIGINT blocked, and what it
    # forks inherits that: only the launcher hears it, and decides. (The tracker first: its start unblocks signals.)
    resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return mp.get_context("forkserver")


def preload(*modules: str) -> None:
    """Add to what the fork server imports once for all ranks. Counts until this process starts its first rank."""
    PRELOADED.extend(modules)
    if "forkserver" in mp.get_all_start_methods():
        mp.set_forkserver_preload(PRELOADED)


def warm_up() -> None:
    """Let the fork server begin with its imports now, while this process has other things to do."""
    context()


def dismiss_server() -> None:
    """End the fork server at once. It ends by itself when it finds this process gone, but if it is still importing
    torch it finds that late."""
    from multiprocessing import forkserver

    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server:  # a child nobody has waited for: the number cannot be anybody else's
        os.kill(server, signal.SIGTERM)


def start(
    number: int,
    size: int,
    backend: str,
    work: bytes,
    meeting: rendezvous.Meeting,
    listener: socket.socket | None,
    timeout: float,
) -> Rank:
    """Bring one rank up. Returns when its process exists: at the first call, when the fork server has its imports."""
    ours, theirs = mp.Pipe()
    process = context().Process(
        target=rank_process.main,
        args=(theirs, number, size, backend, work, meeting, listener, timeout),
        name=f"rank {number} of {size}",
    )
    try:
        with theirs:
            process.start()
    except BaseException:  # Ctrl-C too: the rank may come to be all the same, and leaves when it finds the line dead
        ours.close()
        raise
    return Rank(number, size, process, ours)


def watch(ranks: list[Rank], timeout: float, on_report: Progress) -> None:
    """Return once every rank has handed in its result. Raise as soon as one fails, or all are silent for too long."""
    limit = START_LIMIT
    while not all(rank.result for rank in ranks):
        if not listen(ranks, limit, on_report):
            raise RanksHung(len(ranks), limit, where(ranks))
        if any(rank.failure for rank in ranks):
            raise first_failure(ranks)
        limit = timeout if all(rank.up for rank in ranks) else START_LIMIT


def listen(ranks: list[Rank], seconds: float, on_report: Progress) -> bool:
    """Wait for word from any rank, take in what there is; False if `seconds` passed in silence."""
    lines: dict[Any, Rank] = {rank.line: rank for rank in ranks if not rank.vanished}
    ends: dict[Any, Rank] = {rank.process.sentinel: rank for rank in ranks if not rank.vanished}
    ready = mp.connection.wait([*lines, *ends], seconds)
    for line in lines.keys() & set(ready):
        rank = lines[line]
        try:
            while rank.line.poll():
                if event := rank.hear():
                    on_report(rank.number, event)
        except (EOFError, OSError):
            rank.vanish()
    for end in ends.keys() & set(ready):
        if not ends[end].vanished:
            ends[end].vanish()
    return bool(ready)


def first_failure(ranks: list[Rank]) -> PlaygroundError:
    """The failure that caused the others.

    A rank that raised stays up until it is stopped, so nobody fails because of it. A rank that died took its sockets
    along, and word of the exceptions this causes in its peers may overtake word of its death.
    """
    end = time.monotonic() + AFTERMATH
    while (left := end - time.monotonic()) > 0 and not any(rank.vanished for rank in ranks):
        listen(ranks, left, ignore)
    failed = [rank for rank in ranks if rank.failure]
    first = min(failed, key=lambda rank: (not rank.vanished, isinstance(rank.failure, LostPeer), rank.failed_at))
    assert first.failure
    if isinstance(first.failure, RankFailed) and TIMED_OUT.search(first.failure.traceback):
        # It waited for somebody: the reader wants to know what the others were doing instead.
        first.failure.others = where([rank for rank in ranks if not rank.failure])
    return first.failure


def where(ranks: list[Rank]) -> dict[int, str]:
    """Where each unfinished rank stands: its Python stack."""
    asked = [rank for rank in ranks if rank.result is None and not rank.vanished]
    for rank in asked:
        rank.order("where")
    end = time.monotonic() + GRACE
    while (left := end - time.monotonic()) > 0 and any(rank.stack == UNHEARD for rank in asked):
        listen(asked, left, ignore)
    return {rank.number: rank.stack for rank in asked}


def ignore(rank: int, event: dict[str, Any]) -> None:
    """A report that comes too late to matter."""


def dismiss(ranks: list[Rank]) -> None:
    """Let the ranks go, rank 0 last because it serves the store. Raise if one cannot leave cleanly."""
    for group in (ranks[1:], ranks[:1]):
        for rank in group:
            rank.order("leave")
        for rank in group:
            rank.process.join(LEAVE_LIMIT)
            if rank.process.exitcode != 0:
                how = (
                    f"exit code {rank.process.exitcode}"
                    if rank.process.exitcode
                    else f"still there after {LEAVE_LIMIT:g} s"
                )
                raise RankFailed(rank.number, rank.size, f"returned its result but did not leave cleanly: {how}")


def stop(ranks: list[Rank]) -> None:
    """End what is left of the ranks: the closed line tells them, then SIGTERM, then SIGKILL."""
    for rank in ranks:
        rank.line.close()
        rank.process.terminate()
    end = time.monotonic() + GRACE
    for rank in ranks:
        rank.process.join(max(0.0, end - time.monotonic()))
    for rank in ranks:
        rank.process.kill()
        rank.process.join()
        rank.process.close()
