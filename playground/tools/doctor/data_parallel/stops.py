"""The part of the stop: a training that stops by a value that each rank computes. Ranks whose
values differ leave the loop apart, and those that stay wait for them. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from playground.tools.doctor.data_parallel.edits import Edit, add_after, add_before, replace_node
from playground.tools.doctor.data_parallel.metrics import SHARING, find_evaluations_apart
from playground.tools.doctor.data_parallel.model import find_norms_apart
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.reductions import tell_device
from playground.tools.doctor.data_parallel.script import TrainingScript, is_of_rank
from playground.tools.doctor.data_parallel.start import is_exit
from playground.tools.doctor.data_parallel.sums import find_totals
from playground.tools.doctor.data_parallel.text import Function, Loop
from playground.tools.doctor.data_parallel.trainings import Training

NAME = "stop"
LEAVES = "leaves the loop", "one would stop alone, and the others wait forever"
LOWERS = "lowers the learning rate", "they would train on with other rates"
AGREE = *SHARING, "broadcast", "broadcast_object_list", "gather"
"""Calls after which ranks may have one value."""
CLOCKS = {
    *("time.time", "time.monotonic", "time.perf_counter", "time.process_time"),
    *("datetime.now", "datetime.datetime.now", "datetime.datetime.utcnow"),
}
"""Functions that tell the time."""
NOT_MEASURED = {"cuda", "len", "size", "to"}
"""Calls whose results are the same on all ranks, or are data."""
OF_TENSORS = {"cpu", "detach", "item", "numpy", "tolist"}


def find_stop(script: TrainingScript) -> Part:
    """The first stop of the training: it has to be by a value that all ranks share. Of a learning
    rate that is lowered by a value, the same is told."""
    training = script.training
    if not training or (training.is_lost and not training.epochs):
        saw = "whether the training stops by what each rank measures is not seen"
        return Part(NAME, Status.UNKNOWN, saw)
    none = Part(NAME, Status.NOT_NEEDED, "no stop by what each rank measures is seen")
    if timed := find_clock(script, training):
        return share_clock(script, *timed)
    if inner := share_loss(script):
        return inner
    loop = training.epochs
    if not loop:
        return none
    for leaves, names, verb in find_decisions(script, loop):
        reduced = {*find_totals(script).names}
        values = find_measured(script, loop, names - reduced, reduced)
        if not values or find_evaluations_apart(script):  # whose sums are of all ranks then
            continue
        return find_shared(script) or share(script, loop, leaves, values, verb)
    if found := find_flag(script, loop):
        return share_flag(script, loop, *found)
    return none


def find_shared(script: TrainingScript) -> Part | None:
    """The part of a script in which ranks may agree already."""
    found = script.text.find_calls(*AGREE)
    saw = f"{script.at(found[0])} brings ranks together" if found else ""
    return Part(NAME, Status.THERE, saw) if found else None


def is_elif(script: TrainingScript, test: ast.If) -> bool:
    return script.text.lines[test.lineno - 1].lstrip().startswith("elif")


def find_clock(script: TrainingScript, training: Training) -> tuple[ast.stmt, ast.If] | None:
    """A statement that leaves a loop of the training by the time, and its condition."""
    loops = [each for each in (training.batches, training.epochs) if each]
    for loop in loops:
        for leaves in find_exits(script, loop):
            tests = find_conditions(script, leaves, loop)
            for test in tests if not any(map(is_of_rank, tests)) else ():
                calls = (
                    script.text.dotted(each.func)
                    for each in script.list_sources(test.test)
                    if isinstance(each, ast.Call)
                )
                if CLOCKS.intersection(calls):
                    return leaves, test
    return None


def share_clock(script: TrainingScript, leaves: ast.stmt, test: ast.If) -> Part:
    """The part of a script that stops by the time: that of rank 0 is all ranks'."""
    if shared := find_shared(script):
        return shared
    text, decided = script.text, script.text.fresh("decided")
    saw = (
        f"{script.at(leaves)} leaves the loop by the time, which differs between ranks: one would "
        "stop alone, and the others wait forever. Broadcast rank 0's decision first"
    )
    lines = (
        f"{decided} = [{text.code(test.test)}]",
        f"{script.dist}.broadcast_object_list({decided}, 0)",
    )
    if is_elif(script, test):
        note = f"before it, on all ranks: `{'; '.join(lines)}`; then ask for {decided}[0]"
        return Part(NAME, Status.MISSING, saw, notes=[note])
    before = add_before(test.lineno, script.indent_of(test), *lines)
    return Part(NAME, Status.MISSING, saw, [before, replace_node(test.test, f"{decided}[0]")])


