"""launch(): run one function on N processes as one world, restarted after a failure if asked; results in rank order."""

from __future__ import annotations

import contextlib
import pickle
import resource
import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from playground.runtime import backends
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.launcher import kept, server
from playground.runtime.launcher.output import open_pipes
from playground.runtime.launcher.rank_handle import RankHandle
from playground.runtime.launcher.restarts import OnRestart, check_restarts, log_restart, run_with_restarts
from playground.runtime.launcher.shutdown import release, stop
from playground.runtime.launcher.watch import OnLoss, check_expendable, log_loss, watch
from playground.runtime.meeting.rendezvous import DEFAULT_TIMEOUT, Rendezvous, prepare_rendezvous, remove_store
from playground.runtime.rank import rank as rank_process
from playground.runtime.rank.preemption import PreemptionNotice, raise_if_preempted
from playground.runtime.rank.rank import Progress
from playground.runtime.rank.work import Work, prepare_work

FILES, FILES_PER_RANK = 24, 5
"""Open descriptors of a launcher, and of a rank in two process groups: 13 + 5 * size and 25 + 3 * size, measured."""


def check_open_files(size: int) -> None:
    """Raise `UsageError` if a world of `size` ranks needs more open files than a process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_RANK * size
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"a world of {size} ranks needs {needed} open files, and the limit here is {limit}: "
            f"raise it (ulimit -n {needed}) or take fewer ranks"
        )


MAX_RANKS = 128
"""On one host: beyond it the sockets of a full mesh, size² of them, meet the limits of common machines."""
HEAD_START = 5.0
"""Seconds the ranks' own timeouts come after the launcher's, who knows where every rank stands and so is to speak."""

PORT_LIMIT = 10.0
"""Seconds for which what a killed rank has forked may still hold the world's port. (A worker of torch's DataLoader
looks every five whether its rank is there.)"""


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    backend: str = "gloo",
    args: tuple[Any, ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    on_report: Progress | None = None,
    fresh: bool = False,
    restarts: int = 0,
    on_restart: OnRestart = log_restart,
    grace: float | None = None,
    expendable: Collection[int] = (),
    on_loss: OnLoss = log_loss,
) -> list[Any]:
    """Run `fn(rank, size, *args)` on `size` ranks of one new world; return what each returned, in rank order.

    `fn` must be importable by name (a function at the top of a module) and its results must pickle. One without
    parameters, such as the `main()` of a script for torchrun, is called without: RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT are set, and it may call `init_process_group` itself. The environment variables and the
    working folder are the caller's. The output of ranks appears here, line by line.

    `timeout`, in seconds, bounds the time for which no rank gives a sign of life; `report()` in a rank is one, and
    arrives at `on_report(rank, event)`, and so is what it prints. While others do give one, an operation of the process
    group may take 5 s longer. Where worlds are kept (`keep_worlds`, as in pytest), `fresh` asks for new processes.

    `restarts` is how often a world that fails is replaced by a new one: all its processes are ended, `size` new ones
    started, and `fn` is called again with the same arguments as it was first. Whatever it is to go on from, it must
    have stored; `restart_count()` in a rank is 0 at first, then 1, … After each such failure,
    `on_restart(failure, count)` is called with the `PlaygroundError` and the count of the world to come (by default it
    logs a warning, one line); what it raises ends the launch. After the last one, the failure is raised.

    With a `grace`, in seconds, the first SIGTERM does not end the launch: from then on, `preempted()` is true in its
    ranks, and there is no restart any more. The ranks store where they are, and raise `Preempted` or return. A second
    one, or no end within that time, does end it. (Only where `launch` is called in the main thread of a program that
    does not handle the signal itself.)

    A rank in `expendable` may die, killed or by leaving, once all ranks run the function: `on_loss(failure)` is called
    with the `RankFailed` that says how (by default it logs a warning, one line), the others go on, and the result of
    the lost one is None. They must be able to: collectives with a lost rank fail or hang, but gloo's send and recv
    between two others do not. If another rank fails because of the loss, `RankFailed` is raised for the lost one.
    Rank 0 is never expendable.

    Raises `UsageError` before anything is started, or if a rank raises one, which no restart would change;
    `RankFailed` for the first rank that raised or died; `Deadlock`, as soon as it is proved, when ranks wait for each
    other or for one that has finished; `RankTimeout`, with every unfinished rank's Python stack, when the timeout
    passes; `Preempted` when all ranks have ended and one of them has raised it. However it ends, Ctrl-C
    included, no rank outlives the call; if this process is killed, they end by themselves.
    """
    __tracebackhide__ = True  # pytest shows the failing test and the rank's own traceback
    try:
        server.leave_if_imported()
        check(size, backend, timeout)
        check_restarts(restarts)
        check_expendable(expendable, size)
        work = prepare_work(fn, args, timeout + HEAD_START)
        work = replace(work, preemptible=grace is not None, expendable=frozenset(expendable))
        with PreemptionNotice(grace) as notice:
            attempt = partial(
                run_world, size=size, backend=backend, timeout=timeout, init_method=init_method, fresh=fresh,
                on_report=on_report or (lambda rank, event: None), notice=notice, on_loss=on_loss,
            )  # fmt: skip
            return run_with_restarts(attempt, work, restarts, partial(tell_of_restart, notice, on_restart))
    except PlaygroundError as error:
        failure = error
    raise failure.with_traceback(None)  # where the launcher stood is no help


def tell_of_restart(notice: PreemptionNotice, on_restart: OnRestart, failure: PlaygroundError, count: int) -> None:
    """Call `on_restart`; raise the failure if there is to be no restart, because somebody wants the launch to end."""
    if notice.has_come:
        raise failure
    on_restart(failure, count)


def run_world(
    work: Work, *, size: int, backend: str, timeout: float, init_method: str | None, fresh: bool, on_report: Progress,
    notice: PreemptionNotice, on_loss: OnLoss,
) -> list[Any]:  # fmt: skip
    """Have one world do the work; return its results, in rank order. However it ends, none of its ranks is left."""
    ranks: list[RankHandle] = []
    try:
        reusable = not fresh and init_method is None and backends.get_backend(backend).may_be_kept
        ranks = kept.take(size, backend) if reusable else []
        if not ranks:
            start(ranks, size, backend, init_method, PORT_LIMIT if work.restart_count else 0.0)
        for rank in ranks:
            rank.assign(work)
        watch(ranks, timeout, on_report, notice, on_loss)
        results = [None if rank.lost else pickle.loads(rank.result or b"") for rank in ranks]
        complete = not any(rank.lost for rank in ranks)
        if complete and reusable and kept.keep(ranks):
            ranks = []
        elif complete:  # to leave takes all ranks: otherwise they are stopped
            release(ranks)
        raise_if_preempted(results)
        return results
    finally:
        stop(ranks)
        if ranks:
            remove_store(init_method)


def start(ranks: list[RankHandle], size: int, backend: str, init_method: str | None, port_limit: float) -> None:
    """Start the ranks of a new world, each added to `ranks` as soon as there is something to be stopped.

    The port that `init_method` names may be taken for another `port_limit` seconds.
    """
    rendezvous, listener = prepare_rendezvous(init_method, port_limit)
    with listener or contextlib.nullcontext():
        for number in range(size):
            ranks.append(start_rank(number, size, backend, rendezvous, listener if number == 0 else None))


def start_rank(
    number: int, size: int, backend: str, rendezvous: Rendezvous, listener: socket.socket | None
) -> RankHandle:
    outputs, ends = open_pipes(number)
    try:
        process, line = server.start(
            f"rank {number} of {size}", rank_process.main, number, size, backend, rendezvous, listener, streams=ends
        )
    except BaseException:
        for output in outputs:
            output.close()
        raise
    finally:
        for end in ends:
            end.close()
    return RankHandle(number, size, process, line, outputs, backends.get_backend(backend))


def check(size: int, backend: str, timeout: float) -> None:
    """Raise `UsageError` for a world that cannot be, before anything is started."""
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(f"a world of {size} ranks: one host takes 1 to {MAX_RANKS}; torchrun takes more on several")
    if not 0 < timeout < 1e6:
        raise UsageError(f"a timeout of {timeout} s: use a number of seconds above 0 and below a million")
    check_open_files(size)
    backends.get_backend(backend).check(size)
