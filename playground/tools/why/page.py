"""The command `why`: who waits for whom in a run of this host. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill

import click

from playground.base.errors import UsageError
from playground.base.process_status import list_processes, process_status
from playground.base.untrusted import printable
from playground.base.wrapping import WIDTH
from playground.explain.hang import UNASKED, Doing, RankState, diagnosis
from playground.explain.hang.box import View, find_boxes, is_box
from playground.explain.hang.wording import shorten
from playground.explain.hang.workers import add_place
from playground.tools import TOOLS
from playground.tools.why.family import list_family
from playground.tools.why.stacks import find_py_spy
from playground.tools.why.unrecorded import (
    BETWEEN_LOOKS,
    describe_unrecorded,
    find_unrecorded,
    see,
)
from playground.ui.session import Session, session_command, to_document

MOST_WHOLE = 3
"""As many worlds are told of in full. Of each of more, there is a line."""
TORCHRUN = "torchrun", "torch.distributed.run"
"""The ends of a word in the command line of a torchrun."""
OF_A_RANK = 20
"""Hundredths of a second of processor time that a rank uses at least; what else torchrun starts
uses less."""
NOT_FORMED = "no rank has formed a process group, or called an operation of one"


def find_worlds(pid: int) -> list[list[View]]:
    """The flight recorders of each world that process `pid` has started, or is a rank of, and that
    has not finished; of those on this host. Raises `UsageError` if there is none."""
    worlds = {world for box in find_boxes(list_family(pid)) if (world := box.world)}
    if not worlds:
        unrecorded, _ = find_unrecorded(pid)
        if any(rank.is_ours for rank in unrecorded):
            raise UsageError(f"the ranks of process {pid} are starting: ask again")
        command = find_command(pid)
        if command.partition(" ")[0] == "run":
            raise UsageError(f"the run of process {pid} is starting: ask again")
        if command:
            raise UsageError(f"process {pid} has no ranks yet: if it starts some, ask again")
        if is_torchrun(pid) and not unrecorded and has_had_ranks(pid):
            raise UsageError(
                f"process {pid} has no ranks any more: what it prints says how they ended"
            )
        if is_torchrun(pid):
            raise UsageError(f"the ranks of process {pid} are starting: ask again")
        raise UsageError(
            f"process {pid} has started no ranks that may be looked at: start a script by "
            "python -m playground run -n 2 SCRIPT.py, or examine it by python -m playground doctor "
            "SCRIPT.py"
        )
    boxes = [*find_boxes(list_processes())]
    found = [[box for box in boxes if box.world == world] for world in sorted(worlds)]
    if unfinished := [world for world in found if not all(box.has_ended for box in world)]:
        return unfinished
    raise UsageError(f"the ranks of process {pid} have finished: if it starts others, ask again")


def has_boxes(pid: int) -> bool:
    """Whether a process in the family of process `pid` keeps a flight recorder of a world."""
    return any(box.world for box in find_boxes(list_family(pid)))


def find_command(pid: int) -> str:
    """The words after `python -m playground`, or `playground`, with which this user has started
    process `pid`; empty for any other process."""
    with contextlib.suppress(OSError):  # it has ended since
        if os.stat(f"/proc/{pid}").st_uid == os.getuid():
            return shlex.join(words_of_ours(read_words(pid)))
    return ""


def words_of_ours(words: Sequence[str]) -> Sequence[str]:
    """What follows `python -m playground`, or the script `playground`, in a command line; nothing
    in any other."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in ("-X", "-W") else 1  # an option of Python's
    if [*words[at : at + 2]] == ["-m", "playground"]:
        return words[at + 2 :]
    is_ours = bool(words[at:]) and os.path.basename(words[at]) == "playground"
    return words[at + 1 :] if is_ours else ()


def is_torchrun(pid: int) -> bool:
    """Whether process `pid` is a torchrun."""
    with contextlib.suppress(OSError):  # it has ended since
        return any(word.endswith(TORCHRUN) for word in read_words(pid))
    return False


def has_had_ranks(pid: int) -> bool:
    """Whether children of process `pid` have ended that used as much processor time as a rank does.
    Source: proc_pid_stat(5)"""
    return sum(map(int, process_status(pid)[13:15])) >= OF_A_RANK


def read_words(pid: int) -> list[str]:
    """The command line of a process. Source: proc_pid_cmdline(5)"""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return line.split("\0")[:-1]


def find_run() -> int:
    """The process of the one run of `python -m playground` that this user has ranks of. Raises
    `UsageError` if there are none, or several."""
    known = {pid: find_command(pid) for pid in list_processes()}
    runs, told_of = dict[int, str](), set[object]()
    for pid, command in sorted(known.items()):
        worlds = {
            box.world
            for box in (find_boxes(list_family(pid)) if command else ())
            if box.world and not box.has_ended
        }
        if worlds - told_of:  # not of each rank that torchrun has started
            runs[pid] = command
        told_of |= worlds
    if len(runs) == 1:
        return next(iter(runs))
    if runs:
        told = (shorten(f"  {pid}  {printable(command)}", WIDTH) for pid, command in runs.items())
        raise UsageError("\n".join(("there are several runs: give the PID of one", *told)))
    raise UsageError("no run of yours has ranks now: give the PID of a program")


