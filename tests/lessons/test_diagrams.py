"""The diagrams in text that chapters show are what their boards do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.lessons.experts import lesson as experts
from playground.site.texts import CHAPTERS

Work = tuple[str, int, int]
"""F or B, or W for the second half of a backward; which part of the model, and which microbatch."""


def diagrams(chapter: str) -> list[str]:
    text = CHAPTERS[chapter].read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def fill(orders: list[list[Work]], costs: Mapping[str, Sequence[int]]) -> list[dict[int, Work]]:
    """By rank, what it does from which slot on. A kind of work costs so many slots on each rank. A
    forward waits for that of the part before, a backward for that of the part behind."""
    ends: dict[Work, int] = {}
    begun: list[dict[int, Work]] = [{} for _ in orders]
    left = [list(each) for each in orders]
    free = [0] * len(orders)
    last = max(part for order in orders for _, part, _ in order)
    while any(left):
        for rank, coming in enumerate(left):
            while coming:
                kind, part, m = coming[0]
                source = part + {"F": -1, "B": 1, "W": -part - 1}[kind]
                if 0 <= source <= last and (kind, source, m) not in ends:
                    break
                begin = max(free[rank], ends.get((kind, source, m), 0))
                begun[rank][begin] = coming.pop(0)
                ends[kind, part, m] = free[rank] = begin + costs[kind][rank]
    return begun


def draw(begun: list[dict[int, Work]], costs: Mapping[str, Sequence[int]]) -> list[str]:
    """A row for each rank: a small letter in forward, a capital one in backward."""
    rows = []
    for rank, works in enumerate(begun):
        row = ""
        for begin, (kind, part, m) in works.items():
            letter = ("abcdef" if part < len(begun) else "uvwxyz")[m]
            shown = {"F": letter, "B": letter.upper(), "W": "-"}[kind]
            row = row.ljust(begin, ".") + shown * costs[kind][rank]
        rows.append(row)
    return [row.ljust(max(map(len, rows)), ".") for row in rows]


STAGES, MICROBATCHES = 3, 6


def one_forward_one_backward(rank: int) -> list[Work]:
    """1F1B. On rank r, the second half of a backward waits for r further backwards, whose gradients
    the stage before needs sooner."""
    warm_up = STAGES - 1 - rank
    order: list[Work] = [("F", rank, m) for m in range(warm_up)]
    for m in range(MICROBATCHES):
        order += [("F", rank, warm_up + m)] * (warm_up + m < MICROBATCHES)
        order += [("B", rank, m), *[("W", rank, m - rank)] * (m >= rank)]
    return [*order, *(("W", rank, m) for m in range(MICROBATCHES - rank, MICROBATCHES))]


def interleaved(rank: int, parts: int = 2) -> list[Work]:
    """Narayanan et al., 2021: microbatches go through a part in groups of as many as there are
    ranks."""

    def work(kind: str, k: int) -> Work:
        turn, place = divmod(k, STAGES * parts)
        part = place // STAGES
        part = part if kind == "F" else parts - 1 - part
        return kind, part * STAGES + rank, turn * STAGES + place % STAGES

    total = parts * MICROBATCHES
    warm_up = min(total, 2 * (STAGES - 1 - rank) + (parts - 1) * STAGES)
    order = [work("F", k) for k in range(warm_up)]
    for k in range(warm_up, total):
        order += [work("F", k), work("B", k - warm_up)]
    return [*order, *(work("B", k) for k in range(total - warm_up, total))]


def rows_of(
    order: Callable[[int], list[Work]], kinds: str, forward: int, backward: int
) -> list[str]:
    """The rows of a schedule whose ranks do these kinds of work."""
    costs = {"F": [forward] * STAGES, "B": [backward] * STAGES, "W": [1] * STAGES}
    orders = [[work for work in order(rank) if work[0] in kinds] for rank in range(STAGES)]
    return draw(fill(orders, costs), costs)


def test_further_schedules_of_a_pipeline() -> None:
    """The diagrams, and the formulas of their idle slots."""
    first, second = diagrams("pipeline")[1:]
    drawn = {
        "1F1B": rows_of(one_forward_one_backward, "FB", 2, 4),
        "interleaved": rows_of(interleaved, "FB", 1, 2),
        "zero bubble": rows_of(one_forward_one_backward, "FBW", 1, 1),
    }
    shown = [line for line in (first + second).splitlines() if line]
    assert shown == [
        f"{name * (place == 0):15}{row}"
        for name, rows in drawn.items()
        for place, row in enumerate(rows)
    ]
    ahead = STAGES - 1
    for name, expected in {
        "1F1B": ahead / (MICROBATCHES + ahead),
        "interleaved": ahead / (2 * MICROBATCHES + ahead),
        "zero bubble": ahead / (3 * MICROBATCHES + ahead),
    }.items():
        for row in drawn[name]:
            assert row.count(".") / len(row) == pytest.approx(expected), name


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (3, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_the_slowest_stage_of_a_pipeline_sets_the_pace(
    costs: tuple[int, ...], microbatches: int
) -> None:
    """The chapter's formula, in each direction: the sum of the costs once, and the largest cost for
    each further microbatch."""
    orders: list[list[Work]] = [
        [(kind, stage, m) for kind in "FB" for m in range(microbatches)]
        for stage in range(len(costs))
    ]
    begun = fill(orders, {"F": costs, "B": costs})
    last = max(begin + cost for each, cost in zip(begun, costs, strict=True) for begin in each)
    assert last == 2 * (sum(costs) + (microbatches - 1) * max(costs))


CHOSEN = [[1, 2, 0, 3], [0, 3, 1, 0]]
"""By rank, the expert of each of its tokens; a rank has two of the four experts."""


class Exchanges:
    """In the place of the lesson's `AllToAll`: it keeps what is sent and what arrives."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def apply(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        arrived: torch.Tensor = experts.AllToAll.apply(rows, sent, received)
        if not self.seen:  # of the way back, they are the other way round
            self.seen += [torch.tensor(sent), torch.tensor(received)]
        self.seen += [rows, arrived]
        return arrived


