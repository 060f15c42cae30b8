"""The schedules by name: where the code of each is, and what theory says of it. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    name: str
    code: Remote
    """Called as `schedule(stage, microbatches)`, by every stage."""
    bubble_rule: str
    """`bubble`, as papers write it."""
    bubble: Callable[[int, int], float]
    """The share of the time for which stages idle, given the numbers of stages S and of microbatches M, if every
    forward takes equally long, every backward does, and messages take no time."""
    held_rule: str
    """`held`, as papers write it; s is the stage, 0 for the first."""
    held: Callable[[int, int, int], int]
    """Microbatches whose activations a stage holds at most, given s, S and M."""


def pipelined_bubble(stages: int, microbatches: int) -> float:
    """The last stage waits S - 1 slots for its first microbatch, and all stages have M + S - 1 of them."""
    return (stages - 1) / (microbatches + stages - 1)


SCHEDULES = {
    spec.name: spec
    for spec in (
        ScheduleSpec(
            name="naive",
            code=remote("playground.lessons.pipeline.lesson:naive"),
            bubble_rule="(S-1)/S",
            bubble=lambda stages, microbatches: (stages - 1) / stages,
            held_rule="1",
            held=lambda stage, stages, microbatches: 1,
        ),
        ScheduleSpec(
            name="gpipe",
            code=remote("playground.lessons.pipeline.lesson:gpipe"),
            bubble_rule="(S-1)/(M+S-1)",
            bubble=pipelined_bubble,
            held_rule="M",
            held=lambda stage, stages, microbatches: microbatches,
        ),
        ScheduleSpec(
            name="1f1b",
            code=remote("playground.lessons.pipeline.lesson:one_forward_one_backward"),
            bubble_rule="(S-1)/(M+S-1)",
            bubble=pipelined_bubble,
            held_rule="min(M, S-s)",
            held=lambda stage, stages, microbatches: min(microbatches, stages - stage),
        ),
    )
}
