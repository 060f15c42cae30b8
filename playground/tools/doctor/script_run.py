"""A script runs here for a while, in a copy of its folder: how that ends, and what flight recorders
and records of its training hold then. Does not import torch."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from playground.base.errors import (
    PeerDisconnected,
    RankFailed,
    RankTimeout,
    UsageError,
    has_timed_out,
)
from playground.base.process_status import process_status
from playground.base.threads import OurThread
from playground.explain.hang import (
    UNASKED,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.explain.hang.activity import RUNNABLE
from playground.explain.hang.box import View, find_boxes
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.differences import find_mismatch
from playground.explain.hang.wording import Diagnosis
from playground.explain.right.checked import Checked
from playground.explain.right.finding import Finding
from playground.explain.right.reading import read_ranks
from playground.explain.right.rules import find_mistakes
from playground.explain.starts import folder_of_last_start
from playground.tools.doctor.looked_at import LookedAt, describe_looks
from playground.ui.units import format_bytes
from playground.world.launcher.examiner import line_of
from playground.world.launcher.launch import launch
from playground.world.program import Program
from playground.world.rank.reports import Event, report

COPIED = 2**30
"""Bytes that are copied for a run, at most."""
LEADER = "process group"
"""Key of a report: the id of the process group that a rank leads. With a space, it is none of the
script's own."""
BETWEEN_LOOKS = 1.0
"""Seconds between two looks at ranks whose time is up: one that makes no progress waits."""
TIME_LIMIT = "time limit"
"""Key of the report that the time is up."""


class Elapsed(Exception):
    """The time of a run is up."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run of a script ended, and what is wrong in it."""

    size: int
    """Number of ranks."""
    has_returned: bool
    """Whether it has returned on all ranks; otherwise it has failed, or its time was up."""
    failure: str
    """The failure of a rank; empty for none, and if it has failed in an operation that the
    diagnosis explains."""
    diagnosis: Diagnosis | None
    """Why ranks wait, or what they called differently, if it is known."""
    mistakes: Sequence[Finding]
    """What is silently wrong."""
    looked_at: LookedAt
    stands: str = ""
    """Where the ranks were when their time was up; empty if the run has ended by itself."""
    had_finished: bool = False
    """Whether all ranks had come to the end of the script when their time was up."""

    @property
    def has_failed(self) -> bool:
        return bool(self.failure or self.diagnosis)


def is_copied(path: Path, target: Path) -> bool:
    is_plain = (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)
    return is_plain and not (path / "pyvenv.cfg").is_file() and path.resolve() not in target.parents


def copy_files(path: Path, target: Path) -> Path:
    """Copy the working folder to `target`. Returns the script there. Raises `UsageError` if the
    script is not in that folder, if there is more than `COPIED`, or no room for it."""
    left, here = COPIED, Path.cwd()
    script = Path(os.path.abspath(path))
    about = f"doctor {path} runs it in a copy of the working folder, {here}"
    if not script.is_relative_to(here):
        raise UsageError(f"{about}: start it in a folder that holds the script")

    def leave_out(place: str, names: list[str]) -> list[str]:
        """Virtual environments, what cannot be read, what is no file (a pipe has no end), and the
        copies themselves."""
        nonlocal left
        kept = [name for name in names if is_copied(Path(place, name), target)]
        left -= sum(os.path.getsize(os.path.join(place, name)) for name in kept)
        if left < 0:
            why = (
                f"which has more than {format_bytes(COPIED)}: name data by an absolute path "
                "elsewhere"
            )
            raise UsageError(f"{about}, {why}")
        return [name for name in names if name not in kept]

    try:
        shutil.copytree(here, target, ignore=leave_out)
    except OSError as failure:
        why = failure.args[0][0][2] if isinstance(failure, shutil.Error) else failure.strerror
        raise UsageError(f"{about}, which fails: {why}") from None
    return target / script.relative_to(here)


