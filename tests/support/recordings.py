"""Recordings made by hand: what ranks do, written down, and played on a machine whose times are
known.

recording = play([[Compute(0.02), Send(1, 64), Wait()], [Receive(0, 64), Wait()]])
recording = ring(4, straggler=1)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from playground.explain.replay.record import recording as record
from playground.explain.replay.record.recording import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    Event,
    RankRecording,
    Recording,
    SourceLine,
)

ALPHA, BETA = 1e-4, 1e-9
"""Seconds that a message takes, and that each of its bytes does, unless a test says otherwise."""
POST = 1e-6
"""Seconds between two things that a rank does."""
ELEMENT = 4
"""Bytes: tensors of float32."""
FILE = "lesson.py"


@dataclass(frozen=True)
class Pause:
    """Seconds that no event tells of."""

    seconds: float


@dataclass(frozen=True)
class Compute(Pause):
    name: str = "add"
    line: int = 10
    nbytes: int = 0


@dataclass(frozen=True)
class Send:
    peer: int
    nbytes: int
    values: tuple[float, ...] | None = None
    offset: int | None = None
    line: int = 20
    tag: int = 0


@dataclass(frozen=True)
class Receive(Send):
    line: int = 21


@dataclass(frozen=True)
class Wait:
    """For all messages and collectives started since the last one."""

    line: int = 22


@dataclass(frozen=True)
class Call:
    """A collective of the backend on all ranks, which ends when the last of them has come. `Wait`
    ends it where it is not `blocking`."""

    name: str
    nbytes: int
    line: int = 30
    blocking: bool = True


@dataclass(frozen=True)
class Begin:
    """A phase, or a collective of ours, until its `End`."""

    kind: str
    name: str
    nbytes: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    values: tuple[float, ...] | None = None
    """What the collective left."""


@dataclass(frozen=True)
class Instant:
    kind: str
    name: str
    values: tuple[float, ...] | None = None


Action = Pause | Send | Wait | Call | Begin | End | Instant


class Rank:
    """One rank as it goes through what it is to do. Each of its generators yields where something
    has to come first."""

    def __init__(self, play: Play, rank: int) -> None:
        self.play = play
        self.rank = rank
        self.time = 0.0
        self.events: list[Event] = []
        self.around: list[int] = []
        """Numbers of the events that it is inside, innermost last."""
        self.pending: list[int] = []
        """Numbers of what the next `Wait` waits for."""
        self.counts: Counter[object] = Counter()

    def add(self, kind: str, name: str, line: int, end: float, **more: Any) -> int:
        """Add an event, that of line 0 of none. Returns its number."""
        number, parent = len(self.events), self.around[-1] if self.around else None
        event = Event(
            number,
            self.rank,
            kind,
            name,
            self.time,
            end,
            parent=parent,
            source=line - 1 if line else None,
            **more,
        )
        self.events.append(event)
        return number

    def finish(self, number: int, end: float, **more: Any) -> None:
        self.events[number] = replace(self.events[number], end=end, **more)

    def run(self, actions: Iterable[Action]) -> Iterator[None]:
        for action in actions:
            if isinstance(action, Wait):
                yield from self.wait(action.line)
            elif isinstance(action, Call):
                yield from self.call(action)
            else:
                self.act(action)
            self.time += POST

    def act(self, action: Action) -> None:
        """Do what needs no other rank."""
        group = self.play.group
        if isinstance(action, Pause):
            if isinstance(action, Compute):
                self.add(
                    record.COMPUTE,
                    action.name,
                    action.line,
                    self.time + action.seconds,
                    nbytes=action.nbytes,
                )
            self.time += action.seconds
        elif isinstance(action, Send):
            self.post(action)
        elif isinstance(action, Begin):
            what = {"nbytes": action.nbytes, "shape": action.shape, "group": group}
            self.around.append(self.add(action.kind, action.name, 5, inf, **what))
        elif isinstance(action, End):
            self.finish(self.around.pop(), self.time, values=action.values)
        elif isinstance(action, Instant):
            self.add(action.kind, action.name, 0, self.time, values=action.values)

    def post(self, action: Send) -> None:
        kind, name = (RECEIVE, "irecv") if isinstance(action, Receive) else (SEND, "isend")
        message = self.counts[kind, action.peer, action.tag]
        self.counts[kind, action.peer, action.tag] += 1
        number = self.add(
            kind, name, action.line, inf, peer=action.peer, nbytes=action.nbytes,
            shape=(action.nbytes // ELEMENT,),
            group=self.play.group, message=message, tag=action.tag, offset=action.offset,
            values=action.values,
        )  # fmt: skip
        self.pending.append(number)
        if kind == SEND:
            self.play.sent[self.rank, action.peer, action.tag, message] = self.play.arrival(
                self.time, action.nbytes
            )

    def call(self, call: Call) -> Iterator[None]:
        number = self.add(
            COLLECTIVE, call.name, call.line, inf, nbytes=call.nbytes, group=self.play.group
        )
        self.play.calls[self.counts[COLLECTIVE]].append(self.time)
        self.counts[COLLECTIVE] += 1
        if call.blocking:
            while (end := self.end_of(number)) is None:
                yield
            self.finish(number, end)
            self.time = end
        else:
            self.pending.append(number)

    def wait(self, line: int) -> Iterator[None]:
        while None in (ends := [*map(self.end_of, self.pending)]):
            yield
        end = max([self.time, *(end for end in ends if end is not None)])
        self.add(record.WAIT, "wait", line, end, awaits=tuple(self.pending))
        for number in self.pending:
            self.finish(number, end)
        self.pending = []
        self.time = end

    def end_of(self, number: int) -> float | None:
        """When this is over; None if that is not known yet."""
        event = self.events[number]
        if event.kind == SEND:
            return event.start + POST / 2
        if event.kind == RECEIVE:
            return self.play.sent.get((event.peer, event.rank, event.tag, event.message))
        came = self.play.calls[sum(other.kind == COLLECTIVE for other in self.events[:number])]
        return (
            self.play.arrival(max(came), event.nbytes)
            if len(came) == len(self.play.group)
            else None
        )


class Play:
    """All ranks, played until each has done all it is to do, or waits for what never comes."""

    def __init__(self, programs: Sequence[Iterable[Action]], alpha: float, beta: float) -> None:
        self.alpha, self.beta, self.group = alpha, beta, tuple(range(len(programs)))
        self.sent: dict[object, float] = {}
        """When what was sent is there, by sender, receiver, tag and number."""
        self.calls: defaultdict[int, list[float]] = defaultdict(list)
        """When each rank came to the collective of that number."""
        self.ranks = [Rank(self, rank) for rank in self.group]
        walks = [rank.run(actions) for rank, actions in zip(self.ranks, programs, strict=True)]
        before = None
        while before != (before := sum(rank.time for rank in self.ranks)):
            for walk in walks:
                next(walk, None)

    def arrival(self, time: float, nbytes: int) -> float:
        """When a message that left at that time is there."""
        return time + self.alpha + self.beta * nbytes


def play(
    programs: Sequence[Iterable[Action]], alpha: float = ALPHA, beta: float = BETA
) -> Recording:
    """Record ranks that do this, where a message of n bytes takes alpha + n * beta and sending it
    takes no time."""
    return recording_of([rank.events for rank in Play(programs, alpha, beta).ranks])


def recording_of(events: Sequence[Sequence[Event]]) -> Recording:
    """A recording of these events, by rank. Their `source` is a line of FILE, counted from 0."""
    ranks = tuple(
        RankRecording(rank=rank, device="cpu", events=tuple(its)) for rank, its in enumerate(events)
    )
    return Recording(
        command=("all_reduce", "-n", str(len(ranks))), backend="gloo",
        versions={"python": "3.12", "torch": "2.15", "system": "Linux"}, began=1.75e9, ranks=ranks,
        sources=tuple(SourceLine(FILE, line, "run") for line in range(1, 41)),
        texts={FILE: "".join(f"line {line}\n" for line in range(1, 41))},
    )  # fmt: skip


def on_gpus(recording: Recording) -> Recording:
    """The same, of ranks on GPUs."""
    ranks = tuple(replace(rank, device=f"cuda:{rank.rank}") for rank in recording.ranks)
    return replace(recording, backend="nccl", ranks=ranks)


WORK, DELAY, ADD = 1e-3, 0.02, 1e-5
"""Seconds of forward, of a straggler's in addition, and of an addition."""


