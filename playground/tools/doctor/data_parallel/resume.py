"""The part of resuming: all ranks read what rank 0 has written. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from playground.tools.doctor.data_parallel.edits import Edit, add_before
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Function


def find_resume(script: TrainingScript) -> Part:
    name, text = "resume", script.text
    loads = [each for each in text.find_calls("load") if text.dotted(each.func) == "torch.load"]
    saves = [each for each in text.find_calls("save") if text.dotted(each.func) == "torch.save"]
    if not loads:
        saw = "no torch.load is seen: each rank begins anew" if saves else "no checkpoint is saved"
        return Part(name, Status.NOT_NEEDED, saw)
    loads = [*filter(lambda each: is_checkpoint(script, each, saves), loads)] or loads
    if not is_checkpoint(script, loads[0], saves):
        saw = f"what {script.at(loads[0])} reads is saved by no rank"
        return Part(name, Status.NOT_NEEDED, saw)
    edits = [edit for each in loads for edit in read_together(script, each, saves)]
    if not edits:
        saw = f"{script.at(loads[0])} reads the file on all ranks"
        return Part(name, Status.THERE, saw)
    saw = f"{script.at(loads[0])}: all ranks read what rank 0 has written, to their own devices"
    return Part(name, Status.MISSING, saw, edits)


def read_together(
    script: TrainingScript, load: ast.Call, saves: Collection[ast.Call]
) -> Iterator[Edit]:
    """The changes by which a rank reads when rank 0 has written, and to its own device."""
    text = script.text
    writes = find_writes(script, saves)
    has_barrier = any(call.lineno < load.lineno for call in text.find_calls("barrier"))
    is_alone = script.is_for_first(load)
    if comes_after(script, load, writes) and not (has_barrier or is_alone):
        statement = find_place(script, load, writes)
        wait = f"{script.dist}.barrier()  # until rank 0 has written the file"
        yield add_before(statement.lineno, script.indent_of(statement), wait)
    if not any(one.arg == "map_location" for one in load.keywords) and len(load.args) < 2:
        yield script.add_argument(load, 'map_location="cpu"')


def is_checkpoint(script: TrainingScript, load: ast.Call, saves: Collection[ast.Call]) -> bool:
    """Whether what is read is what a rank saves, or the state of a model: its file is that of a
    save, or not told by the text, or a `load_state_dict` is given it."""
    path = load.args[0] if load.args else None
    written = [each.args[1] for each in saves if len(each.args) > 1]
    if not path or is_for_state(script, load):
        return True
    own = tell_path(script, path)
    is_told = own and all(tell_path(script, each) for each in written)
    return bool(saves) and (not is_told or own in {tell_path(script, each) for each in written})


def tell_path(script: TrainingScript, path: ast.expr) -> str:
    """The text of a file's name, with that of what has a name; empty if it is a parameter, or may
    be several."""
    text, words = script.text, ast.unparse(path)
    if not isinstance(path, ast.Name):
        return words
    key = text.key_of(path)
    values = [
        node.value
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Assign) and key in map(text.key_of, node.targets)
    ]
    return tell_path(script, values[0]) if len(values) == 1 else ""


def is_for_state(script: TrainingScript, load: ast.Call) -> bool:
    """Whether a `load_state_dict` is given what is read, or a part of it."""
    text, made = script.text, [ast.unparse(load)]
    for words in made:
        for node in ast.walk(text.tree):
            if isinstance(node, ast.Assign | ast.For | ast.comprehension):
                value = node.value if isinstance(node, ast.Assign) else node.iter
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if has_words(value, words):
                    made += (name for name in map(ast.unparse, targets) if name not in made)
            elif isinstance(node, ast.Return) and node.value and has_words(node.value, words):
                function = text.function_of(node)
                sites = (call for call in text.calls if text.resolve(call) is function)
                made += (name for name in map(ast.unparse, sites) if name not in made)
    return any(
        has_words(given, words)
        for call in text.find_calls("load_state_dict")
        for given in call.args
        for words in made
    )


def has_words(node: ast.AST, words: str) -> bool:
    """Whether an expression of this text is in it."""
    return any(
        isinstance(each, ast.Name | ast.Attribute | ast.Call) and ast.unparse(each) == words
        for each in ast.walk(node)
    )


def find_writes(script: TrainingScript, saves: Collection[ast.Call]) -> list[ast.AST]:
    """What writes a checkpoint, or has the training in it, in all functions: the saves, the calls
    of functions that save, and the loops of the training."""
    if not saves:
        return []
    text = script.text
    found = list[ast.AST](saves)
    for each in found:
        function = text.function_of(each)
        sites = (call for call in text.calls if function and text.resolve(call) is function)
        found += (call for call in sites if call not in found)
    path = script.training.path if script.training else []
    return [*found, *(one for one in path if isinstance(one, ast.stmt | ast.Call))]


def comes_after(
    script: TrainingScript, node: ast.AST, writes: Collection[ast.AST], known: tuple[int, ...] = ()
) -> bool:
    """Whether it runs behind one of these, in its function, or where that is called."""
    text, line = script.text, getattr(node, "lineno", 0)
    function = text.function_of(node)
    if any(
        getattr(one, "end_lineno", line) < line and text.function_of(one) is function
        for one in writes
        if not isinstance(one, Function) and not is_instead(script, node, one)
    ):
        return True
    sites = [call for call in text.calls if function and text.resolve(call) is function]
    return id(function) not in known and any(
        comes_after(script, each, writes, (*known, id(function))) for each in sites
    )


def is_instead(script: TrainingScript, node: ast.AST, other: ast.AST) -> bool:
    """Whether one of both runs, by the same condition: it is under its `else`."""
    around = {*script.text.climb(other)}
    tests = (each for each in script.text.climb(node) if isinstance(each, ast.If))
    test = next((each for each in tests if each in around), None)
    under_else = {one for each in test.orelse for one in ast.walk(each)} if test else set()
    return node in under_else and other not in under_else


def find_place(script: TrainingScript, load: ast.Call, writes: Collection[ast.AST]) -> ast.stmt:
    """The outermost statement around a load that has no write in it."""
    text = script.text
    last = text.outermost_statement(load)
    found = text.statement_of(load)
    for each in text.climb(found):
        inside = {*ast.walk(each)}
        if found is last or any(one in inside for one in writes):
            break
        if isinstance(each, ast.stmt):
            found = each
    return found
