"""The lessons do what their docstrings say: the tables there are what real ranks return."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from boards import source_of
from fixtures import Run, Worlds
from gpus import shown
from processes import free_port
from test_readme import fenced_blocks

from playground.lessons import LESSONS
from playground.lessons.context.page import ContextSettings
from playground.lessons.ddp import lesson as ddp
from playground.lessons.experts.page import ExpertsSettings
from playground.lessons.mesh.page import MeshSettings, shapes_for
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.sgd import lesson as sgd
from playground.lessons.tensor.page import TensorSettings
from playground.runtime import RankFailed, UsageError
from playground.runtime.rank.reports import hearing
from playground.runtime.rank.steps import run_steps
from playground.runtime.remote import Remote, remote
from playground.site.chapters import CHAPTERS
from playground.training.data import Images
from playground.training.step_settings import LadderSettings


def steps_of(lesson: str, *names: str) -> list[Remote]:
    return [LESSONS[lesson].remote(step) for step in names or LESSONS[lesson].steps]


def docstring_table(lesson: str, step: str) -> list[dict[str, Any]]:
    """The rows of the table in a step's docstring, one per rank, without the rank itself."""
    text = LESSONS[lesson].remote(step).load().__doc__
    rows = [
        line.strip().strip("|").split("|")
        for line in text.splitlines()
        if line.strip().startswith("|")
    ]
    names = [cell.strip() for cell in rows[0]]
    table = [
        dict(zip(names, (ast.literal_eval(cell.strip()) for cell in row), strict=True))
        for row in rows[2:]
    ]
    assert [row.pop("rank") for row in table] == list(range(len(table)))
    return table


@pytest.mark.parametrize("lesson", ["rpc"])
def test_steps_leave_what_their_tables_say(lesson: str, world: Worlds) -> None:
    steps = LESSONS[lesson].steps
    tables = {step: docstring_table(lesson, step) for step in steps}
    for size in {len(table) for table in tables.values()}:
        chosen = [step for step in steps if len(tables[step]) == size]
        by_rank = world(size).run(run_steps, steps_of(lesson, *chosen))
        for step, results in zip(chosen, zip(*by_rank, strict=True), strict=True):
            assert list(results) == tables[step], step


def step_that_draws(rank: int, size: int) -> dict[str, float]:
    return {"drawn": torch.rand(1).item()}


def run_with_seeds(rank: int, size: int) -> list[Any]:
    steps = [Remote(__name__, step_that_draws.__name__)]
    return [run_steps(rank, size, steps, seed) for seed in (1, 2, 1)]


def test_what_steps_draw_is_the_seed_s(world: Worlds) -> None:
    first, other, again = world(1).run(run_with_seeds)[0]
    assert first == again != other


def hear_steps(rank: int, size: int) -> list[Any]:
    steps, heard = [Remote(__name__, step_that_draws.__name__)] * 2, list[Any]()
    with hearing(heard.append):
        run_steps(rank, size, steps)
    return heard


def test_each_step_is_reported_when_it_begins(world: Worlds) -> None:
    """A row of steps may take longer than a rank may be silent."""
    for heard in world(2).run(hear_steps):
        assert heard == [{"phase": "step_that_draws", "step": at, "steps": 2} for at in (0, 1)]


def step_with_a_bug(rank: int, size: int) -> None:
    raise RuntimeError("a bug in this step")


def test_a_step_that_fails_is_not_taken_for_a_refusal(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="RuntimeError: a bug in this step"):
        world(2).run(run_steps, [Remote(__name__, step_with_a_bug.__name__)])


SEEDED: dict[str, Any] = {
    "training.step_times": LadderSettings(folder=Path()),
    "lessons.parameter_server.experiment": ServerSettings(folder=Path()),
    "lessons.tensor.experiment": TensorSettings(size=2),
    "lessons.context.experiment": ContextSettings(size=2),
    "lessons.experts.experiment": ExpertsSettings(size=2),
    "lessons.mesh.experiment": MeshSettings(shapes=shapes_for(2)),
}
"""Settings of runs, by the module of the run."""


