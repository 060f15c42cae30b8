"""Watch the ranks of a world until each has handed in its result, or one of them fails, or all are silent too long."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from playground.runtime.backends import Backend
from playground.runtime.errors import PeerDisconnected, PlaygroundError, RankFailed, RankTimeout, UsageError
from playground.runtime.output import Output
from playground.runtime.preemption import PreemptionNotice
from playground.runtime.rank import Event, Progress
from playground.runtime.server import LOST_BY_THE_SERVER, UNGUARDED, check_server
from playground.runtime.work import Work

START_LIMIT = 300.0
"""Seconds a new process may take to come up (a cold disk reads torch slowly; spawned ranks read it each)."""
AFTERMATH = 0.25
"""Seconds in which, after a first failure, word of another rank's sudden death may still arrive and outrank it."""
GRACE = 1.0
"""Seconds a rank has to answer, or to end once told to, before it is stopped harder."""
LEAVE_LIMIT = 10.0
"""Seconds a rank has to destroy its process group, all results being in."""
UNHEARD = "  (no answer: stopped, or inside C code that holds the GIL)"
OnLoss = Callable[[RankFailed], None]
"""Takes the end of an expendable rank, without which the others go on."""
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout|failed to pass monitoredBarrier")


@dataclass(eq=False)
class Rank:
    """The launcher's end of the line to one rank, and what is known of it."""

    number: int
    size: int
    process: Any
    line: Connection
    outputs: list[Output]
    backend: Backend
    up: bool = False
    expendable: bool = False
    """Whether the others may go on without it, once all run the function."""
    running: bool = False
    """Whether it runs the function. (It only says so where a rank is expendable.)"""
    result: bytes | None = None
    clean: bool = False
    """Whether its process can run something else as a new one would."""
    paused: bool = False
    """Whether a person is debugging it."""
    stack: str = UNHEARD
    failure: PlaygroundError | None = None
    failed_at: float = 0.0
    vanished: bool = False
    lost: bool = False
    """Whether it has died, and the others go on."""

    def assign(self, work: Work) -> None:
        """Give it something to do."""
        self.result, self.stack, self.running = None, UNHEARD, False
        self.expendable = self.number in work.expendable
        self.order(work)

    @property
    def done(self) -> bool:
        """Whether no result is to come from it any more."""
        return self.lost or self.result is not None

    @property
    def may_be_lost(self) -> bool:
        """Whether it has died, and the others may go on. (An exception is another matter.)"""
        return self.expendable and self.vanished and isinstance(self.failure, RankFailed)

    def receive(self) -> Event | None:
        """Take in one message; return the event if it is a report."""
        kind, *content = self.line.recv()
        if kind == "up":
            self.up = True
        elif kind == "running":
            self.running = True
        elif kind == "report":
            return content[0]
        elif kind == "result":
            self.result, self.clean = content
        elif kind == "paused":
            self.paused = content[0]
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
        self.process.join(GRACE)
        code = self.process.exitcode
        if code == UNGUARDED:
            self.fail(UsageError("ranks import this script: put its launch() under if __name__ == '__main__':"))
        else:
            self.fail(RankFailed(self.number, self.size, describe_exit(code, self.backend)))

    def order(self, order: Work | signal.Signals | str) -> None:
        with contextlib.suppress(OSError):  # it is gone: its sentinel says so
            self.line.send(order)

    def relay_output(self) -> None:
        """Pass on all that it has printed by now."""
        for output in self.outputs:
            output.relay_all()


def describe_exit(code: int | None, backend: Backend) -> str:
    """The end of a process that was not told to end, in words."""
    if code is None:
        return "hung up on its launcher but is still there"
    if code == LOST_BY_THE_SERVER:
        return "is out of reach: the fork server it came from was killed or stopped"
    if code >= 0:
        return f"exited with code {code} without a result"
    names = {number.value: number.name for number in signal.Signals}
    return backend.deaths.get(-code, f"was killed by {names.get(-code, f'signal {-code}')}")


def watch(ranks: list[Rank], timeout: float, on_report: Progress, notice: PreemptionNotice, on_loss: OnLoss) -> None:
    """Return once every rank has handed in its result. Raise as soon as one fails, or all are silent for too long.

    A signal of which `notice` is given is passed on to the ranks. An expendable rank that dies is lost: `on_loss` is
    told, and its result is not waited for.
    """
    limit = timeout if all(rank.up for rank in ranks) else START_LIMIT
    while not all(rank.done for rank in ranks):
        heard = listen(ranks, min(limit, notice.seconds_left), on_report, notice.ears)
        if number := notice.take():
            for rank in ranks:
                rank.order(number)
        if not heard and not any(rank.paused for rank in ranks):
            raise RankTimeout(len(ranks), limit, collect_stacks(ranks))
        if any(rank.failure and not rank.lost for rank in ranks):
            lose_dead(ranks, on_report, on_loss)
        limit = timeout if all(rank.up for rank in ranks) else START_LIMIT
    for rank in ranks:
        rank.relay_output()


def listen(ranks: list[Rank], seconds: float, on_report: Progress, others: Sequence[int] = ()) -> bool:
    """Wait for word from any rank, take in what there is; False if `seconds` passed in silence.

    What a rank prints is word from it, and passed on as it comes. So are descriptors in `others` that are ready.
    """
    lines: dict[Any, Rank] = {rank.line: rank for rank in ranks if not rank.vanished}
    ends: dict[Any, Rank] = {rank.process.sentinel: rank for rank in ranks if not rank.vanished}
    ready = wait_relaying(ranks, [*lines, *ends, *others], seconds)
    events: list[tuple[int, Event]] = []
    for line in lines.keys() & set(ready):
        rank = lines[line]
        try:
            while rank.line.poll():
                if event := rank.receive():
                    events.append((rank.number, event))
        except (EOFError, OSError):
            rank.vanish()
    for number, event in events:  # not above: what it raises (a closed stdout, say) is not the rank's doing
        on_report(number, event)
    for end in ends.keys() & set(ready):
        if not ends[end].vanished:
            ends[end].vanish()
    return bool(ready)