def share_flag(
    script: TrainingScript, loop: Loop, leaves: ast.stmt, test: ast.If | ast.While, flag: str
) -> Part:
    """The part of a script that leaves the loop by an attribute that is set elsewhere: all ranks
    take that of rank 0 where it is asked for."""
    if shared := find_shared(script):
        return shared
    saw = (
        f"{script.at(leaves)} leaves the loop by {flag}, which is set elsewhere, maybe by what a "
        "rank measures: one would stop alone, and the others wait forever. Broadcast it from rank "
        "0 first"
    )
    lines = lines_to_share(script, loop, flag)
    around = [each for each in script.text.climb(test) if is_inside(script, each, loop)]
    is_plain = isinstance(test, ast.If) and not any(isinstance(each, ast.If) for each in around)
    if is_plain and script.stands_alone(test):
        edit = add_before(test.lineno, script.indent_of(test), *lines)
        return Part(NAME, Status.MISSING, saw, [edit])
    note = f"before it is asked for, on all ranks: `{'; '.join(lines)}`"
    return Part(NAME, Status.UNKNOWN, saw, notes=[note])


def find_flag(
    script: TrainingScript, loop: Loop
) -> tuple[ast.stmt, ast.If | ast.While, str] | None:
    """A statement that leaves the loop by an attribute that a method sets later, as a callback
    does; its condition, and that attribute."""
    set_later = {
        target.attr
        for node in ast.walk(script.text.tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and getattr(script.text.function_of(node), "name", "__init__") != "__init__"
    }
    counted = {
        ast.unparse(node.target) for node in ast.walk(loop) if isinstance(node, ast.AugAssign)
    }
    tests: list[tuple[ast.stmt, ast.If | ast.While]] = [
        (leaves, test)
        for leaves in find_exits(script, loop)
        for test in find_conditions(script, leaves, loop)
    ]
    tests += [(loop, loop)] if isinstance(loop, ast.While) else []
    for leaves, test in tests:
        if isinstance(test, ast.If) and is_of_rank(test):
            continue
        for node in ast.walk(test.test):
            is_flag = isinstance(node, ast.Attribute) and node.attr in set_later
            if is_flag and ast.unparse(node) not in counted:
                return leaves, test, ast.unparse(node)
    return None


def find_decisions(
    script: TrainingScript, loop: Loop
) -> Iterator[tuple[ast.stmt, set[str], tuple[str, str]]]:
    """The statements that leave the loop, or lower a learning rate, with the names that decide on
    it, and with what it does, and what follows if ranks differ."""
    for leaves in find_exits(script, loop):
        tests = find_conditions(script, leaves, loop)
        if not any(map(is_of_rank, tests)):
            yield (
                leaves,
                set[str]().union(*(reads_in(each.test) for each in tests)),
                LEAVES,
            )
    for call in script.text.find_calls("step"):
        made = script.text.makers(call.func.value) if isinstance(call.func, ast.Attribute) else ()
        is_plateau = any(script.text.called(each) == "ReduceLROnPlateau" for each in made)
        if is_plateau and call.args and is_inside(script, call, loop):
            yield script.text.statement_of(call), reads_in(call.args[0]), LOWERS


def share_loss(script: TrainingScript) -> Part | None:
    """The part of a script that leaves its loop over batches, or goes on with the next one, by a
    loss, or by what that is added to: all ranks decide by the mean of theirs."""
    training = script.training
    assert training
    losses = reads_in(training.loss) if training.loss else set()
    if not (training.batches and losses):
        return None
    for test, name in find_tests(script, training.batches, losses):
        decided = script.text.fresh("decided")
        is_number = any(
            ".item()" in ast.unparse(value) for _, value in find_settings(training.batches, name)
        )
        device = tell_device(script, training.batches)
        own = f"torch.tensor({name}{device})" if is_number else f"{name}.detach()"
        lines = (
            f"{decided} = {own} / {script.size}",
            f"{script.dist}.all_reduce({decided})  # the mean over ranks",
        )
        saw = (
            f"{script.at(test)} leaves a batch, or the loop, by {name}, which differs between "
            "ranks: one would leave alone, and the others wait forever. Decide by the mean"
        )
        if is_elif(script, test):
            note = f"before it is compared, on all ranks: `{'; '.join(lines)}`"
            return Part(NAME, Status.MISSING, saw, notes=[note])
        words = f"{decided}.item()" if is_number else decided
        uses = [
            replace_node(node, words)
            for node in ast.walk(test.test)
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name
        ]
        before = add_before(test.lineno, script.indent_of(test), *lines)
        return Part(NAME, Status.MISSING, saw, [before, *uses])
    return None


def find_tests(
    script: TrainingScript, loop: Loop, losses: set[str]
) -> Iterator[tuple[ast.If, str]]:
    """The conditions in a loop over batches under which it is left, or goes on, that read a loss,
    or what a loss gives its value; and that name."""
    names = {*losses}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign | ast.AugAssign) and reads_in(node.value) & losses:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {*map(ast.unparse, targets)}
    for leaves in find_exits(script, loop, of_batches=True):
        tests = find_conditions(script, leaves, loop)
        if not any(map(is_of_rank, tests)):
            for test in tests:
                yield from ((test, name) for name in sorted(reads_in(test.test) & names))


