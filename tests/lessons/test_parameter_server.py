"""The parameter server takes the steps it should, in every mode."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Worlds
from hypothesis import given, settings as tried, strategies as st
from processes import ENOUGH
from torch.utils.data import TensorDataset

from playground.lessons.parameter_server import experiment, lesson
from playground.lessons.parameter_server.experiment import MeasuredServer, new_model, whole_batches
from playground.lessons.parameter_server.page import (
    MODES,
    ModeResult,
    ServerSettings,
    steps_verdict,
)
from playground.lessons.rpc.lesson import Agent
from playground.lessons.sgd.lesson import average_gradients
from playground.runtime import PlaygroundError, RankFailed, launch
from playground.training.replicas import flatten


def small(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(folder=folder, limit=200, batch_size=40, **more)


def parameters_of_server(rank: int, size: int, settings: ServerSettings) -> list[float]:
    """The server's parameters, after the last mode."""
    experiment.run(rank, size, settings)
    return flatten(lesson.servers[0].params).tolist() if rank == 0 else []


def parameters_by_sgd(rank: int, size: int, settings: ServerSettings) -> list[float]:
    """As the lesson sgd takes its steps."""
    model, coming = new_model(settings), whole_batches(settings, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for _ in range(settings.steps):
        images, labels, samples_per_rank = next(coming)
        optimizer.zero_grad()
        (F.nll_loss(model(images), labels, reduction="sum") / samples_per_rank).backward()
        average_gradients(model)
        optimizer.step()
    return flatten(model.parameters()).tolist()


def in_float64(
    rank: int, size: int, parameters: Callable[..., list[float]], settings: ServerSettings
) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        return parameters(rank, size, settings)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("workers", "about"),
    [
        (3, {"modes": ("sync",)}),
        *(
            pytest.param(workers, about, marks=pytest.mark.stress)
            for workers, about in (
                (8, {"modes": ("sync",)}),
                (1, {"modes": ("async",)}),
                (1, {"modes": ("stale-synchronous",), "staleness": 0}),
            )
        ),
    ],
)
def test_steps_are_those_of_sgd(
    workers: int, about: dict[str, Any], digits_folder: Path, world: Worlds
) -> None:
    """Synchronous ones, and those of one worker alone in every mode."""
    settings = small(digits_folder, steps=6, **about)
    ours = world(workers + 1).run(in_float64, parameters_of_server, settings)[0]
    theirs = world(workers).run(in_float64, parameters_by_sgd, settings)[0]
    assert (torch.tensor(ours).double() - torch.tensor(theirs).double()).abs().max().item() <= 1e-12


def train_on_board(rank: int, size: int, mode: str) -> list[float]:
    """The server's parameters after three steps on ten samples, by the boards alone."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(10, 2).double(), torch.randn(10, 1).double())
    model = torch.nn.Linear(2, 1).double()
    workers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        if rank == lesson.SERVER:
            server = lesson.ParameterServer(model, mode, size - 1, steps=3)
            lesson.serve(agent, server)
            return lesson.flatten(server.params).tolist()
        batches = lesson.batches_of_shard(data, 10, workers)
        lesson.work(agent, rank - 1, partial(lesson.compute_gradient, model, F.mse_loss, batches))
        return agent.call(lesson.SERVER, lesson.pull, rank - 1)[0].tolist()


def train_alone() -> list[float]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(10, 2).double(), torch.randn(10, 1).double()
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return flatten(model.parameters()).tolist()


@pytest.mark.parametrize(("size", "mode"), [(2, "async"), (2, "sync"), (3, "sync"), (4, "sync")])
def test_the_board_takes_the_steps_of_one_process(size: int, mode: str, world: Worlds) -> None:
    """Also where the workers' shards are of different sizes: ten samples for three."""
    for parameters in world(size).run(train_on_board, mode):
        assert parameters == pytest.approx(train_alone(), abs=1e-12)


def push_at_random(server: MeasuredServer, worker: int, seed: int, ahead: list[int]) -> None:
    """What a worker does, without computing. Notes how far it was ahead whenever it was let go."""
    pauses = random.Random(seed + worker)
    _, finished = server.pull(worker)
    while not finished:
        time.sleep(pauses.choice((0, 0, 0.001)))
        parameters, finished = server.push(worker, torch.ones(2), 1.0)
        if not finished:
            ahead.append(server.taken[worker] - min(server.taken))
        assert parameters.shape == (2,)


