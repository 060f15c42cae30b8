"""The diagrams in text that chapters show are what their boards do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Worlds

from playground.lessons.context import lesson as context
from playground.lessons.experts import lesson as experts
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
    last = max(begin + cost for each, cost in zip(begun, costs, strict=True) for begin in each)
    assert last == 2 * (sum(costs) + (microbatches - 1) * max(costs))


def backward_of_ring(rank: int, size: int) -> list[tuple[int, int]]:
    """The block that this rank has at each hop, and the gradient of the block's values once this
    rank has added its part, 10^rank; and at the end its own block with the gradient that backward
    returns."""
    passed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pass_on(block: torch.Tensor, group: Any) -> Any:
        received, works = real(block, group)
        passed.append((block.clone(), received))
        return received, works

    q = torch.zeros(1, 1, 2, 1)  # weighs all keys alike
    v = (q + rank).requires_grad_()
    out = context.ring_attention(q, q, v, zigzag=False, causal=False)
    real, context.pass_on = context.pass_on, pass_on
    try:
        out.backward(torch.full_like(out, size * 10.0**rank))
    finally:
        context.pass_on = real
    of_blocks, of_gradients = passed[:-1:2], [*passed[1:-1:2], passed[-1]]
    blocks = [of_blocks[0][0], *(received for _, received in of_blocks)]
    pairs = [
        (block[1], gradient[1]) for block, (gradient, _) in zip(blocks, of_gradients, strict=True)
    ]
    pairs.append((v.detach(), v.grad))
    return [(round(block.mean().item()), round(each.mean().item())) for block, each in pairs]


def test_gradients_travel_behind_their_blocks(world: Worlds) -> None:
    [diagram] = diagrams("context")
    found = world(3).run(backward_of_ring)
    rows = [[int(word) for word in line.split()[1:]] for line in diagram.splitlines()[2:]]
    assert rows == [[number for pair in hop for number in pair] for hop in zip(*found, strict=True)]


CHOSEN = [[1, 2, 0, 3], [0, 3, 1, 0]]
"""By rank, the expert of each of its tokens; a rank has two of the four experts."""


def way_of_tokens(rank: int, size: int) -> list[list[int]]:
    """The rows of the chapter's diagram, of this rank."""
    chosen = torch.tensor(CHOSEN[rank])
    tokens = 10.0 * rank + torch.arange(4).unsqueeze(1)
    counts = experts.count_tokens(chosen, 4, None)
    order = experts.sort_by_expert(chosen, counts[rank])
    arrived = experts.dispatch(tokens, order, 1, counts, None)
    parts: list[torch.Tensor] = []

    def add_hundreds(expert: int, part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return part + 100 * expert

    own = [partial(add_hundreds, expert) for expert in (2 * rank, 2 * rank + 1)]
    results = experts.compute(own, arrived, counts.tensor_split(size, dim=1)[rank])
    output = experts.combine(results, order, torch.ones(4, 1), counts, None)
    rows = [tokens, chosen, tokens[order], arrived, torch.cat(parts), results, output]
    return [row.flatten().long().tolist() for row in rows]


def test_tokens_are_sorted_by_expert_on_both_sides(world: Worlds) -> None:
    [diagram] = diagrams("experts")
    ways = world(2).run(way_of_tokens)
    names, *columns = zip(*(re.split(r" {2,}", line) for line in diagram.splitlines()), strict=True)
    assert len(names) == 8
    for (_, *shown), rows in zip(columns, ways, strict=True):
        assert [[int(word) for word in cell.split()] for cell in shown] == rows
