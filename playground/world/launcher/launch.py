"""launch(): run one function on N processes as one world, restarted after a failure if asked;
results in rank order."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from playground.base import process_checks
from playground.base.errors import PlaygroundError, Preempted, UsageError
from playground.base.host import SIMULATED_GPUS
from playground.world import backends
from playground.world.launcher import fork_client, forked_process, pool
from playground.world.launcher.ending import dismiss, interrupt, stop
from playground.world.launcher.notices import OutputWithNotices, WorldWithNotices
from playground.world.launcher.output import (
    EVERY_RANK,
    end_lines,
    is_a_terminal,
    open_pipes,
    share_a_file,
)
from playground.world.launcher.rank_handle import GRACE, RankHandle
from playground.world.launcher.receiving import ignore_report
from playground.world.launcher.rounds import ROUNDS, OutputInRounds, WorldInRounds
from playground.world.launcher.store_process import StoreProcess, find_place
from playground.world.launcher.watch import WorldWatch
from playground.world.rank import rank as rank_process
from playground.world.rank.assignment import Assignment, Breakpoints, prepare_work
from playground.world.rank.preemption import PreemptionNotice, await_preemption, raise_if_preempted
from playground.world.rank.reports import JOINED, Progress
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT, MAX_RANKS, listen

OnRestart = Callable[[PlaygroundError, int], None]
"""Takes (failure, count): why a world failed, and how many restarts there have been, the coming one
included."""
END_LIMIT = 30.0
"""Seconds that the ranks of a program have to end when one has failed, as torchrun gives them."""
ADVICE_TO_PROGRAM = "with --debug {rank} it opens here, while the other ranks wait"
ADVICE_TO_CALLER = "it opens where this process has a terminal, and with launch(…, debug=[{rank}])"
HEAD_START = 5.0
"""Seconds by which the ranks' own timeouts come after the launcher's, which can say where every
rank is."""


def log_restart(failure: PlaygroundError, count: int) -> None:
    """Log in one line why there is a restart: on stderr, unless the program has set up logging
    otherwise."""
    logging.getLogger("playground").warning(describe_restart(failure, count))


def describe_restart(failure: PlaygroundError, count: int) -> str:
    """Why there is a restart, and which one it is."""
    return f"{failure.headline}; restart {count}"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a function runs on new ranks: the keyword arguments of `launch`, and of a `World`."""

    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT
    """Maximum time in seconds without a sign of life from any rank: what it prints, and `report()`,
    are such signs. While others give one, an operation of the process group may take 5 s longer."""
    fresh: bool = False
    """Whether to start new processes even where worlds are kept (`keep_worlds`, as in pytest)."""
    spawn: bool = False
    """Whether each rank has an interpreter of its own, which imports torch by itself, instead of
    being a fork of one that all share: then each has a hash seed of its own, too."""
    bare: bool = False
    """Whether ranks are left to the function as torchrun leaves them to a script: it forms its
    process group itself, if it wants one, reads from this process's stdin, and Ctrl-C raises
    `KeyboardInterrupt` in it: it has `grace` to end, or a second."""
    output: str | Path = EVERY_RANK
    """Whose output appears here: that of all ranks, as it comes ("ranks") or with the lines of
    stdout in rounds ("rounds", see `launcher.rounds`), that of rank 0 ("first"), or, if it is a
    folder, none: it goes to files there, a file for each stream of a rank."""
    restarts: int = 0
    """How often a world that fails is replaced by a new one: all its processes are ended, as many
    new ones started, and the function is called again with its first arguments. It must have stored
    what it resumes from; `restart_count()` in a rank is 0 at first, then 1, …"""
    grace: float | None = None
    """Seconds that the first SIGTERM leaves the ranks, instead of ending the launch: from then on
    `preempted()` is true in them, and there is no restart any more. They store where they are, and
    raise `Preempted` or return. A second signal, or no end within that time, ends the launch. (Only
    where `launch` is called in the main thread of a program that does not handle the signal
    itself.)"""
    debug: Collection[int] | None = None
    """Ranks whose breakpoints open a debugger here, one rank at a time, while the others may wait
    for it as long as that takes; the others pass theirs by. Empty: a breakpoint is an error. None:
    those of all ranks open if stdin is a terminal, and timeouts of process groups count; a
    breakpoint is an error if it is none."""
    on_report: Progress = ignore_report
    """Called with (rank, event) for each `report()` of a rank."""
    on_restart: OnRestart = log_restart
    """Called before each restart, with the `PlaygroundError` and the count of the world to come.
    What it raises ends the launch."""

    def check(self, size: int) -> None:
        """Raise `UsageError` for a world of `size` ranks that cannot be, before anything is
        started."""
        if not 0 < size <= MAX_RANKS:
            raise UsageError(
                f"a world of {size} ranks: one host takes 1 to {MAX_RANKS}; torchrun takes more on "
                "several"
            )
        if not 0 < self.timeout < 1e6:
            raise UsageError(
                f"a timeout of {self.timeout} s: use a number of seconds above 0 and below a "
                "million"
            )
        if self.restarts < 0:
            raise UsageError(f"{self.restarts} restarts: use a whole number, 0 or more")
        if self.debug and (none := [rank for rank in self.debug if not 0 <= rank < size]):
            raise UsageError(f"debug rank {none[0]}: the ranks of this world are 0 to {size - 1}")
        process_checks.check_working_folder()
        backends.get_backend(self.backend).check(size)

    @property
    def may_be_kept(self) -> bool:
        """Whether its ranks may serve another launch, before or after."""
        is_alone = self.fresh or self.spawn or self.bare or self.debug
        is_usual = self.output == EVERY_RANK and not is_alone
        return is_usual and backends.get_backend(self.backend).may_be_kept

    def choose_breakpoints(self, size: int) -> Breakpoints | None:
        """What breakpoints do in the ranks. A program that is the only rank is left to Python."""
        if self.debug:
            return Breakpoints(ranks=tuple(self.debug), lifts_timeouts=True)
        if self.bare and size == 1:
            return None
        if self.debug is None and is_a_terminal(sys.stdin):
            return Breakpoints(ranks=tuple(range(size)))
        return Breakpoints(advice=ADVICE_TO_PROGRAM if self.bare else ADVICE_TO_CALLER)


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    args: tuple[Any, ...] = (),
    config: LaunchConfig = LaunchConfig(),
    **options: Any,
) -> list[Any]:
    """Run `fn(rank, size, *args)` on `size` ranks of one new world; return what each returned, in
    rank order.

    `options` are fields of `LaunchConfig`: `launch(fn, 4, timeout=20, restarts=2)`. `fn` must be
    importable by name (a function at the top of a module) and its results must pickle. Without
    `args`, one all of whose parameters have defaults, such as the `main(argv=None)` of a script for
    torchrun, is called without any, unless its first two are called `rank` and `size` or
    `world_size`: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, and it may call
    `init_process_group` itself. The environment variables and the working folder are the caller's.
    The output of ranks appears here, byte for byte and in whole lines. The beginning of a line,
    such as a prompt, appears when its rank is quiet.

    A rank is a process as torchrun's is: `sys.exit(0)` and `os._exit(0)` return None, any other
    exit is a failure, what is registered with `atexit` runs, multiprocessing starts processes as
    the platform does, and each rank draws random numbers of its own unless it seeds the generators.
    A rank has the caller's rights, limits, umask and niceness. But ranks are forks of one process
    that has imported torch. Its hash seed is theirs: where each process of torchrun's walks a set
    of strings in an order of its own, all ranks walk it in the same one.

    Raises `UsageError` before anything is started, or if a rank raises one, which no restart would
    change; `RankFailed` for the first rank that raised or died; `Deadlock`, as soon as it is
    proved, when ranks wait for each other or for one that has finished; `RankTimeout`, with every
    unfinished rank's Python stack, when the timeout passes; `Preempted` when all ranks have ended
    and one of them has raised it. However it ends, Ctrl-C included, no rank outlives the call; if
    this process is killed, they end by themselves.
    """
    __tracebackhide__ = True  # pytest shows the failing test and the rank's own traceback
    config = replace(config, **options)
    try:
        fork_client.leave_if_imported()
        config.check(size)
        work = prepare_work(
            fn, args, timeout=config.timeout + HEAD_START, preemptible=config.grace is not None,
            bare=config.bare, breakpoints=config.choose_breakpoints(size),
        )  # fmt: skip
        with await_preemption(config.grace) as notice:
            for count in itertools.count():
                try:
                    return run_world(replace(work, restart_count=count), size, config, notice)
                except PlaygroundError as error:
                    failure = error
                is_final = notice.has_come or isinstance(failure, (UsageError, Preempted))
                if is_final or count == config.restarts:
                    break
                config.on_restart(failure, count + 1)
    except PlaygroundError as error:
        failure = error
    raise failure.with_traceback(None)  # where the launcher stood is no help


