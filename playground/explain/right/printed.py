"""A rule on what a program prints (S11): the sums of one rank's samples. Does not import torch.

That ranks draw parts is seen while they run. What becomes of the sums is read in the text of the
program, when it has ended and hints are asked for. (doctor reads more of that text.)
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from playground.explain.right.facts import Draw, RankFacts
from playground.explain.right.finding import HINT, Finding

SHARES = re.compile(r"reduce|gather|broadcast|send|recv|all_to_all|synchroni[sz]e_between")
"""In the names of functions by which ranks may bring together what they have added up."""
LIBRARIES = {
    "torchmetrics", "torcheval", "accelerate", "lightning", "pytorch_lightning", "ignite",
    "evaluate", "transformers", "composer", "deepspeed", "horovod", "ray",
}  # fmt: skip
"""Those that may do so for the program."""
PRINTS = {"print", "info", "log", "log_metrics", "add_scalar", "write"}
ONE_RANK = re.compile(r"rank|main|master|primary|chief|first", re.IGNORECASE)
"""In a condition that holds on one rank."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
NAMES = ast.Name, ast.Attribute
Loop = ast.For | ast.AsyncFor


def find_printed(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S11-printed: what one rank prints has all ranks' samples in it.

    A hint: all ranks go through a loop over their parts of a DistributedSampler's samples; it adds
    up or collects; and one rank prints what comes of that, behind the loop. (It may be meant as an
    estimate.) Unknown: a call that may bring ranks together, but for those that take a gradient,
    takes a name of the sums, stands in a function that has some, says no name, or is in a file that
    is imported; a library may do so; no condition on the rank is seen around the print. Source: the
    documentation of `torch.utils.data.distributed.DistributedSampler`.
    """
    if len(facts) < 2 or any(rank.unknown for rank in facts):
        return
    found: dict[str, list[tuple[str, str]]] = {}
    for draw in find_shared_draws(facts):
        file, line, _, path = facts[0].lines[draw.line]
        if told := find_print(path, line):
            place = f"{os.path.basename(file)}:{told.line}"
            loop = facts[0].where(draw.line)
            found.setdefault(place, []).extend((each, loop) for each in told.names)
    for place, told_there in found.items():
        names = ", ".join(dict.fromkeys(name for name, _ in told_there))
        yield Finding(
            rule="S11-printed",
            level=HINT,
            what=f"{place} prints what one rank has added up of its own samples: {names}",
            ranks=tuple(rank.rank for rank in facts),
            since=-1,
            where=", ".join(dict.fromkeys(where for _, where in told_there)),
            why=f"a DistributedSampler gives each rank one of {len(facts)} parts, the loop goes "
            "through that part, and nothing adds up over the ranks",
            fix="on all ranks, call all_reduce on the sums and the counts, and divide afterwards",
        )


def find_shared_draws(facts: Sequence[RankFacts]) -> list[Draw]:
    """Draws of rank 0, one for each line, where each rank draws one of as many parts."""
    found: dict[int, Draw] = {}
    parts = [{(rank.where(each.line), each.length): each for each in rank.draws} for rank in facts]
    for draw in facts[0].draws:
        place = facts[0].where(draw.line), draw.length
        drawn = {each[place].rank for each in parts if place in each}
        if place[0] and draw.parts == len(drawn) == len(facts):
            found.setdefault(draw.line, draw)
    return [*found.values()]


@dataclass(frozen=True)
class Print:
    """A line that prints sums, and what it prints of them."""

    line: int
    names: tuple[str, ...]


@cache
def find_print(path: str, line: int) -> Print | None:
    """Where the program prints on one rank what its loop at this line has added up; None if that is
    not seen, or ranks may have brought it together."""
    try:
        tree = parse(Path(path).read_text(encoding="utf-8"))
        is_helped = imports_sharing(tree, Path(path), frozenset())
    except (OSError, SyntaxError, ValueError):
        return None
    loop = next((each for each in ast.walk(tree) if is_loop_at(each, line)), None)
    if is_helped or loop is None:
        return None
    sums = Sums(tree, loop)
    return None if sums.may_be_shared(tree) else find_print_of(sums, tree, loop)


def may_share(path: Path, seen: frozenset[Path]) -> bool:
    """Whether something in this file, or in one beside it that it imports, may bring together what
    ranks have added up."""
    tree = parse(path.read_text(encoding="utf-8"))
    return any(map(is_sharing, ast.walk(tree))) or imports_sharing(tree, path, seen)


def is_sharing(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and bool(SHARES.search(name_of(node)))
        and not takes_gradient(node)
    )


def imports_sharing(tree: ast.Module, path: Path, seen: frozenset[Path]) -> bool:
    """Whether this file imports what may share: a library, or a file beside it."""
    for name in (name for node in ast.walk(tree) for name in imported_by(node)):
        beside = path.parent / f"{name.replace('.', '/')}.py"
        if name.partition(".")[0] in LIBRARIES or (
            beside.exists() and beside not in seen and may_share(beside, seen | {path, beside})
        ):
            return True
    return False


def takes_gradient(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in ast.walk(call))


def imported_by(node: ast.AST) -> list[str]:
    """The names of modules that a statement may import."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return [module, *(f"{module}.{each.name}".lstrip(".") for each in node.names)]
    return []


def name_of(call: ast.Call) -> str:
    """The last part of what is called: "all_reduce" of dist.all_reduce(x)."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def find_print_of(sums: Sums, tree: ast.Module, loop: ast.AST) -> Print | None:
    """Where the program prints on one rank what comes of these sums, behind the loop."""
    inside = {id(each) for each in ast.walk(loop)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            continue
        call = node.value
        names = sums.names_in(call, sums.function_of(node))
        if names and id(node) not in inside and name_of(call) in PRINTS and sums.is_for_one(node):
            return Print(node.lineno, tuple(names))
    return None


def is_loop_at(node: ast.AST, line: int) -> bool:
    """Whether a loop goes through what it goes through at this line."""
    if not isinstance(node, Loop):
        return False
    return node.lineno <= line <= (node.iter.end_lineno or node.lineno)


class Sums:
    """What a loop adds up or collects, and what comes of it, also where functions return it."""

    def __init__(self, tree: ast.Module, loop: ast.AST) -> None:
        self.parents = {
            id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        owner = self.function_of(loop)
        self.known = {(owner, each) for each in find_sums(loop)}
        """Names, each with the function that has it."""
        self.functions = set[str]()
        """Functions that return some of it."""
        size = -1
        while size < len(self.known) + len(self.functions):
            size = len(self.known) + len(self.functions)
            for node in ast.walk(tree):
                self.follow(node)

    def follow(self, node: ast.AST) -> None:
        """What a statement makes of it."""
        owner = self.function_of(node)
        if isinstance(node, ast.Return) and node.value and owner:
            if self.names_in(node.value, owner):
                self.functions.add(owner)
        elif isinstance(node, ast.Assign) and self.names_in(node.value, owner):
            targets = (part for each in node.targets for part in getattr(each, "elts", [each]))
            self.known |= {(owner, ast.unparse(each)) for each in targets}

    def names_in(self, node: ast.AST, owner: str) -> list[str]:
        """What an expression in this function takes of it."""
        found = dict[str, None]()
        for each in ast.walk(node):
            if isinstance(each, NAMES):
                words = ast.unparse(each)
                if (owner, words) in self.known:
                    found[words] = None
            elif isinstance(each, ast.Call) and name_of(each) in self.functions:
                found[f"{name_of(each)}(…)"] = None
        return [*found]

    def may_be_shared(self, tree: ast.Module) -> bool:
        """Whether a call may bring some of it together: one that stands in a function that has some
        of it, or that takes a name of it; or the call of a function that has such calls."""
        owners, words = {owner for owner, _ in self.known}, {each for _, each in self.known}
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
        shares = [each for each in calls if is_sharing(each)]
        if any(self.function_of(each) in owners or not takes_names(each) for each in shares):
            return True
        sharing, size = {self.function_of(each) for each in shares}, 0
        while size < len(sharing):
            size = len(sharing)
            sharing |= {self.function_of(each) for each in calls if name_of(each) in sharing}
        return any(
            not words.isdisjoint(words_in(each)) or self.names_in(each, self.function_of(each))
            for each in calls
            if is_sharing(each) or name_of(each) in sharing - self.functions - {""}
        )

    def climb(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is around a node, from the inside."""
        while (above := self.parents.get(id(node))) is not None:
            yield above
            node = above

    def function_of(self, node: ast.AST) -> str:
        """The function around a node; empty if there is none."""
        return next((each.name for each in self.climb(node) if isinstance(each, Function)), "")

    def is_for_one(self, node: ast.AST) -> bool:
        """Whether a condition on the rank is around a node."""
        tests = (each.test for each in self.climb(node) if isinstance(each, ast.If))
        return any(ONE_RANK.search(ast.unparse(each)) for each in tests)


def words_in(node: ast.AST) -> set[str]:
    """The names and attributes in an expression, as they are written."""
    return {ast.unparse(each) for each in ast.walk(node) if isinstance(each, NAMES)}


def takes_names(call: ast.Call) -> bool:
    """Whether its arguments say what it takes."""
    taken = (*call.args, *(each.value for each in call.keywords))
    return any(isinstance(each, NAMES) for one in taken for each in ast.walk(one))


def find_sums(loop: ast.AST) -> Iterator[str]:
    """What a loop adds to, or collects in; not what counts its steps."""
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(op=ast.Add(), value=value) if not isinstance(value, ast.Constant):
                target: ast.AST = node.target
                while isinstance(target, ast.Subscript):
                    target = target.value
                yield ast.unparse(target)
            case ast.Call(func=ast.Attribute(attr="append" | "extend", value=owner)):
                yield ast.unparse(owner)
