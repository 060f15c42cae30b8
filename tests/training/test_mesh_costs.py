"""What a step costs on a mesh is what one computes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from playground.training import mesh_costs
from playground.training.mesh_costs import Cost, Shape, TrainingTask, cost_of, hosts_of_eight

LAYERS, WIDTH, LENGTH, SEQUENCES = 80, 8192, 8192, 512
TASK = TrainingTask(
    layers=LAYERS, width=WIDTH, length=LENGTH, sequences=SEQUENCES,
    gpus=512, memory=80e9, flops=400e12, machine=hosts_of_eight(50e9, 450e9),
)  # fmt: skip
ALPHA, INSIDE, BETWEEN = 1e-5, 1 / 450e9, 1 / 50e9
PARAMETERS = 12 * LAYERS * WIDTH**2
HIDDEN = 2 * LENGTH * WIDTH
"""Bytes of the vectors of a sequence."""
ATTENTION = 6 * LAYERS * LENGTH**2 * WIDTH / 400e12
COMPUTE = 6 * PARAMETERS * LENGTH / 400e12 + ATTENTION
"""Seconds of a step: a sequence for each GPU."""


def cost(shape: Shape, stage: int, **options: Any) -> Cost:
    return cost_of(shape, stage, TASK, **options)


def ring(ranks: int, nbytes: float, link: float = BETWEEN) -> float:
    """Seconds of an all_reduce, of a GPU in each host."""
    return 2 * (ranks - 1) * (ALPHA + nbytes / ranks * link)


def test_tensor_parallelism_inside_a_host() -> None:
    found = cost((64, 1, 1, 8), 1)
    own = PARAMETERS / 8
    assert found.compute == pytest.approx(COMPUTE)
    assert found.tensor == pytest.approx(LAYERS * 8 * 4 * 14 * (ALPHA + HIDDEN / 8 * INSIDE))
    assert found.held == pytest.approx(4 * own + 12 * own / 64 + 17 * HIDDEN / 8 * LAYERS)
    assert (found.bubble, found.context) == (0.0, 0.0)


def test_tensor_parallelism_over_two_hosts_is_rings_inside_and_between() -> None:
    inside, between = ring(8, HIDDEN, INSIDE), ring(2, HIDDEN / 8)
    assert cost((32, 1, 1, 16), 1).tensor == pytest.approx(LAYERS * 16 * 4 * (inside + between))


def test_a_pipeline_holds_a_microbatch_for_each_stage_and_has_a_bubble() -> None:
    found = cost((8, 8, 1, 8), 1)
    assert found.held == pytest.approx(
        PARAMETERS / 64 * (4 + 12 / 8) + 17 * HIDDEN / 8 * LAYERS / 8 * 8
    )
    assert found.bubble == pytest.approx(7 / 64 * (COMPUTE + found.tensor))


def test_all_axes_at_once() -> None:
    """tensor's ranks fill a host: all other groups are rings between hosts."""
    found, own = cost((16, 2, 2, 8), 1), PARAMETERS / 16
    assert found.held == pytest.approx(own * (4 + 12 / 32) + 17 * HIDDEN / 2 / 8 * LAYERS / 2 * 2)
    rounds = LAYERS / 2 * 32 * 8 * HIDDEN / 2 / 8 * BETWEEN
    assert found.context == pytest.approx(rounds - ATTENTION)
    assert found.bubble == pytest.approx(1 / 32 * (COMPUTE + found.tensor + found.context))


def test_fewer_heads_of_keys_send_less() -> None:
    fewer = TrainingTask(**vars(TASK) | {"key_share": 1 / 8})
    assert cost((64, 1, 8, 1), 3).context > 0
    assert cost_of((64, 1, 8, 1), 3, fewer).context == 0


@pytest.mark.parametrize("shape", [(64, 1, 1, 8), (8, 8, 1, 8)])
def test_only_half_of_zero_1_can_hide(shape: Shape) -> None:
    """The reduce_scatter, behind the backward of the last microbatch. The all_gather comes after
    the step."""
    dp, pp, _, tp = shape
    sums = ring(dp, 2 * PARAMETERS / (pp * tp))
    hidden = 2 / 3 * COMPUTE / (SEQUENCES / dp)
    assert cost(shape, 0).data == pytest.approx(max(0.0, sums - hidden))
    assert cost(shape, 1).data == pytest.approx(max(0.0, sums / 2 - hidden) + sums / 2)
    assert cost(shape, 1).data > 0


def test_from_zero_2_on_each_layer_of_each_microbatch_sends() -> None:
    """With zero-3, it is gathered twice, and nothing comes after the step."""
    shape = 64, 1, 1, 8
    sums = LAYERS * ring(64, 2 * PARAMETERS / 8 / LAYERS)
    assert cost(shape, 2).data == pytest.approx(max(0.0, 8 * sums / 2 - 2 / 3 * COMPUTE) + sums / 2)
    assert cost(shape, 3).data == pytest.approx(max(0.0, 8 * 3 * sums / 2 - COMPUTE))


def test_recomputing_keeps_inputs_and_takes_another_forward() -> None:
    found, plain = (cost((64, 1, 1, 8), 1, recompute=each) for each in (True, False))
    own = PARAMETERS / 8
    assert found.held == pytest.approx(
        4 * own + 12 * own / 64 + (HIDDEN * LAYERS + 17 * HIDDEN) / 8
    )
    assert found.compute == pytest.approx(4 / 3 * plain.compute)
    assert found.tensor == pytest.approx(3 / 2 * plain.tensor)


def test_a_message_has_the_latency_of_the_page_on_gpus() -> None:
    """Inside a host, too: an all_reduce of nothing is 2 (N - 1) messages."""
    assert mesh_costs.all_reduce_seconds(0, 8, 8, TASK.machine) == pytest.approx(14e-5)
