"""The account of devices' memory: by label, in a rank, against the kernel's figures."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.data_parallel.machine import DataParallel, copy_to
from playground.lessons.data_parallel.memory import label_buckets, track_memory
from playground.runtime import launch
from playground.training.step import training_step
from playground.training.sync import GradSync

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


def test_what_is_freed_makes_room_though_nobody_asks_what_is_held() -> None:
    with track_memory([FIRST]) as account:
        account.put(weight := torch.ones(1000), device=FIRST)
        for _ in range(3):
            result = weight * 2
            del result
    assert account.peak == {FIRST: 8000}


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def test_every_kind_has_its_label() -> None:
    """A model of 100 features: 40,000 bytes of weights, 400 of biases. 8 samples of 3,200 bytes in
    all."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = torch.ones(8, 100), torch.ones(8, 100)
    forward_held = {}

    def forward() -> torch.Tensor:
        outputs = DataParallel(model, [FIRST, SECOND])(inputs)
        loss = mean_square(outputs, copy_to(targets, FIRST, "targets"))
        forward_held.update(account.held_by_label)
        return loss

    with track_memory([FIRST, SECOND]) as account:
        account.put_module(model, FIRST)
        for _ in range(2):
            training_step(optimizer, [forward], GradSync(model), moment=account.moment)
        assert account.held_by_label[FIRST] == {
            "parameters": 40_400,
            "gradients": 40_400,
            "optimizer state": 80_800,
        }
        assert account.label == "activations"
    first = forward_held[FIRST]
    assert (first["gathered outputs"], first["inputs"]) == (3200, 1600), (
        "of the inputs, the half that backward needs"
    )
    assert "gradients" not in first
    assert forward_held[SECOND] == {"inputs": 1600}, "nothing else is needed for backward"
    assert account.at_peak[SECOND]["parameters"] == 40_400
    assert account.at_peak[FIRST].keys() >= {"parameters", "gradients", "optimizer state"}

    with track_memory([FIRST]) as account:
        account.put_module(model, FIRST)
        account.put_state(optimizer, FIRST)
    assert account.held_by_label[FIRST] == {
        "parameters": 40_400,
        "gradients": 40_400,
        "optimizer state": 80_800,
    }


def hold_buckets(rank: int, size: int, as_views: bool) -> list[dict[str, int]]:
    """What a rank holds after each of three steps of DDP. (After it was made, gloo may still hold
    what it has sent.)"""
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
    inputs = torch.ones(4, 100)
    with track_memory([FIRST], default=FIRST) as account:
        account.put_module(model, FIRST)
        account.put(inputs, device=FIRST, label="inputs")
        with account.labelled("gradients"):
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        label_buckets(ddp, account)
        held = []
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(3):
            training_step(
                optimizer, [lambda: ddp(inputs).sum()], GradSync(ddp), moment=account.moment
            )
            held.append(account.held_by_label[FIRST])
        assert sum(account.at_peak[FIRST].values()) == account.peak[FIRST]
    return held


@pytest.mark.parametrize("as_views", [False, True])
def test_the_buckets_of_ddp_are_seen(as_views: bool) -> None:
    parameters = 2 * 40_400
    for steps in launch(hold_buckets, 2, args=(as_views,)):
        # of the parameters, and once more in buckets
        gradients = parameters if as_views else 2 * parameters
        assert steps == [{"parameters": parameters, "gradients": gradients, "inputs": 1600}] * 3


STEP = """
import sys
from dataclasses import replace
import torch
import torch.nn.functional as F
from playground.lessons.data_parallel.memory import track_memory
from playground.lessons.bert.lesson import BertConfig, Model

def read(key):
    [line] = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
config = BertConfig(vocabulary=1000, width=256, layers=4, intermediate=1024)
model = Model(replace(config, dropout=float(sys.argv[2])))
optimizer = torch.optim.Adam(model.parameters())
device = torch.device("cpu", 0)

def step(samples):
    ids, labels = torch.ones(samples, 64, dtype=torch.long), torch.zeros(samples, dtype=torch.long)
    optimizer.zero_grad()
    F.cross_entropy(model(ids, ids, ids > 0), labels).backward()
    optimizer.step()

step(1)  # what libraries keep for good, and Adam's state
optimizer.zero_grad()
if sys.argv[1] == "account":
    with track_memory([device], default=device) as account:
        account.put_module(model, device)
        account.put_state(optimizer, device)
        before = account.held[device]
        step(64)
        print(account.peak[device] - before)
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
    return int(
        subprocess.run(
            command, env={**os.environ, **RETURNS_MEMORY}, capture_output=True, check=True
        ).stdout
    )


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
def test_on_gpus_the_account_is_within_what_the_allocator_knows() -> None:
    gpu = torch.device("cuda", 0)
    model, inputs = nn.Linear(1000, 1000).to(gpu), torch.ones(64, 1000, device=gpu)
    optimizer = torch.optim.Adam(model.parameters())
    torch.cuda.reset_peak_memory_stats(gpu)
    with track_memory([gpu]) as account:
        account.put_module(model, gpu)
        account.put(inputs, device=gpu, label="inputs")
        training_step(
            optimizer, [lambda: model(inputs).sum()], GradSync(model), moment=account.moment
        )
        assert account.held_by_label[gpu]["optimizer state"] >= 2 * 4 * 1_001_000
        assert account.held[gpu] <= torch.cuda.memory_allocated(gpu)
    assert torch.cuda.max_memory_allocated(gpu) <= 1.05 * account.peak[gpu] + 2**25, (
        "libraries keep some workspace"
    )
