"""The diagrams in text that chapters show are what their boards do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from playground.lessons.pipeline import lesson as pipeline
from playground.site.chapters import CHAPTERS

Order = list[tuple[str, int]]
"""What a stage does: F or B, and of which microbatch."""


def diagrams(chapter: str) -> list[str]:
    text = CHAPTERS[chapter].read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def orders(schedule: Callable[..., None], stages: int, microbatches: int) -> list[Order]:
    """What each stage does, in order, by a schedule of the board."""
    found: list[Order] = []
    for index in range(stages):
        done: Order = []
        stage: Any = SimpleNamespace(
            ranks=range(stages),
            index=index,
            forward=lambda m, done=done: done.append(("F", m)),
            backward=lambda m, done=done: done.append(("B", m)),
        )
        schedule(stage, microbatches)
        found.append(done)
    return found


def slots(found: list[Order], costs: Sequence[int]) -> list[dict[int, str]]:
    """By stage, what it does from which slot on, if it takes as many slots as it costs and waits
    for the activations of the stage before or the gradient of the stage behind."""
    ends: dict[tuple[int, str, int], int] = {}
    begun: list[dict[int, str]] = [{} for _ in found]
    left = [list(each) for each in found]
    free = [0] * len(found)
    while any(left):
        for index, coming in enumerate(left):
            while coming:
                kind, m = coming[0]
                source = index - 1 if kind == "F" else index + 1
                needed = (source, kind, m) if 0 <= source < len(found) else (index, "F", m)
                if needed not in ends and not (kind == "F" and index == 0):
                    break
                begin = max(free[index], ends.get(needed, 0))
                begun[index][begin] = f"{kind}{m}"
                ends[index, kind, m] = free[index] = begin + costs[index]
                coming.pop(0)
    return begun


def draw(schedule: Callable[..., None], stages: int, microbatches: int) -> str:
    begun = slots(orders(schedule, stages, microbatches), [1] * stages)
    width = max(max(each) for each in begun) + 1
    return "".join(
        f"stage {index}  " + " ".join(each.get(slot, ". ") for slot in range(width)).rstrip() + "\n"
        for index, each in enumerate(begun)
    )


@pytest.mark.parametrize("name", ["gpipe", "one_forward_one_backward"])
def test_slots_of_a_pipeline(name: str) -> None:
    [diagram] = diagrams("pipeline")
    stages, microbatches = 3, 4
    drawn = draw(getattr(pipeline, name), stages, microbatches)
    assert f"{name}\n{drawn}" in diagram
    begun = slots(orders(getattr(pipeline, name), stages, microbatches), [1] * stages)
    assert max(map(max, begun)) + 1 == 2 * (microbatches + stages - 1)


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (3, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_the_slowest_stage_of_a_pipeline_sets_the_pace(
    costs: tuple[int, ...], microbatches: int
) -> None:
    """The chapter's formula, in each direction: the sum of the costs once, and the largest cost for
    each further microbatch."""
    begun = slots(orders(pipeline.gpipe, len(costs), microbatches), costs)
    last = max(
        begin + cost for each, cost in zip(begun, costs, strict=True) for begin in each
    )
    assert last == 2 * (sum(costs) + (microbatches - 1) * max(costs))
