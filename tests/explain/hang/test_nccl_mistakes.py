"""Calls on nccl that do not match: the deadlock is proved, and the calls are named by their lines.
Right programs of the same shapes are not accused."""

from __future__ import annotations

import os
import re

import pytest
from fixtures import Worlds
from gpu_faults import NCCL2
from gpus import COLD
from nccl_mistakes import MISTAKES, RIGHT, Mistake, run_right

from playground import Deadlock
from playground.explain.hang import Kind
from playground.world import UsageError
from playground.world.backends import BACKENDS
from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
QUICK = (0, 5, 11, 14, 20, 26)
"""A call more, messages, groups, sizes, DDP, a batch without an end."""


def name_of(mistake: Mistake) -> str:
    return f"{mistake.program.__name__}-{mistake.size}"


def check(mistake: Mistake, world: Worlds) -> None:
    if NCCL2 and mistake.kind is Kind.OPEN:
        pytest.skip("torch's ProcessGroupNCCL2 begins each call of a batch at once")
    try:
        BACKENDS["nccl"].check(mistake.size)
    except UsageError as refused:  # this NCCL does not share a GPU
        pytest.skip(str(refused))
    with pytest.raises(Deadlock) as caught:
        world(mistake.size, backend="nccl", timeout=COLD).run(mistake.program)
    found = caught.value.diagnosis
    assert found
    assert (found.proved, found.kind) == (True, mistake.kind), found
    lines = {int(line) for line in re.findall(r":(\d+)\b", str(found))}
    assert lines & mistake.lines, found


@pytest.mark.parametrize("mistake", [MISTAKES[at] for at in QUICK], ids=name_of)
def test_a_mistake_is_named(mistake: Mistake, world: Worlds) -> None:
    check(mistake, world)


@pytest.mark.stress
@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_every_mistake_is_named(mistake: Mistake, world: Worlds) -> None:
    check(mistake, world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.stress)])
def test_right_programs_are_not_accused(
    size: int, world: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(RIGHT) >= 20
    world(size, backend="nccl", timeout=COLD).run(run_right)
    assert caplog.records == []