@given(
    mode=st.sampled_from(sorted(MODES)),
    workers=st.integers(1, 6),
    steps=st.integers(1, 6),
    staleness=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@tried(max_examples=20)
def test_every_mode_ends_and_keeps_its_rule(
    mode: str, workers: int, steps: int, staleness: int, seed: int
) -> None:
    settings = ServerSettings(folder=Path(), steps=steps, staleness=staleness, lr=1.0, momentum=0.0)
    model, ahead = torch.nn.Linear(1, 1), list[int]()
    start = flatten(model.parameters()).clone()
    server = MeasuredServer(model, mode, workers, settings)
    threads = [
        threading.Thread(target=push_at_random, args=(server, worker, seed, ahead), daemon=True)
        for worker in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=ENOUGH)
    assert not server.active
    assert sum(server.taken) == sum(server.staleness_counts.values()) == steps * workers
    # every gradient counted 1 / workers
    torch.testing.assert_close(flatten(model.parameters()), start - steps)
    if mode == "sync":
        assert (server.version, server.taken, set(server.staleness_counts)) == (
            steps,
            [steps] * workers,
            {0},
        )
    if mode == "stale-synchronous":
        assert max(ahead, default=0) <= staleness
        assert max(server.taken) - min(server.taken) <= staleness + 1


def run_until_killed(rank: int, size: int, settings: ServerSettings) -> list[ModeResult]:
    """The lesson. Worker 0 is killed at its sixth batch with a server."""

    def die() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    def whole_batches_until_killed(*about: Any) -> Iterator[Any]:
        return chain(islice(whole_batches(*about), 5), die())

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(experiment, "whole_batches", whole_batches_until_killed)
        return experiment.run(rank, size, settings)


def test_a_killed_worker_is_named(digits_folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 was killed by SIGKILL$"):
        launch(run_until_killed, 3, args=(small(digits_folder, modes=("async",), steps=20),))


def pace(rank: int, size: int, settings: ServerSettings) -> list[object]:
    """What a worker does around work that takes 2 s by its clock."""
    done: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "synchronize", lambda: done.append("synchronized"))
        patch.setattr(time, "perf_counter", iter((10.0, 12.0)).__next__)
        patch.setattr(time, "sleep", done.append)
        with experiment.paced(settings, dist.group.WORLD):
            done.append("worked")
    return done


def test_the_slow_worker_is_slow_by_what_its_device_takes(world: Worlds) -> None:
    """Both wait until the device has done what came before; the last one then takes three times as
    long."""
    fast, slow = world(2).run(pace, ServerSettings(folder=Path(), slow_worker=3.0))
    assert fast == ["synchronized", "worked"]
    assert slow == ["synchronized", "worked", "synchronized", 4.0]


@pytest.fixture
def parameter_server(run_cli: Run, few_digits: None) -> Run:
    """The command, on a few digits: five batches."""
    words = ("--dataset", "digits", "--batch-size", 120, "--steps", 6)
    return lambda *more: run_cli("parameter-server", *words, *more)


def test_as_json(parameter_server: Run) -> None:
    shown = parameter_server("-n", 3, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    modes = {mode["mode"]: mode for mode in document["modes"]}
    assert list(modes) == ["all-reduce", *MODES]
    for mode in modes.values():
        assert sum(mode["gradients_by_worker"]) == sum(mode["staleness"].values()) == 12
    assert modes["sync"]["staleness"] == {"0": 12}
    assert modes["sync"]["samples"] == modes["all-reduce"]["samples"] == 720
    assert modes["sync"]["last_loss"] == pytest.approx(modes["all-reduce"]["last_loss"], abs=1e-4)
    assert modes["all-reduce"]["bytes_per_step"] == 2 * 21_840 * 4
    assert modes["sync"]["bytes_per_step"] >= 2 * modes["all-reduce"]["bytes_per_step"]


def test_less_than_a_batch_is_refused(parameter_server: Run) -> None:
    shown = parameter_server("-n", 3, "--batch-size", 601)
    assert (shown.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert "--batch-size 601" in shown.err


def test_a_server_that_goes_elsewhere_is_no_success() -> None:
    result = ModeResult(
        mode="sync", seconds=1.0, samples=8, speed=8.0, last_loss=1.0, staleness={0: 2},
        gradients_by_worker=[1, 1], bytes_per_step=8, difference_to_all_reduce=1e-8,
    )  # fmt: skip
    assert "1.0e-08" in steps_verdict([result])
    for difference in (0.01, float("nan")):
        with pytest.raises(PlaygroundError, match="away from all-reduce"):
            steps_verdict([replace(result, difference_to_all_reduce=difference)])