def run_world(
    work: Assignment, size: int, config: LaunchConfig, notice: PreemptionNotice
) -> list[Any]:
    """Have one world do the work; return its results, in rank order. However it ends, none of its
    ranks is left."""
    ranks: list[RankHandle] = []
    rounds = notices = None
    grace = GRACE
    if os.environ.get(SIMULATED_GPUS) and config.bare and config.output == EVERY_RANK:
        notices = WorldWithNotices(size)
    try:
        if config.may_be_kept:
            ranks = pool.take(size, config.backend)
        elif config.output == ROUNDS:
            rounds = WorldInRounds(size, partial(has_ended, ranks))
        if not ranks:
            start(ranks, size, config, rounds, notices)
        results = carry_out(work, ranks, config, notice)
        if config.may_be_kept and pool.keep(ranks):
            ranks = []  # those are the pool's
        else:
            dismiss(ranks, config.timeout)
        raise_if_preempted(results)
        return results
    except PlaygroundError:
        grace = grace_after_failure(config)
        raise
    except KeyboardInterrupt:
        if config.bare:
            interrupt(ranks, config.grace or GRACE)
        raise
    finally:
        try:
            stop(ranks, grace)
        finally:
            if rounds:
                rounds.pass_on(all_lines=True)
            if notices:
                notices.pass_on(all_notices=True)
            end_lines()


