"""In a rank: the record of what a solution does in one case, and of its messages in flight. Counts
what leaves the rank."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from playground.exercises.attempt import ENDLESS, SHORT_CUT
from playground.exercises.cases import Actions
from playground.exercises.exercise import ERROR, FOLDER, LOOP, Place
from playground.exercises.observation import Problem
from playground.tap import Call, Observer
from playground.world.rank.reports import report
from playground.world.simulated_gpu.races import notice_of_wait

MAX_CALLS, SHOWN = 2000, 1000
"""Calls of torch.distributed in one case, and bytes printed that are shown."""
OF_OURS = re.compile(rf" at {re.escape(str(FOLDER))}/\S+?:\d+")
"""A line of the check's own, in what a simulated GPU prints."""
CURE = "To fix it, "
"""Before the last sentence of what a simulated GPU says of a missing wait."""
MISSING_WAIT = re.compile("^" + notice_of_wait(r"(?:\.\n|\Z)"), re.MULTILINE | re.DOTALL)
"""What it says, in several lines, of which the last may not be shown."""
TICK = 0.5
"""Seconds between two looks at a solution that runs."""
TAKEN = 1.0
"""Seconds that the parent has to end a rank whose report ends the check."""


def join_missing_wait(said: re.Match[str]) -> str:
    """What a simulated GPU says of a missing wait in one line, without the cure: that is the
    task."""
    return f"{' '.join(said[0].split()).partition(CURE)[0].strip()}\n"


def stop(words: str, line: int, printed: str = "") -> NoReturn:
    """End the check. The parent ends this process: nothing the solution catches can hold it up."""
    status = LOOP if ENDLESS in words else ERROR
    end_check(status=status, words=words, line=line, printed=printed)


def end_check(**event: object) -> NoReturn:
    """Report what ends the check, and wait for the parent to end this process."""
    report(**event)
    threading.Event().wait(TAKEN)
    os._exit(1)


def describe_given(name: str, given: Iterable[object]) -> tuple[str, int] | None:
    """The dtype and the number of elements of the last tensor that an operation is given: its
    input. That of an all_to_all need not have as many on each rank."""
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if not tensors:
        return None
    elements = 0 if name.startswith("all_to_all") else tensors[-1].numel()
    return str(tensors[-1].dtype).removeprefix("torch."), elements


@dataclass
class Transcript:
    """The record of the solution in `file` in one case."""

    file: str
    size: int
    forbidden: tuple[str, ...]
    is_debugged: bool = False
    """Whether a person answers its breakpoints: they see what it prints, and take their time."""
    running: bool = False
    """Whether the solution runs: other calls are the judge's."""
    printed: int = field(default_factory=lambda: os.memfd_create("printed"))
    """Where descriptors 1 and 2 lead."""

    group: Any = None
    """The judge's own: the solution's collectives may differ between ranks."""
    counts: Callable[[torch.Tensor], int | torch.Tensor] = torch.Tensor.numel
    """The number of elements of a tensor that count as sent."""

    def __post_init__(self) -> None:
        self.thread, self.lock = threading.local(), threading.RLock()
        self.begin(Actions())

    @contextlib.contextmanager
    def catching_output(self) -> Iterator[None]:
        """Have what is printed go to `printed`, which is closed in the end; where it is debugged,
        go on to its reader."""
        streams = {} if self.is_debugged else {1: sys.stdout, 2: sys.stderr}
        found = {number: os.dup(number) for number in streams}
        for number, stream in streams.items():
            stream.flush()
            os.dup2(self.printed, number)
        try:
            yield
        finally:
            for number, stream in streams.items():
                stream.flush()
                os.dup2(found[number], number)
                os.close(found[number])
            os.close(self.printed)

    def begin(self, actions: Actions) -> None:
        """Note actions here from now on."""
        self.actions = actions
        self.pending = list[Request]()
        os.ftruncate(self.printed, os.lseek(self.printed, 0, os.SEEK_SET))

    def read_printed(self) -> str:
        sys.stdout.flush()
        return self.read_written()

    def read_written(self) -> str:
        """As `read_printed`, without what the stream still holds: for a signal's handler, which may
        have come while something was printed."""
        text = os.pread(self.printed, SHOWN, 0).decode(errors="replace")
        return OF_OURS.sub("", MISSING_WAIT.sub(join_missing_wait, text))

    def line(self, frame: FrameType | None = None) -> int:
        """The line of the solution that is running; 0 if none is."""
        stack = traceback.walk_stack(frame or sys._getframe(1))
        return next((line for each, line in stack if each.f_code.co_filename == self.file), 0)

    def is_theirs(self) -> bool:
        """Whether what is called now, in this thread, is called by the solution."""
        return self.running and not self.is_within()

    def is_within(self) -> bool:
        """Whether this thread is in an operation."""
        return getattr(self.thread, "depth", 0) > 0

    def forbid(self, name: str, line: int) -> None:
        if name in self.forbidden:
            self.actions.problems.append(
                Problem(SHORT_CUT, f"dist.{name} is not to be used here, says the task", line)
            )

    def add_moved(self, tensors: Sequence[torch.Tensor], share: float = 1.0) -> None:
        """A share of these elements leaves the rank. What is sent as bytes, an object for one,
        counts as as many numbers of 8 bytes."""
        for each in tensors:
            self.actions.moved += (
                share * float(self.counts(each)) / (8 if each.dtype == torch.uint8 else 1)
            )

    @contextlib.contextmanager
    def within(
        self,
        name: str,
        peer: int | None = None,
        blocks: bool = True,
        given: Iterable[object] = (),
    ) -> Iterator[int]:
        """In an operation. If it never ends, the parent knows where this rank is, and if it ends
        the process, what it was given. Returns the line of its call."""
        line = self.line()
        self.actions.calls += 1
        if self.actions.calls > MAX_CALLS:
            words = f"{ENDLESS}: it makes more than {MAX_CALLS:,} calls of torch.distributed"
            stop(words, line, self.read_printed())
        self.forbid(name, line)
        printed = self.read_printed()
        about = {"given": describe_given(name, given), "printed": printed}
        report(at=Place(name, peer, line), **{key: each for key, each in about.items() if each})
        if peer is not None and not 0 <= peer < self.size:
            raise ValueError(f"there is no rank {peer} in a world of {self.size}")
        self.thread.depth = getattr(self.thread, "depth", 0) + 1
        try:
            with self.waiting() if blocks else contextlib.nullcontext():
                yield line
        finally:
            self.thread.depth -= 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For what waits, perhaps for other ranks: without the timer, so that a deadlock can be
        proved."""
        self.actions.waited.append(threading.get_ident())
        is_main = threading.current_thread() is threading.main_thread()
        try:
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, 0)
            yield
        finally:
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, TICK, TICK)


FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_tensor": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
}
"""Torch's functional collectives, and what they are called in torch.distributed."""
WRITING = [
    name
    for name in ("set", "add", "compare_set", "append", "multi_set", "queue_push")
    if hasattr(dist.Store, name)  # older versions of torch have no queues
]
"""Methods of a store by which values leave a rank."""


