"""A rank that waits for a worker of a DataLoader: its own stack has the line of the loop, and not
the line at which the worker stands. Does not import torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from playground.base.frames import is_program
from playground.base.process_status import list_processes, process_status, read_wait
from playground.explain.hang.box import FRAME, QUESTION, View, find_line, find_lines
from playground.explain.hang.states import RankState

OF_TORCH = re.compile(r"/torch/")
STANDS_IN = re.compile(r"wrapper$|inner(_func)?$|decorate_context$|_no_grad_wrapper$|_fn$")
"""Names of functions that decorators of torch put in the place of another."""
IN_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
WAITS_IN = ("_try_get_data", "_get_data")
"""The functions of a DataLoader in which it waits for the next batch of its workers."""
NAME = "pt_data_worker"
"""What torch calls the process of a worker."""
IDLE = re.compile("poll")
"""In the function of the kernel in which a worker waits that has nothing to do."""
WITHOUT_WORKERS = "num_workers=0 shows the line at which the worker stands"
"""The cure where the others wait for a rank that waits for one of several workers."""
UNHEARD_WORKER = "py-spy dump --pid {pid} (pip install py-spy) shows the line of the worker"
"""That where they wait for one that does not say where it stands."""
HEARD_WORKER = "look at what the worker does there: the others wait for its rank"
"""That where it does."""
OF_ONE = re.compile(r"a DataLoader worker \(process (\d+)\)")


def add_place(state: RankState, stack: Sequence[str], pid: int, box: View | None) -> RankState:
    """The state of a rank, process `pid`, with where it is by its stack, and if that is in the loop
    of a DataLoader, with the worker that it waits for, and where that one is."""
    worker = describe_worker(stack, pid)
    one = OF_ONE.match(worker)
    answers = box is not None and one is not None and takes_questions(int(one[1]))
    return replace(
        state,
        line=find_line(stack),
        stack=(*find_lines(stack),),
        called=find_called(stack),
        worker=worker,
        worker_line=find_line(box.ask_for_stack(int(one[1]))) if answers and box and one else "",
    )


def find_called(stack: Sequence[str]) -> str:
    """The function of torch that the program's innermost line has called, by its stack, innermost
    frame first, if it has a public name: the outermost that stands in no other's place. Empty if
    there is none."""
    frames = [*filter(None, map(FRAME.match, stack))]
    at = next((at for at, each in enumerate(frames) if is_program(each[1])), 0)
    inner = [each for each in frames[:at] if not STANDS_IN.match(each[3])]
    is_public = inner and OF_TORCH.search(inner[-1][1]) and not inner[-1][3].startswith("_")
    return inner[-1][3] if is_public else ""


def takes_questions(pid: int) -> bool:
    """Whether a process handles the signal by which a rank is asked for its stack: a worker that a
    rank has forked does, as the rank. Source: proc_pid_status(5)"""
    with contextlib.suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return bool(found and int(found[1], 16) >> (QUESTION - 1) & 1)
    return False


def find_cure_of_worker(state: RankState) -> str:
    """The cure where the others wait for a rank that waits for its worker."""
    if state.worker_line:
        return HEARD_WORKER
    one = OF_ONE.match(state.worker)
    return UNHEARD_WORKER.format(pid=one[1]) if one else WITHOUT_WORKERS


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
