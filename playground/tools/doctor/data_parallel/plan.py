"""From the text of a script to the parts that it lacks. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from playground.explain.right.finding import Finding
from playground.tools.doctor.data_parallel.data import find_sampler
from playground.tools.doctor.data_parallel.edits import apply_edits
from playground.tools.doctor.data_parallel.epochs import find_set_epoch
from playground.tools.doctor.data_parallel.metrics import find_metrics, tells_a_part
from playground.tools.doctor.data_parallel.model import find_model
from playground.tools.doctor.data_parallel.names import find_unbound
from playground.tools.doctor.data_parallel.output import find_logging
from playground.tools.doctor.data_parallel.parts import Part, Plan, Status
from playground.tools.doctor.data_parallel.resume import find_resume
from playground.tools.doctor.data_parallel.script import FIRST, TrainingScript
from playground.tools.doctor.data_parallel.seeds import seed_alike, seed_apart
from playground.tools.doctor.data_parallel.start import find_device, find_start
from playground.tools.doctor.data_parallel.stops import find_stop
from playground.tools.doctor.data_parallel.text import TrainingText
from playground.tools.doctor.data_parallel.trainings import find_trainings

DISTRIBUTED = re.compile(
    r"\b(distributed|accelerate|lightning|pytorch_lightning|deepspeed|horovod|ignite|fastai|"
    r"colossalai|Trainer)\b"
)
"""Words of a script, outside comments, that may start processes or train by something else."""
SET_UP = {
    "init_process_group",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "is_initialized",
    "is_available",
    "barrier",
    "get_backend",
}
"""Functions of torch.distributed that neither send nor receive anything."""
MEASURED = {"S4-setepoch": "set_epoch", "E1-batches": "sampler"}
"""Rules of what is silently wrong in a run, and the parts that are missing then."""
OWN = {"DistributedDataParallel", "DDP", "DistributedSampler"}


def plan(source: str, name: str) -> Plan:
    """What a script lacks. `name`: of its file. Raises `SyntaxError`."""
    script = TrainingScript(TrainingText(source), name)
    *of_trainings, metrics, stop = map(join, zip(*map(plan_training, script.choose()), strict=True))
    parts = [find_device(script), *of_trainings, find_logging(script), metrics, stop]
    parts.append(find_resume(script))
    start = find_start(script, parts)
    unbound = find_unbound(source)
    parts = [leave_unbound(source, unbound, start, each) for each in parts]
    return Plan(source, [find_start(script, parts), *parts])


def plan_training(script: TrainingScript) -> list[Part]:
    """The parts of one training. They tell where all ranks meet, so that what is logged comes
    last."""
    return [
        draw_alike(script, find_sampler(script)),
        find_set_epoch(script),
        draw_apart(script, find_model(script)),
        find_metrics(script),
        find_stop(script),
    ]


def join(parts: Sequence[Part]) -> Part:
    """One part of several trainings."""
    known = {part.status for part in parts}
    order = Status.MISSING, Status.UNKNOWN, Status.THERE, Status.NOT_NEEDED
    status = next(each for each in order if each in known)
    saws = [part.saw for part in parts if part.status is status]
    unknown = [part.saw for part in parts if part.status is Status.UNKNOWN and part.saw not in saws]
    edits = dict.fromkeys(edit for part in parts for edit in part.edits)
    notes = dict.fromkeys([*unknown, *(note for part in parts for note in part.notes)])
    return Part(parts[0].name, status, "; ".join(dict.fromkeys(saws)), (*edits,), (*notes,))


def draw_alike(script: TrainingScript, part: Part) -> Part:
    """The part of the data, with the seeds by which all ranks draw the same."""
    if part.status is not Status.MISSING:
        return part
    edits, notes = seed_alike(script)
    return replace(part, edits=[*edits, *part.edits], notes=[*part.notes, *notes])


def draw_apart(script: TrainingScript, part: Part) -> Part:
    """The part of the model, with the seeds by which each rank draws its own masks and noise."""
    if part.status is not Status.MISSING:
        return part
    edits, notes = seed_apart(script)
    return replace(part, edits=[*part.edits, *edits], notes=[*part.notes, *notes])


def leave_unbound(source: str, before: set[tuple[str, str]], start: Part, part: Part) -> Part:
    """The part, without its lines if those use a name that is not bound there. `before`: the names
    that are not bound without them."""
    if not part.edits:
        return part
    after = apply_edits(source, [*start.edits, *part.edits])
    try:
        names = {name for _, name in find_unbound(after) - before}
    except SyntaxError:
        return Part(part.name, Status.UNKNOWN, f"{part.saw}. Its lines are yours to write")
    if not names:
        return part
    unknown = ", ".join(sorted(names))
    saw = f"{part.saw}. Its lines are not seen: no {unknown} is known where they would be"
    return Part(part.name, Status.UNKNOWN, saw, notes=part.notes)


def is_of_one_process(text: TrainingText, path: Path) -> bool:
    """Whether a script trains, and nothing in its text, or in the files beside it that it imports,
    tells of several processes."""
    if not text.find_calls("backward") or "torch" not in text.source:
        return False
    roots = {name.partition(".")[0] for name in text.imports.values()}
    beside = [*(path.parent / f"{root}.py" for root in roots)]
    for root in roots:
        beside += (path.parent / root).glob("**/*.py")
    sources = [each.read_text("utf-8", "replace") for each in beside if each.is_file()]
    return not any(tells_of_processes(each) for each in (text.source, *sources))


def tells_of_processes(source: str) -> bool:
    """Whether an import or a name of a text tells of several processes."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True
    for node in ast.walk(tree):
        names = [each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        if any(
            DISTRIBUTED.search(name.replace("_", " ")) or DISTRIBUTED.search(name) for name in names
        ):
            return True
    return False


def read_script(path: Path) -> TrainingText | None:
    """The text of a script; None if it is not read here: that is said where it is to be run."""
    try:
        return TrainingText(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError):
        return None


def plan_of_text(path: Path) -> Plan | None:
    """What a script lacks whose processes, if there are several, do not meet; None for any other
    script."""
    if (text := read_script(path)) is None:
        return None
    is_apart = has_half_of_it(text) and not text.find_calls(*OWN)
    return plan(text.source, path.name) if is_apart or is_of_one_process(text, path) else None


def plan_of_half(path: Path) -> Plan | None:
    """What a script lacks that has a part of data parallelism; None if it has all that can be told,
    or it is not plain."""
    text = read_script(path)
    if text is None or not has_half_of_it(text):
        return None
    found = plan(text.source, path.name)
    missing = {part.name for part in found.parts if part.status is Status.MISSING}
    is_part = tells_a_part(TrainingScript(text, path.name))
    return found if is_part or missing & {"sampler", "set_epoch", "model"} else None


def overrule(found: Plan, mistakes: Iterable[Finding]) -> Plan:
    """The plan, in which a part is missing that was missing in a run."""
    measured = {MEASURED[each.rule]: each for each in mistakes if each.rule in MEASURED}

    def correct(part: Part) -> Part:
        if part.status is Status.MISSING or part.name not in measured:
            return part
        seen = measured[part.name]
        where = f" ({seen.where})" if seen.where else ""
        saw = f"in its run, {seen.what}{where}: {seen.why}"
        return Part(part.name, Status.MISSING, saw, notes=[*part.notes, seen.fix])

    return replace(found, parts=[*map(correct, found.parts)])


def has_half_of_it(text: TrainingText) -> bool:
    """Whether a script forms a process group and trains, and the rest is plain: it calls nothing
    else of torch.distributed's unless it has DistributedDataParallel or its sampler, and what it
    does with its rank is no division of data."""
    if not (text.find_calls("init_process_group") and find_trainings(text)):
        return False
    others = [
        call
        for call in text.calls
        if text.dotted(call.func).startswith("torch.distributed.")
        and text.called(call) not in SET_UP
    ]
    if others and not text.find_calls(*OWN):
        return False
    ranks = {
        target.id
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Assign) and FIRST.search(ast.unparse(node.value))
        for each in node.targets
        for target in ast.walk(each)
        if isinstance(target, ast.Name)
    }
    uses = [
        node
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Name) and node.id in ranks and isinstance(node.ctx, ast.Load)
    ] + text.find_calls("get_rank", "get_world_size")
    return all(is_plain_use(text, each) for each in uses)


def is_plain_use(text: TrainingText, node: ast.AST) -> bool:
    """Whether what a script does with its rank is to choose a device or a seed, to print, or to let
    one rank do something."""
    inner = node
    for each in text.climb(node):
        if isinstance(each, (ast.If, ast.While, ast.IfExp)):
            return each.test is inner
        if isinstance(each, (ast.JoinedStr, ast.Assign)):
            return True
        if (
            isinstance(each, ast.Call)
            and each.func is not inner
            and (
                text.called(each)
                in {"print", "manual_seed", "set_device", "device", "to", "cuda", *OWN}
            )
        ):
            return True
        inner = each
    return False
