"""The tier of a script for torchrun: it runs here for a while, on two ranks and then on three, and
the ranks' flight recorders tell what would break on nccl, on more ranks, or with unequal data. What
its optimizers, models and data loaders do is checked for silent mistakes, as by `run`. Each run has
a copy of the files, so that the script does not overwrite the user's. Does not import torch.

What the ranks have not called is not seen; where tensors would be on a machine with GPUs, only the
text tells.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from playground.base.errors import UsageError
from playground.base.files import temporary_folder
from playground.base.gpu_names import find_named_gpus
from playground.explain.hang import (
    MAKE_DDP,
    RECEIVE,
    Operation,
)
from playground.explain.hang.box import SWITCH
from playground.tools.doctor.checks import Check, Fault, error, note, run_checks, warning
from playground.tools.doctor.data_parallel.parts import Status
from playground.tools.doctor.data_parallel.plan import is_of_one_process, read_script
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.start import (
    ONE_GPU,
    find_device,
    find_local_rank,
    uses_gpu,
)
from playground.tools.doctor.data_parallel.text import TrainingText
from playground.tools.doctor.looked_at import say_looks
from playground.tools.doctor.script_run import RunOutcome, RunSettings, copy_files, run_script
from playground.tools.doctor.set_order import find_set_order
from playground.ui.units import plural
from playground.world.backends import BACKENDS, LEAVE_OUT
from playground.world.backends.nccl import SIMULATE, TAKE_OWN_GPU
from playground.world.program import parse_program

TOLD_APART = {"N1-alone", "M7-loss"}
"""Rules of what is silently wrong that tell of ranks which train apart."""
SIZES = (2, 3)
"""Numbers of ranks on which it runs: three are the fewest of an odd number."""


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What the runs of a script have shown: the facts of this tier."""

    path: Path
    folder: str
    """Where the copies were in which it ran."""
    runs: Sequence[RunOutcome]
    """One for each number of ranks."""
    operations: Sequence[Operation] = field(repr=False)
    """Those of all ranks in all runs."""
    seconds: float = 0.0
    """The limit of each run."""

    @property
    def is_undecided(self) -> bool:
        """Whether a run was stopped, so that what comes later is not known."""
        return any(run.stands and not run.had_finished for run in self.runs)

    @property
    def trains_apart(self) -> bool:
        """Whether each rank has trained a model of its own in a run."""
        return any(run.looked_at.trains_apart for run in self.runs)

    @property
    def awaited(self) -> str:
        """The line of the `init_process_group` to which no rank has come that was stopped; empty if
        that is not known."""
        return find_formation(self.path) if self.is_undecided and not self.operations else ""


def find_formation(path: Path) -> str:
    """The line that forms the process group; empty if none is seen."""
    text = read_script(path)
    calls = text.find_calls("init_process_group") if text else []
    return f"{path.name}:{calls[0].lineno}" if calls else ""


def examine(path: Path, words: Sequence[str], seconds: float, timeout: float) -> ScriptFacts:
    """Run `path` with its arguments `words`, for `seconds` at most on each number of ranks, until a
    run fails. Raises `UsageError` for what is no script in Python, for one that calls no operation,
    and without flight recorders."""
    if os.environ.get(SWITCH) == "0":
        raise UsageError(
            f"doctor {path} reads the ranks' flight recorders: it needs them, so not {SWITCH}=0"
        )
    parse_program(path)
    runs, operations = list[RunOutcome](), list[Operation]()
    with temporary_folder("doctor") as folder:
        for size in SIZES:
            here = folder.resolve() / f"{size}-ranks"
            argv = [str(copy_files(path, here)), *words]
            run, states = run_script(
                RunSettings(
                    here=here,
                    argv=argv,
                    size=size,
                    seconds=seconds,
                    timeout=timeout,
                    seen=folder / f"seen-{size}",
                )
            )
            runs.append(run)
            operations += (one for state in states for one in state.operations)
            if run.has_failed:
                break
    script = ScriptFacts(
        path=path, folder=str(folder), runs=runs, operations=operations, seconds=seconds
    )
    if not (runs[-1].has_failed or operations or script.awaited):
        if formed := find_formation(path):
            raise UsageError(
                f"{path} ended without init_process_group ({formed}): give it the arguments with "
                "which it trains on several ranks"
            )
        raise UsageError(
            f"{path} called no operation of torch.distributed within {seconds:g} s: name a script "
            "for torchrun, whose ranks are started for it, or raise --seconds"
        )
    return script


