"""Training as in lesson.py that can be interrupted at any moment, and ends with the same bits.

The loop is the lesson's own; here it is told where to begin, and each step is noted. A snapshot holds what that of any
run holds (playground/training/resumable.py). Which pairs a step takes follows from its number.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from playground.lessons.bert.history import History
from playground.lessons.bert.lesson import Loss, batches, prepare, take_steps, test
from playground.lessons.bert.settings import DDP, BertSettings, Training
from playground.runtime import UsageError, device
from playground.runtime.files import CHECKSUMS, sha256
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import Fingerprint
from playground.training import bert
from playground.training.bert_config import PICKLED_WEIGHTS, WEIGHTS
from playground.training.resumable import ResumableRun
from playground.training.sentence_pairs.pairs import Pairs
from playground.training.sync import GradSync

MAY_DIFFER = ("steps", "loader_workers", "report_every", "memory_cap")
"""Settings that change no number at any step."""


def train(rank: int, size: int, settings: BertSettings, snapshots: SnapshotSettings) -> Training:
    """Train by each way, on the same batches, then test. Begins at a snapshot, if there is one to resume from.

    Every rank returns the same figures. Raises `UsageError` if the snapshot is of more steps than are asked for.
    """
    model, loss_of, optimizer = prepare(settings)
    history = History(settings)
    torch.manual_seed(settings.seed + 1 + rank)  # from here on, other dropout masks on every rank
    rehearse = partial(warm_up, loss_of, settings)
    run = ResumableRun(snapshots, partial(identify, settings), GradSync(model), optimizer, history, rehearse)  # type: ignore[arg-type]
    done = run.position.total
    if done > settings.steps:
        todo = f"ask for {done} or more, or for an earlier snapshot with --resume"
        raise UsageError(f"--steps {settings.steps} from a snapshot of step {done}: {todo}")
    run.draw_as_before()

    coming = itertools.islice(batches(settings, rank, size, done), settings.steps - done)
    for step, loss in enumerate(take_steps(loss_of, optimizer, coming), done + 1):
        history.add(loss)
        run.advance(step, last=step == settings.steps)
    run.end()
    return history.result(model, *test(model.module, settings, rank, size))


def warm_up(loss_of: Loss, settings: BertSettings) -> None:
    """A backward on as many pairs as there are workers."""
    pairs = Pairs(settings.folder, "train", settings.max_length).__getitems__(range(settings.workers))
    loss_of(pairs.to(device())).backward()


def identify(settings: BertSettings) -> Fingerprint:
    """The properties that a run must share with a snapshot to resume from it. (The number of ranks is known.)"""
    different = (*MAY_DIFFER, "workers") if settings.way == DDP else MAY_DIFFER
    same = {name: value for name, value in settings.on_all_ranks().items() if name not in different}
    return {
        **same,
        "data": sha256(settings.folder / CHECKSUMS),
        "weights": identify_weights(settings.weights.folder),
        "model": sha256(Path(bert.__file__)),
    }


def identify_weights(folder: Path | None) -> str:
    """The checksum of pretrained weights, as rank 0 reads them; "scratch" if there are none. All ranks must call this:
    they are large, and each host's cores have other things to do."""
    if not folder:
        return "scratch"
    checksum = [""]
    if dist.get_rank() == 0:
        checksum = [next(sha256(folder / name) for name in (WEIGHTS, PICKLED_WEIGHTS) if (folder / name).exists())]
    dist.broadcast_object_list(checksum, src=0)
    return checksum[0]
