"""Run an algorithm on a small tensor, and record every message when it is started, and what the
rank then holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from playground.algorithms import load_algorithm
from playground.algorithms.all_reduce import current_phase
from playground.algorithms.messages import (
    Addressed,
    Group,
    Watcher,
    Works,
    executed_by,
    number_in_whole,
)
from playground.lessons.all_reduce.page import Note, Received, Sent, Span, Trace
from playground.runtime import device, report


def run(rank: int, size: int, names: Sequence[str], elements: int) -> list[Trace]:
    """Trace each of these algorithms."""
    traces = []
    for number, name in enumerate(names):
        report(phase=f"tracing {name}", step=number, steps=len(names))
        traces.append(trace(rank, size, name, elements))
    return traces


def trace(rank: int, size: int, name: str = "ring", elements: int | None = None) -> Trace:
    """Trace one algorithm on a tensor of so many elements, by default as many as ranks."""
    call, tracer = load_algorithm("all_reduce", name), Tracer()
    tensor = torch.full((elements or size,), 10 ** (rank % 16), dtype=torch.int64, device=device())
    before = tensor.tolist()
    with executed_by(tracer):
        call(tensor)
    parts = [len(message["values"]) for note in tracer.notes for message in note.sends]
    sent = sum(parts) * tensor.element_size()
    return Trace(
        before=before, after=tensor.tolist(), messages=len(parts), sent=sent, notes=tracer.notes
    )


class Tracer(Watcher):
    """Notes the messages of one collective."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        self.flat = flat
        self.inner.run(algorithm, flat, *arguments)

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        sends = [
            Sent(to=to, values=part.tolist(), where=self.span(part))
            for part, to in number_in_whole(group, send)
        ]
        receives = [
            Received({"from": source, "where": self.span(part)})
            for part, source in number_in_whole(group, receive)
        ]
        self.notes.append(
            Note(
                phase=current_phase(group), holds=self.flat.tolist(), sends=sends, receives=receives
            )
        )
        return self.inner.start(group, send, receive)

    def span(self, part: torch.Tensor) -> Span:
        """Which elements of the collective's tensor a part of it is."""
        first = (part.data_ptr() - self.flat.data_ptr()) // part.element_size()
        return (first, first + len(part)) if 0 <= first < len(self.flat) else None
