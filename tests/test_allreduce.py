"""The lesson `allreduce` and training on our algorithms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_lessons import docstring_table

from playground.algorithms import ALGORITHMS
from playground.cli.options import ALL_REDUCES
from playground.cli.training import judged
from playground.lessons import LESSONS, run_steps
from playground.runtime import PlaygroundError
from playground.show.messages import loads, timeline
from playground.testing import World

Run = Callable[..., Any]
Worlds = Callable[..., World]
STEPS = list(LESSONS["allreduce"].steps)


def test_the_lesson_has_every_algorithm() -> None:
    assert [step.replace("_", "-") for step in STEPS] == [name for name in ALGORITHMS if name != "auto"]


def test_steps_do_what_their_tables_say(world: Worlds) -> None:
    by_rank = world(4).run(run_steps, "allreduce", STEPS)
    for step, ranks in zip(STEPS, zip(*by_rank, strict=True), strict=True):
        rows = docstring_table("allreduce", step)
        assert [{name: rank[name] for name in rows[0]} for rank in ranks] == rows, step


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_message_noted_is_one_that_made_the_difference(size: int, world: Worlds) -> None:
    """Replay the notes: what a rank holds after a step comes from what it held and what was sent to it."""
    by_rank = world(size).run(run_steps, "allreduce", ["ring"], 0, (2 * size,))
    ranks = [steps[0] for steps in by_rank]
    steps = timeline(ranks)
    assert len(steps) == 2 * (size - 1)
    for number, step in enumerate(steps):
        for rank in range(size):
            note = ranks[rank]["notes"][step[rank]]
            [sent] = ranks[(rank - 1) % size]["notes"][step[(rank - 1) % size]]["sends"]
            first, stop = sent["where"]
            expected = list(note["holds"])
            held = expected[first:stop] if number < size - 1 else [0] * (stop - first)
            expected[first:stop] = [mine + theirs for mine, theirs in zip(held, sent["values"], strict=True)]
            last = step[rank] + 1 == len(ranks[rank]["notes"])
            assert expected == (ranks[rank]["after"] if last else ranks[rank]["notes"][step[rank] + 1]["holds"])


def test_the_root_of_reduce_broadcast_carries_everything(world: Worlds) -> None:
    by_rank = world(5).run(run_steps, "allreduce", ["reduce_broadcast", "ring"], 0, (10,))
    star, ring = (loads([steps[position] for steps in by_rank]) for position in (0, 1))
    assert star["busiest"] == 2 * 4 * 80
    assert ring["busiest"] == 2 * (2 * 4 * 80 // 5)
    assert star["in_all"] == ring["in_all"] == 2 * 4 * 80


def test_the_story(run_cli: Run) -> None:
    shown = run_cli("allreduce", "-n", "3")
    assert shown.code == 0
    told = [line.split(":")[0] for line in shown.out.splitlines() if line[:1].isalpha() and ": " in line]
    assert told[1:5] == ["reduce-broadcast", "all-to-all", "tutorial-ring", "ring"]
    assert "  1     all = [10, 10, 10] to 0     [10, 10, 10]" in shown.out
    assert "  0     [0:1] = [1] to 1    [1, 1, 101]" in shown.out
    assert all(f"  {name} " in shown.out.split("what each costs")[1] for name in ALGORITHMS if name != "auto")


def test_one_algorithm_as_json(run_cli: Run) -> None:
    shown = run_cli("allreduce", "--algorithm", "binary-tree", "-n", 5, "--elements", 3, "--json")
    document = json.loads(shown.out)
    assert [step["name"] for step in document["steps"]] == ["binary-tree"]
    assert [rank["after"] for rank in document["steps"][0]["ranks"]] == [[11111] * 3] * 5
    assert document["cost"]["binary-tree"]["in_all"] == 2 * 4 * 24


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "bogus"], "'bogus' is not one of"),
        (["--elements", "0"], "0 is not in the range"),
        (["--elements", "65"], "65 is not in the range"),
        (["-n", "1"], "at least 2 ranks"),
        (["-n", "65"], "choose --elements"),
    ],
)
def test_bad_input(words: list[str], message: str, run_cli: Run) -> None:
    shown = run_cli("allreduce", *words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_sgd_learns_the_same_on_every_algorithm(run_cli: Run, data_dir: Path) -> None:
    losses = {}
    for name in ALL_REDUCES:
        words = ["--all-reduce", name, "--epochs", 1, "--limit", 128, "--batch-size", 32]
        shown = run_cli("sgd", "-n", 3, *words, "--dataset", "digits", "--data-dir", data_dir, "--json")
        assert shown.code == 0, shown.err
        document = json.loads(shown.out)
        losses[name] = document["epochs"][-1]["loss"]
        assert document["replicas_max_difference"] == 0 or name == "tutorial-ring"
    assert losses == dict.fromkeys(ALL_REDUCES, pytest.approx(losses["backend"], rel=1e-5))


def test_replicas_that_differ_are_an_error_unless_it_is_rounding() -> None:
    assert "bit-identical" in judged(0.0, "ring")
    assert "differ by up to 1.0e-08" in judged(1e-8, "tutorial-ring")
    for difference, all_reduce in ((1e-8, "ring"), (1e-8, None), (0.1, "tutorial-ring"), (float("nan"), "backend")):
        with pytest.raises(PlaygroundError, match="must not"):
            judged(difference, all_reduce)
