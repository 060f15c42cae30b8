"""The notebook's side of ranks that stay: cells are handed to them, a hang is explained and ended,
and a rank that dies is replaced. Does not import torch."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from playground.base.errors import Deadlock, PlaygroundError, RankFailed, UsageError
from playground.explain.hang import MAKE_DDP, NEW_GROUP, SPLIT_GROUP, Operation
from playground.explain.hang.box_format import CAPACITY
from playground.explain.hang.diagnosis import tell
from playground.explain.hang.differences import find_mismatch
from playground.explain.hang.wording import Diagnosis
from playground.explain.right.finding import Finding
from playground.play import cells
from playground.play.cells import Outcome
from playground.play.checking import CellCheck
from playground.world import backends
from playground.world.launcher import fork_client
from playground.world.launcher.ending import stop
from playground.world.launcher.examiner import Examiner, line_of
from playground.world.launcher.launch import LaunchConfig, start, start_rank
from playground.world.launcher.rank_handle import RankHandle
from playground.world.launcher.receiving import (
    ask_for_stacks,
    ignore_report,
    receive,
    receive_while,
)
from playground.world.launcher.store_process import StoreProcess, find_place
from playground.world.launcher.watch import WorldWatch
from playground.world.rank.assignment import Assignment, Breakpoints, Order, prepare_work
from playground.world.rank.preemption import PreemptionNotice
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.rendezvous import listen

OPERATION_LIMIT = 1800.0
"""Seconds that an operation waits for other ranks by default: whom it waits for in vain is known
long before, and whoever computes may take its time."""
MEETING_LIMIT = 60.0
"""Seconds without a sign of life in which ranks meet."""
AGAIN, PATIENCE = 0.3, 3.0
"""Seconds that a rank has to come out of a cell before it is told again, by all means; and before
it is killed."""
REST = 0.1
"""Seconds without progress in which a rank counts as waiting for others that do not come."""


@dataclass(kw_only=True)
class Run:
    """How a cell ended."""

    number: int
    on: Collection[int] = ()
    """Its ranks."""
    began: float = 0.0
    """On the monotonic clock, in seconds."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By rank; of those that have lived to its end."""
    seconds: float = 0.0
    hang: Diagnosis | None = None
    """The deadlock that was proved."""
    places: dict[int, str] = field(default_factory=dict)
    """By rank, where it was when the cell was interrupted."""
    freed: Collection[int] = ()
    """Ranks that were still in the cell when it was ended."""
    lost: dict[int, str] = field(default_factory=dict)
    """By rank that has been replaced, how it ended."""
    why_lost: Diagnosis | None = None
    has_left: bool = False
    """Whether it has destroyed the process group."""
    gone: Collection[str] = ()
    """Kinds of groups that were there, and are not any more."""
    differing: Diagnosis | None = None
    """An operation in which the ranks did not agree although all have returned from it."""
    operations: dict[int, tuple[Operation, ...]] = field(default_factory=dict)
    """By rank, what it has called."""
    mistakes: Sequence[Finding] = ()
    """What is silently wrong in its training."""

    @property
    def is_whole(self) -> bool:
        """Whether the ranks have come to its end, in the process group in which they began it."""
        failed = any(outcome.error for outcome in self.outcomes.values())
        return not (self.hang or self.places or self.freed or self.lost or failed or self.has_left)


class Cell(NamedTuple):
    """A cell, and how it was run."""

    number: int
    source: str
    on: tuple[int, ...]
    """Its ranks."""
    how: Callable[..., Outcome]
    """What runs it there."""


def configure(backend: str = "gloo", timeout: float = OPERATION_LIMIT) -> LaunchConfig:
    """What ranks are started with."""
    return LaunchConfig(backend=backend, timeout=timeout)


def check_world(config: LaunchConfig, size: int) -> str:
    """A notice of the backend's on a world of this size, if there is one. Raises `UsageError` if
    there can be no such world."""
    config.check(size)
    return backends.get_backend(config.backend).check(size)


