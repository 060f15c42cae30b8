"""The memory of a flight recorder: a log that is a ring of the latest operations, with how many
were called by channel. It takes as much of the machine's memory as has been written to.

It has no name: others open it as /proc/PID/fd/FD, and so have it for as long as they like, however
the rank ends. Does not import torch.

Whoever wants to know where the program is asks for it by a signal, on which the rank writes its
stack behind the log: in C, so that a rank answers which computes, sleeps, or holds the
interpreter's lock in a function of C. Nothing is written while nobody asks.

Sources: memfd_create(2), https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import Any, NamedTuple

from playground.base.event_log import (
    BEGUN,
    NONE,
    USED,
    EventLog,
    LogReader,
    Table,
    read_lines,
)
from playground.base.forks import move_up
from playground.base.frames import RUNNERS, is_program
from playground.base.process_status import is_stopped, process_status
from playground.base.untrusted import printable
from playground.explain.hang.box_format import (
    ANSWERS,
    CAPACITY,
    CHANNEL,
    COUNTS,
    DONE_AT,
    ENDED,
    FIRST,
    FLAGS,
    FORMAT,
    GPU,
    HEADS,
    IS_OPEN,
    IS_QUEUED,
    LENGTH,
    LINE,
    LOADER,
    MAIN,
    MARK_AT,
    MAY_GIVE_UP,
    MOST_BEHIND,
    MOST_CHANNELS,
    MOST_SIZES,
    OPERATION,
    OVERFLOW,
    PID,
    PROGRAMS,
    QUEUE,
    QUEUE_AT,
    RAISED,
    RAISED_AT,
    RANK,
    RECORD,
    SIZE,
    UNNAMED,
    WORLD,
    Description,
)
from playground.explain.hang.sources import Sources
from playground.explain.hang.states import (
    AWAITED,
    DONE,
    ISSUED,
    Channel,
    Doing,
    Gpu,
    Operation,
    RankState,
)

NAME = "flight-recorder-of-a-rank"
SWITCH = "PLAYGROUND_FLIGHT_RECORDER"
LATEST, LATEST_ON_GPU = 64, 512
"""Number of a rank's latest operations that are looked at while it runs. The host of a GPU runs
ahead."""
NO_TAG = -1
"""In the place of the tag of a message that is counted with others."""
MOST_RAISED = 64
"""Number of exceptions that are told apart."""
MOST_LOADERS = 64
"""Number of lines and lengths of DataLoaders that are kept."""
MOST_SAID, MOST_OF_TRACEBACK = 200, 60
"""Characters that are kept of an exception's message, and lines of its traceback."""
NESTED = "Traceback (most recent call last):"
"""What a message holds that hands on the traceback of another process, as a DataLoader's does."""
QUESTION = signal.SIGURG
"""The signal on which the main thread's stack is written: one that is ignored by whoever has no
handler for it."""
ANSWER_TIMEOUT = 2.0
"""Seconds in which the stack must be written."""
FRAME = re.compile(r'\s*File "(.+)", line (\d+),? in (\S+)\n')
FULL = f"what it does on more than {MOST_CHANNELS} channels"


class Known(NamedTuple):
    """Where the box has the description of an operation."""

    description: int
    """Its number in the table."""
    count_at: int
    """The place of its channel's count, in units of 8 bytes."""


def open_box(rank: int, size: int, world: str) -> Box | None:
    """This process's flight recorder. `world` is the same for all ranks of a world, and for no
    others. None if it is turned off, or the system has no such memory."""
    if os.environ.get(SWITCH) == "0":
        return None
    with contextlib.suppress(OSError):
        return Box(rank, size, world)
    return None


