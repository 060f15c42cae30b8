"""The messages of an algorithm as text: step by step, and all algorithms side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from playground.console.tables import RANK_COLUMN, Column, Table
from playground.console.text import Prose, heading, prose
from playground.lessons.all_reduce.results import Note, Trace, load_of, steps_of

SENDS, HOLDS = Column("sends", wraps=True), Column("then holds", wraps=True)


def story(name: str, summary: str, traces: Sequence[Trace]) -> list[str | Prose | Table]:
    """An algorithm step by step: what each rank sends to whom, and what it then holds."""
    start = Table(RANK_COLUMN, Column("holds", wraps=True))
    for rank, trace in enumerate(traces):
        start.add(str(rank), str(trace.before))
    texts: list[str | Prose | Table] = [
        prose(heading(name), f": {summary}"),
        prose("  ", heading("at the start"), ":"),
        start,
    ]
    holds = [trace.before for trace in traces]
    for number, step in enumerate(steps_of(traces), 1):
        phases = {traces[rank].notes[position].phase for rank, position in step.items()} - {""}
        named = "".join(f", {phase}" for phase in sorted(phases))
        texts += [prose("  ", heading(f"step {number}"), f"{named}:"), step_table(traces, step, holds)]
    load = load_of(traces)
    sent = ", ".join(map(str, load.sent))
    texts.append(f"  bytes sent by each rank: {sent}; sent + received by one rank, at most: {load.busiest}")
    return texts


def step_table(traces: Sequence[Trace], step: Mapping[int, int], holds: list[list[int]]) -> Table:
    """One step: which ranks send what. `holds`, what each rank holds before it, becomes what it holds after it."""
    table = Table(RANK_COLUMN, SENDS, HOLDS)
    for rank, trace in enumerate(traces):
        sends = ""
        if rank in step:
            sends = sends_text(trace.notes[step[rank]])
            last = step[rank] + 1 == len(trace.notes)
            holds[rank] = trace.after if last else trace.notes[step[rank] + 1].holds
        table.add(str(rank), sends, str(holds[rank]))
    return table


def sends_text(note: Note) -> str:
    """What is sent to whom: "all = [1, 1] to 1, 2", or of a part, "[2:3] = [110] to 1"."""
    receivers: dict[str, list[str]] = defaultdict(list)
    for message in note.sends:
        whole = message.where is None or len(message.values) == len(note.holds)
        part = "all" if whole else "[{}:{}]".format(*message.where or ())
        receivers[f"{part} = {message.values}"].append(str(message.to))
    return ", ".join(f"{what} to {', '.join(ranks)}" for what, ranks in receivers.items())


def comparison(by_name: Mapping[str, Sequence[Trace]]) -> list[str | Prose | Table]:
    """All algorithms side by side."""
    table = Table(
        Column("algorithm"), Column("steps", right=True), Column("messages", right=True),
        Column("sent", "bytes", right=True), Column("sent +\nreceived", "bytes", right=True),
        Column("sent by\nall ranks", "bytes", right=True),
    )  # fmt: skip
    for name, traces in by_name.items():
        load = load_of(traces)
        figures = (load.steps, max(load.messages), max(load.sent), load.busiest, load.in_all)
        table.add(name, *map(str, figures))
    about = "what each algorithm costs; messages, sent, sent + received: of the rank that has the most"
    return [prose(heading("cost"), f": {about}"), table]
