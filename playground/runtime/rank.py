"""Inside a rank that the launcher started: run the function, tell the launcher how it goes, follow_orders its orders.

| rank → launcher             | launcher → rank                                   |
|-----------------------------|---------------------------------------------------|
| `("up",)`                   | `"where"`: answer with `("stack", text)`           |
| `("report", event)`         | `"leave"`: every rank has its result, you may go   |
| `("result", pickled)`       | end of file: the launcher is gone, go at once      |
| `("failed", error)`         |                                                    |

A rank that failed does not leave by itself: it keeps its sockets open until the launcher stops it, so that no peer
fails only because it is gone, and the first failure to be told is the first that happened.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from playground.runtime.errors import PeerDisconnected, PlaygroundError, RankFailed
from playground.runtime.rendezvous import Rendezvous

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

OURS = os.path.dirname(__file__)
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
Event = dict[str, Any]
"""What a rank reports: names and values of its choice."""
Progress = Callable[[int, Event], None]
"""Takes (rank, event): what a rank reports of its progress."""
_listeners: list[Callable[[Event], None]] = []


def report(**event: Any) -> None:
    """Tell whoever started this rank how far it is (also: that it is alive). Does nothing if nobody listens."""
    for listener in _listeners:
        listener(event)


def report_to(listener: Callable[[Event], None]) -> None:
    """From now on, hand this rank's reports to `listener`."""
    _listeners[:] = [listener]


class Launcher:
    """The rank's end of the line to its launcher."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.may_leave = threading.Event()
        self.one_at_a_time = threading.Lock()
        self.main_thread = threading.get_ident()
        threading.Thread(target=self.follow_orders, name="launcher", daemon=True).start()

    def tell(self, *message: Any) -> None:
        try:
            with self.one_at_a_time:
                self.line.send(message)
        except OSError:  # the launcher is gone
            os._exit(1)

    def follow_orders(self) -> None:
        while True:
            try:
                order = self.line.recv()
            except (EOFError, OSError):
                os._exit(1)
            if order == "where":
                frame = sys._current_frames()[self.main_thread]
                self.tell("stack", "".join(traceback.format_list(user_frames(traceback.extract_stack(frame)))))
            elif order == "leave":
                self.may_leave.set()

    def submit(self, result: Any) -> None:
        """Hand in the result; return when every rank has done so."""
        try:
            pickled = pickle.dumps(result)
        except Exception as error:
            raise TypeError(f"the result cannot be sent to the launcher ({error}): return plain data") from None
        self.tell("result", pickled)
        self.may_leave.wait()


def main(
    line: Connection,
    rank: int,
    size: int,
    backend: str,
    pickled_work: bytes,
    rendezvous: Rendezvous,
    listener: socket.socket | None,
    timeout: float,
) -> None:
    """The life of a rank."""
    launcher = Launcher(line)
    launcher.tell("up")
    report_to(partial(launcher.tell, "report"))
    try:
        from playground.runtime.world import init_process

        fn, args = pickle.loads(pickled_work)
        init_process(
            rank, size, fn, backend,
            args=args, rendezvous=rendezvous, listener=listener, timeout=timeout, before_leaving=launcher.submit,
        )  # fmt: skip
    except BaseException as error:  # whatever it is, SystemExit included: the launcher must hear of it
        sys.stdout.flush()
        sys.stderr.flush()
        launcher.tell("failed", failure(error, rank, size))
        threading.Event().wait()


def failure(error: BaseException, rank: int, size: int) -> PlaygroundError:
    """`error` as the user is to read it: its headline, and its traceback from where their own function begins."""
    if isinstance(error, PlaygroundError):
        return error
    whole = traceback.TracebackException.from_exception(error)
    whole.stack = traceback.StackSummary.from_list(user_frames(whole.stack))
    headline = "".join(whole.format_exception_only()).strip().splitlines()[0]
    kind = PeerDisconnected if LOST_PEER.search(str(error)) else RankFailed
    return kind(rank, size, f"failed: {headline}", "".join(whole.format()).rstrip())


def user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """`stack` without what led to the user's function; all of it if it never got there."""
    ours = [i for i, frame in enumerate(stack) if os.path.dirname(frame.filename) == OURS]
    below = stack[ours[-1] + 1 :] if ours else stack
    return list(below or stack)
