"""torch's DataLoader for a rank that trains, and training on every rank of a world.

The processes that fetch batches for it (`num_workers`) are forked from the rank, and belong to it: they end when it
ends, however that happens, and its failure says so when one of them was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader

from playground.runtime import device, host
from playground.runtime.errors import RankFailed
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.meeting.process_end import end_with_parent
from playground.runtime.remote import Remote

T = TypeVar("T")
START_METHOD = "fork" if sys.platform == "linux" else None
"""Forked workers find torch imported and the dataset in memory. (From Python 3.14 on, this is not the default.)"""
LOST_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (is killed by signal: \w+|exited unexpectedly)")
"""How torch says that a worker is gone."""
NEWS = 0.5
"""Seconds after which torch knows of a worker's end."""


class RankLoader(DataLoader[T]):
    """Fetches batches ahead, in `num_workers` processes that stay from epoch to epoch; with 0 there are none.

    For a GPU, batches are put into pinned memory, from which it copies by itself. The other `options` are DataLoader's.
    torch's generator gives as many random numbers with workers as without: dropout masks do not depend on them.
    """

    def __init__(self, dataset: Any, *, num_workers: int = 0, **options: Any) -> None:
        if num_workers:
            options |= {
                "persistent_workers": True, "worker_init_fn": partial(follow_rank, os.getpid()),
                "multiprocessing_context": START_METHOD,
            }  # fmt: skip
        super().__init__(dataset, num_workers=num_workers, pin_memory=device().type == "cuda", **options)
        self.started = False

    def __iter__(self) -> Any:
        if self.started and self.persistent_workers:
            # what a new iterator draws, and one that goes on does not
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self.started = True
        with warnings.catch_warnings():
            # Of more workers than cores: they are as many as was asked for. Of a fork beside threads: those are the
            # backend's and the launcher's, and no worker takes a lock of theirs.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().__iter__()


def follow_rank(rank: int, number: int) -> None:
    """In a new worker, as `worker_init_fn`: do not react to the rank's signals. On Linux, nor to those of its process
    group (what asks a group to end asks its ranks, and they may need batches until they do; what kills it leaves a
    worker the time to exit in an orderly way); end as soon as the rank does. `rank` is its process id.

    Elsewhere torch's own check ends it, five seconds after the rank.
    """
    signal.set_wakeup_fd(-1)  # that of a rank started by torchrun tells the rank to end
    signal.signal(signal.SIGTERM, leave)
    if sys.platform == "linux":
        os.setpgrp()
        end_with_parent(rank, signal.SIGTERM, ctypes.CDLL(None))


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """Remove the socket over which this worker hands out its batches, and exit at once. (An exception, raised while the
    worker puts a batch into its queue, would leave the queue's thread waiting, and the process with it.)"""
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    os._exit(0)


@contextlib.contextmanager
def explain_lost_worker(rank: int, size: int) -> Iterator[None]:
    """Raise `RankFailed`, in one line, where the rank fails because a worker of its was killed or has exited."""
    try:
        yield
    except Exception as error:
        if lost := LOST_WORKER.search(hear_of_worker(error)):
            why = "the system kills what takes too much memory: try fewer --loader-workers"
            raise RankFailed(rank, size, f"lost a process that fetches its batches ({lost.group()}): {why}") from None
        raise


def hear_of_worker(error: Exception) -> str:
    """What `error` says or, where a worker may just have hung up on the rank, what torch says next. Its handler of
    SIGCHLD raises `RuntimeError`, wherever the rank then is; after this it does so no more."""
    try:
        if isinstance(error, (EOFError, OSError)):
            time.sleep(NEWS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError as news:
        error = news
    return f"{error.__cause__} {error}"  # only one of the two may name the signal


def run_training(rank: int, size: int, lesson: Remote, settings: Any, more: tuple[Any, ...] = ()) -> Any:
    """What `lesson(rank, size, settings, *more)` returns. Ranks agree on their settings, and each keeps to its place.
    Raises `UsageError` if the ranks were not all given the same settings."""
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    with explain_lost_worker(rank, size):
        return lesson(rank, size, settings, *more)
