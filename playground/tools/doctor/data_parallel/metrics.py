"""The part of metrics: what is added up over batches is to be added up over ranks, too. Does not
import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.tools.doctor.data_parallel.edits import Edit, add_after
from playground.tools.doctor.data_parallel.meters import find_meters
from playground.tools.doctor.data_parallel.model import find_norms_apart
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.reductions import (
    gather,
    put_behind,
    reduce_losses,
    reduce_meter,
    reduce_sums,
    reduce_table,
)
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.sums import (
    find_sums,
    find_totals,
    find_unfollowed,
)
from playground.tools.doctor.data_parallel.text import Loop

SHARING = "all_reduce", "reduce", "all_gather", "all_gather_object"
"""Calls by which ranks add up metrics, most often."""
SHARING_OTHERWISE = (
    "gather", "gather_object", "all_gather_into_tensor", "reduce_scatter", "broadcast",
    "broadcast_object_list", "send", "isend", "batch_isend_irecv", "gather_for_metrics",
)  # fmt: skip
"""Further calls by which they may."""
OF_MODEL = re.compile(r"state_dict\(|parameters\(|\brange\(")
"""In what a loop walks: these are no samples."""
OF_METRICS = ("torchmetrics", "torcheval")
"""Libraries whose metrics add up over the ranks."""


def find_metrics(script: TrainingScript) -> Part:
    """What is added up over batches: it has to be reduced over the ranks."""
    name = "metrics over ranks"
    if found := find_sharing(script):
        return Part(name, Status.THERE, f"{script.at(found[0])} brings ranks together")
    if library := find_library(script):
        saw = f"{library} brings ranks together in compute(), which all ranks have to call"
        return Part(name, Status.THERE, saw)
    apart = find_evaluations_apart(script)
    if alone := next((each for each in apart if is_on_first(script, each)), None):
        saw = (
            f"only one rank evaluates ({script.at(alone)}), with a sampler that gives it a part of "
            "the samples"
        )
        note = "leave out the sampler of that DataLoader: the rank evaluates all samples"
        return Part(name, Status.MISSING, saw, notes=[note])
    if unseen := explain_unseen(script, apart):
        return Part(name, Status.UNKNOWN, unseen)
    found_in = [*reduce_training(script), *(reduce_evaluation(script, each) for each in apart)]
    notes = [*note_prints(script), *(note for each in found_in for note in each.notes)]
    if not apart:
        notes += note_validation(script)
    unfollowed = find_unfollowed(script, script.loop) if script.loop and not found_in else []
    if unfollowed:
        assert script.loop
        saw = (
            f"what {', '.join(unfollowed)} of {script.at(script.loop)} collects is of one rank's "
            f"samples: bring it together on all ranks, by {script.dist}.all_reduce, before it is "
            "shown"
        )
        return Part(name, Status.UNKNOWN, saw, notes=notes)
    if not found_in:
        saw = "the loop adds up nothing that is used after it"
        return Part(name, Status.NOT_NEEDED, saw, notes=notes)
    saws = "; ".join(each.saw for each in found_in)
    return Part(name, Status.MISSING, saws, [one for each in found_in for one in each.edits], notes)


def explain_unseen(script: TrainingScript, apart: Sequence[ast.For]) -> str:
    """Why it is not seen what is to be added up; empty if it is. `apart`: loops of evaluations
    over one rank's part."""
    loop, training = script.loop, script.training
    if not (loop and training):
        alone = (
            "no one loop over batches is seen: what it adds up is of one rank's samples, so call "
            f"{script.dist}.all_reduce on it"
        )
        return "" if apart else alone
    divided = ""
    if script.walks_several:
        divided = "what comes from the loader that is divided"
    elif training.serves_tests and not training.switch:
        divided = "what it adds up in the training"
    tells = (
        f"{script.at(loop)} walks the batches of training and of tests: call "
        f"{script.dist}.all_reduce on {divided}, and leave the rest, of which each rank has all"
    )
    return tells if divided else ""


def find_library(script: TrainingScript) -> str:
    """The library whose metrics are of all ranks; empty if the script imports none."""
    roots = {name.partition(".")[0] for name in script.text.imports.values()}
    return next((each for each in OF_METRICS if each in roots), "")


@dataclass(frozen=True)
class Reduction:
    """What is of one rank's samples, and the lines that add it up over the ranks."""

    saw: str
    edits: Sequence[Edit] = ()
    notes: Sequence[str] = ()


