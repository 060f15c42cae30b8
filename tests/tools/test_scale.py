"""The cost model: its counts are those of real messages, its fit finds what is there, its tables say who is first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import pytest
import torch
from ranks import observed
from simulation import Simulation, Sizes

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.algorithms.cost_model import PIECE, Cost, Counts, Machine, Task
from playground.algorithms.messages import Addressed
from playground.console.rendering import render
from playground.measurement import Fields
from playground.runtime import UsageError
from playground.testing import World
from playground.tools.scale import page, plan
from playground.tools.scale.plan import COSTS, EFFORT

Run = Callable[..., Any]
Worlds = Callable[..., World]
SIZES = (4, 20, 1000)
IN_PIECES = ("pipelined-ring", 5 * 2**20)
CLUSTER = Machine(5e-6, 4e-11, 1e-11)
BY_HAND = ("--alpha", "5e-6", "--beta", "4e-11")


def test_every_algorithm_has_its_cost() -> None:
    assert set(COSTS) == set(page.SHORT) == {name for name, spec in ALGORITHMS.items() if spec.cost}
    assert len(set(page.SHORT.values())) == len(COSTS)
    assert max(map(len, page.SHORT.values())) <= len("tutorial")


def sizes(messages: Sequence[Addressed]) -> Sizes:
    return [(other, tensor.nbytes) for tensor, other in messages]


def record(rank: int, size: int, asked: list[tuple[str, int]]) -> list[list[tuple[Sizes, Sizes]]]:
    """For each (algorithm, bytes): what this rank sends and receives, start by start."""
    runs: list[list[tuple[Sizes, Sizes]]] = []

    def note(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        runs[-1].append((sizes(send), sizes(receive)))

    with observed(note):
        for name, nbytes in asked:
            runs.append([])
            load_all_reduce(name)(torch.zeros(nbytes // 4))
    return runs


@pytest.mark.parametrize("size", [2, 4, 5, pytest.param(8, marks=pytest.mark.stress)])
def test_costs_are_those_of_the_messages_really_sent(size: int, world: Worlds) -> None:
    asked = [*((name, nbytes) for name in COSTS for nbytes in SIZES), IN_PIECES]
    by_rank = world(size).run(record, asked)
    for position, (name, nbytes) in enumerate(asked):
        sent = [message for rank in by_rank for send, _ in rank[position] for message in send]
        total = COSTS[name](Task(size, nbytes)).total
        assert (total.messages, total.bytes) == (len(sent), sum(bytes_ for _, bytes_ in sent)), (name, nbytes)
        if nbytes == 1000 and name != "all-to-all":  # whose messages may go in any order, some of them worse
            took = Simulation([rank[position] for rank in by_rank]).run()
            assert COSTS[name](Task(size, nbytes)).path.messages == took, name


def test_pieces_cost_messages_and_hide_additions() -> None:
    """Up to one piece per chunk, the two rings are the same."""
    for nbytes, pieces in ((4 * PIECE, 1), (8 * PIECE, 2)):
        plain, tuned = (COSTS[name](Task(4, nbytes)).path for name in ("ring", "pipelined-ring"))
        assert (tuned.messages, tuned.bytes) == (pieces * plain.messages, plain.bytes)
        assert (tuned == plain) == (pieces == 1)
        assert tuned.added <= plain.added


def test_the_time_is_the_path_or_a_core_s_share_of_all_work() -> None:
    cost = Cost(path=Counts(2, 100, 10), total=Counts(20, 1000, 100))
    assert Machine(1, 0.1, 0.01).seconds(cost) == pytest.approx(2 + 10 + 0.1)
    assert Machine(1, 0.1, 0.01, cores=2).seconds(cost) == pytest.approx((20 + 100 + 1) / 2)
    assert Machine(1, 0.1, 0.01, cores=64).seconds(cost) == pytest.approx(2 + 10 + 0.1)


def samples_from(true: Machine, asked: Fields) -> list[Fields]:
    """What that machine would take for all that is planned."""
    groups = asked["fitted"] | asked["held_out"]
    timed = {(name, size, nbytes): [1.0] for size, sizes in groups.items() for nbytes in sizes for name in COSTS}
    return [sample | {"seconds": plan.error(true, sample) + 1} for sample in plan.samples_of([timed], asked)]


@pytest.mark.parametrize("cores", [2, 64])
def test_the_fit_finds_the_parameters_that_are_there(cores: int) -> None:
    true = Machine(8e-5, 2.5e-10, 3e-10, cores)
    samples = samples_from(true, plan.plan_for(8, EFFORT, cores))
    found = plan.fit([sample for sample in samples if sample["fitted"]], cores)
    assert astuple(found)[:3] == pytest.approx(astuple(true)[:3], rel=1e-6)
    half = samples[-1] | {"seconds": samples[-1]["seconds"] / 2}
    assert plan.error(found, half) == pytest.approx(1)


def test_no_parameter_is_negative() -> None:
    assert min(plan.least_squares([(1.0, 0.0, 0.0), (1.0, 100.0, 1.0), (1.0, 200.0, 5.0)], [1.0, 0.5, 0.25])) >= 0


def test_a_sample_is_the_slowest_rank_in_a_good_round() -> None:
    key, other = ("ring", 2, 4), ("ring", 3, 4)
    rounds = [{key: [1.0, 9.0, 2.0, 5.0], other: [1.0]}, {key: [3.0, 1.0, 4.0, 1.0]}, {}]
    samples = plan.samples_of(rounds, plan.plan_for(8, EFFORT, 2))
    assert [(each["size"], each["seconds"], each["fitted"]) for each in samples] == [(2, 4.0, True), (3, 1.0, False)]


def test_what_is_held_out_is_not_fitted() -> None:
    for size in range(plan.MIN_RANKS, plan.MAX_RANKS + 1):
        asked = plan.plan_for(size, EFFORT, 2)
        assert asked["fitted"]
        assert size in asked["held_out"]
        assert not asked["fitted"].keys() & asked["held_out"].keys()
    assert not {*EFFORT["fitted"]} & {*EFFORT["held_out"]}


def test_few_steps_win_for_small_tensors_and_few_bytes_for_large_ones() -> None:
    rows = {(row["size"], row["world_size"]): row for row in plan.predict(CLUSTER, plan.CLUSTER)}
    assert rows[4, 65536]["winner"] == rows[1024, 64]["winner"] == "recursive-doubling"
    assert rows[2**20, 1024]["winner"] == "halving-doubling"
    slow_adding = plan.predict(Machine(1e-6, 1e-10, 1e-10), [8])[-1]
    assert slow_adding["winner"] == "pipelined-ring"
    assert slow_adding["seconds"]["ring"] < slow_adding["seconds"]["halving-doubling"] * 1.01
    assert all(row["seconds"][row["winner"]] == min(row["seconds"].values()) for row in rows.values())
    assert {size for size, _ in rows} >= {4, 2**30}


def test_a_cluster_by_hand(run_cli: Run) -> None:
    shown = run_cli("scale", *BY_HAND, "--gamma", "1e-11")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:4] == [
        "scale: a cluster with these parameters",
        "  alpha: 5 us per message (latency)",
        "  beta: 0.04 ns per byte, 25 GB/s (inverse bandwidth)",
        "  gamma: 0.01 ns per byte, 100 GB/s added or copied",
    ]
    [headings] = [line for line in lines if line.split()[:2] == ["2", "ranks"]]
    assert headings.split()[::2] == ["2", "64", "2,048", "65,536"]
    assert any(line.split()[:4] == ["4", "B", "doubling", "5.00"] for line in lines)
    last = " ".join(shown.out.split("Predicted: ")[1].split())
    assert last == "all-reduce of 4 B to 1 GiB on 2 to 65,536 ranks, from parameters as given."
    document = json.loads(run_cli("scale", *BY_HAND, "--json").out)
    assert (document["lesson"], document["world_size"], document["steps"], document["fit"]) == ("scale", 1, [], None)
    rows = document["predictions"]["cluster"]
    assert len(rows) == len(plan.SIZES) * len(plan.CLUSTER)
    assert all(set(row["seconds"]) == set(COSTS) for row in rows)


QUICK: Fields = {"seconds": 0.0, "fitted": (4, 4096), "held_out": (1024,)}


def test_measured(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EFFORT", QUICK)
    document = json.loads(run_cli("scale", "-n", 4, "--json").out)
    assert document["world_size"] == 4
    assert document["parameters"]["alpha"] > 0
    points = document["fit"]["points"]
    assert {(point["size"], point["nbytes"], point["fitted"]) for point in points} == {
        (2, 4, True), (2, 4096, True), (3, 1024, False), (4, 1024, False)
    }  # fmt: skip
    errors = [abs(point["error"]) for point in points if not point["fitted"]]
    assert document["fit"]["worst_error"] == max(errors)
    assert {row["world_size"] for row in document["predictions"]["host"]} == set(plan.HOST)
    assert {row["world_size"] for row in document["predictions"]["cluster"]} == set(plan.CLUSTER)


def test_a_measured_host_as_text() -> None:
    """What the model is told by its own predictions, it predicts; all of it is shown."""
    measured = plan.plan_for(8, EFFORT, 2)
    result = plan.evaluate(samples_from(Machine(8e-5, 2.5e-10, 3e-10, 2), measured), measured)
    points = result["fit"]["points"]
    assert result["fit"]["worst_error"] < 1e-6
    assert {(point["size"], point["fitted"]) for point in points} == {(2, True), (4, True), (3, False), (8, False)}
    text = render(page.result_texts(result), 80)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        render(page.machine_lines(result["parameters"]), 80),
        render([page.errors_table([point for point in points if not point["fitted"]])], 80),
        "all ranks on its 2 cores", render(page.winners_texts(result["predictions"]["host"])[1:], 80),
        render(page.winners_texts(result["predictions"]["cluster"])[1:], 80), "predictions are off by 0% (median)",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("size", [3, 17])
def test_what_cannot_be_measured(size: int) -> None:
    with pytest.raises(UsageError, match=f"{size} ranks: measuring takes 4 to 16; for a cluster"):
        plan.plan_for(size, EFFORT, 2)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--alpha", "0", "--beta", "1"), "--alpha"),
        (("--alpha", "1", "--beta", "1e300"), "--beta"),
        (("--beta", "1e-6"), "give both"),
        (("--gamma", "1e-9"), "add --alpha and --beta"),
        ((*BY_HAND, "-n", "4"), "leave -n out"),
        ((*BY_HAND, "--timeout", "9"), "--timeout has no effect"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], part: str, run_cli: Run) -> None:
    shown = run_cli("scale", *words)
    assert (shown.code, shown.out) == (2, "")
    assert part in shown.err
    assert len(shown.err.splitlines()) == 1
