"""The trainings of the command `elastic`, with ranks that are killed: the board's, or
DistributedDataParallel's in the general loop, training/loop.py. And whether two of them have ended
with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from playground.checkpoint.folder import find_snapshots
from playground.checkpoint.snapshots import read_snapshot
from playground.lessons.elastic import lesson
from playground.lessons.elastic.page import Comparison, Kill
from playground.runtime import PlaygroundError, device, report, restart_count, synchronize
from playground.runtime.backends import backend_of
from playground.training.loop import prepare_and_train, run_board, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.resumable import DRAWS_FROM
from playground.training.settings import TrainingSettings

BOARD_FILE = "snapshot.pt"
"""Name of the board's snapshot in a folder."""


def run(
    rank: int, size: int, settings: TrainingSettings, way: str, kills: Sequence[Kill]
) -> TrainingResult:
    """Train `Net` as the lesson `way`, sgd or ddp, from the newest snapshot on. Every rank returns
    the same figures: of sgd, those of the epochs that ended since the last restart.

    Each time the world is started, the next of `kills` happens.
    """
    assert settings.snapshots, "a training that is killed resumes from a snapshot"
    after_step = partial(die_if_due, rank, kills)
    if way == "ddp":
        return prepare_and_train(settings, sync_with_ddp, after_step)
    backend_of().use_deterministic_kernels()
    folder = settings.snapshots.folder
    folder.mkdir(parents=True, exist_ok=True)
    board = partial(
        lesson.run, file=folder / BOARD_FILE, every=settings.snapshots.every,
        rng=DRAWS_FROM[device().type],
        after_resume=lambda step: report(resumed={"total": step}), after_step=after_step,
    )  # fmt: skip
    return run_board(rank, size, settings, board)


def die_if_due(rank: int, kills: Sequence[Kill], step: int) -> None:
    """Be killed after this step, if that is what is to happen. Nothing warns the rank, and nothing
    is tidied up."""
    synchronize()  # on a GPU a step is issued long before it is done
    report(stepped=step)
    if (rank, step) in kills[restart_count() : restart_count() + 1]:
        report(killed=step)
        os.kill(os.getpid(), signal.SIGKILL)


def compare(rank: int, size: int, one: Path, other: Path) -> Comparison:
    """Compare the last snapshots in two folders: every tensor that a rank would resume from,
    parameters, momentum, totals, random numbers. Raises `ValueError` if one has tensors that the
    other has not."""
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    nbytes = sum(first.nbytes for first, _ in pairs)
    differing = sum(count_differing(*pair) for pair in pairs)
    return Comparison(tensors=len(pairs), nbytes=nbytes, differing=differing)


def tensors_in(folder: Path) -> list[torch.Tensor]:
    """All tensors that each rank resumes from, in the newest snapshot. Raises `PlaygroundError` if
    there is none."""
    file = folder / BOARD_FILE
    if file.exists():
        state = torch.load(file, map_location="cpu", weights_only=True)
        shared, owns = state, state.pop("own")
    elif files := find_snapshots(folder):
        snapshot = read_snapshot(files[0][1])
        shared, owns = snapshot.shared, snapshot.own
    else:
        raise PlaygroundError(f"{folder} holds no snapshot: the training took none")
    leaves = tree_leaves([{**shared, **own} for own in owns])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors differ: all, if they have not the same shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return max(one.nbytes, other.nbytes)
    first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return int((first != second).sum())