def reduce_training(script: TrainingScript) -> Iterator[Reduction]:
    """What the loop of the training adds up, or has a meter collect."""
    loop = script.loop
    if not (loop and script.training):
        return
    if script.training.functions:
        script.collective.add(id(script.text.function_of(script.training.backward)))
    at, lines, saws, notes = script.at(loop), list[str](), list[str](), list[str]()
    totals = find_totals(script)
    if totals.names:
        saws.append(f"{', '.join(totals.names)} of {at} would be of one rank's samples only")
        lines += reduce_sums(script, loop, totals.sums, totals.lists, totals.loss)
        lines += (line for each in totals.tables for line in reduce_table(script, loop, *each))
    if totals.losses:
        saws.append(f"{', '.join(totals.losses)} of {at} would be of one rank's samples only")
        lines += (line for each in totals.losses for line in reduce_losses(script, each))
    if totals.results:
        saws.append(f"{', '.join(totals.results)} of {at} would hold one rank's part only")
        lines += (line for each in totals.results for line in gather(script, each))
    for meter in find_meters(script, loop):
        saws.append(f"{meter.name} of {script.at(meter.call)} would collect one rank's samples")
        if not meter.sums:
            notes.append(
                f"{script.at(meter.call)}: after the loop, call {script.dist}.all_reduce on what "
                f"{meter.name} has added up, on all ranks"
            )
        lines += reduce_meter(script, loop, meter)
    if saws:
        note_meeting(script, loop)
        edits = [put_behind(script, loop, lines)] if lines else []
        yield Reduction("; ".join(saws), edits, notes)


def reduce_evaluation(script: TrainingScript, loop: ast.For) -> Reduction:
    """What a loop over one rank's part of the samples adds up."""
    note_meeting(script, loop)
    at = script.at(loop)
    saw = f"{at} walks one rank's part of the samples, and nothing adds up over the ranks"
    if sums := [*find_sums(script, loop)]:
        lines = reduce_sums(script, loop, sums)
        return Reduction(saw, [add_after(loop, script.indent_of(loop), *lines)])
    note = f"{at}: call {script.dist}.all_reduce on its sums and counts, on all ranks"
    return Reduction(saw, notes=[note])


def note_prints(script: TrainingScript) -> list[str]:
    """What is said of the first print within the loop."""
    inside = ast.walk(script.loop) if script.loop else ()
    return [
        f"{script.at(each)}: what this logs within the loop is of rank 0's samples: a count is "
        "its part of all"
        for each in inside
        if isinstance(each, ast.stmt) and script.is_log(each)
    ][:1]


def note_meeting(script: TrainingScript, loop: Loop) -> None:
    """Note that all ranks meet behind this loop."""
    if function := script.text.function_of(loop):
        script.collective.add(id(function))


def is_on_first(script: TrainingScript, node: ast.AST) -> bool:
    """Whether only one rank comes to this node: by a condition around it, or around a call of its
    function."""
    if script.is_for_first(node):
        return True
    function = script.text.function_of(node)
    sites = (
        call for call in script.text.calls if function and script.text.resolve(call) is function
    )
    return any(map(script.is_for_first, sites))


def find_sharing(script: TrainingScript) -> list[ast.Call]:
    """The calls by which ranks may add up metrics: those that take gradients do not."""
    return [
        call
        for call in script.text.find_calls(*SHARING)
        if not any(
            isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(call)
        )
    ]


def find_evaluations_apart(script: TrainingScript) -> list[ast.For]:
    """The loops without gradients over one rank's part of the samples, of a script that prints and
    in which ranks add nothing up."""
    text = script.text
    if shares_results(script) or not text.find_calls("print"):
        return []
    found = []
    for node in ast.walk(text.tree):
        if isinstance(node, ast.For) and text.is_without_gradients(node):
            samplers = (
                each.value
                for call in text.makers(node.iter)
                for each in call.keywords
                if each.arg == "sampler" and text.called(call) == "DataLoader"
            )
            made = (one for each in samplers for one in text.makers(each))
            if any(map(script.is_distributed_sampler, made)):
                found.append(node)
    return found


def shares_results(script: TrainingScript) -> bool:
    """Whether ranks may bring together what they have added up."""
    others = script.text.find_calls(*SHARING_OTHERWISE) or "torchmetrics" in script.text.source
    return bool(others or find_sharing(script))


def tells_a_part(script: TrainingScript) -> bool:
    """Whether a script prints what only one rank's samples are in: of an evaluation, or what its
    training adds up over the batches of a DistributedSampler."""
    if shares_results(script) or not script.text.find_calls("print"):
        return False
    meters = find_meters(script, script.loop) if script.loop else ()
    return bool(find_evaluations_apart(script) or find_totals(script).sums or any(meters))


def note_validation(script: TrainingScript) -> list[str]:
    """What is said of loops under no_grad, or of the training's, if it tests, too."""
    text = script.text
    shared = script.training and script.training.serves_tests
    for node in ast.walk(text.tree):
        is_apart = isinstance(node, ast.For) and text.is_without_gradients(node)
        if (
            isinstance(node, ast.For)
            and (shared if node is script.loop else is_apart)
            and not OF_MODEL.search(ast.unparse(node.iter))
        ):
            divides = "python -m playground read ddp divides them"
            if node is script.loop:
                walks = f"{script.at(node)} walks the samples of tests on every rank"
                return [f"{walks}: the result is the same on all; {divides}"]
            walks = f"{script.at(node)} walks its samples on every rank"
            if norms := find_norms_apart(script):
                return [
                    f"{walks}, and the results differ a little: each rank has BatchNorm statistics "
                    f"of its own ({script.at(norms[0])}). Print the values of rank 0"
                ]
            return [
                f"{walks}: the result is right, and the same on all, unless the model has "
                f"BatchNorm; {divides}"
            ]
    return []
