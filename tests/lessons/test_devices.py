"""Virtual devices: where tensors lie, what is copied, and what is held, by kind and against the
kernel's figures."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from playground.lessons import devices as given

devices: Any = given
FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


def test_an_account_is_what_is_kept_alive() -> None:
    weight = torch.ones(1000, requires_grad=True)  # 4,000 bytes
    with devices.track_memory([FIRST, SECOND]) as memory:
        devices.put(weight, FIRST, "parameters")
        kept = weight * 2  # kept, and no copy of weight is needed for backward
        assert devices.bytes_held(FIRST) == {"parameters": 4000, "activations": 4000}
        squares = kept.exp().sum()  # saves its result
        assert devices.bytes_held(FIRST).total() == 12004
        memory.kind = "gradients"
        squares.backward()
        del squares, kept
        assert devices.bytes_held(FIRST) == {"parameters": 4000, "gradients": 4000}
        assert devices.bytes_held(SECOND) == {}
        assert memory.peak(FIRST) >= 16000
        part = devices.copy_to(weight.detach()[500:], SECOND, "scatter")
        assert devices.copy_to(part, SECOND, "scatter") is part
        assert devices.bytes_held(SECOND) == {"inputs": 2000}
        assert memory.copied == {("scatter", FIRST, SECOND): 2000}
        assert memory.copied_to(SECOND, "scatter") == 2000
        assert memory.copied_to(FIRST, "scatter") == memory.copied_to(SECOND, "gather") == 0
        with pytest.raises(RuntimeError, match="operands on cpu:0 and cpu:1: copy them"):
            part + weight[:500]
        assert devices.device_of(part + torch.tensor(1.0)) == SECOND, "a number may lie elsewhere"


def test_what_is_freed_makes_room_though_nobody_asks_what_is_held() -> None:
    with devices.track_memory([FIRST]) as memory:
        devices.put(weight := torch.ones(1000), FIRST, "parameters")
        for _ in range(3):
            result = weight * 2
            del result
    assert memory.peak(FIRST) == 8000


def test_a_gradient_is_copied_back_and_so_is_a_gradient_s_gradient() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    with devices.track_memory([FIRST, SECOND]) as memory:
        devices.put(x, FIRST, "inputs")
        cube = devices.copy_to(x, SECOND, "scatter") ** 3
        [slope] = torch.autograd.grad(cube.sum(), x, create_graph=True)
        assert devices.device_of(slope) == FIRST
        slope.sum().backward()
    assert (slope.item(), x.grad.item()) == (27.0, 18.0)
    assert memory.copied["backward of scatter", SECOND, FIRST] == 2 * 4


def test_a_failure_in_a_block_ends_the_account() -> None:
    with pytest.raises(ValueError, match="no"), devices.track_memory([FIRST]):
        raise ValueError("no")
    assert devices.observers == []


STEP = """
import sys
import torch
from torch import nn
from playground.lessons.devices import bytes_held, place, put, track_memory

def read(key):
    [line] = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(256, 4, 1024, float(sys.argv[2]), batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4))
optimizer = torch.optim.Adam(model.parameters())
device = torch.device("cpu", 0)

def step(samples):
    ids = torch.ones(samples, 64, dtype=torch.long)
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()

step(1)  # what libraries keep for good, and Adam's state
optimizer.zero_grad()
if sys.argv[1] == "account":
    with track_memory([device]) as memory:
        place(model, device)
        for state in optimizer.state.values():
            for tensor in state.values():
                put(tensor, device, "optimizer state")
        before = bytes_held(device).total()
        step(64)
        print(memory.peak(device) - before)
else:
    before = read("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again: man 5 proc
    step(64)
    print(read("VmHWM") - before)
"""
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives every larger block back to the kernel as soon as it is freed."""


def bytes_added(by: str, dropout: float) -> int:
    """How far a training step takes a new process above what it held before."""
    command = [sys.executable, "-c", STEP, by, str(dropout)]
    environ = {**os.environ, **RETURNS_MEMORY}
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.stress
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a process is read from Linux's /proc",
)
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_the_account_is_within_5_percent_of_the_process_s_memory(dropout: float) -> None:
    account, resident = map(partial(bytes_added, dropout=dropout), ("account", "process"))
    assert resident > 2e8
    assert account == pytest.approx(resident, rel=0.05)


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_counts() -> None:
    [gpu] = devices.find_devices(1)
    assert gpu.type == "cuda"
    with devices.track_memory([gpu]) as memory:
        before = memory.peak(gpu)
        model = devices.place(nn.Linear(1000, 1000), gpu)
        model(devices.copy_to(torch.ones(64, 1000), gpu, "scatter")).sum().backward()
    assert memory.peak(gpu) - before >= 2 * 4 * 1_001_000
    assert memory.copied == {("scatter", devices.HOST, gpu): 64 * 1000 * 4}