def tell_end(run: RunOutcome) -> str:
    """How a run ended."""
    if run.has_returned:
        return "returned"
    if run.has_failed:
        return "failed"
    return "ended as their time was up" if run.had_finished else "stopped when their time was up"


def summarize(script: ScriptFacts) -> str:
    """How the runs ended, in a few words."""
    text = ""
    for run in script.runs:
        text += f"{run.size} ranks {tell_end(run)}, "
    return f"{text}in copies of its folder in {script.folder}, removed by now"


def describe(script: ScriptFacts) -> Iterator[str]:
    """Lines on what was looked at, and what was not, and on where ranks were that were stopped."""
    yield from say_looks([run.looked_at for run in script.runs])
    for run in script.runs:
        if run.stands:
            when = "as their time was up" if run.had_finished else "when they were stopped"
            yield f"  {run.size} ranks {when}: {run.stands}"


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
        again = f"python -m playground run -n {first.size}"
        simulated = f"{again} --gpus {first.size} {script.path}"
        cures = {LEAVE_OUT: f"{LEAVE_OUT}: {simulated}", SIMULATE: f"{simulated} simulates GPUs"}
        for known, fix in cures.items():
            saw, missing, rest = first.failure.partition(f": {known}")
            if missing:
                yield error(saw + rest, "what is for GPUs needs them", fix)
                return
        yield error(
            first.failure,
            "a script returns on all ranks",
            f"{again} {script.path} shows the traceback",
        )
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


def check_averaging(script: ScriptFacts) -> Iterator[Fault]:
    """Ranks that train models apart, where no rule has told that more exactly."""
    for run in script.runs:
        if any(each.rule in TOLD_APART for each in run.mistakes):
            return
        if run.looked_at.trains_apart:
            steps = plural(run.looked_at.steps, "step")
            yield warning(
                f"on {run.size} ranks: {steps} of optimizers, 0 models in DistributedDataParallel, "
                "and no call takes gradients or parameters: each rank trains a model of its own",
                "ranks that train one model average its gradients",
                "wrap the model by DistributedDataParallel, or average the gradients between "
                "backward() and step()",
            )
            return


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
    used = (one.line for one in script.operations if one.dtype or one.name == MAKE_DDP)
    lines = [*dict.fromkeys(each for each in used if each.startswith(f"{name}:"))]
    if lines and not re.search(b"cuda|accelerator", source, re.IGNORECASE):
        place = lines[0].partition(" in ")[0].removeprefix(name if changes else "")
        others = ", among others" if len(lines) > 1 else ""
        device = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
        changes.append(f"make tensors on {device} ({place}{others})")
    if changes:
        yield note(f"for GPUs: {', and '.join(changes)}")


def check_own_gpu(script: ScriptFacts) -> Iterator[Fault]:
    """On GPUs: ranks that would all use the first one, or one that the text names by its number."""
    source = script.path.read_bytes()
    if not re.search(rb"[\"']cuda|\.cuda\(", source) or b"CUDA_VISIBLE_DEVICES" in source:
        return
    found = TrainingScript(TrainingText(source.decode("utf-8-sig", "replace")), script.path.name)
    trains = found.has_start or is_of_one_process(found.text, script.path)
    if trains and uses_gpu(found) and find_device(found).status in (Status.UNKNOWN, Status.MISSING):
        read = next(find_local_rank(found), None)
        more = f"; LOCAL_RANK ({found.at(read)}) chooses none" if read else ""
        yield warning(ONE_GPU + more, "each rank needs a GPU of its own", TAKE_OWN_GPU)
    elif trains:
        for line, name in find_named_gpus(source):
            saw = f"the text names {name}, on all ranks ({script.path.name}:{line})"
            fix = f'put "cuda" there, and {TAKE_OWN_GPU}'
            yield warning(saw, "a rank's tensors are on its own GPU", fix)


def check_set_order(script: ScriptFacts) -> Iterator[Fault]:
    """Ranks of this process are forks, which share the seed of hashes: only the text tells."""
    yield from find_set_order(script.path)


TEXT_CHECKS = (check_device, check_own_gpu, check_set_order)
"""Those that need no run."""
CHECKS = (
    check_agreement, check_failure, check_training, check_averaging, check_any_source, *TEXT_CHECKS,
)  # fmt: skip


def check_text(path: Path, checks: Sequence[Check] = TEXT_CHECKS) -> list[Fault]:
    """What the text of a script shows: it is not run."""
    return [*run_checks(checks, ScriptFacts(path=path, folder="", runs=(), operations=()))]
