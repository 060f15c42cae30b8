"""experts: a mixture of experts over ranks is that of one process, wherever its rows go."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from one_process import EXACT
from torch import nn

from playground.base.remote import file_of
from playground.lessons import LESSONS
from playground.lessons.experts import lesson
from playground.lessons.gpt import LAYERS, C, T

experts: Any = lesson
ROWS = {"as many": [8, 8, 8, 8], "uneven": [5, 0, 1, 9]}
"""Of each rank."""
ROUTINGS = {
    "any": range(experts.EXPERTS),
    "all to one": range(7, 8),
    "none to the first ranks": range(6, experts.EXPERTS),
    "none to the last rank": range(3),
}
"""The experts that are chosen."""


def in_float64(work: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return work()
    finally:
        torch.set_default_dtype(torch.float32)


def new_experts() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(experts.EXPERTS))


def difference_of(apply: Any, baseline: Any, counts: list[int], chosen: range) -> float:
    """The largest difference of a result, or of a gradient, from one process that has all rows. It
    takes those of each rank by themselves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(count, 3, generator=generator) for count in counts[:size]]
    numbers = [
        torch.randint(chosen.start, chosen.stop, (count,), generator=generator)
        for count in counts[:size]
    ]
    whole, part = new_experts(), new_experts()
    part = part[rank * experts.EXPERTS // size :][: experts.EXPERTS // size]
    for each in rows:
        each.requires_grad_()
    expected = [baseline(whole, *each) for each in zip(rows, numbers, strict=True)]
    sum(each.square().sum() for each in expected).backward()
    ours = rows[rank].detach().clone().requires_grad_()
    found = apply(part, ours, numbers[rank])
    found.square().sum().backward()
    theirs = list(whole.parameters())[rank * 2 * len(part) :][: 2 * len(part)]
    pairs = [(found, expected[rank]), (ours.grad, rows[rank].grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(part.parameters(), theirs, strict=True)]
    return max([0.0, *((one - other).abs().max().item() for one, other in pairs if len(one))])


def route_in_every_way(rank: int, size: int) -> dict[str, float]:
    def work() -> dict[str, float]:
        ways = [
            (experts.expert_parallel, experts.one_process, rows, routing)
            for rows in ROWS
            for routing in ROUTINGS
        ]
        ways += [  # ranks must have as many rows: they know how many come
            (experts.with_capacity, experts.one_process_with_capacity, "as many", routing)
            for routing in ROUTINGS
        ]
        return {
            f"{apply.__name__}, {rows}, {routing}": difference_of(
                apply, baseline, ROWS[rows], ROUTINGS[routing]
            )
            for apply, baseline, rows, routing in ways
        }

    return dict(in_float64(work))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_routing_is_one_process_s(size: int, world: Worlds) -> None:
    """Also where a rank has no rows, or no row comes to it."""
    for found in world(size).run(route_in_every_way):
        assert {way: off for way, off in found.items() if not off <= EXACT} == {}
        assert len(found) == 12


def train_both_ways(rank: int, size: int) -> list[float]:
    """The largest difference of a parameter from one process: without capacity, with it, and with
    balance."""

    def work() -> list[float]:
        found = []
        for apply, baseline, balance in (
            (experts.expert_parallel, experts.one_process, 0.0),
            (experts.with_capacity, experts.one_process_with_capacity, 0.0),
            (experts.with_capacity, experts.one_process_with_capacity, 0.05),
        ):
            expected, model = experts.make_model(baseline), experts.make_model(apply)
            experts.keep_experts(model)
            experts.train(expected, balance, range(size), lambda tensor: None)
            experts.train(model, balance, [rank], dist.all_reduce)
            whole = dict(expected.named_parameters())
            first = rank * experts.EXPERTS // size

            def name_of(name: str, first: int = first) -> str:
                """That of one process's parameter."""
                return re.sub(r"(?<=experts\.)\d+", lambda at: str(int(at[0]) + first), name)

            found.append(
                max(
                    (param - whole[name_of(name)]).abs().max().item()
                    for name, param in model.named_parameters()
                )
            )
        return found

    return list(in_float64(work))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_is_one_process_s(size: int, world: Worlds) -> None:
    for found in world(size, timeout=300).run(train_both_ways):
        assert max(found) <= EXACT


def test_a_token_gets_the_weighted_sum_of_its_experts() -> None:
    """Here every expert computes every token. Its weight is its share among the chosen ones, and 0
    where it was not chosen. A bias changes who is chosen, and not the weights."""

    def work() -> None:
        torch.manual_seed(3)
        layer = experts.MixtureOfExperts(experts.one_process)
        layer.bias[4] = 100.0  # all tokens choose it
        x = torch.randn(2, 5, C)
        scores = layer.router(x)
        others = scores.clone()
        others[..., 4] = torch.inf
        is_chosen = others >= others.topk(experts.K).values[..., -1:]
        weights = scores.where(is_chosen, -torch.inf).softmax(-1)
        outputs = torch.stack([expert(x) for expert in layer.experts], 2)
        expected = (weights.unsqueeze(-1) * outputs).sum(2)
        assert (layer(x) - expected).abs().max() <= EXACT
        assert layer.counts[0].sum() == experts.K * 10
        assert layer.counts[0, 4] == 10

    in_float64(work)


def test_a_slot_is_taken_by_the_first_rows_of_an_expert() -> None:
    numbers = torch.randint(experts.EXPERTS, (200,), generator=torch.Generator().manual_seed(4))
    capacity, slots, has_slot = experts.find_slots(numbers)
    assert capacity == -(-experts.CAPACITY_FACTOR * 200 // experts.EXPERTS)
    before = Counter[int]()
    for number, slot, has in zip(numbers.tolist(), slots.tolist(), has_slot.tolist(), strict=True):
        assert slot == number * capacity + before[number]
        assert has == (before[number] < capacity)
        before[number] += 1
    assert not has_slot.all()


def test_the_bias_evens_out_and_less_is_dropped(run_cli: Run) -> None:
    ran = run_cli("experts", "-n", 2, "--steps", 10)
    assert ran.code == 0, ran.err
    [free, limited, _, balanced] = [
        [float(each) for each in row]
        for row in re.findall(r"fullest +(\S+), dropped (\S+)%", ran.out)
    ]
    assert free[0] > 1.5 > 1.3 > balanced[0]
    assert limited[1] > 2 * balanced[1]
    assert free[1] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_the_profile_has_the_bytes_of_the_chapter_s_formula(
    size: int, run_cli: Run, tmp_path: Path
) -> None:
    """Where every token chooses every expert, all experts get as many rows, and nothing is dropped.
    All four trainings then send the same: 4 exchanges for each block, of K vectors for a token."""
    file = tmp_path / "profile.json"
    k, steps = experts.EXPERTS, 2
    options = ("--k", k, "--capacity-factor", 1.0, "--steps", steps, "--profile", file)
    ran = run_cli("experts", "-n", size, *options)
    assert ran.code == 0, ran.err
    assert ran.out.count("fullest 1.00, dropped 0.0%") == 4
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    sent = {row["function"]: row["sent"] for row in rows if row["operation"] == "all_to_all_single"}
    tokens = experts.BATCH_SIZE * T * C * 8
    of_rank = LAYERS * 4 * (size - 1) / size * k * tokens
    assert sent["forward"] == pytest.approx(4 * steps * size * of_rank)


@pytest.mark.torch(2, 14)
def test_the_rows_of_the_docstring_are_those_of_a_run(run_cli: Run) -> None:
    ran = run_cli("experts")
    assert ran.code == 0, ran.err
    source = file_of(LESSONS["experts"].module).read_text(encoding="utf-8")
    rows = re.findall(r"^(?:    )?(\w+ +balance .*%), difference", source + ran.out, re.MULTILINE)
    assert len(rows) == 8
    assert rows[:4] == rows[4:]


def test_experts_that_cannot_be_divided_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("experts", "-n", 5)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "12 experts cannot be divided among 5 ranks" in ran.err
