"""Recorded training: forward, backward and step, gradients as they get ready, and the buckets that
carry them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from ranks import needs_native_calls
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from playground.algorithms import load_all_reduce
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import (
    BUCKET,
    COLLECTIVE,
    COMPUTE,
    GRADIENT,
    PHASE,
    Event,
    RankRecording,
)
from playground.explain.replay.record.run import Recorded
from playground.tap.native import HAS_HOOKS
from playground.training.sync import GradSync, new_grad_sync
from playground.world import report

STEPS = 2
BUCKETS = {
    "ddp": int(hasattr(dist.ProcessGroup, "register_pre_hook")),
    "bucketed": 2,
    "overlapped": 2,
}
"""How many are told: older versions of torch do not tell of DistributedDataParallel's."""
backward = torch.autograd.backward
"""torch's own: when this is imported, nothing is recorded."""


class InAnotherThread(torch.autograd.Function):
    """A loss whose backward another thread computes, as autograd does for a GPU. The loss is in a
    list, so that its graph is no part of this one's."""

    @staticmethod
    def forward(ctx: Any, losses: list[torch.Tensor], beginning: torch.Tensor) -> torch.Tensor:
        [ctx.loss] = losses
        return ctx.loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(backward, ctx.loss, gradient).result()
        return None, None


def train(rank: int, size: int, way: str, all_reduce: str, elsewhere: bool = False) -> None:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
    if way == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1)
        sync = GradSync(model)
    else:
        sync = new_grad_sync(way, model, all_reduce=load_all_reduce(all_reduce), bucket_cap=40_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(torch.ones(STEPS, 100), num_workers=0):
        optimizer.zero_grad()
        loss = model(batch).sum()
        if elsewhere:
            loss = InAnotherThread.apply([loss], torch.ones((), requires_grad=True))
        loss.backward()
        sync.after_backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 100))


WAYS = [
    ("ddp", "backend", False), ("bucketed", "backend", False), ("overlapped", "backend", False),
    ("overlapped", "ring", True), ("ddp", "backend", True),
]  # fmt: skip
"""With DDP or one of ours, by which all-reduce, and whether backward runs in another thread."""


def train_in_all_ways(rank: int, size: int, folder: Path) -> None:
    for number, way in enumerate(WAYS):
        Recorded(train, folder / str(number))(rank, size, *way)


@pytest.fixture(scope="module")
def recorded(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    world(2).run(train_in_all_ways, folder)
    return folder


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, id=" ".join(map(str, way)), marks=[needs_native_calls] * (way[0] == "ddp")
        )
        for number, way in enumerate(WAYS)
    ],
)
def test_every_step_is_told(number: int, recorded: Path) -> None:
    way, all_reduce, _ = WAYS[number]
    for rank in read_recording(recorded / str(number) / "0").ranks:
        steps = [
            event for event in rank.events if event.kind == PHASE and event.name == "training step"
        ]
        assert len(steps) == STEPS
        for step in steps:
            check_step(rank, step, way)
        assert [event.name for event in rank.events if event.kind == COMPUTE][-1] == "inference"
        calls = [event for event in rank.events if event.name == "all_reduce (ring)"]
        assert bool(calls) == (all_reduce == "ring")
        assert all(event.end < float("inf") for event in rank.events)


def check_step(rank: RankRecording, step: Event, way: str) -> None:
    """That all that happens in a step is there, in its order."""
    inside = [event for event in rank.events if step.start <= event.start <= step.end]
    parts = [event for event in inside if event.kind == COMPUTE and event.parent == step.number]
    assert [event.name for event in parts] == ["forward", "backward", "step"]
    gradients = [
        event.name for event in inside if event.kind == GRADIENT and event.parent == parts[1].number
    ]
    assert sorted(gradients) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    # the last layer's are ready first
    assert {name.split(".")[0] for name in gradients[:2]} == {"2"}
    buckets = [event for event in inside if event.kind == (BUCKET if way == "ddp" else COLLECTIVE)]
    assert len(buckets) == BUCKETS[way]
    assert sum(event.nbytes for event in buckets) == (
        4 * 2 * (100 * 100 + 100) if BUCKETS[way] else 0
    )
    assert all(event.end <= step.end for event in buckets)
    if way != "bucketed":  # which averages when backward is done
        assert all(parts[1].start <= event.start <= parts[1].end for event in buckets)
        assert {event.parent for event in buckets} == {parts[1].number}


def join_with_uneven_inputs(rank: int, size: int) -> int:
    """torch hands the work of an all-reduce of its own on to C++."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(1, 4)).sum().backward()
    return 1


def test_works_that_torch_keeps_to_itself(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(Recorded(join_with_uneven_inputs, tmp_path)) == [1, 1]
    assert all(event.end < float("inf") for event in read_recording(tmp_path / "0").events())


def learn_without_steps(rank: int, size: int) -> None:
    """As a worker of a parameter server does: three times a gradient over two batches."""
    model, loss = nn.Linear(4, 4), nn.MSELoss()
    for turn in range(3):
        model.zero_grad()
        if turn == 2:
            report(variant="by hand")
        for _ in range(2):
            loss(model(torch.ones(1, 4)), torch.zeros(1, 4)).backward()
    thread = threading.Thread(target=model, args=(torch.ones(1, 4),))
    thread.start()
    thread.join()


def test_where_no_optimizer_steps_a_training_step_ends_with_its_gradients(
    world: Worlds, tmp_path: Path
) -> None:
    world(1).run(Recorded(learn_without_steps, tmp_path))
    [rank] = read_recording(tmp_path / "0").ranks
    steps = [event for event in rank.events if event.kind == PHASE]
    names = ["training step", "training step", "by hand: training step"]
    assert [(step.name, step.lane) for step in steps] == [(name, "main") for name in names]
    assert None not in [step.source for step in steps]
    for step in steps:
        inside = [
            event.name
            for event in rank.events
            if event.kind == COMPUTE and event.parent == step.number
        ]
        assert inside == ["forward", "forward", "backward"] * 2


def step_in_backward(rank: int, size: int) -> None:
    """The optimizer steps as soon as a gradient is there."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()


def test_an_optimizer_may_step_in_a_backward_pass(world: Worlds, tmp_path: Path) -> None:
    world(1).run(Recorded(step_in_backward, tmp_path))
    [rank] = read_recording(tmp_path / "0").ranks
    names = [event.name for event in rank.events if event.kind == COMPUTE]
    assert names == ["forward", "backward", "step"] * 2
    assert all(event.end < float("inf") for event in rank.events)


@pytest.mark.gpu
@pytest.mark.usefixtures("few_digits")
def test_a_recording_has_what_ranks_issued(
    run_cli: Run, nccl_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part of every step, and every sum of gradients in it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.playground"
    options = ("--epochs", 1, "--microbatches", 1, "--see", file)
    ran = run_cli("ddp", "--backend", "nccl", "-n", nccl_size, *options)
    assert ran.code == 0, ran.err
    for rank in read_recording(file).ranks:
        names = Counter(event.name for event in rank.events)
        # two are of the one process that the program compares itself with
        assert names["backward"] == names["step"] > 4
        averaged = names["step"] - 2
        assert names["training step"] == averaged
        assert names["bucket 0"] == (averaged if HAS_HOOKS else 0)
        assert names["forward"] >= averaged
        assert all(event.end < float("inf") for event in rank.events)
