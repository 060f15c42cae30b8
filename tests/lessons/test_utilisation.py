"""Utilisation: seconds of known work, booked on the device that did it."""

from __future__ import annotations

import os
import time

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.data_parallel.module import data_parallel
from playground.lessons.data_parallel.moves import copy_to
from playground.lessons.data_parallel.utilisation import Utilisation, covered, track_utilisation
from playground.runtime import launch

DEVICES = [torch.device("cpu", number) for number in range(3)]


def test_work_counts_for_the_device_that_does_it() -> None:
    wide, narrow = torch.ones(400, 400), torch.ones(4, 4)
    with track_utilisation(DEVICES) as use:
        on_second = copy_to(wide, DEVICES[1], "scatter")
        for _ in range(20):
            on_second = on_second @ on_second
        copy_to(narrow, DEVICES[2], "scatter")
        time.sleep(0.05)
    assert use.seconds > 0.05
    assert use.busy[DEVICES[1]] > 10 * use.busy[DEVICES[0]]
    assert use.busy[DEVICES[2]] == 0, "a copy is no computation"
    assert all(0 <= share <= 1 for share in use.share.values())
    assert use.share == use.share_of(use.seconds)


def test_the_threads_of_replicas_and_backward_count_too() -> None:
    model, inputs = nn.Linear(300, 300), torch.ones(60, 300)
    with track_utilisation(DEVICES) as use:
        outputs = data_parallel(model, inputs, DEVICES)
        forward = dict(use.busy)
        outputs.sum().backward()
    assert set(forward.values()) == {0.0}, "it is known at the end"
    assert min(use.busy.values()) > 0


def test_waiting_is_no_work() -> None:
    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return tensor * 2

    with track_utilisation(DEVICES[:1]) as use:
        Sleeping.apply(torch.ones(4))
    assert 0 < use.share[DEVICES[0]] < 0.5


def train_in_a_rank(rank: int, size: int) -> tuple[float, float]:
    """The share of a step in which the rank computed, and the seconds."""
    ddp, inputs = DistributedDataParallel(nn.Linear(200, 200)), torch.ones(100, 200)
    with track_utilisation(DEVICES[:1]) as use:
        ddp(inputs).sum().backward()
    return use.share[DEVICES[0]], use.busy[DEVICES[0]]


def test_in_a_rank_everything_counts_for_its_device() -> None:
    for share, busy in launch(train_in_a_rank, 2):
        assert 0 < share <= 1
        assert busy > 0


def test_a_share_is_of_the_seconds_given() -> None:
    use = Utilisation(DEVICES[:2])
    use.seconds, use.busy = 4.0, {DEVICES[0]: 1.0, DEVICES[1]: 3.0}
    assert use.share == {DEVICES[0]: 0.25, DEVICES[1]: 0.75}
    assert use.share_of(2.0) == {DEVICES[0]: 0.5, DEVICES[1]: 1.0}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda span: (min(span), max(span)))))
def test_time_that_several_kernels_share_counts_once(spans: list[tuple[int, int]]) -> None:
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert covered(spans) == len(seconds)


@pytest.mark.gpu
@pytest.mark.skipif("PLAYGROUND_SIMULATED_GPU" in os.environ, reason="CUPTI counts the kernels of hardware")
def test_kernels_of_a_gpu_are_counted() -> None:
    gpu = torch.device("cuda", 0)
    matrix = torch.ones(2000, 2000, device=gpu)
    with track_utilisation([gpu]) as use:
        for _ in range(50):
            matrix = (matrix @ matrix).clamp(max=1)
    assert 0 < use.share[gpu] <= 1