def look_twice(boxes: Sequence[View]) -> list[RankState]:
    """The state of each rank. One that goes on between two looks is in the program. From outside,
    no deadlock is proved: its launcher does that."""
    before = [box.progress for box in boxes]
    time.sleep(BETWEEN_LOOKS)
    states = [box.read_since(was) for box, was in zip(boxes, before, strict=True)]
    return [
        locate(state, box) if state.doing == Doing.IN_PROGRAM else replace(state, may_act=UNASKED)
        for state, box in zip(states, boxes, strict=True)
    ]


def locate(state: RankState, box: View) -> RankState:
    """The state of a rank that is in the program, with where it is."""
    state = replace(state, may_act=UNASKED)
    return add_place(state, box.ask_for_stack(), box.pid, box)


def tell_world(states: Sequence[RankState]) -> str:
    """The diagnosis of a world, or that its ranks have called nothing so far."""
    has_called = any(state.counts or state.unnamed for state in states)
    return diagnosis.tell(states) if has_called else diagnosis.tell(states, NOT_FORMED)


def tell_more(states: Sequence[RankState], boxes: Sequence[View]) -> Iterator[str]:
    """The commands that show where ranks are that are in no operation, and do not say so."""
    for state, box in zip(states, boxes, strict=True):
        if state.doing == Doing.IN_PROGRAM and not state.line:
            yield f"where rank {state.rank} is: py-spy dump --pid {box.pid} (pip install py-spy)"


def describe_launcher(boxes: Sequence[View]) -> str:
    """Whose ranks these are: the process that has started them, its command, and since when."""
    inodes = {os.fstat(box.file).st_ino for box in boxes}
    others = {box.pid for box in boxes} | {os.getpid()}
    with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
        launcher = next(
            (
                pid
                for pid in list_processes()
                if pid not in others and inodes & find_open_boxes(pid)
            ),
            int(process_status(boxes[0].pid)[1]),  # torchrun opens none
        )
        words = read_words(launcher)
        if words and os.path.basename(words[0]).startswith("python"):
            words[0] = "python"
        since = format_age(read_age(launcher))
        return (
            f"the ranks of process {launcher}: {printable(shlex.join(words))}, started {since} ago"
        )
    return "the ranks of a process that has ended"


def read_age(pid: int) -> float:
    """Seconds since a process was started. Source: proc_pid_stat(5), proc_uptime(5)"""
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - int(process_status(pid)[19]) / os.sysconf("SC_CLK_TCK")


def format_age(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def find_open_boxes(pid: int) -> set[int]:
    """The inodes of the flight recorders that a process has open."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        for file in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{file}"
            if is_box(path):
                found.add(os.stat(path).st_ino)
    return found


@session_command(
    "why",
    click.argument("pid", metavar="[PID]", type=click.IntRange(min=1), required=False),
    only=("as_json",),
    short_help=TOOLS["why"].purpose,
)
def command(session: Session, pid: int | None) -> None:
    """Say who waits for whom in the run of process PID: that of `python -m playground`, of a script
    that calls `launch()`, of pytest, of a torchrun of one of our commands, or any rank's. Without
    PID, in the one `python -m playground` of yours that has ranks. The run goes on undisturbed.

    Not seen from here: ranks on other hosts. Of a script that torchrun alone has started, it says
    which ranks compute, at which line each is if py-spy is installed, and the commands that tell
    more. The exit code is 0 if it answers, whatever
    the answer is, and 2 if there are no ranks to be asked.
    """
    pid = pid or find_run()
    if not Path(f"/proc/{pid}").exists():
        raise UsageError(f"there is no process {pid}: ps -ef lists those that run")
    unrecorded, workers = find_unrecorded(pid)
    if unrecorded and not any(rank.is_ours for rank in unrecorded) and not has_boxes(pid):
        if len({rank.rank for rank in unrecorded}) < len(unrecorded):
            raise UsageError(f"process {pid} has ranks of several runs: give the PID of a torchrun")
        program = find_py_spy()
        seen, of_workers = see(unrecorded, program), see(workers, program)
        document = {"worlds": [], "unrecorded": seen.to_json(), "workers": of_workers.to_json()}
        text = describe_unrecorded(seen, of_workers)
        click.echo(to_document(document, indent=2) if session.run.as_json else text)
        return
    views = find_worlds(pid)
    worlds = [look_twice(boxes) for boxes in views]
    found = [{"ranks": ranks, "diagnosis": diagnosis.diagnose(ranks)} for ranks in worlds]
    tell = tell_shortly if len(worlds) > MOST_WHOLE else tell_whole
    told = (tell(ranks, boxes) for ranks, boxes in zip(worlds, views, strict=True))
    between = "\n" if tell is tell_shortly else "\n\n"
    click.echo(
        to_document({"worlds": found}, indent=2) if session.run.as_json else between.join(told)
    )


def tell_whole(ranks: Sequence[RankState], boxes: Sequence[View]) -> str:
    """Whose ranks these are, who waits for whom, and what tells more."""
    whose = fill(describe_launcher(boxes), WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join((whose, tell_world(ranks), *tell_more(ranks, boxes)))


def tell_shortly(ranks: Sequence[RankState], boxes: Sequence[View]) -> str:
    """The same in a line, of one world among many."""
    sentence = tell_world(ranks).partition("\nrank ")[0]
    return f"{describe_launcher(boxes)}: {' '.join(sentence.split())}"
