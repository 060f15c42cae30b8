"""Metrics that an object of the script's own class collects, as an AverageMeter does. Does not
import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Loop, find_method

TRACKERS = {"wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim"}
"""Packages whose objects log what they are given."""


@dataclass(frozen=True)
class Meter:
    """An object that collects numbers of batches, and is read after the loop."""

    name: str
    """How the loop calls it."""
    call: ast.Call
    """Where it collects."""
    sums: tuple[str, ...]
    """Its attributes that are added up; empty if they are not seen."""
    results: tuple[str, ...]
    """Statements that make the rest of its attributes from them."""


def find_meters(script: TrainingScript, loop: Loop) -> Iterator[Meter]:
    """Those that a loop fills."""
    text, known = script.text, set[str]()
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call)):
            continue
        func = call.func
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
            continue
        name = func.value.id
        is_number = any(".item()" in ast.unparse(each) for each in call.args)
        own = [text.classes.get(text.called(made)) for made in text.makers(func.value)]
        meter = read_meter(name, call, own[0] if len(own) == 1 else None)
        if name in known or func.attr == "append" or not own or not (is_number or meter.sums):
            continue
        made = {text.dotted(each.func).partition(".")[0] for each in text.makers(func.value)}
        if made & TRACKERS:
            continue
        if script.is_log(node) or not script.has_attribute_after(name, loop):
            continue
        known.add(name)
        yield meter


def read_meter(name: str, call: ast.Call, owner: ast.ClassDef | None) -> Meter:
    """What the method that collects does to the object."""
    assert isinstance(call.func, ast.Attribute)
    method = find_method(owner, call.func.attr)
    own = f"{method.args.args[0].arg}." if method and method.args.args else "self."
    sums, results = list[str](), list[str]()
    for each in method.body if method else ():
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add):
            sums.append(ast.unparse(each.target).replace(own, f"{name}."))
        elif isinstance(each, ast.Assign):
            words = ast.unparse(each).replace(own, f"{name}.")
            if any(one in words.partition(" = ")[2] for one in sums):
                results.append(words)
    return Meter(name, call, tuple(sums), tuple(results))
