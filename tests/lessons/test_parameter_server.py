"""The parameter server takes the steps it should, in every mode."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings as tried, strategies as st
from processes import ENOUGH

from playground.lessons.parameter_server import experiment, lesson
from playground.lessons.parameter_server.experiment import MeasuredServer
from playground.lessons.parameter_server.lesson import Push, new_model, whole_batches
from playground.lessons.parameter_server.page import MODES, ServerSettings, steps_verdict
from playground.lessons.sgd.lesson import average_gradients
from playground.measurement import Fields
from playground.remote.agent import Agent, agents
from playground.runtime import PlaygroundError, RankFailed, launch
from playground.testing import World
from playground.training.replicas import flat

Run = Callable[..., Any]
Worlds = Callable[..., World]


def small(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(folder=folder, limit=200, batch_size=40, **more)


def parameters_of_server(rank: int, size: int, settings: ServerSettings) -> list[float]:
    """The server's parameters, after the last mode."""
    experiment.run(rank, size, settings)
    return flat(lesson.servers[0].model.parameters()).tolist() if rank == 0 else []


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
    return flat(model.parameters()).tolist()


def in_float64(rank: int, size: int, parameters: Callable[..., list[float]], settings: ServerSettings) -> list[float]:
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
def test_steps_are_those_of_sgd(workers: int, about: dict[str, Any], digits_folder: Path, world: Worlds) -> None:
    """Synchronous ones, and those of one worker alone in every mode."""
    settings = small(digits_folder, steps=6, **about)
    ours = world(workers + 1).run(in_float64, parameters_of_server, settings)[0]
    theirs = world(workers).run(in_float64, parameters_by_sgd, settings)[0]
    assert (torch.tensor(ours).double() - torch.tensor(theirs).double()).abs().max().item() <= 1e-12


def push_at_random(server: MeasuredServer, worker: int, seed: int, ahead: list[int]) -> None:
    """What a worker does, without computing. Notes how far it was ahead whenever it was let go."""
    pauses = random.Random(seed + worker)
    _, version, finished = server.pull(worker)
    while not finished:
        time.sleep(pauses.choice((0, 0, 0.001)))
        parameters, version, finished = server.push(Push(worker, torch.ones(2), version, 1.0, 1))
        if not finished:
            ahead.append(server.taken[worker] - min(server.taken))
        assert parameters.shape == (2,)


def lose_at_random(server: MeasuredServer, worker: int, seed: int, life: int) -> None:
    """What a worker does that dies after so many gradients, and the agent that notices."""
    pauses = random.Random(seed + worker)
    _, version, finished = server.pull(worker)
    for _ in range(life):
        if not finished:
            time.sleep(pauses.choice((0, 0, 0.001)))
            _, version, finished = server.push(Push(worker, torch.ones(2), version, 1.0, 1))
    server.lose_worker(worker)


