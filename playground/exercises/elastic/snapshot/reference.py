import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn


def snapshot(
    rank: int,
    size: int,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    train: Callable[[int], None],
) -> None:
    """Train until `steps` steps have been taken, with a snapshot after each.
    Resume from this rank's snapshot if there is one: the end is the same to the
    bit, wherever the process was killed before.

    folder: where snapshots are written, by all ranks.
    train(step): take step number `step` = 0, …, `steps` - 1 of `model` by
    `optimizer`. It draws random numbers from torch's generator.
    """
    # write this
    file, step = folder / f"rank{rank}.pt", 0
    if file.exists():
        held = torch.load(file)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        torch.set_rng_state(held["rng"])
        step = held["step"]
    while step < steps:
        train(step)
        step += 1
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    # until here
