"""Run an algorithm on small tensors and record every message when it is started, and what the rank then holds.

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins anew), so each digit of what a
rank holds says whose tensor is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from playground.algorithms import load_algorithm
from playground.algorithms.messages import Messages, observed
from playground.algorithms.transport import Addressed
from playground.lessons.all_reduce.results import Incoming, Note, Outgoing, Span, Trace
from playground.lessons.all_reduce.settings import TRACEABLE, AllReduceSettings
from playground.runtime import device, report


def run(rank: int, size: int, settings: AllReduceSettings) -> list[Trace]:
    """Trace everything that the settings name."""
    traces = []
    for number, name in enumerate(settings.names):
        report(phase=f"tracing {name}", step=number, steps=len(settings.names))
        traces.append(trace(name, rank, size, settings.numel))
    return traces


def trace(name: str, rank: int, size: int, elements: int | None = None) -> Trace:
    """Trace one algorithm on a tensor of so many elements, by default as many as ranks.

    A reduce-scatter starts with the whole tensor and ends with this rank's share, an all-gather the other way round.
    """
    collective, algorithm = TRACEABLE[name]
    call = load_algorithm(collective, algorithm)
    whole = torch.full((elements or size,), 10 ** (rank % 16), dtype=torch.int64, device=device())
    share = whole[: whole.numel() // size].clone()
    if collective == "reduce_scatter":
        return record(lambda: call(share, whole), whole, share)
    if collective == "all_gather":
        whole.zero_()
        return record(lambda: call(whole, share), share, whole)
    return record(lambda: call(whole), whole, whole)


def record(call: Callable[[], object], before: torch.Tensor, after: torch.Tensor) -> Trace:
    """Trace a call that takes one tensor and leaves another, which may be the same."""
    given = before.tolist()
    notes: list[Note] = []

    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        if send or receive:
            flat = messages.flat
            sends = [Outgoing(to=to, values=part.tolist(), where=span(part, flat)) for part, to in send]
            receives = [Incoming(source=source, where=span(part, flat)) for part, source in receive]
            notes.append(Note(phase=messages.phase, holds=flat.tolist(), sends=sends, receives=receives))

    with observed(note):
        call()
    parts = [len(message.values) for each in notes for message in each.sends]
    sent = sum(parts) * before.element_size()
    return Trace(before=given, after=after.tolist(), messages=len(parts), sent=sent, notes=notes)


def span(part: torch.Tensor, flat: torch.Tensor) -> Span:
    """Which elements of `flat` a part of it is."""
    first = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
    return (first, first + part.numel()) if 0 <= first < flat.numel() else None
