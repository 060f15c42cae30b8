"""The lane of a GPU: what it did, and when, on the host's clock. The GPU here is a clock and how late it is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from playground.see.record import BUCKET, COLLECTIVE, COMPUTE, DEVICE, GRADIENT, MAIN, PHASE, Event
from playground.see.record.rank import PATIENCE, DeviceRecorder
from playground.see.record.run import read_recording

ABOUT = {"host": "here", "device": "cuda:0", "offset": 0, "bound": 0}
MILLISECOND = 1_000_000
DEVICE_0 = torch.device("cuda", 0)


class HostClock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 5 * MILLISECOND

    def __call__(self) -> int:
        return self.now


class FakeMark:
    """A moment of a GPU's own clock, in milliseconds. As CUDA's, times between two of them are float32."""

    def __init__(self, at: float, is_there: bool) -> None:
        self.at, self.is_there = at, is_there

    def query(self) -> bool:
        return self.is_there

    def elapsed_time(self, end: FakeMark) -> float:
        [milliseconds] = struct.unpack("f", struct.pack("f", end.at - self.at))
        return float(milliseconds)


class FakeGpu:
    """Gets to every mark `late` milliseconds after it was left; its clock has another zero, and another speed."""

    def __init__(self, clock: HostClock, speed: float = 1.0) -> None:
        self.clock, self.speed, self.late, self.stands_still, self.breaks = clock, speed, 0.0, False, False

    def mark(self, device: torch.device) -> FakeMark:
        if self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert device == DEVICE_0
        return FakeMark(1234.5 + self.speed * (self.clock.now / MILLISECOND + self.late), not self.stands_still)


def new_recorder(folder: Path, gpu: FakeGpu, **more: int) -> DeviceRecorder:
    return DeviceRecorder(folder, 0, gpu=DEVICE_0, mark=gpu.mark, clock=gpu.clock, **more, **ABOUT)  # type: ignore[arg-type]


def lanes(folder: Path) -> tuple[list[Event], list[Event]]:
    """The events of the rank and those of its GPU."""
    events = read_recording(folder).ranks[0].events
    return [event for event in events if event.lane == MAIN], [event for event in events if event.lane == DEVICE]


def record_forward(recorder: DeviceRecorder, gpu: FakeGpu) -> int:
    """A forward that takes 1 ms to issue, and that the GPU begins 2 ms later and is at for 4 ms."""
    gpu.late = 2.0
    number = recorder.begin(COMPUTE, "forward", nbytes=12, shape=(3,))
    gpu.clock.now += MILLISECOND
    gpu.late = 5.0
    recorder.end(number)
    gpu.clock.now += 8 * MILLISECOND
    gpu.late = 0.0
    return number


@pytest.mark.parametrize("speed", [1.0, 0.9])
def test_the_gpu_s_times_are_put_onto_the_host_s_clock(tmp_path: Path, speed: float) -> None:
    gpu = FakeGpu(HostClock(), speed)
    recorder = new_recorder(tmp_path, gpu)
    record_forward(recorder, gpu)
    recorder.stop()
    [forward], [done] = lanes(tmp_path)
    assert done.start - forward.start == pytest.approx(2e-3, abs=1e-8)
    assert done.seconds == pytest.approx(4e-3, abs=1e-8)
    assert (done.kind, done.name, done.nbytes, done.shape) == (COMPUTE, "forward", 12, (3,))
    assert done.parent == forward.number


def test_which_events_the_gpu_has(tmp_path: Path) -> None:
    gpu = FakeGpu(HostClock())
    recorder = new_recorder(tmp_path, gpu)
    with recorder.span(PHASE, "training step"):
        numbers = [recorder.begin(kind, "x") for kind in (COMPUTE, BUCKET, COLLECTIVE)]
        wait = recorder.begin_wait(numbers, -1)
        recorder.end_all([*numbers, wait])
        recorder.instant(GRADIENT, "weight", values=[1.0])
    with recorder.working_for(torch.device("cuda", 1)):  # a GPU that is not the rank's
        recorder.end(recorder.begin(COMPUTE, "x"))
    gpu.clock.now += MILLISECOND
    recorder.stop()
    host, device = lanes(tmp_path)
    assert [event.kind for event in device] == [COMPUTE, BUCKET, COLLECTIVE, GRADIENT]
    assert device[-1].seconds == 0
    assert [event for event in device if event.values is not None] == []
    assert [event.awaits for event in host if event.kind == "wait"] == [tuple(numbers[0] + k for k in range(3))]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_the_gpu_does_not_get_to_is_left_out(
    breaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all of its own times, where it fails."""
    monkeypatch.setattr("playground.see.record.rank.PATIENCE", PATIENCE / 100)
    gpu = FakeGpu(HostClock())
    recorder = new_recorder(tmp_path, gpu)
    record_forward(recorder, gpu)
    recorder.begin(COMPUTE, "backward")
    gpu.stands_still = True  # in a collective whose other ranks are gone
    recorder.end(recorder.begin(COLLECTIVE, "all_reduce"))
    gpu.breaks = breaks
    recorder.stop()
    host, device = lanes(tmp_path)
    assert [event.name for event in host] == ["forward", "backward", "all_reduce"]
    assert [event.name for event in device] == ([] if breaks else ["forward"])
    assert not read_recording(tmp_path).ranks[0].is_cut_off
