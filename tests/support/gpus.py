"""Runs on GPUs, real or simulated ones."""

from __future__ import annotations

import json
import time
from typing import Any

from fixtures import Run

from playground.ui.gpus import STARTED_AGAIN
from playground.world.simulated_gpu.environment import GPUS, MEMORY

COLD = 120.0
"""Seconds after which a run on GPUs is taken to hang: CUDA and NCCL start cold."""

NONE = {GPUS: "", MEMORY: "", "LD_PRELOAD": "", "LD_LIBRARY_PATH": "", STARTED_AGAIN: ""}
"""An environment without simulated GPUs."""


def shown(run_cli: Run, *words: Any) -> Any:
    """The document that a command prints, on nccl, having left cleanly."""
    outcome = run_cli(*words, "--backend", "nccl", "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def hold_the_gpu(seconds: float = 0.2) -> float:
    """Give the GPU work for about so long, and do not wait for it. Returns how long it really
    takes."""
    import torch

    cycles = int(seconds * 1e9)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    alone = time.perf_counter() - started
    torch.cuda._sleep(cycles)
    return alone
