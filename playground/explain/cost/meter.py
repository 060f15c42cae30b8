"""In a rank: measures what communication costs, and writes it into the rank's log."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from playground.algorithms.executor import CollectiveCall, WatchingExecutor, executed_by
from playground.algorithms.link import Link
from playground.algorithms.traffic import sent_by
from playground.base.event_log import NONE, EventLog, Table, map_file
from playground.explain.cost.clock import Clock, Moment
from playground.explain.cost.log import (
    BEGAN,
    CALLS,
    ENDED,
    FORMAT,
    HEAD,
    HIDDEN,
    LAST,
    MOST_ROWS,
    ROW,
    SENT,
    SINCE,
    WAITED,
    WAITS,
    WIDTH,
    file_name,
)
from playground.explain.cost.overlap import Covered
from playground.explain.hang.sources import Line
from playground.explain.lines import Lines
from playground.tap import Call, Observer, observing

MOST_CALLS = 10_000
"""How many calls are remembered whose end nobody has told."""


class CostLog(EventLog):
    """The log of a rank. Where it cannot be written, the program runs without."""

    def __init__(self, file: Path) -> None:
        super().__init__(FORMAT, map_file(file, FORMAT.size))
        self.table = Table(self, ROW)
        self.rows: dict[tuple[int, str], int] = {}
        """By the number of the line and the operation."""

    def write_to(self, memory: Any) -> None:
        super().write_to(memory)
        self.numbers = self.octets[FORMAT.words_at : FORMAT.text_at].cast("d")

    def find_row(self, line: Line | None, number: int, operation: str) -> int:
        row = self.rows.get((number, operation))
        if row is None:
            row = self.table[line, operation]
            row = row if 0 <= row < MOST_ROWS else MOST_ROWS
            self.rows[number, operation] = row
        return row

    def add(self, row: int, column: int, amount: float) -> None:
        with self.one_at_a_time:
            self.numbers[HEAD + WIDTH * row + column] += amount

    def set(self, place: int, number: float) -> None:
        self.numbers[place] = number


@dataclass(eq=False, slots=True)
class Issued:
    """A call that is not over."""

    row: int
    start: Moment
    on_gpu: bool = False
    carried: float = 0.0
    """When a simulated link will have carried it."""
    returned: Moment = None
    completed: Moment = None
    is_alone: bool = False
    """Whether torch waits for it in C++, where it has called it."""


class ThreadState(threading.local):
    """`inside`: the row of the collective of ours whose messages this thread sends; `started`:
    since when it waits."""

    inside: int | None = None
    started: Moment = None


class Meter(Observer):
    """Measures the calls that the tap tells of. `link` is simulated under them, if any."""

    looks_inside = True

    def __init__(self, log: CostLog, link: Link | None = None) -> None:
        self.log = log
        self.link = link
        self.clock = Clock()
        self.lines = Lines()
        self.known: list[Line] = []
        self.thread = ThreadState()
        self.calls: dict[int, Issued] = {}
        """By number."""
        self.covered = {on_gpu: Covered() for on_gpu in (False, True)}
        """The waits that are counted, by the host's clock and by the GPU's."""
        self.one_at_a_time = threading.Lock()
        self.backwards: list[list[Call]] = []
        """The asynchronous calls in each backward pass under way."""
        log.set(BEGAN, time.monotonic())

    def find_row(self, operation: str) -> int:
        """The row of this operation on the line that causes it."""
        number = self.lines.find_cause()
        if number >= len(self.known):
            self.known = [*self.lines.lines]
        return self.log.find_row(None if number == NONE else self.known[number], number, operation)

    def stand_still(self, row: int, since: float) -> None:
        """From `since` on the main thread waits, in this row; 0: it goes on."""
        if threading.current_thread() is threading.main_thread():
            self.log.set(WAITS, row)
            self.log.set(SINCE, since)

    def begun(self, call: Call) -> None:
        if self.thread.inside is not None:  # a message of a collective of ours
            self.log.add(self.thread.inside, SENT, sent_by(call))
            return
        row = self.find_row(f"{call.name} in C++" if call.in_cpp else call.name)
        self.log.add(row, CALLS, 1)
        self.log.add(row, SENT, sent_by(call))
        on_gpu = any(tensor.is_cuda for tensor in (*call.inputs, *call.outputs))
        now = time.monotonic()
        if len(self.calls) >= MOST_CALLS:
            self.calls.pop(next(iter(self.calls)))
        issued = Issued(row, self.clock.now(True) if on_gpu else now, on_gpu)
        if self.link and not on_gpu:
            issued.carried = self.link.ends.get(call.number, 0.0)
        self.calls[call.number] = issued
        self.log.set(LAST, now)
        if call.blocks or call.in_cpp:
            self.stand_still(row, now)

    def returned(self, call: Call) -> None:
        issued = self.calls.get(call.number)
        if issued is None:
            return
        issued.returned = self.clock.now(issued.on_gpu)
        if call.is_torchs or call.is_functional:
            self.stand_still(0, 0.0)
        if self.backwards:
            self.backwards[-1].append(call)
        elif call.is_native:
            issued.is_alone = True

    def completed(self, call: Call) -> None:
        issued = self.calls.get(call.number)
        if issued is None:
            return
        issued.completed = self.clock.now(issued.on_gpu)
        if call.is_native:
            # a thread of the backend's tells it: the main one goes on
            self.log.set(SINCE, 0.0)
        if issued.is_alone:
            self.calls.pop(call.number, None)
            self.clock.settle(issued.completed, lambda: self.add_wait(issued, issued.completed))

    def add_wait(self, issued: Issued, end: Moment) -> None:
        """Add what a call that blocks has waited."""
        end = max(self.clock.seconds(end), issued.carried)
        self.add_waited(issued.row, self.clock.seconds(issued.start), end, issued.on_gpu)

    def add_waited(self, row: int, start: float, end: float, on_gpu: bool) -> None:
        """Add what of this time is not counted yet: torch waits for several calls at once, as for
        the broadcasts of buffers of different types."""
        with self.one_at_a_time:
            seconds = self.covered[on_gpu].add(start, end)
        self.log.add(row, WAITED, seconds)

    def done(self, calls: Sequence[Call]) -> None:
        for call in calls:
            issued = self.calls.get(call.number)
            if issued and call.waits_in_call:
                self.calls.pop(call.number)
                end = self.clock.now(issued.on_gpu)
                self.clock.settle(end, partial(self.add_wait, issued, end))
                self.stand_still(0, 0.0)

    def waiting(self, calls: Sequence[Call]) -> None:
        first = self.calls.get(calls[0].number)
        if first:
            self.thread.started = self.clock.now(first.on_gpu)
            self.stand_still(self.find_row(f"{calls[0].name}.wait"), time.monotonic())

    def waited(self, calls: Sequence[Call]) -> None:
        found = [self.calls.pop(call.number, None) for call in calls]
        ended = [issued for issued in found if issued]
        start = self.thread.started
        self.thread.started = None
        if not ended or start is None:
            return
        end, row = self.clock.now(ended[0].on_gpu), self.find_row(f"{calls[0].name}.wait")
        on_gpu = ended[0].on_gpu
        self.clock.settle(end, lambda: self.add_async(ended, row, start, end, on_gpu=on_gpu))
        self.stand_still(0, 0.0)

    def add_async(
        self, ended: Sequence[Issued], row: int, start: Moment, end: Moment, *, on_gpu: bool = False
    ) -> None:
        """Add what the program has waited for calls, from `start` to `end`."""
        began = self.clock.seconds(start)
        self.add_waited(row, began, self.clock.seconds(end), on_gpu)
        for issued in ended:
            self.add_hidden(issued, began)

    def add_hidden(self, issued: Issued, until: float) -> None:
        """What of a call was hidden until the program began to wait."""
        done = until
        if issued.completed is not None:
            done = max(self.clock.seconds(issued.completed), issued.carried)
        hidden = min(until, done) - self.clock.seconds(issued.returned)
        self.log.add(issued.row, HIDDEN, max(0.0, hidden))

    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        self.done(calls)

    def dropped(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.calls.pop(call.number, None)

    def backward_begun(self, root: Any) -> None:
        self.backwards.append([])

    def backward_ended(self) -> None:
        """What nobody else has waited for is over now: the pass has waited from the last of these
        calls on, which is made when the last gradient is ready."""
        left = [call for call in self.backwards.pop() if call.is_left_to_backward]
        found = [self.calls.pop(call.number, None) for call in left]
        calls = [issued for issued in found if issued]
        if calls:
            end = self.clock.now(calls[0].on_gpu)
            self.clock.settle(end, lambda: self.add_backward(calls, end))
            self.stand_still(0, 0.0)

    def add_backward(self, calls: Sequence[Issued], end: Moment) -> None:
        began = max(self.clock.seconds(issued.returned) for issued in calls)
        ends = [
            max(self.clock.seconds(issued.completed), issued.carried)
            for issued in calls
            if issued.completed is not None
        ]
        # a thread of the backend's may be late to tell the last
        over = max(ends) if len(ends) == len(calls) else self.clock.seconds(end)
        until = min(over, self.clock.seconds(end))
        self.add_waited(calls[-1].row, began, until, calls[-1].on_gpu)
        for issued in calls:
            self.add_hidden(issued, began)

    def finish(self) -> None:
        """The program has ended."""
        self.clock.settle_all()
        self.log.set(SINCE, 0.0)
        self.log.set(ENDED, time.monotonic())


class MeteredExecutor(WatchingExecutor):
    """Measures our own collectives, whose messages are counted one by one."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def collective(self, made: CollectiveCall) -> Any:
        meter = self.meter
        issued = Issued(meter.find_row(made.name), time.monotonic())
        meter.log.add(issued.row, CALLS, 1)

        def run() -> None:
            before = meter.thread.inside
            meter.thread.inside = issued.row
            try:
                made.call()
            finally:
                meter.thread.inside = before
                issued.completed = time.monotonic()

        if not made.async_op:
            meter.stand_still(issued.row, issued.start)
        try:
            work = self.inner.collective(made._replace(call=run))
        finally:
            if not made.async_op:
                meter.add_wait(issued, time.monotonic())
                meter.stand_still(0, 0.0)
        issued.returned = time.monotonic()
        return None if work is None else MeteredWork(meter, work, issued, made.name)