class Box(EventLog):
    """A rank's own flight recorder, to write to."""

    def __init__(self, rank: int, size: int, world: str) -> None:
        """Raises `OSError`."""
        self.file = move_up(os.memfd_create(NAME))
        os.ftruncate(self.file, FORMAT.size)
        super().__init__(FORMAT, mmap.mmap(self.file, FORMAT.size))
        self.words[PID] = os.getpid()
        self.words[RANK] = rank
        self.words[SIZE] = size
        self.world = world
        self.main_thread = threading.main_thread().ident
        # The rest begins with each world.
        self.worlds = -1
        """How many worlds the program has formed itself."""
        self.known: dict[Any, Known] = {}
        """What the hooks look up, by keys of their own."""
        self.around = NONE
        """The operation of the main thread in which it may call others."""
        self.descriptions: Table
        self.channels: Table
        self.raised: Table
        """Exceptions that were being handled when an operation was called."""
        self.known_raised: dict[tuple[str, str], int]
        """Their numbers, by class and message."""
        self.unnamed: Table
        """What the program has called that is not counted."""
        self.loaders: Table
        """Lines that go through a DataLoader, and how many batches it has."""
        self.sources: Sources
        self.call: Callable[..., int]
        """See `make_call`."""
        if signal.getsignal(QUESTION) == signal.SIG_DFL:
            os.lseek(self.file, 0, os.SEEK_END)
            faulthandler.register(QUESTION, self.file, all_threads=False)
            self.words[ANSWERS] = 1

    def begin_program(self) -> None:
        """A program begins, in a process group of its own."""
        self.worlds = -1
        self.begin_world(self.words[RANK])
        self.words[PROGRAMS] += 1

    def continue_program(self) -> None:
        """The program that has returned goes on: what it calls is counted with what it has called
        before."""
        self.words[PROGRAMS] += 1

    def begin_world(self, number: int) -> None:
        """A world begins, in which this rank has another number, maybe: nothing has been called
        there."""
        words = self.words
        self.worlds += 1
        self.known = {}
        self.descriptions, self.channels = Table(self, OPERATION), Table(self, CHANNEL)
        self.raised, self.unnamed = Table(self, RAISED), Table(self, UNNAMED)
        self.known_raised = {}
        self.loaders = Table(self, LOADER)
        self.sources = Sources(Table(self, LINE).__getitem__)
        words[MAIN] = NONE
        words[USED] = 0
        words[GPU] = Gpu.NONE
        self.around = NONE
        has_moved = number != words[RANK]
        self.write(WORLD, (self.world, words[BEGUN], self.worlds, has_moved, time.monotonic()))
        self.octets[FORMAT.words_at : FORMAT.text_at] = bytes(8 * MOST_CHANNELS)
        self.call = self.make_call()

    def end_program(self) -> None:
        """The program has returned."""
        self.words[ENDED] = self.words[PROGRAMS]

    def doubt(self, what: str) -> None:
        """The program has called something that is not counted: `what` it is. From now on nothing
        is proved of it."""
        if self.unnamed[what] == NONE:
            self.words[OVERFLOW] = 1

    def describe(self, key: Any, description: Description) -> Known:
        """From now on, operations like this are known by `key`."""
        channel = description.channel
        with self.one_at_a_time:
            if len(self.known) >= 2 * MOST_CHANNELS:
                self.known.clear()
            has_room = channel in self.channels or len(self.channels) < MOST_CHANNELS - 1
            if not has_room or self.channels[channel] == NONE:
                self.words[OVERFLOW] = 1
                # What it is can still be told, but for the tag: those may be ever new.
                untagged = description._replace(tag=NO_TAG)
                return Known(self.descriptions[tuple(map(plain, untagged))], OVERFLOW)
            described = self.descriptions[tuple(map(plain, description))]
            self.known[key] = Known(described, COUNTS + self.channels[channel])
            return self.known[key]

    def make_call(self) -> Callable[..., int]:
        """The function that is called at each operation, with all that it needs at hand."""
        words = self.words
        memory = self.memory
        packs = [each.pack_into for each in HEADS]
        start, length = FORMAT.place_of(0), RECORD.size
        find, now, exc_info = self.sources.find, time.monotonic_ns, sys.exc_info

        def call(known: Known, depth: int, may_give_up: bool, shape: Sequence[int] = ()) -> int:
            """An operation is called, by the program's innermost line from `depth` frames above
            this one on. Returns its number."""
            description, place = known
            error = exc_info()[1]
            # before the call is numbered: to print an exception may call operations
            raised = NONE if error is None else self.note_raised(error)
            # no other thread comes between: nothing is called in these lines
            number = words[BEGUN]
            words[BEGUN] = mark = number + 1
            words[place] = index = words[place] + 1
            try:
                pack = packs[len(shape)]
            except IndexError:
                shape = (*shape[: MOST_SIZES - 1], prod(shape[MOST_SIZES - 1 :]))
                pack = packs[MOST_SIZES]
            pack(
                memory, start + length * (number % CAPACITY), now(), -may_give_up, index,
                find(depth), description, raised, len(shape), *shape, mark,
            )  # fmt: skip
            return number

        return call

    def put_in_queue(
        self, number: int, batch: int | None, behind: Sequence[int], is_open: bool = False
    ) -> None:
        """The operation is behind these batches, of which the last ones are told. With a `batch`, a
        stream carries it out; without one the host waits for them."""
        place = FIRST + LENGTH * (number % CAPACITY)
        if self.words[place + MARK_AT] != number + 1:  # a later one has taken its place
            return
        flags = 0 if batch is None else batch << FLAGS | IS_QUEUED | IS_OPEN * is_open
        told = [each + 1 for each in behind[-MOST_BEHIND:]]
        told += [0] * (MOST_BEHIND - len(told))
        QUEUE.pack_into(self.memory, 8 * (place + QUEUE_AT), flags, *told)

    def close_batch(self, number: int) -> None:
        """The batch of an operation has its end."""
        place = FIRST + LENGTH * (number % CAPACITY)
        if self.words[place + MARK_AT] == number + 1:
            self.words[place + QUEUE_AT] &= ~IS_OPEN

    def count(self, key: Any, describe: Callable[[], Description]) -> None:
        """Count what is no operation, as operations of this channel are counted."""
        known = self.known.get(key) or self.describe(key, describe())
        self.words[known.count_at] += 1

    def note_loader(self, batches: int, depth: int) -> None:
        """The program goes through a DataLoader of so many batches, in its innermost line from
        `depth` frames above this one on."""
        if len(self.loaders) < MOST_LOADERS:
            self.loaders[self.sources.find(depth), batches]

    def take_back(self, number: int, known: Known) -> None:
        """The operation was refused before it began: it does not count, and meets none of the
        others'."""
        self.words[known.count_at] -= 1
        self.words[FIRST + LENGTH * (number % CAPACITY) + MARK_AT] = 0

    def note_raised(self, error: BaseException) -> int:
        """The number of an exception in the text: its class, what it says, and its traceback. When
        `MOST_RAISED` are known, a further one is known by its class, if that is."""
        name, said = type(error).__name__, say(error)
        known = self.known_raised.get((name, said))
        if known is not None:
            return known
        if len(self.known_raised) < MOST_RAISED:
            known = self.known_raised[name, said] = self.raised[name, *describe_raised(error)]
            return known
        is_known = any(name == one for one, _ in self.known_raised)
        name = name if is_known else BaseException.__name__
        return self.raised[name, name, ()]

    def end(self, number: int, how: int = 0) -> None:
        """The operation is over; with `MAY_GIVE_UP`, it has a time limit of its own from now on."""
        place = FIRST + LENGTH * (number % CAPACITY)
        if self.words[place + MARK_AT] == number + 1:  # otherwise a later one has taken its place
            self.words[place + DONE_AT] = how or time.monotonic_ns()


