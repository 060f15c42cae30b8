"""The tier of a script for torchrun: it runs here for a while, on two ranks and then on three, and
the ranks' flight recorders tell what would break on nccl, on more ranks, or with unequal data. What
its optimizers, models and data loaders do is checked for silent mistakes, as by `run`. Each run has
a copy of the files, so that the script does not overwrite the user's. Does not import torch.

What the ranks have not called is not seen; where tensors would be on a machine with GPUs, only the
text tells.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from playground.base.errors import TIMED_OUT, PeerDisconnected, RankFailed, RankTimeout, UsageError
from playground.base.files import temporary_folder
from playground.base.process_status import process_status
from playground.base.threads import OurThread
from playground.explain.hang import (
    MAKE_DDP,
    RECEIVE,
    UNASKED,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.explain.hang.activity import RUNNABLE
from playground.explain.hang.box import SWITCH, View, find_boxes
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.differences import find_mismatch
from playground.explain.hang.wording import Diagnosis
from playground.explain.right.checked import Checked
from playground.explain.right.finding import Finding
from playground.explain.right.reading import read_ranks
from playground.explain.right.rules import find_mistakes
from playground.explain.starts import folder_of_last_start
from playground.tools.doctor.checks import Check, Fault, error, note, run_checks, warning
from playground.tools.doctor.data_parallel.parts import Status
from playground.tools.doctor.data_parallel.script import Script
from playground.tools.doctor.data_parallel.start import find_device
from playground.tools.doctor.data_parallel.text import TrainingText
from playground.tools.doctor.looked_at import LookedAt, describe_looks, say_looks
from playground.ui.units import format_bytes
from playground.world.backends import BACKENDS, LEAVE_OUT
from playground.world.launcher.examiner import line_of
from playground.world.launcher.launch import launch
from playground.world.program import Program, parse_program
from playground.world.rank.reports import Event, report

SIZES = (2, 3)
"""Numbers of ranks on which it runs: three are the fewest of an odd number."""
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
class ScriptRun:
    """A run of a script."""

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

    @property
    def has_failed(self) -> bool:
        return bool(self.failure or self.diagnosis)


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """The facts of a script."""

    path: Path
    folder: str
    """Where the copies were in which it ran."""
    runs: Sequence[ScriptRun]
    """One for each number of ranks."""
    operations: Sequence[Operation] = field(repr=False)
    """Those of all ranks in all runs."""
    seconds: float = 0.0
    """The limit of each run."""

    @property
    def is_undecided(self) -> bool:
        """Whether a run was stopped, so that what comes later is not known."""
        return any(run.stands for run in self.runs)


def examine(path: Path, words: Sequence[str], seconds: float, timeout: float) -> ScriptFacts:
    """Run `path` with its arguments `words`, for `seconds` at most on each number of ranks, until a
    run fails. Raises `UsageError` for what is no script in Python, for one that calls no operation,
    and without flight recorders."""
    if os.environ.get(SWITCH) == "0":
        raise UsageError(
            f"doctor {path} reads the ranks' flight recorders: it needs them, so not {SWITCH}=0"
        )
    parse_program(path)
    runs, operations = list[ScriptRun](), list[Operation]()
    with temporary_folder("doctor") as folder:
        for size in SIZES:
            here = folder.resolve() / f"{size}-ranks"
            argv = [str(copy_files(path, here)), *words]
            run, states = run_script(here, argv, size, seconds, timeout, folder / f"seen-{size}")
            runs.append(run)
            operations += (one for state in states for one in state.operations)
            if run.has_failed:
                break
    script = ScriptFacts(
        path=path, folder=str(folder), runs=runs, operations=operations, seconds=seconds
    )
    if not runs[-1].has_failed and not operations:
        raise UsageError(
            f"{path} called no operation of torch.distributed within {seconds:g} s: name a script "
            "for torchrun, whose ranks are started for it, or raise --seconds"
        )
    return script


def summarize(script: ScriptFacts) -> str:
    """How the runs ended, in a few words."""
    text = ""
    for run in script.runs:
        otherwise = "failed" if run.has_failed else "stopped when their time was up"
        text += f"{run.size} ranks {'returned' if run.has_returned else otherwise}, "
    return f"{text}in copies of its folder in {script.folder}, removed by now"


def describe(script: ScriptFacts) -> Iterator[str]:
    """Lines on what was looked at, and what was not, and on where ranks were that were stopped."""
    yield from say_looks([run.looked_at for run in script.runs])
    for run in script.runs:
        if run.stands:
            yield f"  {run.size} ranks when they were stopped: {run.stands}"


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


def run_script(
    here: Path, argv: Sequence[str], size: int, seconds: float, timeout: float, seen: Path
) -> tuple[ScriptRun, Sequence[RankState]]:
    """The script on `size` ranks, in the working folder `here`: how that ended, and the state of
    each rank. The ranks write what they see of its training into the folder `seen`."""
    boxes: dict[int, View] = {}
    groups: list[int] = []
    last: list[RankState] = []
    were_still = False

    def listen(rank: int, event: Event) -> None:
        if LEADER in event:
            groups.append(event[LEADER])
            boxes.update((rank, view) for view in find_boxes(groups[-1:]))
        if TIME_LIMIT in event:  # they are looked at before they are stopped
            nonlocal were_still
            views = [boxes[rank] for rank in sorted(boxes)]
            last[:], were_still = look_at_the_end(views)
            raise Elapsed

    quiet = logging.NullHandler()
    has_returned = is_stopped = False
    failed: RankFailed | RankTimeout | None = None
    why = None
    logging.getLogger("playground").addHandler(quiet)  # a mismatch is a fault
    try:
        launch(
            Checked(run_on_rank, seen),
            size,
            args=(here, argv, seconds),
            timeout=timeout,
            on_report=listen,
            bare=True,
        )
        has_returned = True
    except Elapsed:
        is_stopped = True
        waits = were_still and any(state.waits_for for state in last)
        why = diagnose([replace(state, may_act=UNASKED) for state in last]) if waits else None
        why = None if why and why.kind in (Kind.RUNNING, Kind.STRAGGLER) else why
    except (RankFailed, RankTimeout) as raised:
        failed, why = raised, raised.diagnosis
    finally:
        logging.getLogger("playground").removeHandler(quiet)
        for group in groups:  # what the script itself has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    states = last or [boxes[rank].read() for rank in sorted(boxes)]
    why = why or find_mismatch(states)
    stands = "; ".join(map(tell_place, last)) or "they had not begun" if is_stopped else ""
    facts = read_ranks(folder_of_last_start(seen), size)
    run = ScriptRun(
        size=size, has_returned=has_returned, diagnosis=why,
        failure=explain_end(failed, states) if failed else "",
        mistakes=find_mistakes(facts), stands=stands,
        looked_at=describe_looks(
            facts, size, calls=sum(len(state.operations) for state in states),
            stopped_after=seconds if is_stopped else 0,
        ),
    )  # fmt: skip
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
    return not failure.traceback or bool(TIMED_OUT.search(failure.traceback))


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


def check_agreement(script: ScriptFacts) -> Iterator[Fault]:
    rule = "ranks call operations that match, equally often, in the same order"
    for run in script.runs:
        if run.diagnosis:
            told = " ".join(run.diagnosis.sentence.split())
            difference = run.diagnosis.difference
            before = f"; before that, {difference}" if difference else ""
            saw = f"on {run.size} ranks: {told}{before}"
            yield error(saw, rule, run.diagnosis.cure)


def check_failure(script: ScriptFacts) -> Iterator[Fault]:
    first, run = script.runs[0], script.runs[-1]
    if first.failure:
        saw, missing, fix = first.failure.partition(f": {LEAVE_OUT}")
        if missing:
            yield error(saw + fix, "each backend needs its device", LEAVE_OUT)
            return
        fix = f"python -m playground run -n {first.size} {script.path} shows the traceback"
        yield error(first.failure, "a script returns on all ranks", fix)
    elif run.failure:
        saw = f"it works on {first.size} ranks; {run.failure}"
        fix = "derive peers, groups and shards from get_world_size(), not from a constant"
        yield error(saw, "a script works on any number of ranks", fix)


def check_training(script: ScriptFacts) -> Iterator[Fault]:
    told = set[str]()
    for run in script.runs:
        for each in run.mistakes:
            if each.rule not in told:
                told.add(each.rule)
                where = f" ({each.where})" if each.where else ""
                saw = f"on {run.size} ranks: {each.what}{where}"
                report_as = error if each.is_certain else warning
                yield report_as(saw, f"{each.rule}: {each.why}", each.fix)


def check_any_source(script: ScriptFacts) -> Iterator[Fault]:
    rule = "nccl receives from a given rank only"
    received = (one for one in script.operations if one.kind == RECEIVE and one.peer is None)
    for line in sorted({one.line for one in received}):
        yield warning(f"a receive from anyone ({line})", rule, "pass src to recv")


def check_device(script: ScriptFacts) -> Iterator[Fault]:
    """On GPUs: a backend for CPUs that is given by name, and tensors that are left on the CPU."""
    source, name = script.path.read_bytes(), script.path.name
    changes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("init_process_group"):
            given = [
                *node.args[:1],
                *(each.value for each in node.keywords if each.arg == "backend"),
            ]
            for backend in (each.value for each in given if isinstance(each, ast.Constant)):
                if backend in BACKENDS and BACKENDS[backend].device_type == "cpu":
                    changes.append(f'leave out "{backend}" ({name}:{node.lineno})')
    lines = (one.line for one in script.operations if one.dtype or one.name == MAKE_DDP)
    first = next((line for line in lines if line.startswith(f"{name}:")), "")
    if first and not re.search(b"cuda|accelerator", source, re.IGNORECASE):
        place = first.partition(" in ")[0].removeprefix(name if changes else "")
        changes.append(f'make tensors on torch.device("cuda", LOCAL_RANK) ({place})')
    if changes:
        yield note(f"for GPUs: {', and '.join(changes)}")


def check_own_gpu(script: ScriptFacts) -> Iterator[Fault]:
    """On GPUs: ranks that would all use the first one."""
    source = script.path.read_bytes()
    if not re.search(rb"[\"']cuda|\.cuda\(", source) or b"CUDA_VISIBLE_DEVICES" in source:
        return
    found = Script(TrainingText(source.decode("utf-8-sig", "replace")), script.path.name)
    part = find_device(found)
    if found.has_start and part.status is Status.UNKNOWN:
        saw, _, fix = part.saw.partition(". ")
        yield warning(saw, "each rank needs a GPU of its own", fix[0].lower() + fix[1:])


FREE_OF_ORDER = {"sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all"}
"""Calls whose result does not depend on the order of their argument."""
IN_ORDER = {"list", "tuple", "enumerate", "iter", "zip", "map", "fromkeys", "join", "extend"}
"""Calls whose result has the order of their argument."""


def check_set_order(script: ScriptFacts) -> Iterator[Fault]:
    """Ranks of this process are forks, which share the seed of hashes: only the text tells."""
    for line in sets_walked(ast.parse(script.path.read_bytes())):
        saw = f"a set is walked in its own order ({script.path.name}:{line})"
        rule = (
            "strings in a set have another order on each rank: each process of torchrun draws "
            "its own seed of hashes"
        )
        yield warning(saw, rule, "walk sorted(…), or use a dict for a set that keeps its order")


def sets_walked(tree: ast.Module) -> list[int]:
    """The lines on which a set, unless it is one of numbers, is walked where its order counts."""
    nodes = [*ast.walk(tree)]
    names: dict[str, bool] = {}
    for node in nodes:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if (
                isinstance(target, ast.Name)
                and isinstance(node, (ast.Assign, ast.AnnAssign))
                and node.value
            ):
                names[target.id] = names.get(target.id, True) and is_set(node.value, {})
    free = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.SetComp)
        or (isinstance(node, ast.Call) and name_of_call(node) in FREE_OF_ORDER)
        for inner in (node.generators if isinstance(node, ast.SetComp) else [*walk_arguments(node)])
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.For) or (
            isinstance(node, ast.comprehension) and id(node) not in free
        ):
            walked = [node.iter]
        elif isinstance(node, ast.Call) and name_of_call(node) in IN_ORDER and id(node) not in free:
            walked = node.args
        else:
            continue
        found |= {each.lineno for each in walked if is_set(each, names)}
    return sorted(found)


def walk_arguments(call: ast.Call) -> Iterator[ast.AST]:
    """The arguments, and where one is a generator or a list of its own making, what it walks."""
    for each in call.args:
        yield each
        yield from getattr(each, "generators", ())


def name_of_call(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def is_set(node: ast.expr, names: Mapping[str, bool]) -> bool:
    """Whether it is a set, of whose elements none is known to be a number. `names`: those of
    sets."""
    if isinstance(node, ast.Set):
        return not all(
            isinstance(each, ast.Constant) and not isinstance(each.value, str) for each in node.elts
        )
    if isinstance(node, ast.BinOp):
        return is_set(node.left, names) or is_set(node.right, names)
    if isinstance(node, ast.Call):
        of_numbers = any(
            isinstance(each, ast.Call) and name_of_call(each) == "range" for each in node.args
        )
        return name_of_call(node) in ("set", "frozenset") and not of_numbers
    return isinstance(node, ast.SetComp) or (
        isinstance(node, ast.Name) and names.get(node.id, False)
    )


TEXT_CHECKS = (check_device, check_own_gpu, check_set_order)
"""Those that need no run."""
CHECKS = (check_agreement, check_failure, check_training, check_any_source, *TEXT_CHECKS)


def check_text(path: Path, checks: Sequence[Check] = TEXT_CHECKS) -> list[Fault]:
    """What the text of a script shows: it is not run."""
    return [*run_checks(checks, ScriptFacts(path=path, folder="", runs=(), operations=()))]


def check_hash_seed(path: Path) -> list[Fault]:
    """What the text shows of an order that differs between ranks which are no forks."""
    return check_text(path, [check_set_order])
