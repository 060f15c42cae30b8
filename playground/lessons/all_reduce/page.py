"""The page of `allreduce`: what can be asked for, what was recorded, and how it is told. Does not
import torch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from playground.algorithms import ALGORITHMS
from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Table, Texts, numbers
from playground.console.text import heading, prose
from playground.lessons import LESSONS
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag

LESSON = LESSONS["allreduce"]
RUN = LESSON.remote("run", "trace")
MAX_ELEMENTS = 64
"""Largest tensor that can still be read step by step; `bench` takes larger ones."""
TRACEABLE = tuple(name for name, spec in ALGORITHMS.items() if spec.has_messages)
"""Algorithms that can be traced: all are, by default."""
STORY = tuple(name for name in TRACEABLE if ALGORITHMS[name].in_story)
"""Shown step by step with --wide; the table at the end has all."""
BRIEF = ("ring",)
"""Shown step by step by default."""
ELEMENT = 8
"""Bytes of an element of the lesson's tensors."""
Span = tuple[int, int] | None
"""[first, stop) of the tensor's elements that a message is; None for memory beside it."""


class Sent(TypedDict):
    """A message to a rank."""

    to: int
    values: list[int]
    where: Span


Received = TypedDict("Received", {"from": int, "where": Span})
"""A message from a rank."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """One start of messages, recorded when they were started."""

    phase: str = field(repr=False)
    """Phase of the algorithm; empty where its phases have no names."""
    holds: list[int]
    """The tensor when the messages were started."""
    sends: list[Sent]
    receives: list[Received]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run of an algorithm on one rank."""

    before: list[int]
    """Input of the rank."""
    after: list[int]
    """Output of the rank."""
    messages: int
    """Number of messages sent."""
    sent: int
    """Bytes sent."""
    notes: list[Note]
    """Messages, start by start."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The cost of an algorithm."""

    steps: int
    messages: list[int]
    """Number of messages that each rank sends."""
    sent: list[int]
    """Bytes that each rank sends."""
    busiest: int
    """Bytes that the busiest rank sends and receives."""
    in_all: int
    """Bytes that all ranks send together."""


def load_of(traces: Sequence[Trace]) -> Load:
    """The cost of an algorithm, from the recordings of all ranks."""
    sent = [trace.sent for trace in traces]
    passed = list(sent)
    for message in (message for trace in traces for note in trace.notes for message in note.sends):
        passed[message["to"]] += ELEMENT * len(message["values"])
    return Load(
        steps=len(steps_of(traces)),
        messages=[trace.messages for trace in traces],
        sent=sent,
        busiest=max(passed),
        in_all=sum(sent),
    )


def steps_of(traces: Sequence[Trace]) -> list[dict[int, int]]:
    """For each step of the whole, which of its notes each rank was at: {rank: position}.

    Ranks have no clock in common. But a rank's messages follow each other, and nothing arrives
    before it was sent: each one's step is the earliest that obeys both. Source: Lamport: Time,
    Clocks, and the Ordering of Events in a Distributed System (1978)
    """
    # (from, to): steps, in the order of the messages
    left_at: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    to_do = [deque(enumerate(trace.notes)) for trace in traces]
    clock, has_sent = [0] * len(traces), [False] * len(traces)
    steps: dict[int, dict[int, int]] = defaultdict(dict)
    while any(to_do):
        for rank, notes in enumerate(to_do):
            if not notes:
                continue
            position, note = notes[0]
            if not has_sent[rank]:
                has_sent[rank] = True
                for outgoing in note.sends:
                    left_at[rank, outgoing["to"]].append(clock[rank])
            lines = [left_at[incoming["from"], rank] for incoming in note.receives]
            if all(lines):
                step = max([clock[rank], *(line.popleft() for line in lines)])
                steps[step][rank] = position
                clock[rank] = step + 1
                has_sent[rank] = False
                notes.popleft()
    return [steps[step] for step in sorted(steps)]


