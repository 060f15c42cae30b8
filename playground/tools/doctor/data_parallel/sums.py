"""What a loop over batches adds up or collects, and is used after it. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Loop, find_results
from playground.tools.doctor.data_parallel.trainings import take

GROUPED = ast.Dict, ast.DictComp, ast.Tuple, ast.List, ast.ListComp
BATCHES = ast.Call, *GROUPED
"""What a loop appends to a list of results, besides numbers."""
NUMBERS, LOSSES, RESULTS = "numbers", "losses", "results"
"""What a loop may append to a list."""
NUMBER = re.compile(r"\.item\(\)|^float\(")
INTEGER = re.compile(
    r"^len\(.*\)$|\.size\(\d*\)$|\.size\(\)\[\d+\]$|\.shape\[\d+\]$|\.numel\(\)$|^\d+$|"
    r"(==|\.eq\(|\.ne\(|!=).*\.sum\(\)(\.item\(\))?$|^int\("
)
"""The text of an integer that a loop adds."""
COLLECTS = {"add", "add_batch", "append", "extend", "record", "update"}
"""Methods by which an object may collect something of each batch."""
SUMMED = re.compile(r"==|\.eq\(|\bsum\(")
TABLES = {"dict", "defaultdict", "Counter", "OrderedDict"}
"""Functions that make a dictionary."""
COUNTED = re.compile(r"\.size\(|\blen\(|\.shape\b|\.numel\(|^\d+$")
"""In what is added up: it is a sum over samples, not the mean of a batch."""


@dataclass(frozen=True)
class Totals:
    """What a loop over batches makes of them, and is used after it."""

    sums: Sequence[tuple[str, bool]] = ()
    """Each with whether it is a mean per batch."""
    lists: Sequence[str] = ()
    """Lists of numbers of batches."""
    losses: Sequence[str] = ()
    """Lists of losses."""
    results: Sequence[str] = ()
    """Lists of results of samples."""
    loss: str = ""
    """The last loss; empty if there are lists, or it is not used."""
    tables: Sequence[tuple[str, bool]] = ()
    """Dictionaries of sums, each with whether they are means per batch."""

    @property
    def names(self) -> list[str]:
        """Those whose values become the same on all ranks."""
        last = [self.loss] if self.loss and not self.sums else []
        return [*self.lists, *(each for each, _ in (*self.sums, *self.tables)), *last]


def find_totals(script: TrainingScript) -> Totals:
    """What the training makes of its batches."""
    if not script.loop or not script.training:
        return Totals()
    filled = find_filled(script, script.loop)
    lists, losses, results = (
        [words for words, given in filled.items() if given == kind]
        for kind in (NUMBERS, LOSSES, RESULTS)
    )
    tables = [*find_tables(script, script.loop)]
    loss = "" if lists or losses or tables else loss_after(script, script.loop)
    return Totals([*find_sums(script, script.loop)], lists, losses, results, loss, tables)


def find_sums(script: TrainingScript, loop: ast.For) -> Iterator[tuple[str, bool]]:
    """What the loop adds up and is used after it, and whether that is a mean per batch."""
    found = dict[str, bool]()
    for target, added in find_additions(loop):
        held = table_of(target)
        if held is not target and not is_table(script, held):
            continue
        is_name = isinstance(held, (ast.Name, ast.Attribute))
        if is_name and script.is_used_after(ast.unparse(held), loop):
            added = follow_once(loop, added)
            own = script.text.resolve(added) if isinstance(added, ast.Call) else None
            values = find_results(own) if own else [added]
            if not isinstance(added, ast.Constant):  # which counts batches
                is_sum = any(map(is_over_samples, map(ast.unparse, values)))
                found[script.text.code(target)] = not (is_sum or script.summed_loss)
    yield from found.items()


def find_additions(loop: Loop) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What the loop adds to, and what it adds: `total += x`, and `total = total + x`."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield node.target, node.value
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.Add)
            and ast.unparse(node.value.left) == ast.unparse(node.targets[0])
        ):
            yield node.targets[0], node.value.right


def follow_once(loop: Loop, value: ast.expr) -> ast.expr:
    """What a name is set to in the loop, if that is done once; any other expression itself."""
    if not isinstance(value, ast.Name):
        return value
    made = [
        node.value
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and value.id in map(ast.unparse, node.targets)
    ]
    return made[0] if len(made) == 1 else value


def is_over_samples(words: str) -> bool:
    """Whether what is added up is a sum over samples, by its text."""
    return bool(COUNTED.search(words) or (SUMMED.search(words) and ".mean(" not in words))


def stays_integer(script: TrainingScript, loop: Loop, name: str) -> bool:
    """Whether a sum begins as an integer, and only integers are added to it."""
    targets = [(each, added) for each, added in find_additions(loop) if ast.unparse(each) == name]
    keys = {key for each, _ in targets if (key := script.text.key_of(each))}
    begins = [each for key in keys for each in script.text.settings.get(key, [])]
    values = [each.value for each in begins if isinstance(each, ast.Constant)]
    added = [ast.unparse(follow_once(loop, each)) for _, each in targets]
    return (
        bool(values)
        and all(type(each) is int for each in values)
        and all(INTEGER.search(each) for each in added)
    )


def find_tables(script: TrainingScript, loop: ast.For) -> Iterator[tuple[str, bool]]:
    """The dictionaries in which the loop adds up under changing keys, and that are used after it,
    each with whether they hold means per batch."""
    found = dict[str, bool]()
    target: ast.expr
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            target, added = node.target, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            target, added = node.targets[0], node.value.right  # table[key] = table.get(key, 0) + x
        else:
            continue
        if isinstance(target, ast.Subscript) and is_table(script, target.value):
            words = ast.unparse(target.value)
            is_own = isinstance(node, ast.AugAssign) or words in ast.unparse(node.value)
            if is_own and not isinstance(target.slice, ast.Constant):
                found[words] = not (is_over_samples(ast.unparse(added)) or script.summed_loss)
    yield from ((words, each) for words, each in found.items() if script.is_used_after(words, loop))


def is_table(script: TrainingScript, node: ast.expr) -> bool:
    """Whether a name is set to a dictionary, once."""
    made = take(script.text, node, {})
    is_call = isinstance(made, ast.Call) and script.text.called(made) in TABLES
    return is_call or isinstance(made, (ast.Dict, ast.DictComp))


def table_of(node: ast.expr) -> ast.expr:
    """The dictionary of which it is an item, or itself."""
    is_item = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return node.value if is_item and isinstance(node, ast.Subscript) else node


def find_filled(script: TrainingScript, loop: ast.For) -> dict[str, str]:
    """The lists that the loop fills and that are used after it, each with what it is given: numbers
    of batches, `losses.append(loss.item())`, losses, which are tensors, or results of samples."""
    found = dict[str, str]()
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        name, given = node.func.attr, follow_once(loop, node.args[0])
        words, used = script.text.code(node.func.value), table_of(node.func.value)
        if not script.is_used_after(ast.unparse(used), loop):
            continue
        is_result = name == "extend" or isinstance(given, GROUPED)
        if name == "append" and NUMBER.search(ast.unparse(given)) and not is_result:
            found[words] = NUMBERS
        elif name == "append" and is_loss(script, node.args[0]):
            found[words] = LOSSES
        elif name == "extend" or (name == "append" and isinstance(given, BATCHES)):
            found.setdefault(words, RESULTS)
    return found


def is_loss(script: TrainingScript, given: ast.expr) -> bool:
    """Whether it is the loss of a batch, detached or not."""
    loss = name_loss(script)
    while isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and not given.args:
        given = given.func.value  # loss.detach().clone()
    return isinstance(given, ast.Name) and given.id == loss


def find_unfollowed(script: TrainingScript, loop: ast.For) -> list[str]:
    """What else the loop collects in, or adds to, and is used after it."""
    found = dict[str, None]()
    for node in ast.walk(loop):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            is_log = isinstance(node, ast.stmt) and script.is_log(node)
            if value.func.attr in COLLECTS and value.args and not is_log:
                found[ast.unparse(value.func.value)] = None
        elif isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant):
            found[ast.unparse(table_of(node.target))] = None
    known = {*map(ast.unparse, (loop.target, loop.iter))}
    return [each for each in found if each not in known and script.is_used_after(each, loop)]


def loss_after(script: TrainingScript, loop: ast.For) -> str:
    """The loss, if the loop makes it, and it is used after it."""
    assert script.training
    name = name_loss(script)
    if not name or not any(node is loop for node in script.text.climb(script.training.backward)):
        return ""
    return name if script.is_used_after(name, loop) else ""


def name_loss(script: TrainingScript) -> str:
    """The name of the loss; empty if it has none."""
    owner = script.training.loss if script.training else None
    while isinstance(owner, ast.Call) and owner.args:  # scaler.scale(loss)
        owner = owner.args[0]
    return owner.id if isinstance(owner, ast.Name) else ""