class MeteredWork:
    """The work of a collective of ours."""

    def __init__(self, meter: Meter, work: Any, issued: Issued, name: str) -> None:
        self.meter = meter
        self.work = work
        self.name = name
        self.issued: Issued | None = issued
        """Until the first wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self) -> Any:
        meter, start = self.meter, time.monotonic()
        issued = self.issued
        self.issued = None
        row = meter.find_row(f"{self.name}.wait")
        meter.stand_still(row, start)
        try:
            return self.work.wait()
        finally:
            meter.stand_still(0, 0.0)
            meter.add_async([issued] if issued else [], row, start, time.monotonic())


_logs: list[CostLog] = []
"""That of this process, if any."""


@contextlib.contextmanager
def metered(folder: Path | None, rank: int, gbit: float | None) -> Iterator[None]:
    """In this block, measure what this rank calls, into a log in `folder` if there is one; have a
    link of so many 10^9 bits per second under all of it, if it is given."""
    with contextlib.ExitStack() as block:
        link = Link(gbit) if gbit else None
        if link:
            block.enter_context(observing(link))
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            log = CostLog(folder / file_name(rank))
            meter = Meter(log, link)
            _logs[:] = [log]
            block.callback(_logs.clear)
            block.callback(meter.finish)
            block.enter_context(observing(meter))
            block.enter_context(executed_by(MeteredExecutor(meter)))
        yield


def forget() -> None:
    """Stop measuring in a process that was forked from a rank, such as a worker of a DataLoader."""
    while _logs:
        _logs.pop().let_go()


os.register_at_fork(after_in_child=forget)
