"""Run what stands on the board on small tensors, and record every message when it is started, and what the rank then
holds. The board knows nothing of it.

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins again), so each digit of what a
rank holds says whose tensor is in it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from playground.algorithms import load_algorithm
from playground.algorithms.collectives import AllGather, AllReduce, ReduceScatter
from playground.algorithms.messages import Messages, observed
from playground.algorithms.operation import Add
from playground.algorithms.transport import Addressed
from playground.lessons.all_reduce.page import PHASES, TRACEABLE, AllReduceSettings, Note, Span, Trace
from playground.runtime import device, report

COLLECTIVES = {"all_reduce": AllReduce, "reduce_scatter": ReduceScatter, "all_gather": AllGather}
Step = Callable[..., Any]
"""Called as `step(rank, size, tensor)`: leaves the sum over all ranks in the tensor."""
_steps: dict[str, Step] = {}
"""The functions on the board, by the name of the algorithm."""
_messages: list[Messages] = []
"""Those that carry what is being traced."""


def traced(step: Step) -> Callable[..., Any]:
    """Make `step` a step of the lesson, called as `step(rank, size, elements)`: it is traced on a tensor of as many
    elements. Called with a tensor, it is what it was."""
    name = step.__name__.replace("_", "-")

    @functools.wraps(step)
    def call(rank: int, size: int, tensor: torch.Tensor | int | None = None) -> Trace | None:
        if not isinstance(tensor, torch.Tensor):
            return trace(name, rank, size, tensor)
        if _messages and name in PHASES:
            _messages[-1].phase = name
        return step(rank, size, tensor)

    _steps[name] = call
    return call


def run(rank: int, size: int, settings: AllReduceSettings) -> list[Trace]:
    """Trace everything that the settings name."""
    traces = []
    for number, name in enumerate(settings.names):
        report(phase=f"tracing {name}", step=number, steps=len(settings.names))
        traces.append(trace(name, rank, size, settings.numel))
    return traces


def trace(name: str, rank: int, size: int, elements: int | None = None) -> Trace:
    """Trace one algorithm on a tensor of so many elements, by default as many as ranks: what stands on the board or,
    where that has none of this name, ours.

    A reduce-scatter starts with the whole tensor and ends with this rank's share, an all-gather the other way round.
    """
    collective, algorithm = TRACEABLE[name]
    step = _steps.get(name)
    call = COLLECTIVES[collective](as_algorithm(step)) if step else load_algorithm(collective, algorithm)
    whole = torch.full((elements or size,), 10 ** (rank % 16), dtype=torch.int64, device=device())
    share = whole[: whole.numel() // size].clone()
    if collective == "reduce_scatter":
        return record(lambda: call(share, whole), whole, share)
    if collective == "all_gather":
        whole.zero_()
        return record(lambda: call(whole, share), share, whole)
    return record(lambda: call(whole), whole, whole)


def as_algorithm(step: Step) -> Callable[..., None]:
    """A step as an algorithm of `playground.algorithms`: a recorder of runs then sees its messages as one's."""

    @functools.wraps(step)
    def algorithm(flat: torch.Tensor, *add_and_messages: Any) -> None:
        *add, messages = add_and_messages
        with carried(messages), AddingBy(*add):
            step(messages.rank, messages.size, flat)

    return algorithm


@contextlib.contextmanager
def carried(messages: Messages) -> Iterator[None]:
    """In this block, what is sent and received by torch.distributed are these messages. Empty ones are left out."""
    real = {name: getattr(dist, name) for name in ("send", "recv", "batch_isend_irecv")}

    def exchange(send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> None:
        put(real)  # which the transport may need
        messages.exchange(send, receive)
        put(ours)

    def batch(started: Sequence[dist.P2POp]) -> Sequence[dist.Work]:
        addressed: dict[Any, list[Addressed]] = {dist.isend: [], dist.irecv: []}
        for message in started:
            addressed[message.op].append((message.tensor, message.peer))
        exchange(*addressed.values())
        return []

    ours = {
        "send": lambda tensor, dst: exchange(send=[(tensor, dst)]),
        "recv": lambda tensor, src: exchange(receive=[(tensor, src)]),
        "batch_isend_irecv": batch,
    }
    _messages.append(messages)
    put(ours)
    try:
        yield
    finally:
        put(real)
        _messages.remove(messages)


def put(functions: Mapping[str, object]) -> None:
    """Put these in the place of torch.distributed's."""
    for name, function in functions.items():
        setattr(dist, name, function)


class AddingBy(TorchFunctionMode):
    """In its block, `mine += theirs` is `add(mine, theirs)`: our collectives' addition, which a recorder sees."""

    def __init__(self, add: Add | None = None) -> None:
        super().__init__()
        self.add = add

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.add and function in (torch.Tensor.__iadd__, torch.Tensor.add_):
            self.add(*args)
            return args[0]
        return function(*args, **(kwargs or {}))


def record(call: Callable[[], object], before: torch.Tensor, after: torch.Tensor) -> Trace:
    """Trace a call that takes one tensor and leaves another, which may be the same."""
    given = before.tolist()
    notes: list[Note] = []

    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        if send or receive:
            flat = messages.flat
            sends = [{"to": to, "values": part.tolist(), "where": span(part, flat)} for part, to in send]
            receives = [{"from": source, "where": span(part, flat)} for part, source in receive]
            notes.append(Note(phase=messages.phase, holds=flat.tolist(), sends=sends, receives=receives))

    with observed(note):
        call()
    parts = [len(message["values"]) for each in notes for message in each.sends]
    sent = sum(parts) * before.element_size()
    return Trace(before=given, after=after.tolist(), messages=len(parts), sent=sent, notes=notes)


def span(part: torch.Tensor, flat: torch.Tensor) -> Span:
    """Which elements of `flat` a part of it is."""
    first = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
    return (first, first + part.numel()) if 0 <= first < flat.numel() else None
