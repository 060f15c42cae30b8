"""Steps of a lesson, run one after the other on every rank of a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from playground.runtime.backends import on_device, refusal
from playground.runtime.errors import PlaygroundError
from playground.runtime.rank.reports import report
from playground.runtime.remote import Remote


def run_steps(rank: int, size: int, steps: Sequence[Remote], seed: int = 1234) -> list[Any]:
    """This rank's outcome of each step, as `attempt` returns it.

    Each step is reported, then called as `step(rank, size)`. Raises `PlaygroundError` for one that
    does not return plain data.
    """
    torch.manual_seed(seed)
    outcomes = []
    for number, step in enumerate(steps):
        report(phase=step.name, step=number, steps=len(steps))
        outcomes.append(check_outcome(step.name, attempt(step, rank, size)))
    return outcomes


def attempt(step: Remote, *args: Any) -> Any:
    """The result of `step(*args)`; {"refused": words} for what the backend cannot do."""
    try:
        with on_device():
            return step(*args)
    except (RuntimeError, ValueError) as error:
        if not refusal(error):
            raise
        return {"refused": refusal(error)}


def check_outcome(step: str, outcome: Any) -> Any:
    """`outcome`, if it is a mapping or a dataclass without tensors. Raises `PlaygroundError` if it
    is not."""
    rule = "return plain data, e.g. {'before': tensor.item(), 'after': tensor.tolist()}"
    if not isinstance(outcome, Mapping):
        if is_dataclass(outcome) and not isinstance(outcome, type):
            return outcome
        what = "nothing" if outcome is None else f"a {type(outcome).__name__}"
        raise PlaygroundError(f"step {step} returned {what}: {rule}")
    for name, value in outcome.items():
        if any(
            isinstance(each, torch.Tensor)
            for each in (value if isinstance(value, (list, tuple)) else [value])
        ):
            raise PlaygroundError(f"step {step} returned a Tensor in {name!r}: {rule}")
    return outcome