def with_own_seeds(rank: int, size: int) -> dict[str, str]:
    """What each run says where every rank is given another seed."""
    said = {}
    for name, settings in SEEDED.items():
        with pytest.raises(UsageError) as refused:
            remote(f"playground.{name}:run")(rank, size, replace(settings, seed=rank + 1))
        said[name] = str(refused.value)
    return said


def test_ranks_that_were_given_different_settings_are_stopped(world: Worlds) -> None:
    for said in world(2).run(with_own_seeds):
        assert said.keys() == SEEDED.keys()
        for name, message in said.items():
            assert "seed is 1 on rank 0 and 2 on rank 1" in message, name


def test_the_tutorial_s_program_runs_as_it_stands(run_script: Callable[..., Any]) -> None:
    """As the chapter hello shows it, with a port of its own: 29500 is taken where two tests run at
    once. And forked, for processes that are spawned import torch."""
    chapter = CHAPTERS["hello"].read_text(encoding="utf-8")
    [program] = [block for block in fenced_blocks(chapter, "python") if "mp.Process" in block]
    for written, instead in (('"29500"', f'"{free_port()}"'), ('"spawn"', '"fork", force=True')):
        assert program.count(written) == 1
        program = program.replace(written, instead)
    ran = run_script(program)
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["Rank 0 of 2", "Rank 1 of 2"]


def train_on_boards(rank: int, size: int, folder: Path) -> list[list[torch.Tensor]]:
    """The parameters after two epochs of each board that trains `Net`, and what the epochs told."""
    data, told = Images(folder, "train", 100), []
    models = [
        board.run(
            rank,
            size,
            data,
            30,
            epochs=2,
            after_epoch=lambda epoch, model, totals: told.append(totals),
        )
        for board in (sgd, ddp)
    ]
    return [*([param.detach() for param in model.parameters()] for model in models), told]


def test_sgd_and_ddp_train_the_same_model(world: Worlds, digits_folder: Path) -> None:
    """On 3 ranks, whose shares of a batch are not equal, and of the last one, 10 samples, even less
    so."""
    results = world(3).run(train_on_boards, digits_folder)
    for by_hand, by_ddp, told in results:
        torch.testing.assert_close(by_ddp, by_hand)
        assert [totals[2].item() for totals in told] == [float(told[0][2])] * 4
    torch.testing.assert_close(
        [result[0] for result in results[1:]], [results[0][0]] * 2, rtol=0, atol=0
    )
    assert sum(told[0][2].item() for _, _, told in results) == 100


def lines_of_run(lesson: str) -> list[str]:
    module = ast.parse(source_of(lesson))
    [run] = [
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "run"
    ]
    return source_of(lesson).splitlines()[run.lineno - 1 : run.end_lineno]


def test_between_sgd_and_ddp_are_two_lines() -> None:
    changed = [
        line for line in difflib.ndiff(lines_of_run("sgd"), lines_of_run("ddp")) if line[0] in "+-"
    ]
    assert [line.split("(")[0] for line in changed] == [
        "-     broadcast_parameters", "+     model = DistributedDataParallel", "-             "
                                                                               "average_gradients",
    ]  # fmt: skip


def ranks_by_step(document: Any) -> dict[str, Any]:
    return {step["name"]: step["ranks"] for step in document["steps"]}


@pytest.mark.gpu
@pytest.mark.parametrize("lesson", ["rpc"])
def test_a_lesson_leaves_what_it_leaves_on_gloo(lesson: str, run_cli: Run, pair: int) -> None:
    here = ranks_by_step(shown(run_cli, lesson, "-n", pair))
    there = ranks_by_step(json.loads(run_cli(lesson, "-n", pair, "--json").out))
    assert here.keys() == there.keys()
    compared = [
        name for name, ranks in here.items() if not any("refused" in str(rank) for rank in ranks)
    ]
    assert len(compared) >= len(here) - 3
    for name in compared:
        for ours, theirs in zip(here[name], there[name], strict=True):
            assert ours.get("after") == theirs.get("after"), name
