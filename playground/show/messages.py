"""The messages of an algorithm, step by step, as its ranks noted them (see `playground.lessons.allreduce.noted`)."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from playground.show.results import table

ELEMENT = 8
"""Bytes of an element of the lesson's tensors."""


def timeline(ranks: list[dict[str, Any]]) -> list[dict[int, int]]:
    """For each step of the whole, which of its notes each rank was at: {rank: position}.

    The ranks have no clock in common. But a rank's notes follow each other, and nothing arrives before it was sent:
    each note's step is the earliest that obeys both (Lamport, 1978, Time, Clocks, and the Ordering of Events).
    """
    left_at: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # (from, to): steps, in the order of the messages
    to_do = [deque(enumerate(values["notes"])) for values in ranks]
    clock, has_sent = [0] * len(ranks), [False] * len(ranks)
    steps: dict[int, dict[int, int]] = defaultdict(dict)
    while any(to_do):
        for rank, notes in enumerate(to_do):
            if not notes:
                continue
            position, note = notes[0]
            if not has_sent[rank]:
                has_sent[rank] = True
                for message in note["sends"]:
                    left_at[rank, message["to"]].append(clock[rank])
            lines = [left_at[message["from"], rank] for message in note["receives"]]
            if all(lines):
                step = max([clock[rank], *(line.popleft() for line in lines)])
                steps[step][rank] = position
                clock[rank], has_sent[rank] = step + 1, False
                notes.popleft()
    return [steps[step] for step in sorted(steps)]


def story(name: str, about: str, ranks: list[dict[str, Any]]) -> str:
    """An algorithm told step by step: what each rank sends to whom, and what it then holds."""
    lines = [f"{name}: {about}", "  at first:"]
    lines += table([["rank", "holds"], *([str(rank), str(values["before"])] for rank, values in enumerate(ranks))])
    holds = [values["before"] for values in ranks]
    for number, step in enumerate(timeline(ranks), 1):
        lines.append(f"  step {number}:")
        rows = [["rank", "sends", "then holds"]]
        for rank, values in enumerate(ranks):
            sends = ""
            if rank in step:
                notes = values["notes"]
                sends = sent_text(notes[step[rank]], len(values["before"]))
                last = step[rank] + 1 == len(notes)
                holds[rank] = values["after"] if last else notes[step[rank] + 1]["holds"]
            rows.append([str(rank), sends, str(holds[rank])])
        lines += table(rows)
    load = loads(ranks)
    lines.append(f"  sent per rank: {', '.join(map(str, load['sent']))} bytes; the busiest carries {load['busiest']}")
    return "\n".join(lines)


def sent_text(note: dict[str, Any], elements: int) -> str:
    """What is sent to whom: "all = [1, 1] to 1, 2", or of a part, "[2:3] = [110] to 1"."""
    to: dict[str, list[str]] = defaultdict(list)
    for message in note["sends"]:
        values = message["values"]
        part = "all" if len(values) == elements else "[{}:{}]".format(*message["where"])
        to[f"{part} = {values}"].append(str(message["to"]))
    return ", ".join(f"{what} to {', '.join(whom)}" for what, whom in to.items())


def loads(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What an algorithm costs: steps, messages, and bytes by rank."""
    received = [0] * len(ranks)
    for values in ranks:
        for message in (message for note in values["notes"] for message in note["sends"]):
            received[message["to"]] += ELEMENT * len(message["values"])
    sent = [values["sent"] for values in ranks]
    return {
        "steps": len(timeline(ranks)),
        "messages": [values["messages"] for values in ranks],
        "sent": sent,
        "busiest": max(map(sum, zip(sent, received, strict=True))),
        "in_all": sum(sent),
    }


def comparison(by_algorithm: dict[str, list[dict[str, Any]]]) -> str:
    """All algorithms side by side."""
    rows = [["algorithm", "steps", "messages a rank", "bytes sent a rank", "busiest, in + out", "bytes in all"]]
    for name, ranks in by_algorithm.items():
        load = loads(ranks)
        figures = (load["steps"], max(load["messages"]), max(load["sent"]), load["busiest"], load["in_all"])
        rows.append([name, *map(str, figures)])
    return "\n".join(["what each costs (at most, of any rank):", *table(rows)])
