"""The messages of an algorithm as text: step by step, and all algorithms side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from playground.console.tables import table
from playground.lessons.all_reduce.results import Note, Trace, load_of, steps_of


def story(name: str, summary: str, traces: Sequence[Trace]) -> str:
    """An algorithm step by step: what each rank sends to whom, and what it then holds."""
    lines = [f"{name}: {summary}", "  at first:"]
    lines += table([["rank", "holds"], *([str(rank), str(trace.before)] for rank, trace in enumerate(traces))])
    holds = [trace.before for trace in traces]
    for number, step in enumerate(steps_of(traces), 1):
        phases = {traces[rank].notes[position].phase for rank, position in step.items()} - {""}
        lines.append(f"  step {number}{''.join(f', {phase}' for phase in sorted(phases))}:")
        rows = [["rank", "sends", "then holds"]]
        for rank, trace in enumerate(traces):
            sends = ""
            if rank in step:
                sends = sends_text(trace.notes[step[rank]])
                last = step[rank] + 1 == len(trace.notes)
                holds[rank] = trace.after if last else trace.notes[step[rank] + 1].holds
            rows.append([str(rank), sends, str(holds[rank])])
        lines += table(rows)
    load = load_of(traces)
    lines.append(f"  sent per rank: {', '.join(map(str, load.sent))} bytes; the busiest carries {load.busiest}")
    return "\n".join(lines)


def sends_text(note: Note) -> str:
    """What is sent to whom: "all = [1, 1] to 1, 2", or of a part, "[2:3] = [110] to 1"."""
    receivers: dict[str, list[str]] = defaultdict(list)
    for message in note.sends:
        whole = message.where is None or len(message.values) == len(note.holds)
        part = "all" if whole else "[{}:{}]".format(*message.where or ())
        receivers[f"{part} = {message.values}"].append(str(message.to))
    return ", ".join(f"{what} to {', '.join(ranks)}" for what, ranks in receivers.items())


def comparison(by_name: Mapping[str, Sequence[Trace]]) -> str:
    """All algorithms side by side."""
    rows = [["algorithm", "steps", "messages", "bytes sent", "in + out", "bytes in all"]]
    for name, traces in by_name.items():
        load = load_of(traces)
        figures = (load.steps, max(load.messages), max(load.sent), load.busiest, load.in_all)
        rows.append([name, *map(str, figures)])
    return "\n".join(["what each costs (messages, bytes sent, in + out: of the rank that has most):", *table(rows)])
