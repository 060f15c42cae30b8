"""Where a training stops by a value that each rank computes: ranks whose values differ leave the
loop apart, and those that stay wait for them. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from playground.tools.doctor.data_parallel.script import FIRST, Script
from playground.tools.doctor.data_parallel.text import Function, Loop

AGREE = ("all_reduce", "reduce", "all_gather", "all_gather_object", "broadcast", "gather")
"""Calls after which ranks may have one value."""


def note_stop(script: Script, reduced: Collection[str], where: str) -> list[str]:
    """What is said of the first stop of the loop over epochs. `reduced`: names whose values become
    the same on all ranks; `where`: how a tensor is told its device."""
    loop = script.training and script.training.epochs
    if not loop or script.text.find_calls(*AGREE):
        return []
    for leaves in find_exits(script, loop):
        tests = [each for each in script.text.climb(leaves) if isinstance(each, ast.If)]
        tests = [each for each in tests if is_inside(script, each, loop)]
        if not tests or leaves not in tests[0].body or any(map(is_of_rank, tests)):
            continue
        names = names_in(tests[0].test)  # which rank 0 can test at the end of an epoch
        if value := find_measured(script, loop, names - {*reduced}, {*reduced}):
            stop = script.text.fresh("stop")
            test = script.text.code(tests[0].test)
            return [
                f"{script.at(leaves)} stops by {value}, which each rank computes. Let rank 0 "
                "decide, at the end of each epoch, on all ranks: "
                f"`{stop} = torch.tensor([float({test})]{where}); "
                f"{script.dist}.broadcast({stop}, 0)`, then `if {stop}.item(): break`"
            ]
    return []


def find_exits(script: Script, loop: Loop) -> Iterator[ast.stmt]:
    """The statements that leave the loop itself."""
    for node in ast.walk(loop):
        if isinstance(node, (ast.Break, ast.Return)):
            around = script.text.climb(node)
            kinds = (Function, Loop) if isinstance(node, ast.Break) else (Function,)
            inner = next((each for each in around if isinstance(each, kinds)), None)
            if inner is (loop if isinstance(node, ast.Break) else script.text.function_of(loop)):
                yield node


def is_inside(script: Script, node: ast.AST, loop: Loop) -> bool:
    return any(each is loop for each in script.text.climb(node))


def is_of_rank(test: ast.If) -> bool:
    return bool(FIRST.search(ast.unparse(test.test)))


def names_in(expression: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def find_measured(script: Script, loop: Loop, names: set[str], known: set[str]) -> str:
    """The name of a result of an evaluation in the loop that these names depend on: by their
    values, or by the conditions under which they get them. Empty if there is none."""
    left = sorted(names)
    seen = known | names
    for name in left:
        for node in ast.walk(loop):
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or not node.value:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name not in {one for each in targets for one in names_in(each)}:
                continue
            if is_evaluation(script, node.value):
                return name
            ifs = [each for each in script.text.climb(node) if isinstance(each, ast.If)]
            tests = (names_in(each.test) for each in ifs if is_inside(script, each, loop))
            new = names_in(node.value).union(*tests) - seen
            seen |= new
            left += sorted(new)
    return ""


def is_evaluation(script: Script, value: ast.expr) -> bool:
    """Whether it is a result of the script's own function that computes without gradients."""
    function = script.text.resolve(value) if isinstance(value, ast.Call) else None
    return function is not None and any(
        script.text.is_without_gradients(node) for node in ast.walk(function)
    )
