"""A checkpoint: one rank writes it, all read it, and training goes on.

    python -m playground ddp --only checkpoint -n 3

Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, save and load checkpoints
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.lessons.ddp.ddp_run import DDPRun, build_run, measure_difference
from playground.lessons.ddp.settings import CheckpointResult, LabSettings, ResumedRun
from playground.runtime import UsageError, device
from playground.runtime.meeting.agreement import all_gather_object
from playground.runtime.temporary_folder import temporary_folder

State = dict[str, Any]
"""state_dict() of the model and of the optimizer, under these names."""


def checkpoint(rank: int, size: int, settings: LabSettings) -> CheckpointResult:
    """Rank 0 writes model and optimizer into one file, all ranks read it, and training goes on. A rank hears where the
    file is when it is whole; a rank that looked for it before would find nothing, or that of an earlier run.

    Raises `PlaygroundError` if the training that was resumed ends elsewhere than one that was never interrupted.
    """
    run = build_run(settings)
    train(run, range(settings.steps))
    with ExitStack() as stack:
        file = save_on_rank_0(run, rank, stack)
        state = load(file)
        read = file.stat().st_size
        all_gather_object(read)  # rank 0 removes the file when all have read it
    train(run, range(settings.steps, 2 * settings.steps))
    resumed = [resume(settings, state, names, run.parameters()) for names in (("model",), ("model", "optimizer"))]
    result = CheckpointResult(
        steps=settings.steps, written=read if rank == 0 else 0, read=read, device=str(device()), resumed=resumed
    )
    result.check()
    return result


def train(run: DDPRun, steps: range) -> None:
    for number in steps:
        run.step(number)


def save_on_rank_0(run: DDPRun, rank: int, stack: ExitStack) -> Path:
    """The file that rank 0 has written, on every rank; `stack` removes it. Raises `UsageError` on all ranks if one of
    them, on another host, does not see it."""
    message: list[str | None] = [None]
    if rank == 0:
        folder = stack.enter_context(temporary_folder("checkpoint"))
        message = [save(run, folder)]
    dist.broadcast_object_list(message, src=0)  # orders what follows after `save`, as a barrier would
    file = Path(str(message[0]))
    if not all(all_gather_object(file.exists())):
        raise UsageError(f"checkpoint: not all ranks see {file}: set TMPDIR to a folder that all hosts share")
    return file


def save(run: DDPRun, folder: Path) -> str:
    """Write the checkpoint into `folder`; under its name it is whole or not there. Returns its path."""
    state: State = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    unfinished, file = folder / "checkpoint.unfinished", folder / "checkpoint.pt"
    torch.save(state, unfinished)
    os.replace(unfinished, file)
    return str(file)


def load(file: Path) -> State:
    """Its content, on this rank's device (rank 0 wrote from its own); no code in it is run, as a pickle's would be."""
    state: State = torch.load(file, map_location=device(), weights_only=True)
    return state


def resume(settings: LabSettings, state: State, names: tuple[str, ...], expected: torch.Tensor) -> ResumedRun:
    """A new run takes what `names` says from the checkpoint, then the same steps as the uninterrupted one. `expected`:
    the parameters of that one in the end."""
    run = build_run(settings)
    run.backward(0)  # after its first backward DDP rebuilds its buckets, and they decide in which order it adds
    run.ddp.module.load_state_dict(state["model"])
    if "optimizer" in names:
        run.optimizer.load_state_dict(state["optimizer"])
    train(run, range(settings.steps, 2 * settings.steps))
    return ResumedRun(loaded=", ".join(names), difference=measure_difference(run.parameters(), expected))