def say(error: BaseException) -> str:
    """An exception's message; empty if printing it fails."""
    try:
        return str(error)
    except Exception:
        return ""


def say_innermost(said: Sequence[str]) -> str:
    """The headline of an exception, of the lines of what it is and says: where these hold a
    traceback, that of the innermost one."""
    begins = max((at for at, line in enumerate(said) if NESTED in line), default=-1) + 1
    heads = (line for line in said[begins:] if line.strip() and not line.startswith(" "))
    return next(heads, said[-1])


def find_place(lines: Sequence[str]) -> str:
    """The program's innermost line in those of a traceback, "data.py:16"; empty if there is
    none."""
    return find_line(f"{line}\n" for line in reversed(lines)).partition(" in ")[0]


def describe_raised(error: BaseException) -> tuple[str, tuple[str, ...]]:
    """An exception in one line, with the program's line that raised it, and its traceback. Where
    its message holds a traceback, both are of the innermost one."""
    whole = TracebackException.from_exception(error)
    frames = [frame for frame in whole.stack if not frame.filename.startswith(RUNNERS)]
    whole.stack = StackSummary.from_list(frames)
    lines = "".join(whole.format()).rstrip().splitlines()
    said = "".join(whole.format_exception_only()).strip().splitlines()
    headline, place = say_innermost(said), find_place(lines)
    headline = headline if len(headline) <= MOST_SAID else f"{headline[:MOST_SAID]}…"
    return f"{headline} ({place})" if place else headline, tuple(lines[-MOST_OF_TRACEBACK:])


def plain(value: Any) -> Any:
    """As it is written: torch's types by their names, without a module's."""
    is_plain = value is None or isinstance(value, int | str | tuple)
    return value if is_plain else str(value).rpartition(".")[2]


