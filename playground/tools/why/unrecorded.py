"""Ranks that keep no flight recorder, by what the system says of them. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from playground.base.process_status import process_status, read_wait
from playground.tools.why.family import list_family
from playground.tools.why.stacks import Stacks, describe_lines, describe_stacks, read_stacks
from playground.ui.units import plural

BETWEEN_LOOKS = 0.3
"""Seconds: a rank that makes no progress meanwhile stands still."""
COMPUTING = 3
"""Hundredths of a second of CPU time between two looks of a rank that computes: one that waits
takes none."""

OF_WORKERS = re.compile(r"multiprocessing\.(spawn|forkserver)\b")
"""In the command line of a process that multiprocessing has started anew."""


@dataclass(frozen=True)
class Seen:
    """What is seen from outside of ranks, or of their workers."""

    processes: Sequence[UnrecordedRank]
    acts: Sequence[str]
    """What each does."""
    stacks: Stacks | None
    """Where each is, by process; None without py-spy."""

    def to_json(self) -> list[dict[str, object]]:
        found = self.stacks.found if self.stacks else {}
        return [
            {"rank": each.rank, "process": each.pid, "does": act, "stack": found.get(each.pid, [])}
            for each, act in zip(self.processes, self.acts, strict=True)
        ]


@dataclass(frozen=True)
class UnrecordedRank:
    """A rank that keeps no flight recorder, or a worker of one, by what the system says of it."""

    pid: int
    environ: Mapping[str, str]
    words: Sequence[str]
    """Its command line, without the interpreter."""

    @property
    def rank(self) -> int:
        return int(self.environ["RANK"])

    @property
    def is_ours(self) -> bool:
        """Whether it will keep a flight recorder: it is started by a command of ours."""
        return [*self.words[:2]] == ["-m", "playground"]


def find_unrecorded(pid: int) -> tuple[list[UnrecordedRank], list[UnrecordedRank]]:
    """The ranks in the family of process `pid`, and their workers. A process that a rank has
    started has the rank's variables, too: a rank is one whose parent has none."""
    found = {each.pid: each for each in list_unrecorded(pid)}
    started = {
        each.pid: found[parent]
        for each in found.values()
        if (parent := read_parent(each.pid)) in found
    }
    ranks = [each for each in found.values() if each.pid not in started]
    workers = [found[each] for each, by in started.items() if is_worker(found[each], by)]
    return ranks, workers


