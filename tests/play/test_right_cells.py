"""Right programs, typed as cells: they run, and none of them is accused of a deadlock."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards import BOARDS, source_of
from processes import is_alive

from playground.exercises.exercise import CATALOGUE, Exercise
from playground.play.text_report import describe_end, describe_values
from playground.play.world import PlayWorld, Run

SIZE = 4
QUICK_BOARDS = ["hello", "p2p", "collectives", "all_reduce"]
QUICK_EXERCISES = ["handover", "ring", "average", "flat"]


@pytest.fixture(scope="module")
def world(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayWorld]:
    folder = tmp_path_factory.mktemp("cells")
    shutil.copytree(digits_folder, folder / "data" / "MNIST" / "raw")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        world = PlayWorld(SIZE)
        processes = [rank.process.pid for rank in world.ranks]
        yield world
        # no cell has had to be ended by a new process
        assert processes == [rank.process.pid for rank in world.ranks]
        world.close()
    assert not any(map(is_alive, processes))


def check(world: PlayWorld, source: str) -> Run:
    run = world.run_cell(source)
    told = "\n".join([*describe_values(run, SIZE), *describe_end(run, SIZE)])
    assert not any((run.hang, run.differing, run.lost, run.freed)), told
    assert not any(outcome.error for outcome in run.outcomes.values()), told
    return run


def check_board(world: PlayWorld, lesson: str) -> None:
    """A whole `lesson.py`, which forms its process group and destroys it."""
    run = check(world, source_of(lesson))
    assert run.has_left == (lesson != "data_parallel")
    assert check(world, "dist.barrier(); a_name").outcomes[0].value == "8"


def check_exercise(world: PlayWorld, exercise: Exercise) -> None:
    """Its reference, defined by a cell, and called with what the judge gives it."""
    for name in (*exercise.builds_on, exercise.name):
        text = CATALOGUE[name].solution
        for before in CATALOGUE[name].builds_on:
            function = CATALOGUE[before].function
            text = re.sub(f"from {function} import {function}\n", "", text)
        check(world, text)
    check(world, f"from {exercise.module} import {exercise.function} as cases")
    run = check(world, CALLS.format(exercise.function))
    assert int(str(run.outcomes[0].value)) > 0


CALLS = """\
import time
for number, case in enumerate(cases(rank, size, 0), 1):
    time.sleep(case.delay)
    place = (rank, size) if case.gives_rank else ()
    case.run({0}) if case.run else {0}(*place, *case.args)
number
"""


@pytest.mark.parametrize("lesson", QUICK_BOARDS)
def test_a_board_is_a_cell(world: PlayWorld, lesson: str) -> None:
    check(world, "a_name = 8")
    check_board(world, lesson)


@pytest.mark.parametrize("name", QUICK_EXERCISES)
def test_a_reference_is_a_cell(world: PlayWorld, name: str) -> None:
    check_exercise(world, CATALOGUE[name])


@pytest.mark.stress
@pytest.mark.parametrize("lesson", [each for each in BOARDS if each not in QUICK_BOARDS])
def test_every_board_is_a_cell(world: PlayWorld, lesson: str) -> None:
    check(world, "a_name = 8")
    check_board(world, lesson)


@pytest.mark.stress
@pytest.mark.parametrize("name", [each for each in CATALOGUE if each not in QUICK_EXERCISES])
def test_every_reference_is_a_cell(world: PlayWorld, name: str) -> None:
    check_exercise(world, CATALOGUE[name])
