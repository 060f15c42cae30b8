"""The cost model of several hosts: both levels are measured, fitted, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hosts import Network
from hypothesis import given, settings, strategies as st

from playground.algorithms.cost_model import Machine
from playground.console.rendering import render
from playground.runtime import UsageError
from playground.runtime.host import ranks_by_host
from playground.tools.scale import page, plan
from playground.tools.scale.plan import Sample

Run = Callable[..., Any]
CORES = 4
TRUE = Machine(1e-4, 1e-9, 5e-11, None, 4, 1e-5, 1e-10)
"""Ten times as slow between hosts as inside."""
latency, inverse_bandwidth = st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7)
share = st.floats(0.001, 1)


def even(hosts: int, node: int) -> tuple[tuple[int, ...], ...]:
    return ranks_by_host(rank // node for rank in range(hosts * node))


def plan_of(hosts: int, node: int) -> plan.Plan:
    return plan.plan_for(even(hosts, node), plan.Effort(0.0), CORES, hosts * CORES)


def samples_from(true: Machine, asked: plan.Plan) -> list[Sample]:
    """What that machine would take for all that is planned."""
    samples = []
    for group in asked.groups:
        for nbytes in group.sizes:
            for name in asked.names:
                sample = Sample(name, len(group.ranks), nbytes, 1.0, node=group.node)
                samples.append(replace(sample, seconds=plan.error(true, sample, asked) + 1))
    return samples


@settings(max_examples=5)
@given(latency, inverse_bandwidth, share, share)
def test_both_levels_are_found(alpha: float, beta: float, share_of_alpha: float, share_of_beta: float) -> None:
    """Hosts are no slower inside than between them: what they cost there is drawn as a share."""
    inner_alpha, inner_beta = share_of_alpha * alpha, share_of_beta * beta
    true = Machine(alpha, beta, 1e-10, None, 4, inner_alpha, inner_beta)
    asked = plan_of(3, 4)
    result = plan.evaluate(samples_from(true, asked), asked)
    found = result.parameters
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=0.01)
    assert (found.inner_alpha, found.inner_beta) == pytest.approx((inner_alpha, inner_beta), rel=0.01)
    assert result.fit
    assert result.fit["worst_error"] < 0.01
    assert {(point.size, point.node) for point in result.fit["points"] if not point.fitted} == {
        (2, 1),
        (3, 1),
        (2, 2),
        (4, 4),
        (12, 4),
    }


def test_which_figure_is_of_which_link() -> None:
    asked = plan_of(2, 4)
    result = plan.evaluate(samples_from(TRUE, asked), asked)
    text = " ".join(render([page.plan_text(asked), *page.result_texts(result)], 80).split())
    for part in (
        "Hosts: 2 with 4 ranks each.", "alpha: 100 us per message (latency)",
        "within a node of 4 ranks: alpha 10 us, beta 0.1 ns per byte, 10 GB/s",
        "alpha and beta are of the link between hosts, as ranks 0 and 4 have found it; those within a node, ranks 0 "
        "and 1", "inside a host 0 0", "between hosts 0 0", "both 0 0", "One host, all ranks on its 4 cores",
        "4 ranks per node, every rank with its own cores", "on these hosts predictions are off by 0% (median)",
    ):  # fmt: skip
        assert part in text


def test_a_level_that_cannot_be_measured_is_named() -> None:
    asked = plan_of(4, 1)
    result = plan.evaluate(samples_from(replace(TRUE, ranks_per_node=1), asked), asked)
    assert (result.parameters.alpha, result.parameters.beta) == pytest.approx((TRUE.alpha, TRUE.beta), rel=0.01)
    assert result.predictions["host"] is None
    text = " ".join(render(page.result_texts(result), 80).split())
    assert "inside a host nothing could be measured, with one rank on each" in text
    assert "within a node of" not in text


@pytest.mark.parametrize("layout", [(0, 0, 1), (0, 1, 0, 1)])
def test_hosts_that_are_not_alike_are_refused(layout: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="as many ranks on each host, consecutive ones"):
        plan.plan_for(ranks_by_host(layout), plan.Effort(0.0), CORES, CORES)


def test_simulated_hosts_are_measured(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "EFFORT", plan.Effort(0.0, *2 * ((4, 4096), (1024,))))
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    shown = run_cli("scale", "-n", 4, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert (document["measured"]["hosts"], document["measured"]["ranks_per_host"]) == (2, 2)
    assert document["measured"]["all_cores"] == document["measured"]["cores"]
    parameters = document["parameters"]
    assert parameters["ranks_per_node"] == 2
    assert min(parameters["alpha"], parameters["inner_alpha"]) > 0
    points = {(point["size"], point["node"], point["nbytes"], point["fitted"]) for point in document["fit"]["points"]}
    assert points == {
        (2, 1, 4, True), (2, 1, 4096, True), (2, 1, 1024, False), (2, 2, 4, True), (2, 2, 4096, True),
        (2, 2, 1024, False), (4, 2, 1024, False),
    }  # fmt: skip


RATE = 1e-9 * 100e6 / 8
"""GB/s: 100 Mbit/s."""


@pytest.mark.stress
def test_the_link_between_hosts_has_the_bandwidth_that_is_fitted(hosts: Callable[..., Network]) -> None:
    first, second = (host.torchrun(2, "scale", "--json") for host in hosts(2, rate="100mbit").hosts)
    out, err = first.communicate(timeout=300)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err
    document = json.loads(out)
    assert (document["measured"]["hosts"], document["measured"]["ranks_per_host"]) == (2, 2)
    parameters = document["parameters"]
    # Small tensors count as much as large ones in the fit, and their times are mostly the machine's: 13.2 to 15.1 MB/s
    # were found in a quiet hour.
    assert 1e-9 / parameters["beta"] == pytest.approx(RATE, rel=0.4)
    assert 1e-9 / parameters["inner_beta"] > 5 * RATE
    unseen = {(point["size"], point["node"]) for point in document["fit"]["points"] if not point["fitted"]}
    assert unseen == {(2, 1), (2, 2), (4, 2)}