class View(LogReader):
    """A rank's flight recorder as others see it."""

    def __init__(self, pid: int, file: int) -> None:
        """The box that process `pid` has opened as `file`. Raises `OSError` if it cannot be opened,
        `ValueError` if it is no box, or one of another version."""
        super().__init__(os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC), FORMAT)
        if self.format != FORMAT:
            raise ValueError("it is no flight recorder, or one of another version")
        self.pid = pid

    @property
    def progress(self) -> object:
        """Stays the same as long as the main thread sleeps, or is stopped, in one operation, or is
        in none, and the program has not returned."""
        status = process_status(self.pid, "task", str(self.pid)) if self.waits else []
        # ticks of the processor, as user and system; the host of a GPU spins where it waits for it
        used = [] if self.read_header()[GPU] == Gpu.REAL else status[11:13]
        return self.calls, used, status[:1] == [b"T"]

    @property
    def calls(self) -> tuple[int, int, int]:
        """Stays the same as long as no operation begins, the main thread enters and leaves none,
        and the program has not returned."""
        header = self.read_header()
        return header[BEGUN], header[MAIN], header[ENDED]

    @property
    def begun(self) -> int:
        """The number of operations that have begun."""
        return self.read_header()[BEGUN]

    @property
    def programs(self) -> int:
        """The number of programs that have begun."""
        return self.read_header()[PROGRAMS]

    @property
    def waits(self) -> bool:
        """Whether the main thread is in an operation, or may wait for a simulated GPU, of which it
        is to be asked."""
        header = self.read_header()
        return header[MAIN] != NONE or header[GPU] == Gpu.SIMULATED

    def read(self, latest: int = CAPACITY) -> RankState:
        """The rank's state and its latest operations, without one that is half written."""
        header = self.read_header()
        begun, main = header[BEGUN], header[MAIN]
        if header[GPU] and latest < LATEST_ON_GPU:
            latest = LATEST_ON_GPU
        records = self.read_records(sorted({main, *range(max(0, begun - latest), begun)}))
        now = time.monotonic()
        counts = memoryview(self.read_words()).cast("q")
        tables = self.read_tables()  # after the records, which refer to them
        tables[LINE] = [
            f"{Path(file).name}:{line} in {function}" for file, line, function, _ in tables[LINE]
        ]
        _, first, worlds, moved, formed = (tables[WORLD] or [("", begun, 0, False, now)])[0]
        operations = {
            number: read
            for number, record in records.items()
            if number >= first and (read := read_operation(record, number, main, tables))
        }
        inside = operations.get(main)
        doing = Doing.IN_OPERATION if inside else Doing.IN_PROGRAM
        _, error, traceback = read_raised(records[main], tables) if inside else ("", "", "")
        latest_times = [max(operation.issued, operation.done) for operation in operations.values()]
        return RankState(
            rank=header[RANK],
            doing=Doing.FINISHED if header[ENDED] == header[PROGRAMS] else doing,
            operations=tuple(operations.values()),
            waits_for=inside,
            counts={
                Channel(kind, tuple(group), *rest): count
                for (kind, group, *rest), count in zip(tables[CHANNEL], counts, strict=False)
            },
            since=now - (inside.issued if inside else max(latest_times, default=formed)),
            unnamed=FULL if counts[-1] else "".join(tables[UNNAMED][:1]),
            worlds=worlds,
            is_renumbered=bool(moved),
            gpu=Gpu(header[GPU]),
            batches=read_batches(tables),
            error=error,
            traceback=traceback,
        )

    def read_tables(self) -> dict[str, list[Any]]:
        """The things that the text holds, by subject, up to the first line that is not whole."""
        tables = defaultdict[str, list[Any]](list)
        with contextlib.suppress(ValueError, TypeError):
            for subject, thing in read_lines(self.read_text()):
                tables[subject].append(clean(thing))
        return tables

    def read_since(self, progress: object, latest: int = CAPACITY) -> RankState:
        """The rank's state: if it is in an operation, but has gone on since its progress was this,
        it is in the program, and about to do something else."""
        state = self.read(latest)
        if is_stopped(self.pid):
            return replace(state, doing=Doing.STOPPED)
        moves = state.doing == Doing.IN_OPERATION and self.progress != progress
        return replace(state, doing=Doing.IN_PROGRAM) if moves else state

    def ask_for_line(self) -> str:
        """The program's line that the main thread is in, "train.py:12 in step"; empty if the rank
        does not say so in time."""
        return find_line(self.ask_for_stack())

    def ask_for_stack(self, child: int | None = None) -> list[str]:
        """The frames of the main thread as Python prints them, from the innermost one at least to
        the program's first; empty if the rank does not say so in time. Those of a `child` that it
        has forked, which answers in the rank's flight recorder."""
        start = os.fstat(self.file).st_size
        if not self.read_header()[ANSWERS]:
            return []
        deadline = time.monotonic() + ANSWER_TIMEOUT
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            os.kill(child or self.pid, QUESTION)
            while time.monotonic() < deadline:
                time.sleep(0.005)
                text = self.read_bytes(start, os.fstat(self.file).st_size).decode()
                if find_line(stack := text.splitlines(keepends=True)):
                    return stack
        return []

    @property
    def has_ended(self) -> bool:
        header = self.read_header()
        return header[ENDED] == header[PROGRAMS]

    @property
    def world(self) -> tuple[str, int] | None:
        """The name of its world, and how many ranks that has; None before the first program."""
        worlds = self.read_tables()[WORLD]
        return (worlds[0][0], self.read_header()[SIZE]) if worlds else None


