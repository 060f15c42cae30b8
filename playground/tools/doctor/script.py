"""The tier of a script for torchrun: it runs here for a while, on two ranks and then on three, and the ranks' black
boxes tell what would break on nccl, on more ranks, or with unequal data. Each run has a copy of the files, so that the
script does not overwrite the user's. Does not import torch.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from playground.measurement import format_bytes
from playground.runtime.black_box import UNASKED, Kind, Operation, RankState
from playground.runtime.black_box.box import SWITCH, TIME_LIMIT, View, find_boxes
from playground.runtime.black_box.diagnosis import Diagnosis, diagnose, find_mismatch
from playground.runtime.errors import RankFailed, RankTimeout, UsageError
from playground.runtime.launcher.examine import line_of
from playground.runtime.launcher.launch import launch
from playground.runtime.rank.rank import Event, report
from playground.runtime.remote import syntax_errors_in_one_line

SIZES = (2, 3)
"""Numbers of ranks on which it runs: three are the fewest of an odd number."""
FAILED = "failed"
COPIED = 2**30
"""Bytes that are copied for a run, at most."""
LEADER = "process group"
"""Key of a report: the id of the process group that a rank leads. With a space, it is none of the script's own."""


class Elapsed(Exception):
    """The time of a run is up."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The script on one number of ranks."""

    size: int
    has_returned: bool
    """Whether all ranks have returned: otherwise it has failed, or its time was up."""
    failure: str = ""
    """That of a rank: a deadlock is in the diagnosis alone."""
    diagnosis: Diagnosis | None = None
    states: Sequence[RankState] = field(default=(), repr=False)

    @property
    def outcome(self) -> str:
        failed = FAILED if self.failure or self.diagnosis else "stopped when their time was up"
        return "returned" if self.has_returned else failed


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is known of a script."""

    path: Path
    folder: str
    """Where the copies were in which it ran."""
    runs: Sequence[Run]

    def operations(self) -> Iterator[Operation]:
        return (one for run in self.runs for state in run.states for one in state.operations)


def examine(path: Path, words: Sequence[str], seconds: float, timeout: float) -> Script:
    """Run `path` with its arguments `words`, for `seconds` at most on each number of ranks, until a run fails. Raises
    `UsageError` for what is no script in Python, for one that calls no operation, and without black boxes."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        raise UsageError(f"doctor {path} reads the ranks' black boxes: it needs Linux, and not {SWITCH}=0")
    try:
        with syntax_errors_in_one_line():
            ast.parse(path.read_bytes(), str(path))
    except (OSError, ValueError) as failure:
        raise UsageError(f"{path} cannot be read as a script in Python ({failure}): name one for torchrun") from None
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        while len(runs) < len(SIZES) and not any(run.failure or run.diagnosis for run in runs):
            size = SIZES[len(runs)]
            here, argv = copy_files(Path(os.path.abspath(path)), words, Path(folder).resolve() / f"{size}-ranks")
            runs.append(run_script(here, argv, size, seconds, timeout))
    script = Script(path=path, folder=folder, runs=runs)
    if runs[-1].outcome != FAILED and not any(script.operations()):
        raise UsageError(
            f"{path} called no operation of torch.distributed within {seconds:g} s: name a script for torchrun, whose "
            f"ranks are started for it, or raise --seconds"
        )
    return script


def is_copied(path: Path, target: Path) -> bool:
    is_plain = (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)
    return is_plain and not (path / "pyvenv.cfg").is_file() and path.resolve() not in target.parents


def copy_files(path: Path, words: Sequence[str], target: Path) -> tuple[Path, list[str]]:
    """Copy the working folder, and that of the script if it lies elsewhere: returns the copy of the working folder, and
    the script's with its arguments, where what lies in a copied folder is the copy. Raises `UsageError` if there is
    more than `COPIED`, or no room for it."""
    left, copies = COPIED, dict[Path, Path]()

    def copy(source: str, to: str) -> None:
        nonlocal left
        left -= os.path.getsize(source)
        if left < 0:
            raise UsageError(
                f"doctor {path.name} runs it in a copy of {folder}, which has more than {format_bytes(COPIED)}: "
                f"start it in a folder with the script's files, and name data by an absolute path elsewhere"
            )
        shutil.copy2(source, to)

    def leave_out(place: str, names: list[str]) -> list[str]:
        """Virtual environments, what cannot be read, what is no file (a pipe has no end), and the copies themselves."""
        return [name for name in names if not is_copied(Path(place, name), target)]

    for folder in (Path.cwd(), path.parent):
        if not any(folder.is_relative_to(each) for each in copies):
            copies[folder] = target / str(len(copies)) / folder.name
            try:
                shutil.copytree(folder, copies[folder], ignore=leave_out, copy_function=copy)
            except OSError as failure:
                why = failure.args[0][0][2] if isinstance(failure, shutil.Error) else failure.strerror
                raise UsageError(f"doctor {path.name} runs it in a copy of {folder}, which fails: {why}") from None
    longest_first = sorted(map(str, copies), key=len, reverse=True)
    inside = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, longest_first))})(?=/|$)")
    argv = [inside.sub(lambda found: str(copies[Path(found[0])]), word) for word in (str(path), *words)]
    return next(iter(copies.values())), argv


def run_script(here: Path, argv: Sequence[str], size: int, seconds: float, timeout: float) -> Run:
    """The script on `size` ranks, in the working folder `here`."""
    boxes: dict[int, View] = {}
    groups: list[int] = []
    last: list[RankState] = []

    def listen(rank: int, event: Event) -> None:
        if LEADER in event:
            groups.append(event[LEADER])
            boxes.update((rank, view) for view in find_boxes(groups[-1:]))
        if TIME_LIMIT in event:
            last[:] = (boxes[rank].read() for rank in sorted(boxes))  # before they are stopped
            raise Elapsed

    quiet, has_returned, failure, why = logging.NullHandler(), False, "", None
    logging.getLogger("playground").addHandler(quiet)  # a mismatch is a finding
    try:
        launch(run_on_rank, size, args=(here, argv, seconds), timeout=timeout, on_report=listen, fresh=True)
        has_returned = True
    except Elapsed:
        waits = any(state.waits_for and state.since > seconds / 2 for state in last)
        why = diagnose([replace(state, may_act=UNASKED) for state in last]) if waits else None
        why = None if why and why.kind in (Kind.RUNNING, Kind.STRAGGLER) else why
    except (RankFailed, RankTimeout) as failed:
        line, why = line_of(failed.traceback) if isinstance(failed, RankFailed) else "", failed.diagnosis
        if not (why and isinstance(failed, RankTimeout)):
            failure = failed.headline + f" ({line})" * bool(line)
    finally:
        logging.getLogger("playground").removeHandler(quiet)
        for group in groups:  # what the script itself has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    states = last or [boxes[rank].read() for rank in sorted(boxes)]
    why = why or find_mismatch(states)
    return Run(size=size, has_returned=has_returned, failure=failure, diagnosis=why, states=states)


def run_on_rank(rank: int, size: int, here: Path, argv: Sequence[str], seconds: float) -> None:
    """Run the script as its own program, without its output."""
    os.setpgid(0, 0)
    report(**{LEADER: os.getpid()})
    if rank == 0:
        clock = threading.Timer(seconds, report, kwargs={TIME_LIMIT: seconds})
        clock.name, clock.daemon = TIME_LIMIT, True
        clock.start()
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    os.chdir(here)
    os.environ["PWD"] = str(here)
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