@given(
    mode=st.sampled_from(sorted(MODES)),
    workers=st.integers(1, 4),
    lives=st.lists(st.integers(0, 4), max_size=3),
    steps=st.integers(1, 6),
    staleness=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@tried(max_examples=20)
def test_every_mode_ends_and_keeps_its_rule(
    mode: str, workers: int, lives: list[int], steps: int, staleness: int, seed: int
) -> None:
    """With workers that stay and, but in sync, others that die, some of them when all is done."""
    lives = [] if mode == "sync" else lives
    settings = ServerSettings(folder=Path(), steps=steps, staleness=staleness, lr=1.0, momentum=0.0)
    model, total, ahead = torch.nn.Linear(1, 1), workers + len(lives), list[int]()
    start = flat(model.parameters()).clone()
    server = MeasuredServer(model, mode, total, settings)
    jobs: list[tuple[Any, ...]] = [(push_at_random, worker, ahead) for worker in range(workers)]
    jobs += [(lose_at_random, worker, life) for worker, life in enumerate(lives, workers)]
    threads = [
        threading.Thread(target=job, args=(server, worker, seed, more), daemon=True) for job, worker, more in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=ENOUGH)
    assert (server.active, set(server.lost) - set(range(workers, total))) == (set(), set())
    assert sum(server.taken) == sum(server.staleness.values()) == steps * total
    assert all(server.taken[worker] <= life for worker, life in enumerate(lives, workers))
    torch.testing.assert_close(flat(model.parameters()), start - steps)  # every gradient counted 1 / workers
    if mode == "sync":
        assert (server.version, server.taken, set(server.staleness)) == (steps, [steps] * total, {0})
    if mode == "stale-synchronous" and not lives:
        assert max(ahead, default=0) <= staleness
        assert max(server.taken) - min(server.taken) <= staleness + 1


def gradients_taken() -> list[int]:
    """Runs on the server: of each worker."""
    return list(lesson.servers[0].taken) if lesson.servers else []


def kill_after(agent: Any, gradients: int) -> None:
    """End this process once the server has taken so many gradients, and one of its own."""
    taken: list[int] = []
    while sum(taken) < gradients or not taken[agent.rank - 1]:
        time.sleep(0.002)
        taken = agent.call(0, gradients_taken)
    os.kill(os.getpid(), signal.SIGKILL)


class PatientServer(MeasuredServer):
    """Lets no worker go on beyond half of the gradients before one of them has died, however late that is."""

    def may_go_on(self, push: Push) -> bool:
        is_early = sum(self.taken) < self.settings.steps * self.workers // 2
        return super().may_go_on(push) and (is_early or bool(self.lost))


def train_until_killed(rank: int, size: int, settings: ServerSettings) -> list[Fields]:
    """The first mode, without all-reduce before. Worker 0 is killed in it."""
    workers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        lesson.servers.clear()
        agent.barrier()
        if rank == 1:
            threading.Thread(target=kill_after, args=(agent, 20), daemon=True).start()
        if rank == 0:
            return [experiment.serve_mode(agent, settings.modes[0], size - 1, settings, torch.zeros(1))]
        agent.barrier()
        lesson.train_with_server(agent, workers, settings)
    return []


def test_without_a_worker_sync_cannot_go_on(digits_folder: Path) -> None:
    settings, lost = small(digits_folder, modes=("sync",), steps=100_000), list[RankFailed]()
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 was killed by SIGKILL$"):
        launch(train_until_killed, 3, args=(settings,), expendable=range(1, 3), on_loss=lost.append)


@pytest.fixture
def parameter_server(run_cli: Run, data_dir: Path) -> Run:
    """The command, on a few digits."""
    words = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 200, "--batch-size", 40, "--steps", 6)
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
    assert modes["sync"]["samples"] == modes["all-reduce"]["samples"] == 240
    assert modes["sync"]["last_loss"] == pytest.approx(modes["all-reduce"]["last_loss"], abs=1e-4)
    assert modes["all-reduce"]["bytes_per_step"] == 2 * 21_840 * 4
    assert modes["sync"]["bytes_per_step"] >= 2 * modes["all-reduce"]["bytes_per_step"]


def run_and_kill(rank: int, size: int, settings: ServerSettings) -> Any:
    """The lesson; its last worker is killed when the server has taken some gradients in the first mode."""
    lesson.servers.clear()
    if rank == size - 1:
        threading.Thread(target=kill_with_current_agent, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "MeasuredServer", PatientServer)
        return experiment.run(rank, size, settings)


def kill_with_current_agent() -> None:
    while not agents:
        time.sleep(0.01)
    kill_after(agents[0], 5)


def test_the_command_names_a_killed_worker_and_goes_on(parameter_server: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.lessons.parameter_server.page.RUN", run_and_kill)
    monkeypatch.setattr("playground.runtime.launcher.entry.CommandWorld.warm_up", lambda *_: None)  # of ours
    modes = ("--mode", "async", "--mode", "stale-synchronous")
    shown = parameter_server("-n", 3, *modes, "--steps", 40)
    assert (shown.code, shown.err) == (0, "rank 2 of 3 was killed by SIGKILL; the others go on\n")
    text = " ".join(shown.out.split())
    assert re.search(r"async: worker 1 was lost after \d+ of 80 gradients \([1-9]\d* of its own\)", text)
    assert "stale-synchronous: worker 1 had been lost before; the others computed the rest." in text
    assert "training: 40 steps of 40 samples, shared by 2 workers" in text
    assert (
        "Shown: a parameter server in every mode, beside all-reduce; in every mode the server took as many gradients"
        in text
    )


def test_less_than_a_batch_is_refused(parameter_server: Run) -> None:
    shown = parameter_server("-n", 3, "--limit", 30)
    assert (shown.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert "--batch-size 40" in shown.err


def test_a_server_that_goes_elsewhere_is_no_success() -> None:
    assert "1.0e-08" in steps_verdict([{"mode": "sync", "difference_to_all_reduce": 1e-8}])
    for difference in (0.01, float("nan")):
        with pytest.raises(PlaygroundError, match="away from all-reduce"):
            steps_verdict([{"mode": "sync", "difference_to_all_reduce": difference}])