def wait_relaying(ranks: list[Rank], others: list[Any], seconds: float) -> list[Any]:
    """Wait until there is something at one of `others`, or in a pipe that the ranks print to: that is passed on.

    Returns all that was ready, the pipes too; nothing if `seconds` passed in silence.
    """
    outputs: dict[Any, Output] = {
        output.pipe: output for rank in ranks for output in rank.outputs if not output.pipe.closed
    }
    ready = wait([*others, *outputs], seconds)
    for pipe in outputs.keys() & set(ready):
        outputs[pipe].relay()
    return ready


def lose_dead(ranks: list[Rank], on_report: Progress, on_loss: OnLoss) -> None:
    """The ranks that have died are lost, if all of them are expendable: `on_loss` is told of each.

    Raise the first failure if another one has failed, or fails in the `AFTERMATH`: it cannot go on without them. If it
    says that it has lost somebody, raise what that one died of, even if it was lost before.
    """
    going = [rank for rank in ranks if not rank.lost]
    end = time.monotonic() + AFTERMATH
    while all(rank.running for rank in ranks) and all(rank.may_be_lost for rank in going if rank.failure):
        if (left := end - time.monotonic()) > 0:
            listen(ranks, left, on_report)
            continue
        for rank in going:
            if isinstance(rank.failure, RankFailed):
                rank.lost = True
                on_loss(rank.failure)
        return
    failure, lost = first_failure(going), [rank for rank in ranks if rank.lost]
    if lost and isinstance(failure, PeerDisconnected):
        failure = max(lost, key=lambda rank: rank.failed_at).failure or failure
    raise failure


def log_loss(failure: RankFailed) -> None:
    """Say in one line who is lost: on stderr, unless the program has set up logging otherwise."""
    logging.getLogger("playground").warning("%s; the others go on", failure.headline)


def first_failure(ranks: list[Rank]) -> PlaygroundError:
    """The failure that caused the others.

    A rank that raised stays up until it is stopped, so nobody fails because of it. A rank that died took its sockets
    along, and word of the exceptions this causes in its peers may overtake word of its death.
    """
    end = time.monotonic() + AFTERMATH
    while (left := end - time.monotonic()) > 0 and not any(rank.vanished for rank in ranks):
        listen(ranks, left, ignore)
    failed = [rank for rank in ranks if rank.failure]
    first = min(
        failed, key=lambda rank: (not rank.vanished, isinstance(rank.failure, PeerDisconnected), rank.failed_at)
    )
    assert first.failure
    if isinstance(first.failure, RankFailed) and TIMED_OUT.search(first.failure.traceback):
        # It waited for somebody: the reader wants to know what the others were doing instead.
        first.failure.others = collect_stacks([rank for rank in ranks if not rank.failure])
    return first.failure


def collect_stacks(ranks: list[Rank]) -> dict[int, str]:
    """Where each unfinished rank stands: its Python stack."""
    asked = [rank for rank in ranks if rank.result is None and not rank.vanished]
    for rank in asked:
        rank.order("where")
    end = time.monotonic() + GRACE
    while (left := end - time.monotonic()) > 0 and any(rank.stack == UNHEARD for rank in asked):
        listen(asked, left, ignore)
    return {rank.number: rank.stack for rank in asked}


def ignore(rank: int, event: Event) -> None:
    """A report that comes too late to matter."""


def release(ranks: list[Rank]) -> None:
    """Let the ranks go, all at once. Raise `RankFailed` for one that cannot leave cleanly."""
    for rank in ranks:
        rank.order("leave")
    staying: dict[Any, Rank] = {rank.process.sentinel: rank for rank in ranks}
    lines: dict[Any, Rank] = {rank.line: rank for rank in ranks}
    end = time.monotonic() + LEAVE_LIMIT
    while staying:
        ready = wait_relaying(ranks, [*staying, *lines], max(0.0, end - time.monotonic()))
        if not ready:
            check_server()
            # rank 0 waits for the others: if one of them is still there, it is that one
            last = max(staying.values(), key=lambda rank: rank.number)
            raise unclean_exit(last, f"still there after {LEAVE_LIMIT:g} s")
        for line in lines.keys() & set(ready):
            try:
                lines[line].receive()
            except (EOFError, OSError):  # it is about to end
                del lines[line]
            else:
                if failure := lines[line].failure:
                    raise failure
        for sentinel in staying.keys() & set(ready):
            rank = staying.pop(sentinel)
            rank.process.join()
            if rank.process.exitcode != 0:
                raise unclean_exit(rank, describe_exit(rank.process.exitcode, rank.backend))


def unclean_exit(rank: Rank, how: str) -> RankFailed:
    return RankFailed(rank.number, rank.size, f"returned its result but did not leave cleanly: {how}")


def stop(ranks: list[Rank]) -> None:
    """End what is left of the ranks: the closed line tells them, then SIGTERM, then SIGKILL."""
    try:
        for rank in ranks:
            rank.relay_output()
    finally:  # whoever was to read that may be gone
        try:
            for rank in ranks:
                rank.line.close()
                rank.process.terminate()
            end = time.monotonic() + GRACE
            for rank in ranks:
                rank.process.join(max(0.0, end - time.monotonic()))
        finally:  # Ctrl-C may come once more
            kill(ranks)


def kill(ranks: list[Rank]) -> None:
    """End them at once, and let go of all that belongs to them."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.line.close()
        for output in rank.outputs:
            output.close()