class PlayWorld:
    """Ranks that stay. `size` and `backend` as for `launch`; `timeout`: seconds that an operation
    waits for other ranks; `checks`: whether cells are checked for silent mistakes.

    Raises what `launch` raises before a function runs. A method that raises a `PlaygroundError`
    later has ended the ranks.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        timeout: float = OPERATION_LIMIT,
        checks: bool = True,
    ) -> None:
        fork_client.leave_if_imported()
        self.config = configure(backend, timeout)
        self.notice = check_world(self.config, size)
        self.size = size
        log_level = backends.get_backend(backend).log_level
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", log_level)  # before torch is imported
        self.ranks: list[RankHandle] = []
        self.is_stale = False
        """Whether the process group is of no use any more."""
        self.last = Cell(0, "", tuple(range(size)), cells.run_cell)
        """The cell that ran last."""
        self.texts: dict[str, str] = {}
        """The cells so far, by the name that their lines have: "cell 3"."""
        self.state = "no cell has hung or was interrupted"
        """What the ranks did when a cell hung or was interrupted."""
        self.one_at_a_time = threading.Lock()
        self.training = CellCheck(size) if checks else None
        if checks:
            fork_client.preload(cells.OBSERVED.module)
        try:
            start(self.ranks, size, self.config)
            for rank in self.ranks:
                self.begin(rank)
            self.await_all()
        except BaseException:
            self.close()
            raise

    def begin(self, rank: RankHandle) -> None:
        """Give a new rank its namespace, and its output a label."""
        for output in rank.outputs:
            output.label = f"[{rank.number}] "
            output.is_labelled = True
        breakpoints = Breakpoints(ranks=tuple(range(self.size)))
        rank.assign(self.prepare(cells.begin, stays=False, breakpoints=breakpoints))

    def prepare(self, fn: Callable[..., Any], *args: object, **more: Any) -> Assignment:
        return prepare_work(
            fn, args, timeout=self.config.timeout, preemptible=False, **{"stays": True, **more}
        )

    def watch(self, limit: float) -> WorldWatch:
        return WorldWatch(self.ranks, limit, ignore_report, PreemptionNotice(0.0))

    def await_all(self) -> None:
        """Wait for new ranks, and for a new group."""
        watch = self.watch(MEETING_LIMIT)
        while not all(rank.done for rank in self.ranks):
            watch.look()
        for rank in self.ranks:
            rank.relay_output()

    def close(self) -> None:
        """End the ranks."""
        ranks = self.ranks
        self.ranks = []
        stop(ranks)
        if self.training:
            self.training.close()

    def run_cell(
        self,
        source: str,
        number: int = 1,
        on: Sequence[int] | None = None,
        how: Callable[..., Outcome] = cells.run_cell,
    ) -> Run:
        """Run a cell on all ranks, or on some, as `how` does there. It ends when they have
        returned, when a deadlock is proved, a rank has died, or at Ctrl-C; in any case all of them
        are there again."""
        on = self.check(on)
        self.last = Cell(number, source, on, how)
        self.texts[f"cell {number}"] = source
        how = self.training.prepare(how) if self.training else how
        ran = self.perform(self.prepare(how, number, source), on, number)
        if self.training:
            is_whole = ran.is_whole and len(on) == self.size
            ran.mistakes = self.training.conclude(is_whole=is_whole)
        return ran

    def retry(self) -> Run:
        """Run the last cell again."""
        last = self.last
        if not last.number:
            raise UsageError("no cell has run yet")
        return self.run_cell(last.source, last.number, last.on, last.how)

    def call(
        self,
        fn: Callable[..., object],
        *args: object,
        on: Sequence[int] | None = None,
        limit: float = math.inf,
    ) -> list[Any]:
        """What `fn(*args)`, a function of `cells`, returns on each of these ranks. Raises
        `UsageError` with the first traceback where it raises, or takes longer than `limit`
        seconds."""
        run = self.perform(self.prepare(cells.call, fn, *args), self.check(on), 0, limit)
        for rank, reason in run.lost.items():
            raise UsageError(f"rank {rank} {reason}")
        for outcome in run.outcomes.values():
            if outcome.error:
                raise UsageError(outcome.error)
        return [outcome.value for outcome in run.outcomes.values()]

    def push(self, on: Sequence[int] | None = None, **values: object) -> None:
        """Set these names on all ranks, or on some."""
        self.call(cells.define, pickle.dumps(values), on=on)

    def pull(self, expression: str, on: Sequence[int] | None = None) -> list[Any]:
        """The value of an expression on each rank."""
        pickled = self.call(cells.pickle_name, expression, on=on)
        try:
            return [pickle.loads(each) for each in pickled]
        except Exception as error:  # a class that a cell has defined
            raise UsageError(f"{expression} cannot be made here ({error})") from None

    def complete(self, text: str) -> list[str]:
        """The names and attributes of rank 0 that begin like this; none while a cell runs."""
        if self.one_at_a_time.locked():
            return []
        try:
            return list(self.call(cells.complete, text, on=(0,), limit=1.0)[0])
        except UsageError:
            return []

    def check(self, on: Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that are meant. Raises `UsageError` for one that is none."""
        if on is None:
            return tuple(range(self.size))
        if not on or not {*on} <= {*range(self.size)}:
            wrong = ", ".join(str(rank) for rank in on if not 0 <= rank < self.size) or "no rank"
            raise UsageError(f"{wrong} in a world of {self.size}: its ranks are 0-{self.size - 1}")
        return tuple(sorted({*on}))

    def perform(
        self, work: Assignment, on: tuple[int, ...], number: int, limit: float = math.inf
    ) -> Run:
        """Have the ranks in `on` do the work of cell `number`, for `limit` seconds at most: one
        work at a time. Raises `UsageError` if there are no ranks."""
        if not self.ranks:
            raise UsageError("the ranks have ended: start others with %ranks")
        with self.one_at_a_time:
            try:
                return self.perform_alone(work, on, Run(number=number, on=on), limit)
            except BaseException:
                self.close()
                raise

    def perform_alone(self, work: Assignment, on: tuple[int, ...], run: Run, limit: float) -> Run:
        """Have the ranks in `on` do the work, for `limit` seconds at most, and fill in `run`."""
        receive(self.ranks, 0)
        self.mend(run)
        ranks = [self.ranks[rank] for rank in on]
        run.began = time.monotonic()
        called = self.count_calls()
        for rank in ranks:
            rank.assign(work)
        watch = self.watch(math.inf)
        watch.examiner.began = run.began
        is_interrupted = self.await_end(run, ranks, watch, limit)
        run.seconds = time.monotonic() - run.began
        busy = self.list_inside(ranks)
        run.freed = tuple(rank.number for rank in busy)
        has_called = self.count_calls() != called
        if has_called:
            self.note_operations(run, ranks, watch.examiner)
        if is_interrupted or run.hang or busy:
            may_wait = has_called or not is_interrupted
            self.let_go(run, busy, watch.examiner, is_interrupted=is_interrupted, may_wait=may_wait)
        for rank in ranks:
            rank.relay_output()
            if rank.done and not self.is_lost(rank):
                run.outcomes[rank.number] = pickle.loads(rank.result or b"")
        run.has_left = any(outcome.has_left for outcome in run.outcomes.values())
        self.is_stale |= bool(self.list_lost()) or run.has_left
        if self.is_stale:
            run.gone = self.find_groups(watch.examiner)
        self.mend(run)
        return run

    def await_end(
        self, run: Run, ranks: Sequence[RankHandle], watch: WorldWatch, limit: float
    ) -> bool:
        """Wait until the ranks have done their work, one is lost, a deadlock is proved, or they are
        interrupted. Returns whether they are, by Ctrl-C or after `limit` seconds."""
        try:
            while not all(rank.done for rank in ranks) and not self.list_lost():
                watch.look()
                if time.monotonic() - run.began > limit:
                    return True
        except KeyboardInterrupt:
            return True
        except Deadlock as hang:
            run.hang = hang.diagnosis
            self.state = str(run.hang)
        except RankFailed as failure:
            run.why_lost = failure.diagnosis
        return False

    def count_calls(self) -> list[object]:
        return [rank.box and rank.box.begun for rank in self.ranks]

    def note_operations(self, run: Run, ranks: Sequence[RankHandle], examiner: Examiner) -> None:
        """Read from the flight recorders what was called since the cell began."""
        states = [
            replace(
                state,
                operations=tuple(one for one in state.operations if one.issued >= examiner.began),
            )
            for state in examiner.states(latest=CAPACITY)
        ]
        run.operations = {rank.number: states[rank.number].operations for rank in ranks}
        if not run.hang and not run.freed:
            run.differing = find_mismatch(states)

    def note_places(self, run: Run, busy: Sequence[RankHandle], examiner: Examiner) -> None:
        """Note where ranks are that are interrupted."""
        stacks = ask_for_stacks(busy)
        states = examiner.states()
        self.state = tell(states)
        for number, stack in stacks.items():
            waits = states[number].waits_for
            place = f"{waits.name} ({waits.line})" if waits else line_of(stack)
            run.places[number] = place or "it does not say where"

    def let_go(
        self,
        run: Run,
        busy: Sequence[RankHandle],
        examiner: Examiner,
        *,
        is_interrupted: bool,
        may_wait: bool,
    ) -> None:
        """Get these ranks out of the cell: by `KeyboardInterrupt` where they are interrupted, by an
        error in what waits for other ranks, if they may wait for some, and in the end by killing
        them."""
        try:
            if is_interrupted:
                self.note_places(run, busy, examiner)
                self.order(busy, Order.INTERRUPT)
            end = time.monotonic() + PATIENCE
            if not run.hang:
                self.await_rest(busy, examiner, end)
            if may_wait:
                self.abort()
            self.insist(busy, end)
        except KeyboardInterrupt:  # who presses it twice does not want to wait
            self.is_stale = True
        for rank in self.list_inside(busy):
            rank.fail(RankFailed(rank.number, self.size, "did not come out of the cell"))

    def await_rest(self, busy: Sequence[RankHandle], examiner: Examiner, end: float) -> None:
        """Wait until ranks have come out of the cell or make no progress: gloo never wakes up an
        operation that was about to send when its connection is shut down."""
        before: list[object] = []
        now = examiner.progress
        while self.list_inside(busy) and time.monotonic() < end and now != before:
            receive_while(lambda: bool(self.list_inside(busy)), self.ranks, REST)
            before, now = now, examiner.progress

    def abort(self) -> None:
        """Have what waits for other ranks raise an error, on all ranks: their group is of no use
        after that."""
        self.is_stale = True
        self.order(self.ranks, Order.ABORT)

    def insist(self, busy: Sequence[RankHandle], end: float) -> None:
        """Tell ranks that do not come out again, by all means, until `end`."""
        while (
            receive_while(lambda: bool(self.list_inside(busy)), self.ranks, AGAIN)
            and time.monotonic() < end
        ):
            asking = [rank for rank in self.list_inside(busy) if rank.question is not None]
            for rank in asking:  # such as a debugger, whose prompt outlives Ctrl-C
                rank.answer(None)
            if asking:
                continue
            # gloo tries again to connect; a loop of the program's calls again
            self.abort()
            self.order(busy, Order.INTERRUPT)
            for rank in self.list_inside(busy):
                if rank.is_stopped():
                    rank.process.send_signal(signal.SIGCONT)

    def list_inside(self, ranks: Sequence[RankHandle]) -> list[RankHandle]:
        """Those that are still in the cell."""
        return [rank for rank in ranks if not rank.done and not self.is_lost(rank)]

    def order(self, ranks: Sequence[RankHandle], what: Order) -> None:
        for rank in ranks:
            if not self.is_lost(rank):
                rank.order(what)

    def is_lost(self, rank: RankHandle) -> bool:
        return rank.vanished or rank.failure is not None

    def list_lost(self) -> list[RankHandle]:
        return [rank for rank in self.ranks if self.is_lost(rank)]

    def find_groups(self, examiner: Examiner) -> list[str]:
        """The kinds of groups, besides the world's, that ranks have made in this world."""
        made = {channel.kind for state in examiner.states() for channel in state.counts}
        return [kind for kind in (NEW_GROUP, SPLIT_GROUP, MAKE_DDP) if kind in made]

    def mend(self, run: Run) -> None:
        """Put new processes in the places of ranks that are lost, and form the group anew, if there
        is need. Raises `PlaygroundError` if that fails."""
        lost = self.list_lost()
        if not lost and not self.is_stale:
            return
        for rank in lost:
            reason = "exited with code 0" if rank.failure is None else describe(rank.failure)
            run.lost[rank.number] = reason
        stop(lost)
        with listen("127.0.0.1", 0) as listener:
            rendezvous = find_place(listener)
            for rank in self.ranks:
                if rank not in lost:
                    rank.assign(self.prepare(cells.call, cells.stay, rendezvous=rendezvous))
            for number in (rank.number for rank in lost):
                env = RankEnv(
                    rank=number, size=self.size, local_rank=number, local_size=self.size,
                    rendezvous=rendezvous,
                )  # fmt: skip
                self.ranks[number] = start_rank(env, self.config, None)
                self.begin(self.ranks[number])
            self.ranks[0].replace_store_process(StoreProcess(listener))
        self.await_all()
        self.is_stale = False


def describe(failure: PlaygroundError) -> str:
    return failure.reason if isinstance(failure, RankFailed) else failure.headline