def ring(
    size: int = 4,
    elements: int | None = None,
    *,
    straggler: int | None = None,
    alpha: float = ALPHA,
) -> Recording:
    """Our ring all-reduce of `elements` (by default one per rank), after a forward, which takes a
    straggler longer.

    Rank r starts with 10 to the power r in every element.
    """
    elements = elements or size
    held = [[float(10**rank)] * elements for rank in range(size)]
    what = COLLECTIVE, "all_reduce (ring)", elements * ELEMENT, (elements,)
    programs: list[list[Action]] = []
    for rank, own in enumerate(held):
        forward = Compute(WORK + DELAY if rank == straggler else WORK, "forward", line=11)
        programs.append([forward, Begin(*what), Instant(record.VALUES, "before", tuple(own))])
    for phase, first in (("reduce-scatter", 1), ("all-gather", 0)):
        for actions in programs:
            actions.append(Begin(record.PHASE, phase))
        for step in range(first, first + size - 1):
            sent = [chunk_of(held[rank], size, (rank - step) % size) for rank in range(size)]
            for rank, actions in enumerate(programs):
                (begin, values), (came, arrived) = sent[rank], sent[(rank - 1) % size]
                if values:
                    actions.append(Send((rank + 1) % size, len(values) * ELEMENT, values, begin))
                if arrived:
                    actions.append(
                        Receive((rank - 1) % size, len(arrived) * ELEMENT, arrived, came)
                    )
                actions.append(Wait())
                mine = slice(came, came + len(arrived))
                if phase == "reduce-scatter":
                    arrived = tuple(
                        own + other for own, other in zip(held[rank][mine], arrived, strict=True)
                    )
                    actions.append(Compute(ADD, "add", nbytes=len(arrived) * ELEMENT))
                held[rank][mine] = arrived
        for actions in programs:
            actions.append(End())
    for result, actions in zip(held, programs, strict=True):
        actions += [Instant(record.VALUES, "after", tuple(result)), End(tuple(result))]
    return play(programs, alpha)


