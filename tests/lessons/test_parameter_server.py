"""The parameter server takes the steps that it should, in every mode."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Worlds
from hypothesis import given, settings, strategies as st

from playground.lessons.parameter_server import lesson
from playground.world import RankFailed, launch

MODES: dict[str, Callable[[Any], None]] = {
    mode.__name__: mode for mode in (lesson.synchronous, lesson.asynchronous, lesson.bounded)
}


SMALL = {"STEPS": 5, "COMPUTE": 0, "SLOWER": 1, "CLASSES": 4, "FEATURES": 8, "MOMENTUM": 0.5}
"""A training of a few milliseconds, whose workers are equally fast."""


@contextmanager
def constants(**values: float) -> Iterator[None]:
    """The program with these constants, in float64."""
    before = {name: vars(lesson)[name] for name in values}
    vars(lesson).update(values)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        vars(lesson).update(before)


def train_with_server(rank: int, size: int, mode: str) -> tuple[list[float], list[int]] | None:
    """The weight after a training, and the staleness of each gradient. Workers return None."""
    group = dist.new_group(backend="gloo")
    with constants(**SMALL):
        if rank > 0:
            return lesson.work(rank, size, group)
        server: Any = lesson.Server(size, group)
        MODES[mode](server)
        server.stop()
        return server.parameters.weight.flatten().tolist(), server.staleness


def train_by_all_reduce(rank: int, size: int) -> list[float]:
    with constants(**SMALL):
        parameters: Any = lesson.all_reduce(rank, size, dist.group.WORLD)
        return parameters.weight.flatten().tolist()


def train_in_one_process(workers: int) -> list[float]:
    """The weight after a training by torch's optimizer, on the samples of all workers."""
    with constants(**SMALL):
        weight = torch.zeros(4, 8, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lesson.LR, momentum=0.5)
        for step in range(5):
            seeds = [worker + (workers + 1) * step for worker in range(1, workers + 1)]
            batches: Any = [lesson.make_batch(seed, lesson.BATCH) for seed in seeds]
            inputs, labels = map(torch.cat, zip(*batches, strict=True))
            optimizer.zero_grad()
            F.cross_entropy(inputs @ weight.T, labels).backward()
            optimizer.step()
    return weight.flatten().tolist()


@pytest.mark.parametrize(
    ("size", "mode"),
    [(2, "synchronous"), (2, "asynchronous"), (2, "bounded"), (3, "synchronous"),
     (5, "synchronous")],
)  # fmt: skip
def test_steps_are_those_of_one_process(size: int, mode: str, world: Worlds) -> None:
    """Synchronous ones, and those of a single worker in every mode."""
    [found, *others] = world(size).run(train_with_server, mode)
    assert found is not None
    assert others == [None] * (size - 1)
    assert found[0] == pytest.approx(train_in_one_process(size - 1), abs=1e-12)
    assert {*found[1]} == {0}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_a_server_the_steps_are_the_same(size: int, world: Worlds) -> None:
    for weight in world(size).run(train_by_all_reduce):
        assert weight == pytest.approx(train_in_one_process(size - 1), abs=1e-12)


class Workers:
    """Workers of which any may push next, as a server sees them. Their gradients are ones."""

    def __init__(self, workers: int, choose: Callable[[list[int]], int]) -> None:
        self.parameters = lesson.Parameters()
        self.pushes = dict.fromkeys(range(1, workers + 1), 0)
        self.computing = [*self.pushes]
        self.choose = choose
        self.ahead: list[int] = []
        """How far a worker was ahead of the slowest whenever it was let go."""

    def receive(self) -> tuple[int, torch.Tensor]:
        worker = self.choose(self.computing)
        self.computing.remove(worker)
        self.pushes[worker] += 1
        return worker, torch.ones(lesson.CLASSES, lesson.FEATURES)

    def reply(self, worker: int) -> None:
        assert worker not in self.computing
        self.computing.append(worker)
        self.ahead.append(self.pushes[worker] - min(self.pushes.values()))


@given(
    mode=st.sampled_from(sorted(MODES)), workers=st.integers(1, 6), ahead=st.integers(0, 3),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_mode_ends_and_keeps_its_rule(
    mode: str, workers: int, ahead: int, data: st.DataObject
) -> None:
    """Whoever pushes next: the server never waits for a worker that waits for the server."""
    with constants(STEPS=4, AHEAD=ahead):
        found = Workers(workers, lambda computing: data.draw(st.sampled_from(sorted(computing))))
        MODES[mode](found)
    assert sum(found.pushes.values()) == 4 * workers
    # every gradient counted 1 / workers
    expected = torch.full_like(found.parameters.weight, -lesson.LR * 4)
    torch.testing.assert_close(found.parameters.weight, expected)
    if mode == "synchronous":
        assert {*found.pushes.values()} == {4}
        assert len(found.parameters.curve) == 4
    if mode == "bounded":
        assert max(found.ahead) <= ahead
        assert max(found.pushes.values()) - min(found.pushes.values()) <= ahead + 1


def work_until_killed(rank: int, size: int) -> None:
    """Rank 1 is killed at its third gradient, while the server waits for any worker."""
    compute: Any = lesson.compute_gradient

    def compute_or_die(weight: Any, rank: int, size: int, step: int) -> Any:
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(weight, rank, size, step)

    vars(lesson).update(compute_gradient=compute_or_die)
    train_with_server(rank, size, "asynchronous")


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 was killed by SIGKILL$"):
        launch(work_until_killed, 3)


def test_the_slow_worker_and_the_staleness_are_printed(run_cli: Run) -> None:
    ran = run_cli("parameter-server", "-n", 4, "--steps", 6, "--compute", 5)
    assert (ran.code, ran.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()[1:]}
    assert [*rows] == ["all_reduce", *MODES]
    assert [rows[mode][1] for mode in ("all_reduce", "synchronous")] == ["0.00"] * 2
    assert float(rows["asynchronous"][1]) > 1
    assert int(rows["asynchronous"][2]) > float(rows["asynchronous"][1])
    assert float(rows["synchronous"][5]) <= 1e-12 < float(rows["asynchronous"][5])