def share(
    script: TrainingScript,
    loop: Loop,
    leaves: ast.stmt,
    values: Sequence[str],
    told: tuple[str, str],
) -> Part:
    """The part of a script that decides by these values. `told`: what it does by them, and what
    follows if they differ."""
    does, follows = told
    differs = find_norms_apart(script)
    verb = ("" if differs else "may ") + ("differs" if differs and len(values) == 1 else "differ")
    saw = (
        f"{script.at(leaves)} {does} by {' and '.join(values)}, which {verb} between ranks: "
        f"{follows}. Broadcast "
        f"{'it' if len(values) == 1 else 'them'} from rank 0 first"
    )
    edits, notes = list[Edit](), list[str]()
    for each in values:
        made = find_end(script, loop, leaves, each)
        lines = lines_to_share(script, loop, each)
        if made and script.stands_alone(made):
            edits.append(add_after(made, script.indent_of(made), *lines))
        else:
            notes.append(f"before it is compared, on all ranks: `{'; '.join(lines)}`")
    return Part(NAME, Status.MISSING, saw, edits, notes)


def lines_to_share(script: TrainingScript, loop: Loop, value: str) -> list[str]:
    """The lines that give all ranks the value of rank 0."""
    uses = [script.text.parents[node] for node in ast.walk(loop) if ast.unparse(node) == value]
    if any(isinstance(each, ast.Attribute) and each.attr in OF_TENSORS for each in uses):
        return [f"{value} = {value}.clone()", f"{script.dist}.broadcast({value}, 0)"]
    decided = script.text.fresh("decided")
    if any(map(is_of_number, uses)):
        return [
            f"{decided} = torch.tensor([{value}]{tell_device(script, loop)})",
            f"{script.dist}.broadcast({decided}, 0)",
            f"{value} = {decided}.item()",
        ]
    return [
        f"{decided} = [{value}]",
        f"{script.dist}.broadcast_object_list({decided}, 0)",
        f"{value} = {decided}[0]",
    ]


def is_of_number(use: ast.AST) -> bool:
    """Whether what is used so is a number: it is compared, divided, shown with its digits, or the
    metric of a scheduler."""
    is_divided = isinstance(use, (ast.BinOp, ast.AugAssign)) and isinstance(use.op, ast.Div)
    is_shown = isinstance(use, ast.FormattedValue) and use.format_spec is not None
    is_metric = isinstance(use, ast.Call) and ast.unparse(use.func).endswith(".step")
    return isinstance(use, ast.Compare) or is_divided or is_shown or is_metric


def find_end(script: TrainingScript, loop: Loop, leaves: ast.stmt, value: str) -> ast.stmt | None:
    """The last statement that gives the value before it is read, with what it is in, unless the
    reader is in that, too. None if a condition on the value is around both."""
    settings = [node for node, _ in find_settings(loop, value)]
    reader = min([leaves, *find_readers(script, loop, value)], key=lambda each: each.lineno)
    around = {*script.text.climb(reader)}
    made = [each for each in settings if each.lineno < reader.lineno]
    last = max(made, key=lambda each: each.lineno, default=None)
    if last is None:
        return None
    for each in script.text.climb(last):
        if each in around:
            both = [each, *script.text.climb(each)]
            tests = [one.test for one in both if isinstance(one, ast.If)]
            return None if any(value in reads_in(test) for test in tests) else last
        last = each if isinstance(each, ast.stmt) else last
    return None


def find_readers(script: TrainingScript, loop: Loop, value: str) -> Iterator[ast.stmt]:
    """The statements of the loop that read the value, and do not set it: conditions, and what is
    not a part of the evaluation."""
    settings = {node for node, _ in find_settings(loop, value)}
    for node in ast.walk(loop):
        if (isinstance(node, ast.If) and value in reads_in(node.test)) or (
            isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr))
            and node not in settings
            and value in reads_in(node.value)
            and not script.text.is_without_gradients(node)
        ):
            yield node


