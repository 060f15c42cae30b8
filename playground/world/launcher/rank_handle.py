"""The launcher's end of the line to one rank, and what is known of it there."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from playground.base import errors
from playground.base.errors import UNHEARD, PlaygroundError, RankFailed, UsageError
from playground.base.process_status import is_asleep, is_ending, is_stopped
from playground.base.signals import describe_signal
from playground.base.untrusted import unpickle
from playground.explain.hang.activity import Activity
from playground.explain.hang.box import View
from playground.explain.hang.idle import Sleep
from playground.world.backends.backend import Backend
from playground.world.launcher.fork_client import UNGUARDED
from playground.world.launcher.forked_process import LOST_BY_THE_SERVER, find_sender
from playground.world.launcher.output import Output
from playground.world.launcher.store_process import StoreProcess
from playground.world.rank.assignment import Answer, Assignment, MessageKind, Order
from playground.world.rank.reports import HUNG_UP, Event

GRACE = 1.0
"""Seconds a rank has to answer, or to end once asked to, before it is stopped harder."""
EXIT_LIMIT = 10.0
"""Seconds in which the process of a rank that has hung up ends, and its exit code is known: one
that was killed first gives its memory back, on a busy machine later than in a second."""
PLAIN = (
    Activity, Sleep, *(each for each in vars(errors).values() if isinstance(each, type)),
)  # fmt: skip
"""The classes of ours that a rank sends of itself: to make one runs no code of the rank's."""