def chunk_of(values: Sequence[float], size: int, number: int) -> tuple[int, tuple[float, ...]]:
    """Where the chunk begins, and what is in it: cut as `Tensor.tensor_split` does. Chunks may have
    no elements."""
    least, more = divmod(len(values), size)
    begin = number * least + min(number, more)
    return begin, tuple(values[begin : begin + least + (number < more)])


def training(
    size: int = 2, *, exposed: float = 1e-3, hidden: float = 2e-3, steps: int = 3
) -> Recording:
    """Training steps: forward, a backward with a bucket that leaves early, one that leaves last,
    the optimizer's step.

    The first bucket's all-reduce has `hidden` seconds of backward beside it; the last one takes
    about `exposed` longer than the backward.
    """
    nbytes = 4096
    step: list[Action] = [
        Compute(2e-3, "forward", line=11), Compute(1e-3, "backward", line=12),
        Instant(record.GRADIENT, "fc2.weight"),
        Call("all_reduce", nbytes, line=13, blocking=False), Compute(hidden, "backward", line=12),
        Instant(record.GRADIENT, "fc1.weight"), Call("all_reduce", nbytes, line=13, blocking=False),
        Wait(line=14),
        Compute(5e-4, "step", line=15),
    ]  # fmt: skip
    return play([step * steps] * size, alpha=exposed, beta=0.0)