def read_parent(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    status = process_status(pid)
    return int(status[1]) if status else 0


def is_worker(process: UnrecordedRank, parent: UnrecordedRank) -> bool:
    """Whether a process is one that multiprocessing has forked or spawned for its parent."""
    return process.words == parent.words or any(map(OF_WORKERS.search, process.words))


def list_unrecorded(pid: int) -> Iterator[UnrecordedRank]:
    """Python's processes in the family of process `pid` that have the variables that torchrun
    sets."""
    for member in list_family(pid):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            start, words = (
                Path(f"/proc/{member}/{file}").read_bytes().decode(errors="replace").split("\0")
                for file in ("environ", "cmdline")
            )
            environ = {name: value for name, _, value in (entry.partition("=") for entry in start)}
            is_python = os.path.basename(words[0]).startswith("python")
            if {"RANK", "WORLD_SIZE"} <= environ.keys() and is_python and words[1:-1]:
                words = words[1:-1]
                yield UnrecordedRank(member, environ, words[words[0] == "-u" :])


def see(processes: Sequence[UnrecordedRank], py_spy: str | None) -> Seen:
    """What such ranks, or workers, do, and where they are."""
    acts = describe_ranks(processes)
    pids = [each.pid for each in processes]
    return Seen(
        processes, acts, read_stacks(py_spy, {pid: pid for pid in pids}) if py_spy else None
    )


def describe_unrecorded(ranks: Seen, workers: Seen) -> str:
    """What is seen from outside of such ranks, each with what it does, and where it is, if py-spy
    is there to tell; the same of their workers; and the commands that tell more."""
    seen = [
        f"rank {rank.rank} (process {rank.pid}) {act}"
        for rank, act in zip(ranks.processes, ranks.acts, strict=True)
    ]
    late = find_late(ranks.processes, ranks.acts)
    if late:
        seen.append(f"the others probably wait for rank {late.rank}")
    if ranks.stacks:
        places = ranks.stacks.rename({each.pid: each.rank for each in ranks.processes})
        seen += ["where they are, by py-spy:", *describe_stacks(places)]
    seen += describe_workers(workers)
    first = ranks.processes[0]
    words = shlex.join(first.words)
    folder = os.path.realpath(f"/proc/{first.pid}/cwd")
    there = f"cd {shlex.quote(folder)} && " if folder != os.getcwd() else ""
    size = first.environ.get("LOCAL_WORLD_SIZE", first.environ["WORLD_SIZE"])
    ways = [
        f"for who waits for whom, start it by: {there}python -m playground run -n {size} {words}"
    ]
    if first.words[0] != "-m":
        ways.append(f"to examine the script: {there}python -m playground doctor {words}")
    if ranks.stacks is None:
        pids = " ".join(str(each.pid) for each in (*ranks.processes, *workers.processes))
        loop = f"for pid in {pids}; do py-spy dump --pid $pid; done"
        ways.append(
            f"for the line of each: pip install py-spy, beside python, and ask again; or {loop}"
        )
    return "\n".join(["torchrun alone gives a script no flight recorder", *seen, *ways])


def describe_workers(workers: Seen) -> Iterator[str]:
    """What each worker does, and where; if py-spy tells that, the number of those that are in no
    line of the program."""
    idle = 0
    for worker, act in zip(workers.processes, workers.acts, strict=True):
        name = f"worker of rank {worker.rank} (process {worker.pid})"
        lines = workers.stacks.found.get(worker.pid) if workers.stacks else None
        if lines:
            yield f"{name} {act}: {describe_lines(lines)}"
        elif lines is None:
            yield f"{name} {act}"
        else:
            idle += 1
    if idle:
        yield f"{plural(idle, 'worker')} in no line of the program"


def describe_ranks(ranks: Sequence[UnrecordedRank]) -> list[str]:
    """What each rank does: between two looks at its status."""
    before = [process_status(rank.pid) for rank in ranks]
    time.sleep(BETWEEN_LOOKS)
    acts = [
        describe_activity(was, process_status(rank.pid), read_wait(rank.pid))
        for rank, was in zip(ranks, before, strict=True)
    ]
    return [
        STARTS if act == COMPUTES and not has_met(rank) else act
        for rank, act in zip(ranks, acts, strict=True)
    ]


def find_late(ranks: Sequence[UnrecordedRank], acts: Sequence[str]) -> UnrecordedRank | None:
    """The rank for which the others probably wait: the only one that does not wait, if all others
    have met. None if there is no such one."""
    late = [
        rank
        for rank, act in zip(ranks, acts, strict=True)
        if not (act.startswith("waits") and has_met(rank))
    ]
    return late[0] if len(late) == 1 < len(ranks) else None


def has_met(rank: UnrecordedRank) -> bool:
    """Whether a rank has a connection to the store of its world, or has the store itself. Source:
    proc_pid_net(5)"""
    port = int(rank.environ.get("MASTER_PORT", "0"))
    with contextlib.suppress(OSError):  # it has ended
        files = (f"/proc/{rank.pid}/fd/{file}" for file in os.listdir(f"/proc/{rank.pid}/fd"))
        own = {os.readlink(file) for file in files}
        for kind in ("tcp", "tcp6"):
            table = Path(f"/proc/{rank.pid}/net/{kind}").read_text(encoding="ascii")
            for words in map(str.split, table.splitlines()[1:]):
                ports = {int(address.rpartition(":")[2], 16) for address in words[1:3]}
                if port in ports and f"socket:[{words[9]}]" in own:
                    return True
    return False


COMPUTES, STARTS = "computes", "starts (it has not met the others so far)"
WAITS = {
    "nanosleep": "sleeps (a timer)",
    "futex": "waits (for another thread, as in a collective of gloo)",
    "inet_": "waits (a socket)",
    "sk_wait": "waits (a socket)",
    "poll": "waits (a socket)",
    "pipe": "waits (a pipe)",
}
"""What a process does whose main thread waits in a function of the kernel with such a name."""


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
        return COMPUTES
    return next((words for name, words in WAITS.items() if name in wait), "waits")
