"""Inside a rank: record what it does while it runs a function."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from playground.runtime import device
from playground.runtime.agreement import all_gather_object
from playground.runtime.host import cores, host_id
from playground.see.record.container import trim
from playground.see.record.device import DeviceRecorder, Gpu
from playground.see.record.hooks import installed
from playground.see.record.layout import FILES, RUN, file_name
from playground.see.record.ping_pong import ROUNDS, compare_clocks
from playground.see.record.recorder import Recorder
from playground.see.record.tables import CLOCK

FEW_ROUNDS = 10
"""To compare clocks on one host: they are the same."""
_recorders: list[Recorder] = []
"""That of this process, while it records."""


@contextlib.contextmanager
def recorded(
    folder: Path, rank: int, size: int, run: str = "", clock: Callable[[], int] = time.perf_counter_ns
) -> Iterator[Recorder]:
    """Record what this rank does in this block, into `folder`. All ranks must enter it, and leave it unless they fail.

    When they have left it, what was recorded on other hosts than rank 0's is in rank 0's folder too. `run` is what is
    written into run.json there; `clock` gives nanoseconds.
    """
    hosts = all_gather_object(host_id())
    about = {"host": socket.gethostname(), "host_id": hosts[rank], "device": str(device()), "cores": cores()}
    with contextlib.suppress(OSError):  # of which the recorder tells
        folder.mkdir(parents=True, exist_ok=True)
    recorder = new_recorder(folder, rank, clock=clock, **about)
    if run:
        with contextlib.suppress(OSError):  # then the launcher writes it
            (folder / RUN).write_text(run)
    _recorders[:] = [recorder]
    strangers = [other for other, host in enumerate(hosts) if host != hosts[0]]
    try:
        compare(recorder, rank, strangers, ROUNDS)
        if not strangers and device().type == "cpu":
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


def new_recorder(folder: Path, rank: int, **more: Any) -> Recorder:
    """One that takes the times of this rank's device, too, if that has its own."""
    if device().type == "cuda":
        return DeviceRecorder(folder, rank, gpu=Gpu(device()), **more)
    return Recorder(folder, rank, **more)


def compare(recorder: Recorder, rank: int, ranks: list[int], rounds: int) -> None:
    """Compare the clocks of these ranks with rank 0's, and write down what came of it."""
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


def forget() -> None:
    """A process that was forked from a rank, such as a worker of a DataLoader, is not the rank."""
    while _recorders:
        _recorders.pop().let_go()


os.register_at_fork(after_in_child=forget)
