"""One process and its devices, recorded: every copy between them, and what each device's thread
computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import (
    BACKGROUND,
    COMPUTE,
    MOVE,
    PHASE,
    Recording,
    read_move,
)
from playground.explain.replay.record.run import Recorded
from playground.lessons.data_parallel.lesson import data_parallel
from playground.lessons.devices import find_devices, place, track_memory
from playground.testing import World

DEVICES = ("cpu:0", "cpu:1", "cpu:2")
SAMPLES, FEATURES, OUTPUTS = 9, 4, 5
FLOAT = 4
Bytes = dict[tuple[str, str, str], int]


def step_on_three(rank: int, size: int) -> Bytes:
    """Forward and backward of a layer on three devices; what its account says was copied."""
    devices = find_devices(len(DEVICES))
    with track_memory(devices) as account:
        model = place(nn.Linear(FEATURES, OUTPUTS), devices[0])
        outputs = data_parallel(model, [torch.ones(SAMPLES, FEATURES)], devices, devices[0])
        outputs.sum().backward()
    return {
        (part, str(source), str(target)): count
        for (part, source, target), count in account.copied.items()
    }


@pytest.fixture(scope="module")
def run(
    world: Callable[..., World], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bytes, Recording]:
    folder = tmp_path_factory.mktemp("recorded")
    [counted] = world(1).run(Recorded(step_on_three, folder))
    return counted, read_recording(folder / "0")


def test_every_copy_is_recorded(run: tuple[Bytes, Recording]) -> None:
    counted, recording = run
    copied: Counter[tuple[str, str, str]] = Counter()
    for event in recording.events(MOVE):
        copied[read_move(event.name)] += event.nbytes
    layer, chunk = (FEATURES + 1) * OUTPUTS * FLOAT, SAMPLES // 3 * OUTPUTS * FLOAT
    others = DEVICES[1:]
    assert copied == counted
    assert copied == {
        **{("scatter", "cpu", device): SAMPLES // 3 * FEATURES * FLOAT for device in DEVICES},
        **{("replicate", "cpu:0", device): layer for device in others},
        **{("gather", device, "cpu:0"): chunk for device in others},
        **{("backward of gather", "cpu:0", device): chunk for device in others},
        **{("backward of replicate", device, "cpu:0"): layer for device in others},
    }
    shapes = {event.shape for event in recording.events(MOVE) if event.name.startswith("gather")}
    assert shapes == {(SAMPLES // 3, OUTPUTS)}


def test_each_device_has_a_thread_that_computes_and_moves_are_within_what_makes_them(
    run: tuple[Bytes, Recording],
) -> None:
    events, sources = run[1].ranks[0].events, run[1].sources
    phases = {event.number: event.name for event in events if event.kind == PHASE}
    forwards = [event for event in events if event.kind == COMPUTE and event.name == "forward"]
    assert (
        sorted(phases.values())
        == sorted(phases[event.parent or 0] for event in forwards)
        == [*DEVICES]
    )
    assert {event.lane for event in forwards} == {BACKGROUND}
    assert all(event.end < float("inf") for event in events)
    [backward] = [event for event in events if event.name == "backward"]
    for event in (event for event in events if event.kind == MOVE):
        is_back = read_move(event.name).part.startswith("backward of ")
        assert (event.parent == backward.number) == is_back
        assert event.source is not None
        file = "test_recorded_devices.py" if is_back else "lessons/data_parallel/lesson.py"
        assert sources[event.source].file.endswith(file)
