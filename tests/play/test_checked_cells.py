"""Cells that train are checked for silent mistakes: what is told of them, and what is not, since a
person at a prompt may do it on purpose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from playground.play.text_report import describe_end
from playground.play.world import PlayWorld, Run

SIZE = 2
MAKE = """
from torch import nn
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank + 1)
"""
TRAIN = """
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(2, 6)).square().sum().backward()
    {step}
"""
STEP = "optimizer.step()"
SKIP = "(rank == 0 and step == 1) or optimizer.step()"
WRITE = "with torch.no_grad(): model.module.weight += rank"


@pytest.fixture(scope="module")
def world() -> Iterator[PlayWorld]:
    world = PlayWorld(SIZE)
    yield world
    world.close()


def rules(run: Run) -> list[str]:
    assert not any(each.error for each in run.outcomes.values()), run.outcomes
    return [each.rule for each in run.mistakes]


def train(steps: int = 4, step: str = STEP) -> str:
    return TRAIN.format(steps=steps, step=step)


def test_a_mistake_within_a_cell_is_told_once_after_it(world: PlayWorld) -> None:
    ran = world.run_cell(MAKE + train(step=SKIP), 1)
    assert rules(ran) == ["D5-skip"]
    told = " ".join(" ".join(describe_end(ran, SIZE)).split())
    assert "playground: wrong [D5-skip]" in told
    assert "rank 0 made 0 steps" in told
    assert "(cell 1, line 11)" in told
    assert rules(world.run_cell(train(), 2)) == []


def test_a_mistake_in_the_training_of_an_earlier_cells_model_is_told(world: PlayWorld) -> None:
    assert rules(world.run_cell(MAKE, 1)) == []
    assert rules(world.run_cell(train(), 2)) == []
    assert rules(world.run_cell(train(step=SKIP), 3)) == ["D5-skip"]


def test_a_call_with_other_elements_than_those_meant_is_told(world: PlayWorld) -> None:
    column = "x = torch.ones(4, 4)\ndist.all_reduce(x[:, 0])"
    assert rules(world.run_cell(MAKE + train(), 1)) == []
    assert rules(world.run_cell(column, 2)) == ["G1-noncontig"]


def test_right_training_cell_by_cell_is_not_accused(world: PlayWorld) -> None:
    for number, cell in enumerate((MAKE, train(1), train(1), "optimizer.step()", train(8)), 1):
        assert rules(world.run_cell(cell, number)) == []


@pytest.mark.parametrize("change", [WRITE, f"if rank == 0: {STEP}"])
def test_what_is_done_to_one_rank_between_cells_is_not_accused(
    world: PlayWorld, change: str
) -> None:
    world.run_cell("1 / 0")  # the ranks begin anew
    for cells in ((MAKE, train(), change, train(), train()), (MAKE, change, train(), train())):
        for number, cell in enumerate(cells, 1):
            assert rules(world.run_cell(cell, number)) == []


def test_after_a_cell_of_some_ranks_or_an_error_nothing_is_said_of_what_was_there(
    world: PlayWorld,
) -> None:
    for between in ({"source": STEP, "on": [0]}, {"source": "1 / 0"}):
        assert rules(world.run_cell(MAKE + train(), 1)) == []
        world.run_cell(**between, number=2)
        assert rules(world.run_cell(train(step=SKIP), 3)) == []
    assert rules(world.run_cell(MAKE + train(step=SKIP), 4)) == ["D5-skip"]


def test_a_program_that_forms_its_group_is_checked_and_so_is_the_next(world: PlayWorld) -> None:
    program = "dist.init_process_group()\n" + MAKE + train() + "dist.destroy_process_group()"
    for _ in range(2):
        ran = world.run_cell(program, 1)
        assert ran.has_left
        assert rules(ran) == []
    assert rules(world.run_cell(MAKE + train(step=SKIP), 2)) == ["D5-skip"]


def test_the_check_can_be_switched_off() -> None:
    world = PlayWorld(SIZE, checks=False)
    try:
        assert rules(world.run_cell(MAKE + train(step=SKIP), 1)) == []
    finally:
        world.close()
