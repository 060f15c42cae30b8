"""The part of the epochs: a sampler is told each, for another order. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Collection

from playground.tools.doctor.data_parallel.batches import share_drawn
from playground.tools.doctor.data_parallel.data import (
    dataset_of,
    find_own_sampler,
    find_stream,
    has_distributed_sampler,
    is_plain,
)
from playground.tools.doctor.data_parallel.edits import add_before, replace_node
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Loop
from playground.tools.doctor.data_parallel.trainings import take

SET_EPOCH = "set_epoch"
SAME_ORDER = "without it, every epoch has the same order"


def find_set_epoch(script: TrainingScript) -> Part:
    """The order of samples, which has to differ from epoch to epoch."""
    return explain_order(script) or tell_epoch(script)


def explain_order(script: TrainingScript) -> Part | None:
    """The part of a script whose sampler is told the epoch, needs none, or is not seen."""
    name, text, rule = SET_EPOCH, script.text, SAME_ORDER
    if found := text.find_calls("set_epoch"):
        return Part(name, Status.THERE, f"{script.at(found[0])} tells the sampler the epoch")
    if not has_distributed_sampler(script) and (lost := script.lost_sampler):
        saw = (
            f"nothing tells the DistributedSampler of {script.at(lost)} its epoch: if it is that "
            f"of the training, call set_epoch on it at the beginning of each; {rule}"
        )
        return Part(name, Status.UNKNOWN, saw)
    if share_drawn(script):
        return Part(name, Status.NOT_NEEDED, "no sampler orders what the script draws itself")
    if not script.loop or len(script.loaders) != 1:
        return Part(name, Status.UNKNOWN, f"no loop over a DataLoader is seen: {rule}")
    if find_stream(script, script.loaders[0]):
        return Part(name, Status.NOT_NEEDED, "a stream has no sampler")
    if own := find_own_sampler(script):
        if not has_distributed_sampler(script):
            return Part(name, Status.NOT_NEEDED, "the script's own sampler draws in every epoch")
        if all(map(keeps_order, text.makers(own.value))):
            return Part(name, Status.NOT_NEEDED, "the DistributedSampler does not shuffle")
    data = dataset_of(script.loaders[0])
    if data and (by := script.find_division(data)):
        saw = f"{script.at(by)} seems to divide the data by rank, so that no sampler does"
        return Part(name, Status.NOT_NEEDED, saw)
    return None


def tell_epoch(script: TrainingScript) -> Part:
    """The part of a script whose DataLoader shuffles by a sampler."""
    name, text, rule = SET_EPOCH, script.text, SAME_ORDER
    epochs = script.training.epochs if script.training else None
    if epochs is None and (again := find_endless(script)):
        saw = (
            f"{script.at(again)} walks the loader again and again: call set_epoch on its sampler "
            f"before each walk; {rule}"
        )
        return Part(name, Status.UNKNOWN, saw)
    if epochs is None:
        return Part(name, Status.NOT_NEEDED, "no loop over epochs is seen: one pass needs none")
    loaders = [*script.loaders, *(each for each in script.more_loaders if is_plain(script, each))]
    names = [name_loader(script, epochs, each) for each in loaders]
    counter = find_counter(script, epochs)
    if not (all(names) and counter):
        return Part(
            name,
            Status.UNKNOWN,
            f"how {script.at(epochs)} counts its epochs, or where "
            "it has the loader, is not seen: call loader.sampler.set_epoch(epoch) at "
            f"the beginning of each; {rule}",
        )
    epoch, edits = counter, []
    if epoch == "_" and isinstance(epochs, ast.For):
        epoch = text.fresh("epoch")
        edits.append(replace_node(epochs.target, epoch))
    indent = script.indent_of(epochs.body[0])
    lines = [f"{each}.sampler.set_epoch({epoch})" for each in names]
    edits.append(add_before(epochs.body[0].lineno, indent, *lines))
    return Part(
        name, Status.MISSING, f"{script.at(epochs)} tells no sampler its epoch: {rule}", edits
    )


def find_counter(script: TrainingScript, epochs: Loop) -> str:
    """What counts the rounds of a loop over epochs: the target of `for`, or of a `while` what is
    compared, and raised once by one; empty if that is not seen."""
    if isinstance(epochs, ast.For):
        is_name = isinstance(epochs.target, (ast.Name, ast.Attribute))
        return ast.unparse(epochs.target) if is_name else ""
    raised = [
        ast.unparse(node.target)
        for node in ast.walk(epochs)
        if isinstance(node, ast.AugAssign)
        and ast.unparse(node) == f"{ast.unparse(node.target)} += 1"
    ]
    compared = [
        ast.unparse(node.left) for node in ast.walk(epochs.test) if isinstance(node, ast.Compare)
    ]
    found = [each for each in compared if raised.count(each) == 1]
    return found[0] if found else ""


def find_endless(script: TrainingScript) -> ast.For | None:
    """The loop of a generator that hands on the batches of the training's loader, endlessly."""
    text = script.text
    for node in ast.walk(text.tree):
        is_generator = isinstance(node, ast.For) and any(
            isinstance(each, ast.Yield) for each in ast.walk(node)
        )
        if is_generator and any(isinstance(each, ast.While) for each in text.climb(node)):
            assert isinstance(node, ast.For)
            if script.loaders[0] in text.makers(node.iter):
                return node
    return None


