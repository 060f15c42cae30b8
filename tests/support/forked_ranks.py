"""Ranks without a launcher: processes forked from the one that asks, which share a segment. Nobody
ends them when one of them dies, so that they must notice by themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from playground.algorithms.segment import Segment, open_segment

fork: Any = multiprocessing.get_context("fork")


def run_forked(
    size: int, fn: Callable[..., Any], timeout: float, *args: Any
) -> list[tuple[Any, int | None]]:
    """What `fn(segment, *args)` returned on each of `size` ranks, or its error's text, or None; and
    its exit code.

    To be called by a rank of a world of one, which has torch, and no threads of its own at work but
    OpenMP's.
    """
    pipes = [fork.Pipe() for _ in range(size)]
    processes = [
        fork.Process(target=live, args=(number, pipes, fn, timeout, args)) for number in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    for _ in range(2):  # an exchange
        told = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(told)
    lines, results = {ours: number for number, (ours, _) in enumerate(pipes)}, dict[int, Any]()
    while lines.keys() - {
        pipes[number][0] for number, each in enumerate(processes) if is_stopped(each.pid)
    }:
        for line in wait([*lines], 0.1):
            with contextlib.suppress(EOFError):
                results[lines[line]] = line.recv()  # type: ignore[union-attr,call-arg]
            del lines[line]
    for number, process in enumerate(processes):
        if number not in results:
            process.kill()
        process.join()
    return [(results.get(number), process.exitcode) for number, process in enumerate(processes)]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def live(
    rank: int,
    pipes: Sequence[tuple[Connection, Connection]],
    fn: Callable[..., Any],
    timeout: float,
    args: Any,
) -> None:
    # the threads of OpenMP's pool are not forked along, and would be waited for
    torch.set_num_threads(1)
    line = pipes[rank][1]
    for number, (ours, theirs) in enumerate(pipes):
        ours.close()
        if number != rank:
            theirs.close()

    def exchange(values: Sequence[int]) -> list[tuple[int, ...]]:
        line.send(tuple(values))
        return list(line.recv())

    everyone = range(len(pipes))
    segment = open_segment(rank, [everyone], everyone, exchange, lambda: timeout)
    assert isinstance(segment, Segment), segment
    try:
        line.send(fn(segment, *args))
    except RuntimeError as error:
        line.send(str(error))
