"""In a rank: records a function that it runs.

Before and after it, ranks on several hosts compare their clocks with rank 0's. On a GPU a receive returns at once, and
only orders what comes after it: a message has arrived when its value has been read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device, steps
from playground.runtime.agreement import all_gather_object
from playground.runtime.host import cores, host_id
from playground.runtime.remote import Remote
from playground.see.record import PHASE
from playground.see.record.algorithms import recorded_algorithms
from playground.see.record.device import DeviceRecorder, Gpu
from playground.see.record.distributed import Groups, recorded_agents, recorded_distributed, replaced
from playground.see.record.layout import CLOCK, FILES, RUN, file_name, trim
from playground.see.record.merge import ClockSample
from playground.see.record.recorder import Recorder
from playground.see.record.training import BucketHooks, TrainingHooks, recorded_devices

ROUNDS = 100
"""Number of round trips, of which the shortest counts: nothing delayed it."""
TAG = 20171


def compare_clocks(rank: int, ranks: list[int], clock: Callable[[], int], rounds: int = ROUNDS) -> ClockSample | None:
    """Compare the clocks of `ranks`, one after the other, with rank 0's. These, and rank 0, must call this.

    Returns the comparison of this rank; None on rank 0. Source: Cristian, Probabilistic clock synchronization (1989)
    """
    ping, pong = torch.zeros(2, 1, dtype=torch.int64, device=device())
    if rank == 0:
        for other in ranks:
            for _ in range(rounds):
                dist.recv(ping, other, tag=TAG)
                ping.item()
                dist.send(pong.fill_(clock()), other, tag=TAG)
        return None
    samples = []
    for _ in range(rounds):
        asked = clock()
        dist.send(ping, 0, tag=TAG)
        dist.recv(pong, 0, tag=TAG)
        theirs, answered = int(pong.item()), clock()
        middle = (asked + answered) // 2
        samples.append(ClockSample(at=middle, offset=theirs - middle, bound=(answered - asked + 1) // 2))
    return min(samples, key=lambda sample: sample.bound)


FEW_ROUNDS = 10
"""Number of round trips on one host, where clocks are the same."""
_recorders: list[Recorder] = []
"""The active recorder of this process, if any."""


@contextlib.contextmanager
def recorded(
    folder: Path, rank: int, size: int, run: str = "", clock: Callable[[], int] = time.perf_counter_ns
) -> Iterator[Recorder]:
    """Record this rank in this block, into `folder`. All ranks must enter the block, and leave it unless they fail.

    Afterwards the files of other hosts are in rank 0's folder, too. `run` is the content of run.json there; `clock`
    returns nanoseconds.
    """
    hosts = all_gather_object(host_id())
    about = {"host": socket.gethostname(), "host_id": hosts[rank], "device": str(device()), "cores": cores()}
    with contextlib.suppress(OSError):  # the recorder reports it
        folder.mkdir(parents=True, exist_ok=True)
    is_gpu = device().type == "cuda"
    make: Callable[..., Recorder] = functools.partial(DeviceRecorder, gpu=Gpu(device())) if is_gpu else Recorder
    recorder = make(folder, rank, clock=clock, **about)
    if run:
        with contextlib.suppress(OSError):  # then the launcher writes it
            (folder / RUN).write_text(run)
    _recorders[:] = [recorder]
    strangers = [other for other, host in enumerate(hosts) if host != hosts[0]]
    try:
        compare(recorder, rank, strangers, ROUNDS)
        if not strangers and not is_gpu:
            compare(recorder, rank, list(range(1, size)), FEW_ROUNDS)
        with installed(recorder):
            yield recorder
        stands = dist.is_initialized() and dist.get_world_size() == size  # the function may have left its group
        if stands:
            compare(recorder, rank, strangers, ROUNDS)
    finally:
        _recorders.clear()
        recorder.stop()
    if stands and strangers:
        bring_to_rank_0(folder, rank, strangers)


def compare(recorder: Recorder, rank: int, ranks: list[int], rounds: int) -> None:
    """Compare the clocks of these ranks with rank 0's, and record the result."""
    if ranks and (rank == 0 or rank in ranks):
        sample = compare_clocks(rank, ranks, recorder.clock, rounds)
        if sample:
            recorder.tables.write(CLOCK, sample.at, sample.offset, sample.bound)


def bring_to_rank_0(folder: Path, rank: int, strangers: list[int]) -> None:
    """Copy the files of these ranks, which may be on other disks, into rank 0's folder. All ranks must call this."""
    files = {}
    if rank in strangers:
        present = (folder / file_name(rank, kind) for kind in FILES if (folder / file_name(rank, kind)).exists())
        files = {file.name: file.read_bytes() for file in present}
        files = {name: trim(name, content, files) for name, content in files.items()}
    for theirs in all_gather_object(files):
        if rank == 0:
            for name, content in theirs.items():
                try:
                    (folder / name).write_bytes(content)
                except OSError as error:
                    print(f"--see: {name} is missing in {folder} ({error.strerror})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def recorded_steps(recorder: Recorder) -> Iterator[None]:
    """Record each step of a lesson in this block as a phase."""

    def wrap(real: Any) -> Any:
        def attempt(step: Remote, *args: Any) -> Any:
            with recorder.span(PHASE, step.name):
                return real(step, *args)

        return attempt

    with replaced(steps, "attempt", wrap):
        yield


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Install all recorders in this block."""
    groups = Groups()
    with (
        recorded_distributed(recorder, groups),
        recorded_algorithms(recorder, groups),
        recorded_agents(recorder, groups),
        recorded_steps(recorder),
        recorded_devices(recorder),
        TrainingHooks(recorder, BucketHooks(recorder, groups)).installed(),
    ):
        yield


def forget() -> None:
    """Stop recording in a process that was forked from a rank, such as a worker of a DataLoader."""
    while _recorders:
        _recorders.pop().let_go()


os.register_at_fork(after_in_child=forget)