class RunWatch:
    """What is seen of the ranks of a run while it goes on."""

    def __init__(self) -> None:
        self.boxes: dict[int, View] = {}
        """The flight recorders, by rank."""
        self.groups: list[int] = []
        """Process groups that ranks lead: what the script itself starts is in them."""
        self.last: list[RankState] = []
        """Where the ranks were when their time was up; empty if it was not."""
        self.were_still = False

    def listen(self, rank: int, event: Event) -> None:
        """Take a report. Raises `Elapsed` if it is that the time is up."""
        if LEADER in event:
            self.groups.append(event[LEADER])
            self.boxes.update((rank, view) for view in find_boxes(self.groups[-1:]))
        if TIME_LIMIT in event:  # they are looked at before they are stopped
            self.last, self.were_still = look_at_the_end(self.views)
            raise Elapsed

    @property
    def views(self) -> list[View]:
        return [self.boxes[rank] for rank in sorted(self.boxes)]

    def explain_waits(self) -> Diagnosis | None:
        """Why ranks waited when their time was up; None if they did not, or one went on."""
        if not (self.were_still and any(state.waits_for for state in self.last)):
            return None
        found = diagnose([replace(state, may_act=UNASKED) for state in self.last])
        return None if found and found.kind in (Kind.RUNNING, Kind.STRAGGLER) else found

    def kill(self) -> None:
        """End what the script itself has started."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of ours: a mismatch is a fault."""
    handler = logging.NullHandler()
    logging.getLogger("playground").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("playground").removeHandler(handler)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a script is to be run."""

    here: Path
    """Its working folder."""
    argv: Sequence[str]
    """The script, and its arguments."""
    size: int
    """Number of ranks."""
    seconds: float
    """The time after which it is stopped."""
    timeout: float
    """Seconds that a rank may wait in an operation."""
    seen: Path
    """The folder into which ranks write what they see of its training."""


def run_script(settings: RunSettings) -> tuple[RunOutcome, Sequence[RankState]]:
    """How a run of the script ended, and the state of each rank."""
    watch = RunWatch()
    has_returned = is_stopped = False
    failed: RankFailed | RankTimeout | None = None
    why: Diagnosis | None = None
    try:
        with quiet():
            launch(
                Checked(run_on_rank, settings.seen),
                settings.size,
                args=(settings.here, settings.argv, settings.seconds),
                timeout=settings.timeout,
                on_report=watch.listen,
                bare=True,
            )
        has_returned = True
    except Elapsed:
        is_stopped = True
        why = watch.explain_waits()
    except (RankFailed, RankTimeout) as raised:
        failed, why = raised, raised.diagnosis
    finally:
        watch.kill()
    states = watch.last or [view.read() for view in watch.views]
    why = why or find_mismatch(states)
    facts = read_ranks(folder_of_last_start(settings.seen), settings.size)
    had_finished = have_finished(watch.last)
    run = RunOutcome(
        size=settings.size,
        has_returned=has_returned,
        diagnosis=why,
        failure=explain_end(failed, states) if failed else "",
        mistakes=find_mistakes(facts),
        stands=tell_places(watch.last) if is_stopped else "",
        had_finished=had_finished,
        looked_at=describe_looks(
            facts,
            settings.size,
            calls=sum(len(state.operations) for state in states),
            stopped_after=settings.seconds if is_stopped and not had_finished else 0,
        ),
    )
    return run, states


def explain_end(failed: RankFailed | RankTimeout, states: Sequence[RankState]) -> str:
    """How the script failed, and on which line; without one, the rank's last call. Empty if the
    diagnosis tells it."""
    if failed.diagnosis and failed_in_operation(failed):
        return ""
    if not isinstance(failed, RankFailed):
        return failed.headline
    if line := line_of(failed.traceback):
        return f"{failed.headline} ({line})"
    last = next(reversed(find_calls(states, failed.rank)), None)
    return failed.headline + (f"; its last call is {last.name} ({last.line})" if last else "")


def find_calls(states: Sequence[RankState], rank: int) -> Sequence[Operation]:
    """What a rank has called; empty if there is no such rank."""
    return next((state.operations for state in states if state.rank == rank), ())


def look_at_the_end(views: Sequence[View]) -> tuple[list[RankState], bool]:
    """The state of each rank, with its line, and whether none has moved or computed meanwhile."""
    before = [view.progress for view in views]
    time.sleep(BETWEEN_LOOKS)
    states = [view.read_since(was) for view, was in zip(views, before, strict=True)]
    were_still = all(
        view.progress == was and process_status(view.pid)[:1] not in RUNNABLE
        for view, was in zip(views, before, strict=True)
    )
    return [
        replace(state, line=view.ask_for_line()) if state.doing == Doing.IN_PROGRAM else state
        for state, view in zip(states, views, strict=True)
    ], were_still


def have_finished(states: Sequence[RankState]) -> bool:
    """Whether there are ranks, and all have come to the end of the script."""
    return bool(states) and all(state.doing == Doing.FINISHED for state in states)


def tell_places(states: Sequence[RankState]) -> str:
    """Where the ranks were when their time was up."""
    return "; ".join(map(tell_place, states)) or "they had not begun"


def tell_place(state: RankState) -> str:
    """Where a rank is."""
    inside = state.waits_for if state.doing == Doing.IN_OPERATION else None
    line = (inside.line if inside else state.line).partition(" in ")[0]
    what = f"in {inside.name}" if inside else state.doing
    return f"rank {state.rank} {what}" + (f" ({line})" if line else "")


def failed_in_operation(failure: RankFailed | RankTimeout) -> bool:
    """Whether a rank has failed in an operation, by what the others did: it was ended there without
    a traceback, its connection was closed, or its time was up."""
    if isinstance(failure, (RankTimeout, PeerDisconnected)):
        return True
    return not failure.traceback or has_timed_out(failure.traceback)


def run_on_rank(rank: int, size: int, here: Path, argv: Sequence[str], seconds: float) -> None:
    """Run the script as its own program, without its output."""
    report(**{LEADER: os.getpid()})
    if rank == 0:
        OurThread(report_later, (seconds,), name="time limit", daemon=True).start()
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    os.chdir(here)
    os.environ["PWD"] = str(here)
    Program(name=argv[0], arguments=tuple(argv[1:]), path=tuple(sys.path)).run()


def report_later(seconds: float) -> None:
    time.sleep(seconds)
    report(**{TIME_LIMIT: seconds})
