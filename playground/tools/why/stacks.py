"""The stacks of ranks that keep no flight recorder, as py-spy reads them. Does not import torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import Any

from playground.base.frames import is_program
from playground.base.ranks import group_alike, name_ranks
from playground.base.untrusted import printable
from playground.base.wrapping import WIDTH
from playground.explain.hang.wording import name_caller

PY_SPY = "py-spy"
LIMIT = 10.0
"""Seconds in which all stacks have to be read."""
REFUSED = re.compile(r"permission denied|operation not permitted|ptrace", re.IGNORECASE)
"""What py-spy says where the system does not let it look into another process."""
OF_PYTHON = re.compile(r"/lib/python3\.\d+/|^<")
"""In the path of a module of Python's own, whichever Python the ranks run."""

FORKED = "/multiprocessing/process.py"
"""The end of the path of the module in which a worker's own calls begin."""
MAY_NOT = (
    "py-spy may not look at ranks: the system refuses it (ptrace). Root may; in a container, "
    "start that with --cap-add SYS_PTRACE"
)


@dataclass(frozen=True)
class Stacks:
    """What py-spy has read of ranks."""

    found: Mapping[int, Sequence[str]]
    """By number, the program's lines, the innermost first."""
    errors: Mapping[int, str]
    """What it says of those that it could not read."""

    def rename(self, names: Mapping[int, int]) -> Stacks:
        """The same by other numbers: `names` has one for each."""
        return Stacks(
            {names[each]: lines for each, lines in self.found.items()},
            {names[each]: error for each, error in self.errors.items()},
        )


def find_py_spy() -> str | None:
    """The program, beside this interpreter or in PATH."""
    beside = os.path.dirname(sys.executable)
    return shutil.which(PY_SPY, path=os.pathsep.join((beside, os.environ.get("PATH", ""))))


def read_stacks(program: str, pids: Mapping[int, int]) -> Stacks:
    """The stacks of these processes, by the numbers that they have here. py-spy pauses only those
    that it can not read otherwise, as they compute."""
    first = dump(program, pids, "--nonblocking")
    rest = {rank: pids[rank] for rank, error in first.errors.items() if error != MAY_NOT}
    second = dump(program, rest)
    return Stacks({**first.found, **second.found}, {
        rank: second.errors.get(rank, error)
        for rank, error in first.errors.items()
        if rank not in second.found
    })  # fmt: skip


def dump(program: str, pids: Mapping[int, int], *options: str) -> Stacks:
    """What py-spy tells of these processes at the same time."""
    words = [program, "dump", "--json", *options, "--pid"]
    looks = {
        rank: subprocess.Popen(
            [*words, str(pid)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank, pid in pids.items()
    }  # fmt: skip
    end = time.monotonic() + LIMIT
    found, errors = dict[int, Sequence[str]](), dict[int, str]()
    for rank, look in looks.items():
        try:
            out, err = look.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            look.kill()
            look.communicate()
            out, err = "", f"no answer in {LIMIT:.0f} s"
        if look.returncode:
            first = err.strip().partition("\n")[0]
            errors[rank] = MAY_NOT if REFUSED.search(err) else f"py-spy: {printable(first)}"
        else:
            found[rank] = parse_dump(out, pids[rank])
    return Stacks(found, errors)


def parse_dump(text: str, pid: int) -> list[str]:
    """The program's lines on the stack of a process's main thread, the innermost first, by what
    py-spy prints as JSON: "train.py:12 in step". Without those of the parent, which a fork has on
    its stack, too."""
    threads: list[dict[str, Any]] = json.loads(text)
    frames = (frame for each in threads if each["os_thread_id"] == pid for frame in each["frames"])
    main = takewhile(lambda frame: not frame["filename"].endswith(FORKED), frames)
    return [
        printable(f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}")
        for frame in main
        if is_program(frame["filename"]) and not OF_PYTHON.search(frame["filename"])
    ]


def describe_stacks(stacks: Stacks) -> list[str]:
    """Where the ranks are, those that are at the same place together, and why it is not known of
    some."""
    places = {rank: describe_lines(lines) for rank, lines in stacks.found.items()}
    told = [f"  {name_ranks(ranks)}: {place}" for place, ranks in group_alike(places).items()]
    whys = [f"  {name_ranks(ranks)}: {why}" for why, ranks in group_alike(stacks.errors).items()]
    return [*told, *(fill(why, WIDTH, subsequent_indent="  ") for why in whys)]


def describe_lines(lines: Sequence[str]) -> str:
    """A stack in a line: "eval.py:38 in evaluate, called in main :70"."""
    if not lines:
        return "in no line of the program"
    place, *callers = lines
    caller = next((each for each in callers if not each.endswith(" in <module>")), "")
    return name_caller(place, caller) if caller else place
