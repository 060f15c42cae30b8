"""Ranks that keep no flight recorder, by what the system says of them. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from playground.base.process_status import process_status
from playground.tools.why.family import list_family

BETWEEN_LOOKS = 0.3
"""Seconds: a rank that makes no progress meanwhile stands still."""
COMPUTING = 3
"""Hundredths of a second of CPU time between two looks of a rank that computes: one that waits
takes none."""


@dataclass(frozen=True)
class UnrecordedRank:
    """A rank that keeps no flight recorder, by what the system says of it."""

    pid: int
    environ: Mapping[str, str]
    words: Sequence[str]
    """Its command line, without the interpreter."""


def find_unrecorded(pid: int) -> Iterator[UnrecordedRank]:
    """The ranks in the family of process `pid`, by the variables that torchrun sets."""
    for member in list_family(pid):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            start, words = (
                Path(f"/proc/{member}/{file}").read_bytes().decode(errors="replace").split("\0")
                for file in ("environ", "cmdline")
            )
            environ = {name: value for name, _, value in (entry.partition("=") for entry in start)}
            if {"RANK", "WORLD_SIZE"} <= environ.keys() and words[1:-1]:
                words = words[1:-1]
                yield UnrecordedRank(member, environ, words[words[0] == "-u" :])


def describe_unrecorded(pid: int) -> str:
    """What is seen from outside of such ranks, and the commands that tell more; empty if there is
    none."""
    if not (ranks := [*find_unrecorded(pid)]):
        return ""
    before = [process_status(rank.pid) for rank in ranks]
    time.sleep(BETWEEN_LOOKS)
    seen = [
        f"rank {rank.environ['RANK']} (process {rank.pid}) "
        f"{describe_activity(was, process_status(rank.pid), read_wait(rank.pid))}"
        for rank, was in zip(ranks, before, strict=True)
    ]
    first = ranks[0]
    words = shlex.join(first.words)
    folder = os.path.realpath(f"/proc/{first.pid}/cwd")
    there = f"cd {shlex.quote(folder)} && " if folder != os.getcwd() else ""
    size = first.environ.get("LOCAL_WORLD_SIZE", first.environ["WORLD_SIZE"])
    ways = [
        f"for who waits for whom, start it by: {there}python -m playground run -n {size} {words}"
    ]
    if first.words[0] != "-m":
        ways.append(f"to examine the script: {there}python -m playground doctor {words}")
    ways.append(f"for a rank's stack: py-spy dump --pid {first.pid} (pip install py-spy)")
    return "\n".join(["torchrun alone gives a script no flight recorder", *seen, *ways])


WAITS = {
    "nanosleep": "sleeps (a timer)",
    "futex": "waits (for another thread, as in a collective of gloo)",
    "inet_": "waits (a socket)",
    "sk_wait": "waits (a socket)",
    "poll": "waits (a socket)",
    "pipe": "waits (a pipe)",
}
"""What a process does whose main thread waits in a function of the kernel with such a name."""


def read_wait(pid: int) -> str:
    """The function of the kernel in which the main thread of a process waits; empty where the
    system does not tell. Source: proc_pid_wchan(5)"""
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n")
    return ""


def describe_activity(before: Sequence[bytes], now: Sequence[bytes], wait: str = "") -> str:
    """What a process does, by two looks at its status, which has the state, and ticks of CPU time;
    and by the function of the kernel in which it waits."""
    if not (before and now):
        return "has ended"
    if now[0] == b"T":
        return "is stopped"
    ticks = sum(map(int, now[11:13])) - sum(map(int, before[11:13]))
    is_runnable = before[0] == now[0] == b"R"  # on a busy machine it may have no core meanwhile
    if is_runnable or ticks >= COMPUTING:
        return "computes"
    return next((words for name, words in WAITS.items() if name in wait), "waits")