def has_ended(ranks: Sequence[RankHandle], number: int) -> bool:
    """Whether the rank with this number has begun and ended."""
    return number < len(ranks) and (ranks[number].done or ranks[number].failure is not None)


def carry_out(
    work: Assignment, ranks: list[RankHandle], config: LaunchConfig, notice: PreemptionNotice
) -> list[Any]:
    """Have these ranks do the work; return its results, in rank order."""
    for rank in ranks:
        rank.assign(work)
    WorldWatch(ranks, config.timeout, config.on_report, notice, bare=config.bare).run()
    if config.bare and len(ranks) > 1:
        tell_of_children(ranks, config.on_report)
    return [rank.load_result() for rank in ranks]


def grace_after_failure(config: LaunchConfig) -> float:
    """Seconds that the ranks of a world that has failed have for an orderly end: whole programs
    have more."""
    return (config.grace or END_LIMIT) if config.bare else GRACE


def tell_of_children(ranks: Sequence[RankHandle], on_report: Progress) -> None:
    """Report that the first rank has `JOINED` if a process that is no rank, and so reports nothing,
    may have formed a group at the ranks' store."""
    server = ranks[0].store_process
    if server and server.is_used():
        on_report(0, {JOINED: True})


def start(
    ranks: list[RankHandle],
    size: int,
    config: LaunchConfig,
    rounds: WorldInRounds | None = None,
    notices: WorldWithNotices | None = None,
) -> None:
    """Start the ranks of a new world, each added to `ranks` as soon as there is something to be
    stopped."""
    servers = [fork_client.new_server() for _ in range(size * config.spawn)]
    try:
        with listen("127.0.0.1", 0) as listener:
            place = find_place(listener)
            for number in range(size):
                env = RankEnv(
                    rank=number, size=size, local_rank=number, local_size=size, rendezvous=place
                )
                own_server = servers.pop() if servers else None
                handle = start_rank(env, config, own_server)
                ranks.append(handle)
                if rounds:
                    handle.outputs[0] = OutputInRounds(handle.outputs[0], rounds)
                if notices:
                    handle.outputs[-1] = OutputWithNotices(handle.outputs[-1], notices)
            # the last, as they have most to do before they ask it for anything
            ranks[0].store_process = StoreProcess(listener, ranks[0].process.own_server)
    finally:
        for unused in servers:
            unused.end()


def start_rank(
    env: RankEnv, config: LaunchConfig, own_server: fork_client.ForkServerClient | None
) -> RankHandle:
    """Start one rank. Raises `ForkServerFailed`."""
    # a world that is kept may outlive a redirection; rounds are counted in lines of stdout
    are_apart = pool.are_kept() or isinstance(config.output, Path) or config.output == ROUNDS
    are_one = share_a_file() and not are_apart
    shown = EVERY_RANK if config.output == ROUNDS else config.output
    outputs, ends = open_pipes(env.rank, shown, are_one)
    try:
        if config.bare:
            ends.append(Connection(os.dup(0), writable=False))
        process, line = forked_process.start(
            rank_process.main, env, config.backend, streams=ends, server=own_server
        )
    except BaseException:
        for output in outputs:
            output.pipe.close()
        raise
    finally:
        for end in ends:
            end.close()
    backend = backends.get_backend(config.backend)
    return RankHandle(env.rank, env.size, process, line, outputs, backend)
