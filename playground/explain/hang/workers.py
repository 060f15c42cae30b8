"""A rank that waits for a worker of a DataLoader: its own stack has the line of the loop, and not
the line at which the worker stands. Does not import torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from playground.base.process_status import list_processes, process_status, read_wait
from playground.explain.hang.box import FRAME

OF_TORCH = re.compile(r"/torch/")
IN_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
WAITS_IN = ("_try_get_data", "_get_data")
"""The functions of a DataLoader in which it waits for the next batch of its workers."""
NAME = "pt_data_worker"
"""What torch calls the process of a worker."""
IDLE = re.compile("poll")
"""In the function of the kernel in which a worker waits that has nothing to do."""
WITHOUT_WORKERS = "num_workers=0 shows the line at which the worker stands"
"""The cure where the others wait for a rank that waits for its worker."""


def describe_worker(stack: Iterable[str], pid: int) -> str:
    """The worker that process `pid` waits for, by its stack, innermost frame first: "a DataLoader
    worker (process 12), which sleeps". Empty if it waits for none."""
    frames = filter(None, map(FRAME.match, stack))
    frame = next((each for each in frames if OF_TORCH.search(each[1])), None)
    if frame is None or not IN_LOADER.search(frame[1]) or frame[3] not in WAITS_IN:
        return ""
    workers = {worker: read_wait(worker) for worker in list_workers(pid)}
    busy = [worker for worker, wait in workers.items() if not IDLE.search(wait)]
    if len(busy) == 1:
        return f"a DataLoader worker (process {busy[0]}), which {describe_act(busy[0])}"
    told = ", ".join(map(str, busy or workers))
    return f"a DataLoader worker (one of processes {told})" if told else "a DataLoader worker"


def list_workers(pid: int) -> Iterator[int]:
    """The workers that a process has started, ascending. Source: proc_pid_comm(5)"""
    for member in list_processes():
        with contextlib.suppress(OSError):  # it has ended
            name = Path(f"/proc/{member}/comm").read_text(encoding="utf-8", errors="replace")
            if name.strip() == NAME and process_status(member)[1:2] == [b"%d" % pid]:
                yield member


def describe_act(pid: int) -> str:
    """What a process does, in a word."""
    if process_status(pid)[:1] == [b"R"]:
        return "computes"
    return "sleeps" if "nanosleep" in read_wait(pid) else "waits"