def keeps_order(sampler: ast.Call) -> bool:
    """Whether this call of DistributedSampler says that it does not shuffle."""
    given = (each.value for each in sampler.keywords if each.arg == "shuffle")
    return any(ast.unparse(each) == "False" for each in given)


def name_loader(script: TrainingScript, epochs: ast.AST, loader: ast.Call) -> str:
    """How a loader of the training is named where this loop begins; empty if it has no name
    there."""
    text = script.text
    stored = {
        ast.unparse(node)
        for node in ast.walk(epochs)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    }
    ways = [way for way in script.walked if loader in script.find_loaders(way)]
    inside = {*ast.walk(epochs)}
    passed = [each for way in ways for each in way if each in inside]
    others = [] if script.case_of(loader) else [*ast.walk(epochs)]
    for node in (*passed, *others):
        is_name = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(
            getattr(node, "ctx", None), ast.Load
        )
        if not is_name or ast.unparse(node) in stored:
            continue
        if text.makers(node) == {loader}:
            return text.code(node)
    assert script.loop
    for node in ast.walk(script.loop.iter):  # a name of the module
        if isinstance(node, ast.Name) and text.makers(node) == {loader}:
            function = text.function_of(epochs)
            is_seen = not function or node.id not in text.bound[id(function)]
            if is_seen and text.key_of(node) == (0, node.id):
                return node.id
    is_of_one = text.class_of(epochs) is text.class_of(script.loop)
    for node in ast.walk(script.loop.iter) if is_of_one else ():
        if isinstance(node, ast.Attribute) and text.makers(node) == {loader}:
            return text.code(node)
    for each in (one for way in ways for one in way if is_of_one):  # bar = tqdm(self.loader)
        if isinstance(each, ast.Attribute) and text.makers(each) == {loader}:
            return text.code(each)
    return name_item(script, epochs, loader, stored)


def name_item(
    script: TrainingScript, epochs: ast.AST, loader: ast.Call, stored: Collection[str]
) -> str:
    """How a loader that is an item of a dictionary is named where this loop begins; empty if it is
    none, or the dictionary has no name there."""
    assert script.training
    for way in script.walked:
        for each in way if loader in script.find_loaders(way) else ():
            if isinstance(each, ast.Subscript):
                key = take(script.text, each.slice, script.training.values)
                is_here = script.text.function_of(each.value) is script.text.function_of(epochs)
                held = ast.unparse(each.value)
                if is_here and isinstance(key, ast.Constant) and held not in stored:
                    return f"{held}[{script.text.code(key)}]"
    return ""