@dataclass(eq=False)
class RankHandle:
    """The launcher's end of the line to one rank, and what is known of it.

    Its states, in their order: started; up; assigned work; done, where it has handed in the result,
    from which it goes back to assigned, or failed; and vanished, which may come at any time.
    """

    number: int
    size: int
    process: Any
    line: Connection
    outputs: list[Output]
    backend: Backend
    up: bool = False
    """Whether its process runs: it has told that it takes work."""
    result: bytes | None = None
    changes: list[str] = field(default_factory=list)
    """What its function has changed of its process. Without changes, the process can run something
    else as a new one would."""
    stack: str = UNHEARD
    activity: Activity | None = None
    """Its activity besides its main thread, as of the stack. None if it has not answered."""
    failure: PlaygroundError | None = None
    failed_at: float = 0.0
    has_told_failure: bool = False
    """Whether it has told its failure itself: it ends by itself once the line is closed."""
    vanished: bool = False
    """Whether its process has ended before it was let go."""
    hung_up: bool = False
    """Whether its program has closed the line, as daemons do, or has ended by `os._exit(0)`. The
    end of its process tells the rest."""
    assigned: int = 0
    """How often it was given work."""
    box: View | None = None
    """Its flight recorder, if it has one and has told."""
    store_process: StoreProcess | None = None
    """What serves the store of its world, and ends with this rank's process."""
    is_of_other_user: bool = False
    """Whether its latest message came from it as another user: its program gave its rights away."""
    question: str | None = None
    """The prompt of the question that it waits for an answer to."""

    def assign(self, work: Assignment) -> None:
        """Give it something to do."""
        self.result = None
        self.stack = UNHEARD
        self.activity = self.question = None
        self.assigned += 1
        self.order(work)

    def unpickle(self, content: bytes) -> Any:
        """What the rank has pickled. To make it may run code of the rank's choice. That is right as
        long as the rank runs as this process's user; of another one, plain data is taken. Raises
        whatever the pickle does."""
        if self.is_of_other_user:
            return unpickle(content, *PLAIN)
        return pickle.loads(content)

    @property
    def pid(self) -> int:
        number: int = self.process.pid
        return number

    @property
    def done(self) -> bool:
        """Whether no result is to come from it any more."""
        return self.result is not None

    def load_result(self) -> Any:
        """What its function has returned. Raises `RankFailed` if that cannot be made here."""
        try:
            return self.unpickle(self.result or b"")
        except Exception as error:
            words = (
                f"returned what cannot be read here ({type(error).__name__}: {error}): return "
                "plain data"
            )
            raise RankFailed(self.number, self.size, words) from error

    @property
    def died(self) -> bool:
        """Whether its process has ended by something else than its function."""
        return self.vanished and self.failure is not None

    def is_stopped(self) -> bool:
        """Whether somebody has stopped its process (SIGSTOP)."""
        return is_stopped(self.process.pid)

    def is_ending(self) -> bool:
        """Whether its process is about to end, or has ended, and that is not known here yet."""
        return not self.vanished and is_ending(self.process.pid)

    def receive_all(self) -> list[Event]:
        """Take in the messages that have arrived, and return the reports among them. Where the line
        ends, its process has ended, or its program has closed the line. That it has hung up without
        a result or a failure is reported."""
        events = []
        try:
            while self.line.poll():
                if event := self.receive():
                    events.append(event)
        except (EOFError, OSError):
            is_over = self.done
            if self.is_ending():
                self.vanish()
            if not (is_over or self.failure or self.hung_up):
                self.hung_up = True
                events.append({HUNG_UP: True})
        return events

    def receive(self) -> Event | None:
        """Take in one message; return the event if it is a report. Raises `EOFError` or `OSError`
        where the line ends, and for nothing else."""
        sender, user = find_sender(self.line)
        message = self.line.recv_bytes()
        if sender != self.process.pid:
            words = f"is not heard any more: process {sender}, which is not the rank, speaks for it"
            self.fail(RankFailed(self.number, self.size, words))
            return None
        self.is_of_other_user = user != os.getuid()
        try:
            kind, *content = self.unpickle(message)
        except Exception as error:  # a class of the user's that cannot be made here
            words = (
                f"sent what cannot be read here ({type(error).__name__}: {error}): report and "
                "raise plain data"
            )
            self.fail(RankFailed(self.number, self.size, words))
            return None
        match kind:
            case MessageKind.UP:
                self.up = True
            case MessageKind.REPORT:
                return content[0]
            case MessageKind.RESULT:
                self.result, self.changes = content
            case MessageKind.BOX:
                with contextlib.suppress(OSError, ValueError):  # gone, or not to be looked at
                    self.box = View(self.process.pid, *content)
                self.order(Order.OPENED)
            case MessageKind.STACK:
                self.stack, self.activity = content
            case MessageKind.ASK:
                self.question = content[0]
            case MessageKind.FAILED:
                self.has_told_failure = True
                self.fail(content[0])
        return None

    def fail(self, error: PlaygroundError) -> None:
        self.failure = error
        self.failed_at = time.monotonic()

    def vanish(self) -> None:
        """The process has ended unasked: by `os._exit(0)` its function has returned None."""
        self.vanished = True
        code = self.process.join(EXIT_LIMIT)
        if code == 0:
            self.result = self.result or pickle.dumps(None)
        elif code == UNGUARDED:
            words = "ranks import this script: put its launch() under if __name__ == '__main__':"
            self.fail(UsageError(words))
        else:
            self.fail(RankFailed(self.number, self.size, describe_exit(code, self.backend)))

    def unclean_exit(self, how: str) -> RankFailed:
        words = f"returned its result but did not leave cleanly: {how}"
        return RankFailed(self.number, self.size, words)

    def answer(self, text: str | None, reason: str = "") -> None:
        """Answer its question: with a line, or with the end of the input."""
        self.question = None
        self.order(Answer(text, reason))

    def order(self, order: Assignment | Answer | Order) -> None:
        with contextlib.suppress(OSError):  # it is gone: its sentinel says so
            self.line.send(order)

    def replace_store_process(self, new: StoreProcess | None) -> None:
        """From now on `new` serves the store of its world, in the place of the one that did."""
        if self.store_process:
            self.store_process.end()
        self.store_process = new

    def relay_output(self) -> None:
        """Pass on all that it has printed by now."""
        for output in self.outputs:
            output.relay_all()

    def relay_parts(self) -> None:
        """Pass on the beginnings of lines that have waited long enough for their ends."""
        for output in self.outputs:
            output.relay_part(lambda: is_asleep(self.process.pid))

    def close(self) -> None:
        """Wait for the end of its process, and let go of all that belongs to it."""
        self.process.join()
        self.process.close()
        self.line.close()
        self.replace_store_process(None)
        self.box = None
        for output in self.outputs:
            output.pipe.close()


def describe_exit(code: int | None, backend: Backend) -> str:
    """How a process ended that was not asked to, in words."""
    if code is None:
        return "hung up on its launcher but is still there"
    if code == LOST_BY_THE_SERVER:
        return "is out of reach: the fork server it came from was killed or stopped"
    if code >= 0:
        return f"exited with code {code} without a result"
    return backend.deaths.get(-code, f"was killed by {describe_signal(-code)}")