class Meter(Observer):
    """Counts the elements that leave this rank while the solution runs, by whatever it calls. Of a
    collective on n ranks with S elements of this rank's: what goes to all others counts once for
    each of them, and else as many as with the algorithm that sends least.

    | collective                    | elements      |
    |-------------------------------|---------------|
    | all_gather                    | (n - 1) S     |
    | all_reduce                    | 2 (n - 1) / n S |
    | reduce_scatter, all_to_all, … | (n - 1) / n S |
    | broadcast                     | (n - 1) S, at the root |
    | a store's set                 | bytes / 8     |
    """

    def __init__(self, record: Transcript) -> None:
        self.record = record

    def begun(self, call: Call) -> None:
        # which counts itself
        if self.record.running and not ("send" in call.name and self.record.is_within()):
            self.record.actions.widths.extend(each.element_size() for each in call.inputs)
            self.add(call.name, call.inputs, len(call.ranks), call.peer == dist.get_rank())
            # a method of the group itself
            if self.record.is_theirs() and (line := self.record.line()):
                self.record.forbid(call.name, line)

    def add(self, name: str, inputs: Sequence[torch.Tensor], ranks: int, is_root: bool) -> None:
        others = ranks - 1
        if "send" in name:
            share = 1.0
        elif name.startswith("all_gather"):
            share = others
        elif name == "broadcast":
            share = others * is_root
        else:
            share = (1 + name.startswith("all_reduce")) * others / ranks
        self.record.add_moved(inputs, share)

    def wrap_store(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What is written to a store leaves the rank, too, its key included."""

        def write(store: Any, *args: Any) -> Any:
            if self.record.is_theirs():
                texts = [
                    text for each in args for text in (each if isinstance(each, list) else [each])
                ]
                self.record.actions.moved += (
                    sum(len(text) if isinstance(text, (str, bytes)) else 8 for text in texts) / 8
                )
            return real(store, *args)

        return write

    def wrap_functional(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A collective of torch's functional ones, which calls no method of Python's."""
        name = FUNCTIONAL[real.__name__.removesuffix("_autograd")]

        @functools.wraps(real)
        def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.record.is_theirs():
                return real(tensor, *args, **kwargs)
            group = next(
                (each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)),
                None,
            )
            is_root = name != "broadcast" or {*args, *kwargs.values()} & {dist.get_rank()}
            self.add(name, [tensor], dist.get_world_size(group), bool(is_root))
            with self.record.within(name):
                return real(tensor, *args, **kwargs)

        return function


@dataclass(eq=False, repr=False)
class Request:
    """A message in flight, or an all_reduce, as torch's `Work`."""

    record: Transcript
    work: Any
    kind: str
    peer: int | None
    line: int
    tensor: torch.Tensor
    copy: torch.Tensor
    """The tensor that is sent, received or summed."""
    held: torch.Tensor
    """The content that `tensor` must keep until the message is over."""

    def __post_init__(self) -> None:
        self.record.pending.append(self)

    def __repr__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"<Work of {self.kind}{peer}, line {self.line}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self, *args: Any) -> Any:
        with self.record.within(f"wait() for {self.kind}", self.peer):
            result = self.work.wait(*args)
        self.finish()
        return result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done when this is over."""

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            future.value()  # raises what has failed
            self.finish()
            return [self.tensor]

        return self.work.get_future().then(finish)

    def is_completed(self) -> bool:
        completed = self.work.is_completed()
        if completed:
            self.finish()
        return bool(completed)

    def finish(self) -> None:
        record = self.record
        with record.lock:  # a callback may come at the same time
            if self not in record.pending:
                return
            record.pending.remove(self)
            if not torch.equal(bits(self.tensor), bits(self.held)):
                words = f"the tensor of this {self.kind} changed before wait()"
                record.actions.problems.append(Problem("written before wait", words, self.line))
            if self.kind != "isend" and self.tensor.numel():
                self.tensor.data.copy_(self.copy)
            if self.kind == "irecv":
                record.actions.received.append(
                    self.work._source_rank() if self.peer is None else self.peer
                )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: NaN equals itself there."""
    return tensor.detach().reshape(-1).view(torch.uint8)