def clean(value: Any) -> Any:
    """Without characters that a terminal obeys: a box may be another user's."""
    if isinstance(value, str):
        return printable(value)
    return [clean(each) for each in value] if isinstance(value, list) else value


def read_operation(
    record: bytes, call: int, main: int, tables: Mapping[str, list[Any]]
) -> Operation | None:
    """The operation of this record, the rank's operation `call`; None if its description is
    missing. The main thread is in operation `main`."""
    called, done, index, line, description, _, sizes, *shape, _ = RECORD.unpack(record)
    flags, *behind = QUEUE.unpack_from(record, 8 * QUEUE_AT)
    if not 0 <= description < len(tables[OPERATION]):
        return None
    what = Description(*tables[OPERATION][description])
    state = ISSUED
    if done > 0:
        state = DONE
    elif call == main:
        state = AWAITED
    return Operation(
        kind=what.kind, name=what.name, group=tuple(what.group),
        shape=tuple(shape[: max(sizes, 0)]), dtype=what.dtype, peer=what.peer, tag=what.tag,
        number=what.number, members=tuple(what.members), index=index - 1,
        line=find_in(tables[LINE], line),
        raised=read_raised(record, tables)[0],
        state=state,
        issued=called / 1e9, done=max(done, 0) / 1e9, may_give_up=done == MAY_GIVE_UP,
        call=call,
        batch=flags >> FLAGS if flags & IS_QUEUED else None,
        is_open=bool(flags & IS_OPEN),
        behind=tuple(each - 1 for each in behind if each),
    )  # fmt: skip


def read_raised(record: bytes, tables: Mapping[str, list[Any]]) -> tuple[str, str, str]:
    """The exception below which the operation of this record was called: its class, what it says,
    and its traceback. Empty if there was none."""
    number, known = RECORD.unpack(record)[RAISED_AT], tables[RAISED]
    if not 0 <= number < len(known):
        return "", "", ""
    name, error, lines = known[number]
    return name, error, "\n".join(lines)


def read_batches(tables: Mapping[str, list[Any]]) -> dict[str, int]:
    """Numbers of batches by line: see `RankState.batches`."""
    lines = Counter(line for line, _ in tables[LOADER])
    numbered = (
        (find_in(tables[LINE], line), each) for line, each in tables[LOADER] if lines[line] == 1
    )
    return {line: batches for line, batches in numbered if line}


def find_in(things: Sequence[str], number: int) -> str:
    """The text of this number; empty if there is none."""
    return things[number] if 0 <= number < len(things) else ""


def find_line(frames: Iterable[str]) -> str:
    """The program's first line among these of a stack; empty if there is none."""
    return next(find_lines(frames), "")


def find_lines(frames: Iterable[str]) -> Iterator[str]:
    """The program's lines among these of a stack, as Python prints them; those that are not whole
    do not count."""
    for frame in frames:
        if (found := FRAME.match(frame)) and is_program(found[1]):
            yield printable(f"{Path(found[1]).name}:{found[2]} in {found[3]}")


def find_boxes(pids: Iterable[int]) -> Iterator[View]:
    """The flight recorders of these processes, of those that may be looked at. (A launcher has its
    ranks' open.)"""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            files = (
                file for file in os.listdir(f"/proc/{pid}/fd") if is_box(f"/proc/{pid}/fd/{file}")
            )
            views = (View(pid, int(file)) for file in files)
            if own := next((view for view in views if view.read_header()[PID] == pid), None):
                yield own


def is_box(path: str) -> bool:
    with contextlib.suppress(OSError):  # it has been closed since
        return os.readlink(path).startswith(f"/memfd:{NAME}")
    return False