def story(name: str, traces: Sequence[Trace]) -> Texts:
    """An algorithm step by step: what each rank sends to whom, and what it then holds."""
    columns = [Column(each, wraps=True) for each in ("sends", "then holds")]
    table = Table("step", RANK_COLUMN, *columns)
    holds = [trace.before for trace in traces]
    for rank, values in enumerate(holds):
        table.add("" if rank else "start", rank, "", values)
    for number, step in enumerate(steps_of(traces), 1):
        phases = {traces[rank].notes[position].phase for rank, position in step.items()} - {""}
        named = ", ".join([str(number), *sorted(phases)])
        for rank, trace in enumerate(traces):
            sends = ""
            if rank in step:
                note, *later = trace.notes[step[rank] :]
                sends = sends_text(note)
                holds[rank] = later[0].holds if later else trace.after
            table.add("" if rank else named, rank, sends, holds[rank])
    load = load_of(traces)
    sent = ", ".join(map(str, load.sent))
    return [
        prose(heading(name), f": {summary_of(name)}"),
        table,
        f"  bytes sent by each rank: {sent}; sent + received by one rank, at most: {load.busiest}",
    ]


def sends_text(note: Note) -> str:
    """Values, and the ranks they are sent to: "all = [1, 1] to 1, 2", or for a part, "[2:3] = [110]
    to 1"."""
    receivers: dict[str, list[str]] = defaultdict(list)
    for message in note.sends:
        span = message["where"]
        part = "all"
        if span and len(message["values"]) != len(note.holds):
            part = f"[{span[0]}:{span[1]}]"
        receivers[f"{part} = {message['values']}"].append(str(message["to"]))
    return ", ".join(f"{what} to {', '.join(ranks)}" for what, ranks in receivers.items())


def cost_table(cost: Mapping[str, Load]) -> Table:
    """All algorithms side by side."""
    of_bytes = ((name, "bytes") for name in ("sent", "sent +\nreceived", "sent by\nall ranks"))
    table = Table("algorithm", *numbers("steps", "messages", *of_bytes))
    for name, load in cost.items():
        sent, messages = max(load.sent), max(load.messages)
        table.add(name, load.steps, messages, sent, load.busiest, load.in_all)
    return table


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions:
    algorithms: tuple[str, ...] = flag(
        (),
        "Show only these algorithms, step by step",
        name="--algorithm",
        choices=TRACEABLE,
    )
    elements: int | None = flag(
        None, "Number of elements.", least=1, most=MAX_ELEMENTS, shown_default="the world size"
    )


@LESSON.run_by(flags(AllReduceOptions))
def command(session: Session, algorithms: tuple[str, ...], elements: int | None) -> None:
    names = tuple(name for name in TRACEABLE if name in (algorithms or TRACEABLE))
    elements = elements or session.world.size
    if elements > MAX_ELEMENTS:
        raise UsageError(
            f"{elements} ranks with an element each are more than can be read: choose --elements"
        )
    session.world.warm_up(RUN)
    session.say(f"{LESSON.name}: {session.world}, {elements} elements of {ELEMENT} bytes")
    by_rank: list[list[Trace]] = session.launch(RUN, names, elements)
    by_name = dict(zip(names, zip(*by_rank, strict=True), strict=True))
    for name, traces in by_name.items():
        if name in (algorithms or (STORY if session.run.wide else BRIEF)):
            session.say("", *story(name, traces))
    head = ": messages, sent, sent + received are those of the rank that has the most"
    if not (algorithms or session.run.wide):
        head += "; step by step with --algorithm NAME, or the board's with --wide"
    cost = {name: load_of(traces) for name, traces in by_name.items()}
    session.say("", prose(heading("cost"), head), cost_table(cost), "")
    most = {name: max(load.sent) for name, load in cost.items()}
    cheapest, dearest = min(most, key=most.__getitem__), max(most, key=most.__getitem__)
    sums = {value for traces in by_name.values() for trace in traces for value in trace.after}
    about = {"sums": ", ".join(map(str, sorted(sums))), "least": most[cheapest]}
    shown = LESSON.conclude(session.world.size, cheapest=cheapest, **about)
    more = f", and {most[dearest]:,} by {dearest}" * (most[dearest] > most[cheapest])
    session.say(f"Shown: {shown}{more}.")
    session.print_document(by_name, cost=cost)


def summary_of(name: str) -> str:
    """The algorithm in one paragraph."""
    code = ALGORITHMS[name].code
    return LESSON.remote(code.name).summary or code.summary
