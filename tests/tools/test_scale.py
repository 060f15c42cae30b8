"""The cost model: its counts are those of real messages, its fit finds what is there, its tables
say who is first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import pytest
import torch
from fixtures import Run, Worlds
from hosts import Network
from hypothesis import given, settings, strategies as st
from ranks import observed
from simulation import Simulation, Sizes
from widths import too_wide

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.algorithms.cost_model import RING_PIECE, Cost, Counts, Machine, Task
from playground.algorithms.executor import Addressed
from playground.base.host import ranks_by_host
from playground.tools.scale import fit, page, plan, results
from playground.tools.scale.plan import COSTS, EFFORT, Effort, Plan
from playground.tools.scale.results import Sample
from playground.tools.scale.settings import MAX_RANKS, MIN_RANKS
from playground.ui.rendering import render
from playground.world import UsageError

SIZES = (4, 20, 1000)
IN_PIECES = ("pipelined-ring", 5 * 2**20)
CLUSTER = Machine(5e-6, 4e-11, 1e-11)
BY_HAND = ("--alpha", "5e-6", "--beta", "4e-11")
names = st.sampled_from(sorted(COSTS))
ONE_LEVEL = [name for name in COSTS if not ALGORITHMS[name].needs_hosts]
seconds = st.floats(1e-12, 1e-3)


def test_every_algorithm_has_its_cost() -> None:
    assert (
        set(COSTS)
        == set(page.SHORT)
        == {name for name, spec in ALGORITHMS.items() if spec.has_messages}
    )
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


@pytest.mark.parametrize(
    "size", [2, 5, *(pytest.param(size, marks=pytest.mark.stress) for size in (4, 8))]
)
def test_costs_are_those_of_the_messages_really_sent(size: int, world: Worlds) -> None:
    asked = [*((name, nbytes) for name in COSTS for nbytes in SIZES), IN_PIECES]
    by_rank = world(size).run(record, asked)
    for position, (name, nbytes) in enumerate(asked):
        sent = [message for rank in by_rank for send, _ in rank[position] for message in send]
        total = COSTS[name](Task(size, nbytes)).total
        assert (total.messages, total.bytes) == (len(sent), sum(bytes_ for _, bytes_ in sent)), (
            name,
            nbytes,
        )
        # whose messages may go in any order, some of them worse
        if nbytes == 1000 and name != "all-to-all":
            took = Simulation([rank[position] for rank in by_rank]).run()
            assert COSTS[name](Task(size, nbytes)).between.messages == took, name


def test_pieces_cost_messages_and_hide_additions() -> None:
    """Up to one piece per chunk, the two rings are the same."""
    for nbytes, pieces in ((4 * RING_PIECE, 1), (8 * RING_PIECE, 2)):
        plain, tuned = (COSTS[name](Task(4, nbytes)).between for name in ("ring", "pipelined-ring"))
        assert (tuned.messages, tuned.bytes) == (pieces * plain.messages, plain.bytes)
        assert (tuned == plain) == (pieces == 1)
        assert tuned.added <= plain.added


def test_the_time_is_the_path_and_a_core_s_share_of_the_rest() -> None:
    cost = Cost(
        between=Counts(2, 100, 10),
        inside=Counts(1, 50, 0),
        total=Counts(20, 1000, 100),
        depth=Counts(2, 60, 10),
    )
    cluster = Machine(1, 0.1, 0.01, inner_alpha=0.5, inner_beta=0.02)
    assert cluster.seconds(cost) == pytest.approx(2 + 10 + 0.1 + 0.5 + 1)
    shared = Machine(1, 0.1, 0.01, 2, 4, 0.5, 0.02)
    rest = (20 - 3) * 0.5 + (1000 - 150) * 0.02 + (100 - 10) * 0.01
    assert shared.seconds(cost) == pytest.approx(cluster.seconds(cost) + rest / 2)
    alike = Machine(1, 0.1, 0.01, cores=2)
    assert alike.seconds(cost) == pytest.approx(2 + 6 + 0.1 + (18 + 94 + 0.9) / 2)
    assert replace(alike, cores=1).seconds(cost) == pytest.approx(20 + 100 + 1)


@settings(max_examples=40)
@given(names, st.integers(2, 300), st.integers(1, 2**20), st.integers(0, 2**20), seconds, seconds)
def test_more_bytes_never_take_less(
    name: str, size: int, few: int, more: int, alpha: float, beta: float
) -> None:
    """With adding for free: a tensor in one more piece may, by hiding the additions, be faster."""
    for machine in (Machine(alpha, beta), Machine(alpha, beta, cores=2)):
        before, after = (
            results.seconds(machine, size, 4 * count)[name] for count in (few, few + more)
        )
        assert before <= after * (1 + 1e-9)


@settings(max_examples=40)
@given(st.sampled_from(ONE_LEVEL), st.integers(2, 200), st.integers(1, 50))
def test_nodes_make_nothing_slower_and_one_node_is_all_inside(
    name: str, size: int, node: int
) -> None:
    inner = Machine(1e-6, 1e-11)
    two = Machine(1e-5, 1e-10, 0, None, node, inner.alpha, inner.beta)
    took = results.seconds(two, size, 1024)[name]
    fastest, slowest = (
        results.seconds(each, size, 1024)[name] for each in (inner, Machine(1e-5, 1e-10))
    )
    assert fastest * (1 - 1e-9) <= took <= slowest * (1 + 1e-9)
    if size <= node:
        assert took == pytest.approx(fastest)


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("reduce-broadcast", 2 * 8), ("all-to-all", 8), ("tutorial-ring", 11), ("ring", 22),
        ("recursive-doubling", 1 + 2), ("halving-doubling", 2 + 2), ("binary-tree", 10),
    ],
)  # fmt: skip
def test_messages_between_three_nodes_of_four(name: str, between: int) -> None:
    """Doubling: distances 1 and 2 stay inside, 4 and the way in and out do not."""
    assert COSTS[name](Task(12, 1024, 4)).between.messages == between


def one_host(size: int) -> list[tuple[int, ...]]:
    return [tuple(range(size))]


def samples_from(true: Machine, asked: Plan) -> list[Sample]:
    """What that machine would take for all that is planned."""
    timed = {
        (name, len(each.ranks), nbytes, each.node): [1.0]
        for each in asked.groups
        for nbytes in (*each.fitted, *each.held_out)
        for name in asked.algorithms
    }
    samples = results.samples_of([timed], asked)
    return [replace(each, seconds=fit.error(true, each, asked) + 1) for each in samples]


@pytest.mark.parametrize("cores", [2, 64])
def test_the_fit_finds_the_parameters_that_are_there(cores: int) -> None:
    true = Machine(8e-5, 2.5e-10, 3e-10, cores)
    on_one_host = plan.plan_for(one_host(8), EFFORT, cores, cores)
    samples = samples_from(true, on_one_host)
    found = fit.fit([sample for sample in samples if sample.fitted], on_one_host)
    assert astuple(found)[:3] == pytest.approx(astuple(true)[:3], rel=1e-6)
    half = replace(samples[-1], seconds=samples[-1].seconds / 2)
    assert fit.error(found, half, on_one_host) == pytest.approx(1)


def test_no_parameter_is_negative() -> None:
    terms = [(1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 100.0, 1.0, 0.0, 0.0), (1.0, 200.0, 5.0, 0.0, 0.0)]
    found = fit.least_squares(terms, [1.0, 0.5, 0.25])
    assert min(found) >= 0
    assert found[3:] == [0, 0]


def test_a_sample_is_the_slowest_rank_in_a_good_round() -> None:
    key, other = ("ring", 2, 4, 1), ("ring", 3, 4, 1)
    rounds = [{key: [1.0, 9.0, 2.0, 5.0], other: [1.0]}, {key: [3.0, 1.0, 4.0, 1.0]}, {}]
    samples = results.samples_of(rounds, plan.plan_for(one_host(8), EFFORT, 2, 2))
    assert [(each.size, each.seconds, each.fitted) for each in samples] == [
        (2, 4.0, True),
        (3, 1.0, False),
    ]


def test_what_is_held_out_is_not_fitted() -> None:
    for size in range(MIN_RANKS, MAX_RANKS + 1):
        groups = plan.plan_for(one_host(size), EFFORT, 2, 2).groups
        fitted, held_out = (
            {len(group.ranks) for group in groups if getattr(group, which)}
            for which in ("fitted", "held_out")
        )
        assert {2, size} == fitted
        assert held_out
        assert not fitted & held_out
    assert not {*EFFORT.fitted} & {*EFFORT.held_out}


def test_few_steps_win_for_small_tensors_and_few_bytes_for_large_ones() -> None:
    rows = {(row.size, row.world_size): row for row in results.predict(CLUSTER, results.CLUSTER)}
    assert rows[4, 65536].winner == rows[1024, 64].winner == "recursive-doubling"
    assert rows[2**20, 1024].winner == "halving-doubling"
    slow_adding = results.predict(Machine(1e-6, 1e-10, 1e-10), [8])[-1]
    assert slow_adding.winner == "pipelined-ring"
    assert slow_adding.seconds["ring"] < slow_adding.seconds["halving-doubling"] * 1.01
    assert all(row.seconds[row.winner] == min(row.seconds.values()) for row in rows.values())
    assert {size for size, _ in rows} >= {4, 2**30}


def test_a_cluster_by_hand(run_cli: Run) -> None:
    shown = run_cli("scale", *BY_HAND, "--gamma", "1e-11")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert too_wide("\n".join(lines)) == []
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
    assert (document["lesson"], document["world_size"], document["steps"], document["fit"]) == (
        "scale",
        1,
        [],
        None,
    )
    assert document["parameters"]["ranks_per_node"] == 1
    rows = document["predictions"]
    assert len(rows) == len(results.SIZES) * len(results.CLUSTER)
    assert all(set(row["seconds"]) == set(COSTS) for row in rows)


QUICK = Effort(
    seconds=0.0,
    fitted=(4, 4096),
    held_out=(1024,),
    fitted_between=(4, 4096),
    held_out_between=(1024,),
)


def test_measured(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EFFORT", QUICK)
    document = json.loads(run_cli("scale", "-n", 4, "--json").out)
    assert document["world_size"] == 4
    assert max(document["parameters"][name] for name in ("alpha", "beta")) > 0
    points = document["fit"]["points"]
    assert {(point["size"], point["nbytes"], point["fitted"]) for point in points} == {
        (2, 4, True), (2, 4096, True), (4, 4, True), (4, 4096, True), (3, 1024, False)
    }  # fmt: skip
    errors = [abs(point["error"]) for point in points if not point["fitted"]]
    assert document["fit"]["worst_error"] == max(errors)
    assert {row["world_size"] for row in document["predictions"]} == set(results.CLUSTER)


def test_a_measured_host_as_text() -> None:
    """What the model is told by its own predictions, it predicts; all of it is shown."""
    measured = plan.plan_for(one_host(8), EFFORT, 2, 2)
    result = fit.evaluate(samples_from(Machine(8e-5, 2.5e-10, 3e-10, 2), measured), measured)
    assert result.fit
    points = result.fit.points
    assert result.fit.worst_error < 1e-6
    assert {(point.size, point.fitted) for point in points} == {
        (2, True),
        (8, True),
        (3, False),
        (4, False),
    }
    text = render(page.result_texts(result), 80)
    assert too_wide(text) == []
    for part in (
        render(page.machine_lines(result.parameters), 80),
        render([page.errors_table([point for point in points if not point.fitted])], 80),
        render(page.winners_texts(result.predictions)[1:], 80), "predictions are off by 0% "
                                                                   "(median)",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("size", [3, 17])
def test_what_cannot_be_measured(size: int) -> None:
    with pytest.raises(
        UsageError, match=f"{size} ranks: measuring takes 4 to 16, on several hosts 2 to 16"
    ):
        plan.plan_for(one_host(size), EFFORT, 2, 2)


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


# --- several hosts: both levels are measured, fitted, and checked

CORES = 4
TRUE = Machine(1e-4, 1e-9, 5e-11, None, 4, 1e-5, 1e-10)
"""Ten times as slow between hosts as inside."""
latency, inverse_bandwidth = st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7)
share = st.floats(0.001, 1)


def even(hosts: int, node: int) -> tuple[tuple[int, ...], ...]:
    return ranks_by_host([rank // node for rank in range(hosts * node)])


def plan_of(hosts: int, node: int) -> Plan:
    return plan.plan_for(even(hosts, node), EFFORT, CORES, hosts * CORES)


@settings(max_examples=3)
@given(latency, inverse_bandwidth, share, share)
def test_both_levels_are_found(
    alpha: float, beta: float, share_of_alpha: float, share_of_beta: float
) -> None:
    """Hosts are no slower inside than between them: what they cost there is drawn as a share."""
    inner_alpha, inner_beta = share_of_alpha * alpha, share_of_beta * beta
    true = Machine(alpha, beta, 1e-10, None, 4, inner_alpha, inner_beta)
    asked = plan_of(3, 4)
    result = fit.evaluate(samples_from(true, asked), asked)
    assert result.fit
    found = result.parameters
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=0.01)
    assert (found.inner_alpha, found.inner_beta) == pytest.approx(
        (inner_alpha, inner_beta), rel=0.01
    )
    assert result.fit.worst_error < 0.01
    unseen = {(point.size, point.node) for point in result.fit.points if not point.fitted}
    assert unseen == {(2, 1), (3, 1), (2, 2), (4, 4), (12, 4)}


def test_which_figure_is_of_which_link() -> None:
    asked = plan_of(2, 4)
    result = fit.evaluate(samples_from(TRUE, asked), asked)
    text = " ".join(render([page.plan_text(asked), *page.result_texts(result)], 80).split())
    for part in (
        "Hosts: 2 with 4 each. Fitted to groups of 2 ranks", "alpha: 100 us per message (latency)",
        "within a node of 4 ranks: alpha 10 us, beta 0.1 ns per byte, 10 GB/s",
        "4 ranks per node, every rank with its own cores", "on these hosts predictions are off by "
                                                           "0% (median)",
    ):  # fmt: skip
        assert part in text


def test_one_rank_per_host_has_one_level() -> None:
    asked = plan_of(4, 1)
    result = fit.evaluate(samples_from(replace(TRUE, ranks_per_node=1), asked), asked)
    found = result.parameters
    assert (found.alpha, found.beta) == pytest.approx((TRUE.alpha, TRUE.beta), rel=0.01)
    assert "within a node of" not in render(page.result_texts(result), 80)


@pytest.mark.parametrize("layout", [(0, 0, 1), (0, 1, 0, 1)])
def test_hosts_that_are_not_alike_are_refused(layout: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="as many ranks on each host, consecutive ones"):
        plan.plan_for(ranks_by_host(layout), EFFORT, CORES, CORES)


def test_simulated_hosts_are_measured(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EFFORT", QUICK)
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    shown = run_cli("scale", "-n", 4, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert (document["measured"]["hosts"], document["measured"]["ranks_per_host"]) == (2, 2)
    assert document["measured"]["all_cores"] == document["measured"]["cores"]
    parameters = document["parameters"]
    assert parameters["ranks_per_node"] == 2
    assert max(parameters["alpha"], parameters["inner_alpha"]) > 0
    points = {
        (point["size"], point["node"], point["nbytes"], point["fitted"])
        for point in document["fit"]["points"]
    }
    assert points == {
        (2, 1, 4, True), (2, 1, 4096, True), (2, 1, 1024, False), (2, 2, 4, True), (2, 2, 4096,
        True),
        (2, 2, 1024, False), (4, 2, 1024, False),
    }  # fmt: skip


RATE = 1e-9 * 100e6 / 8
"""GB/s: 100 Mbit/s."""


@pytest.mark.stress
def test_the_link_between_hosts_has_the_bandwidth_that_is_fitted(
    hosts: Callable[..., Network],
) -> None:
    first, second = (host.torchrun(2, "scale", "--json") for host in hosts(2, rate="100mbit").hosts)
    out, err = first.communicate(timeout=300)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err
    document = json.loads(out)
    assert (document["measured"]["hosts"], document["measured"]["ranks_per_host"]) == (2, 2)
    parameters = document["parameters"]
    # Small tensors count as much as large ones in the fit, and their times are mostly the
    # machine's: 13.2 to 15.1 MB/s were found in a quiet hour.
    assert 1e-9 / parameters["beta"] == pytest.approx(RATE, rel=0.4)
    assert 1e-9 / parameters["inner_beta"] > 5 * RATE
    unseen = {
        (point["size"], point["node"]) for point in document["fit"]["points"] if not point["fitted"]
    }
    assert unseen == {(2, 1), (2, 2), (4, 2)}


@given(st.integers(2, 5000), st.integers(1, 2**20), st.integers(1, 100))
def test_two_levels_that_are_alike_are_one(size: int, count: int, node: int) -> None:
    """But for the one that sends other messages then."""
    one = results.seconds(CLUSTER, size, 4 * count)
    alike = replace(
        CLUSTER, ranks_per_node=node, inner_alpha=CLUSTER.alpha, inner_beta=CLUSTER.beta
    )
    two = results.seconds(alike, size, 4 * count)
    same = [name for name in one if name != "hierarchical"]
    assert [two[name] for name in same] == pytest.approx([one[name] for name in same])


def test_wide_shows_every_number_of_ranks(run_cli: Run) -> None:
    lines = run_cli("scale", *BY_HAND, "--wide").out.splitlines()
    [headings] = [line for line in lines if line.split()[:2] == ["2", "ranks"]]
    assert [int(size.replace(",", "")) for size in headings.split()[::2]] == results.CLUSTER