class Counts:
    """In the place of `dist` there: it keeps the numbers of rows that are exchanged."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.get_world_size = dist.get_world_size

    def all_to_all_single(self, arriving: torch.Tensor, leaving: torch.Tensor) -> None:
        dist.all_to_all_single(arriving, leaving)
        self.seen += [leaving, arriving]


def way_of_tokens(rank: int, size: int) -> list[list[int]]:
    """The rows of the chapter's diagram, of this rank."""
    chosen = torch.tensor(CHOSEN[rank])
    tokens = 10.0 * rank + torch.arange(4).unsqueeze(1)
    exchanges, counts, local_ids = Exchanges(), Counts(), list[torch.Tensor]()

    def one_process(own: Any, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        local_ids.append(ids)
        results: torch.Tensor = experts.one_process(own, rows, ids)
        return results

    changed = {"AllToAll": exchanges, "dist": counts, "one_process": one_process, "EXPERTS": 4}
    function = FunctionType(experts.expert_parallel.__code__, vars(experts) | changed)
    own: list[Any] = [lambda part: part + 200 * rank, lambda part: part + 200 * rank + 100]
    output = function(own, tokens, chosen)
    sent, received, rows, arrived, results, returned = exchanges.seen
    numbers = [tokens, chosen, *counts.seen, sent, received, rows, arrived, *local_ids]
    return [row.flatten().long().tolist() for row in [*numbers, results, returned, output]]


def test_tokens_are_sorted_by_expert_on_both_sides(world: Worlds) -> None:
    *_, diagram = diagrams("experts")
    ways = world(2).run(way_of_tokens)
    names, *columns = zip(*(re.split(r" {2,}", line) for line in diagram.splitlines()), strict=True)
    assert len(names) == 13
    for (_, *shown), rows in zip(columns, ways, strict=True):
        assert [[int(word) for word in cell.split()] for cell in shown] == rows
