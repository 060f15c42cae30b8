"""Recordings made by hand: what ranks do, written down, and played on a machine whose times are known.

recording = play([[Compute(0.02), Send(1, 64), Wait()], [Receive(0, 64), Wait()]])
recording = ring(4, straggler=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from playground.see.record import (
    COLLECTIVE,
    COMPUTE,
    GRADIENT,
    PHASE,
    RECEIVE,
    SEND,
    VALUES,
    WAIT,
    Event,
    RankRecording,
    Recording,
    Source,
)

ALPHA, BETA = 1e-4, 1e-9
"""Seconds that a message takes, and that each of its bytes does, unless a test says otherwise."""
POST = 1e-6
"""Seconds between two things that a rank does."""
ELEMENT = 4
"""Bytes: tensors of float32."""
FILE = "lesson.py"


@dataclass(frozen=True)
class Compute:
    seconds: float
    name: str = "add"
    line: int = 10
    nbytes: int = 0


@dataclass(frozen=True)
class Pause:
    """Seconds that no event tells of."""

    seconds: float


@dataclass(frozen=True)
class Send:
    peer: int
    nbytes: int
    values: tuple[float, ...] | None = None
    offset: int | None = None
    line: int = 20
    tag: int = 0


@dataclass(frozen=True)
class Receive:
    peer: int
    nbytes: int
    values: tuple[float, ...] | None = None
    offset: int | None = None
    line: int = 21
    tag: int = 0


@dataclass(frozen=True)
class Wait:
    """For all messages and collectives started since the last one."""

    line: int = 22


@dataclass(frozen=True)
class Call:
    """A collective of the backend on all ranks, which ends when the last of them has come. `Wait` ends it where it is
    not `blocking`."""

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
    line: int = 5


@dataclass(frozen=True)
class End:
    values: tuple[float, ...] | None = None
    """What the collective left."""


@dataclass(frozen=True)
class Instant:
    kind: str
    name: str
    values: tuple[float, ...] | None = None


Action = Compute | Pause | Send | Receive | Wait | Call | Begin | End | Instant


@dataclass
class Player:
    """One rank as it goes through what it is to do."""

    rank: int
    actions: list[Action]
    time: float = 0.0
    events: list[Event] = field(default_factory=list)
    around: list[int] = field(default_factory=list)
    """Numbers of the events that it is inside, innermost last."""
    pending: list[int] = field(default_factory=list)
    """Numbers of what the next `Wait` waits for."""
    counted: dict[tuple[str, int, int], int] = field(default_factory=dict)
    waits_from: float | None = None

    def add(self, kind: str, name: str, line: int | None, end: float | None = None, **more: object) -> Event:
        event = Event(
            number=len(self.events), rank=self.rank, kind=kind, name=name, start=self.time,
            end=self.time if end is None else end, parent=self.around[-1] if self.around else None,
            source=None if line is None else line - 1, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.events.append(event)
        return event

    def finish(self, number: int, end: float) -> None:
        self.events[number] = replace(self.events[number], end=end)


class Play:
    """All ranks, played until each has done all it is to do, or waits for what never comes."""

    def __init__(self, programs: Sequence[Iterable[Action]], alpha: float, beta: float) -> None:
        self.players = [Player(rank, list(actions)) for rank, actions in enumerate(programs)]
        self.alpha, self.beta, self.group = alpha, beta, tuple(range(len(programs)))
        self.sent: dict[tuple[int, int, int, int], float] = {}
        """When what was sent is there, by sender, receiver, tag and number."""
        self.calls: dict[int, dict[int, tuple[int, float]]] = {}
        """Each rank's event of the collective of that number, and when it came."""

    def run(self) -> None:
        while any(self.advance(player) for player in self.players):
            pass

    def advance(self, player: Player) -> bool:
        """Do what can be done; whether anything was."""
        moved = False
        while player.actions and self.act(player, player.actions[0]):
            del player.actions[0]
            player.time += POST
            moved = True
        return moved

    def act(self, player: Player, action: Action) -> bool:
        """Do this; False if something has to come first."""
        if isinstance(action, Wait):
            return self.wait(player, action.line)
        if isinstance(action, Call):
            return self.call(player, action)
        if isinstance(action, Pause):
            player.time += action.seconds
        elif isinstance(action, Compute):
            player.add(COMPUTE, action.name, action.line, player.time + action.seconds, nbytes=action.nbytes)
            player.time += action.seconds
        elif isinstance(action, Send | Receive):
            self.post(player, action)
        elif isinstance(action, Begin):
            event = player.add(
                action.kind,
                action.name,
                action.line,
                float("inf"),
                nbytes=action.nbytes,
                shape=action.shape,
                group=self.group,
            )
            player.around.append(event.number)
        elif isinstance(action, End):
            number = player.around.pop()
            player.events[number] = replace(player.events[number], end=player.time, values=action.values)
        else:
            player.add(action.kind, action.name, None, values=action.values)
        return True

    def post(self, player: Player, action: Send | Receive) -> None:
        kind = SEND if isinstance(action, Send) else RECEIVE
        count = (kind, action.peer, action.tag)
        message = player.counted.get(count, 0)
        player.counted[count] = message + 1
        event = player.add(
            kind, "isend" if kind == SEND else "irecv", action.line, float("inf"), peer=action.peer,
            nbytes=action.nbytes, shape=(action.nbytes // ELEMENT,), group=self.group, message=message, tag=action.tag,
            offset=action.offset, values=action.values,
        )  # fmt: skip
        player.pending.append(event.number)
        if kind == SEND:
            there = player.time + self.alpha + self.beta * action.nbytes
            self.sent[player.rank, action.peer, action.tag, message] = there

    def wait(self, player: Player, line: int) -> bool:
        ends = [self.end_of(player.events[number]) for number in player.pending]
        if None in ends:
            return False
        end = max([player.time, *(end for end in ends if end is not None)])
        player.add(WAIT, "wait", line, end, awaits=tuple(player.pending))
        for number in player.pending:
            player.finish(number, end)
        player.pending, player.time = [], end
        return True

    def end_of(self, event: Event) -> float | None:
        """When this is over; None if that is not known yet."""
        if event.kind == SEND:
            return event.start + POST / 2
        if event.kind == RECEIVE and event.peer is not None and event.message is not None:
            return self.sent.get((event.peer, event.rank, event.tag, event.message))
        place = sum(other.kind == COLLECTIVE for other in self.players[event.rank].events[: event.number])
        arrived = self.calls[place]
        if len(arrived) < len(self.players):
            return None
        return max(time for _, time in arrived.values()) + self.alpha + self.beta * event.nbytes

    def call(self, player: Player, call: Call) -> bool:
        place = sum(event.kind == COLLECTIVE for event in player.events)
        if player.waits_from is None:
            event = player.add(COLLECTIVE, call.name, call.line, float("inf"), nbytes=call.nbytes, group=self.group)
            self.calls.setdefault(place, {})[player.rank] = (event.number, player.time)
            if not call.blocking:
                player.pending.append(event.number)
                return True
            player.waits_from = player.time
            place += 1
        event = [event for event in player.events if event.kind == COLLECTIVE][place - 1]
        end = self.end_of(event)
        if end is None:
            return False
        player.finish(event.number, end)
        player.time, player.waits_from = end, None
        return True


def play(programs: Sequence[Iterable[Action]], alpha: float = ALPHA, beta: float = BETA) -> Recording:
    """Record ranks that do this, where a message of n bytes takes alpha + n * beta and sending it takes no time."""
    game = Play(programs, alpha, beta)
    game.run()
    return recording_of([player.events for player in game.players])


def recording_of(events: Sequence[Sequence[Event]]) -> Recording:
    """A recording of these events, by rank. Their `source` is a line of FILE, counted from 0."""
    ranks = tuple(
        RankRecording(rank=rank, host="here", device="cpu", events=tuple(its)) for rank, its in enumerate(events)
    )
    return Recording(
        command=("all_reduce", "-n", str(len(ranks))), backend="gloo",
        versions={"python": "3.12", "torch": "2.15", "system": "Linux"}, began=1.75e9, ranks=ranks,
        sources=tuple(Source(FILE, line, "run") for line in range(1, 41)),
        texts={FILE: "\n".join(f"line {line}" for line in range(1, 41)) + "\n"},
    )  # fmt: skip


def on_gpus(recording: Recording) -> Recording:
    """The same, of ranks on GPUs."""
    ranks = tuple(replace(rank, device=f"cuda:{rank.rank}") for rank in recording.ranks)
    return replace(recording, backend="nccl", ranks=ranks)


def ring(
    size: int = 4, elements: int | None = None, *, straggler: int | None = None, delay: float = 0.02,
    work: float = 1e-3, add: float = 1e-5, alpha: float = ALPHA, beta: float = BETA,
) -> Recording:  # fmt: skip
    """Our ring all-reduce of `elements` (by default one per rank), after `work` seconds of forward on every rank.

    Rank r starts with 10 to the power r in every element. The `straggler`'s forward takes `delay` seconds longer.
    """
    programs = []
    for rank, actions in enumerate(ring_actions(size, elements or size, add)):
        seconds = work + delay if rank == straggler else work
        programs.append([Compute(seconds, "forward", line=11), *actions])
    return play(programs, alpha, beta)


def ring_actions(size: int, elements: int, add: float) -> list[list[Action]]:
    """What each rank of a ring does, with the values that it sends and receives."""
    held = [[float(10**rank)] * elements for rank in range(size)]
    programs: list[list[Action]] = [
        [
            Begin(COLLECTIVE, "all_reduce (ring)", elements * ELEMENT, (elements,), line=5),
            Instant(VALUES, "before", tuple(held[rank])),
        ]
        for rank in range(size)
    ]
    for phase, first in (("reduce-scatter", 1), ("all-gather", 0)):
        for actions in programs:
            actions.append(Begin(PHASE, phase))
        for step in range(first, first + size - 1):
            sent = [chunk_of(held[rank], size, (rank - step) % size) for rank in range(size)]
            for rank, actions in enumerate(programs):
                actions += exchange(rank, size, step, sent)
                begin, arrived = sent[(rank - 1) % size]
                mine = held[rank][begin : begin + len(arrived)]
                if phase == "reduce-scatter":
                    arrived = tuple(own + other for own, other in zip(mine, arrived, strict=True))
                    actions.append(Compute(add, "add", nbytes=len(arrived) * ELEMENT))
                held[rank][begin : begin + len(arrived)] = arrived
        for actions in programs:
            actions.append(End())
    for rank, actions in enumerate(programs):
        actions += [Instant(VALUES, "after", tuple(held[rank])), End(tuple(held[rank]))]
    return programs


def exchange(rank: int, size: int, step: int, sent: Sequence[tuple[int, tuple[float, ...]]]) -> list[Action]:
    """One step of the ring: what a rank sends to the right and receives from the left, chunks without elements left
    out."""
    begin, values = sent[rank]
    came_from, arrives = sent[(rank - 1) % size]
    actions: list[Action] = []
    if values:
        actions.append(Send((rank + 1) % size, len(values) * ELEMENT, values, begin))
    if arrives:
        actions.append(Receive((rank - 1) % size, len(arrives) * ELEMENT, arrives, came_from))
    return [*actions, Wait()]


def chunk_of(values: Sequence[float], size: int, number: int) -> tuple[int, tuple[float, ...]]:
    """Where the chunk begins, and what is in it: cut as `Tensor.tensor_split` does."""
    least, more = divmod(len(values), size)
    begin = number * least + min(number, more)
    return begin, tuple(values[begin : begin + least + (number < more)])


def training(size: int = 2, *, exposed: float = 1e-3, hidden: float = 2e-3, steps: int = 3) -> Recording:
    """Training steps: forward, a backward with a bucket that leaves early, one that leaves last, the optimizer's step.

    The first bucket's all-reduce has `hidden` seconds of backward beside it; the last one takes about `exposed` longer
    than the backward.
    """
    nbytes = 4096
    step: list[Action] = [
        Compute(2e-3, "forward", line=11), Compute(1e-3, "backward", line=12), Instant(GRADIENT, "fc2.weight"),
        Call("all_reduce", nbytes, line=13, blocking=False), Compute(hidden, "backward", line=12),
        Instant(GRADIENT, "fc1.weight"), Call("all_reduce", nbytes, line=13, blocking=False), Wait(line=14),
        Compute(5e-4, "step", line=15),
    ]  # fmt: skip
    return play([step * steps] * size, alpha=exposed, beta=0.0)