def find_exits(
    script: TrainingScript, loop: Loop, *, of_batches: bool = False
) -> Iterator[ast.stmt]:
    """The statements that leave the loop itself. `of_batches`: those too that leave one batch, or
    end the process."""
    text = script.text
    for node in ast.walk(loop):
        ends = isinstance(node, ast.Return) or (
            of_batches and isinstance(node, ast.Expr) and is_exit(node)
        )
        goes_on = of_batches and isinstance(node, ast.Continue)
        if isinstance(node, ast.stmt) and (ends or goes_on or isinstance(node, ast.Break)):
            kinds = (Function,) if ends else (Function, Loop)
            inner = next((each for each in text.climb(node) if isinstance(each, kinds)), None)
            if inner is (text.function_of(loop) if ends else loop):
                yield node


def find_conditions(script: TrainingScript, leaves: ast.stmt, loop: Loop) -> list[ast.If]:
    """The conditions in the loop under which it is left here."""
    around = (each for each in script.text.climb(leaves) if isinstance(each, ast.If))
    return [each for each in around if is_inside(script, each, loop)]


def is_inside(script: TrainingScript, node: ast.AST, loop: Loop | None) -> bool:
    return any(each is loop for each in script.text.climb(node))


def reads_in(expression: ast.AST) -> set[str]:
    """The names in it, and the attributes of `self`."""
    found = set[str]()
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id != "self":
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            found.add(ast.unparse(node))
    return found


def find_settings(loop: Loop, name: str) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The statements of the loop that give a name its value, or call a method of it or itself with
    arguments, `losses.append(loss)`; and that value, or call."""
    for node in ast.walk(loop):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(name in reads_in(each) for each in targets):
                yield node, node.value
        elif (
            isinstance(node, ast.Expr)
            and isinstance(call := node.value, ast.Call)
            and name in reads_in(call.func)
            and (call.args or call.keywords)
        ):
            yield node, call


def find_measured(
    script: TrainingScript, loop: Loop, names: set[str], known: Collection[str]
) -> list[str]:
    """The names of results of an evaluation in the loop that these names depend on: by their
    values, or by the conditions under which they get them."""
    left, found = sorted(names), list[str]()
    seen = {*known, *names}
    for name in left:
        settings = [*find_settings(loop, name)]
        if any(is_measured(script, loop, *each) for each in settings):
            found.append(name)
            continue
        for node, value in settings:
            ifs = [each for each in script.text.climb(node) if isinstance(each, ast.If)]
            tests = (reads_in(each.test) for each in ifs if is_inside(script, each, loop))
            new = reads_in(value).union(*tests) - seen
            seen |= new
            left += sorted(new)
    return found


def is_measured(script: TrainingScript, loop: Loop, node: ast.stmt, value: ast.expr) -> bool:
    """Whether a statement sets a result of an evaluation: of the script's own function that
    computes without gradients, of a loop without gradients around it, or of what that filled."""
    if is_evaluation(script, value) or is_of_evaluation(script, node, value):
        return True
    return isinstance(node, ast.Assign) and any(
        isinstance(one, ast.Expr) and is_of_evaluation(script, one, call)
        for name in reads_in(value)
        for one, call in find_settings(loop, name)
    )


def is_of_evaluation(script: TrainingScript, node: ast.stmt, value: ast.expr) -> bool:
    """Whether a statement computes something beside a call of a model without gradients, in a
    block that is none of the training."""
    text, path = script.text, script.training.path if script.training else []
    called = {text.called(each) for each in ast.walk(value) if isinstance(each, ast.Call)}
    if not called - NOT_MEASURED or is_inside(script, node, script.loop):
        return False
    around = [node, *text.climb(node)]
    blocks = [each for each in around if isinstance(each, (ast.With, ast.For))]
    return any(
        isinstance(each, ast.Call)
        and text.key_of(each.func)
        and text.makers(each.func)
        and text.is_without_gradients(each)
        for block in blocks
        if block not in path
        for each in ast.walk(block)
    )


def is_evaluation(script: TrainingScript, value: ast.expr) -> bool:
    """Whether it is a result of the script's own function that computes without gradients, and is
    none of the training."""
    function = script.text.resolve(value) if isinstance(value, ast.Call) else None
    if function is None:
        return False
    if script.training and function in script.training.functions:
        return script.training.serves_tests and value not in script.training.path
    return any(script.text.is_without_gradients(node) for node in ast.walk(function))
