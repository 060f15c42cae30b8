"""The loops of a text that train, and the way to each: through functions and loops over phases that
serve tests, too. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from playground.tools.doctor.data_parallel.text import (
    WALKS,
    Function,
    Key,
    Loop,
    TrainingText,
    find_results,
    names_in,
    owner_of,
)

Values = Mapping[Key, ast.expr]
"""What names are in one case, such as the parameters of a function that is called once more."""


@dataclass
class Training:
    """The loop of a training, as far as the text shows it."""

    backward: ast.Call
    batches: Loop | None = None
    """The loop over batches; None if no loop is seen."""
    epochs: Loop | None = None
    path: list[ast.AST] = field(default_factory=list)
    """From `backward` outwards: its parents, and where its function is called, the calls."""
    is_lost: bool = False
    """Whether the way ends at a function that is called for several trainings, as far as is
    seen."""
    functions: list[Function] = field(default_factory=list)
    """Those that are called for it, from the innermost on."""
    values: dict[Key, ast.expr] = field(default_factory=dict)
    """What the names of phases and parameters are in the training."""
    serves_tests: bool = False
    """Whether the loop over batches serves tests, too."""
    switch: str = ""
    """The condition under which it trains, if it serves tests; empty if none holds behind it."""

    @property
    def loss(self) -> ast.expr | None:
        """What `backward` is called on; None for a function of that name."""
        return owner_of(self.backward)


@dataclass(frozen=True)
class Condition:
    """A condition around `backward`."""

    test: ast.expr
    is_met: bool
    """Whether `backward` is called if it is met."""


def find_trainings(text: TrainingText) -> list[Training]:
    """One for each loop over batches in which `backward()` is called; those without a loop, too."""
    found: dict[int, Training] = {}
    for call in text.find_calls("backward"):
        training = trace(text, call)
        found.setdefault(id(training.batches), training)
    return [*found.values()]


def trace(text: TrainingText, backward: ast.Call) -> Training:
    """Go outwards from `backward`: to the loop over batches, then to that over epochs. A function
    that is called at several places ends the way, unless only one of them trains."""
    training = Training(backward)
    node: ast.AST = backward
    conditions: list[Condition] = []
    while True:
        training.path.append(node)
        if isinstance(node, Loop):
            if training.batches is None:
                training.batches = node
            elif not enter_phase(text, training, node, conditions) and training.epochs is None:
                training.epochs = node
        if isinstance(node, Function):
            sites = [call for call in text.calls if text.resolve(call) is node]
            trains = [each for each in sites if meets(text, conditions, text.bind_all(each))]
            if len(trains) != 1 or node in training.functions:
                training.is_lost = len(sites) > 1
                return training
            values = [text.bind_all(each) for each in sites if each is not trains[0]]
            note_case(text, training, conditions, text.bind_all(trains[0]), values)
            training.functions.append(node)
            node, conditions = trains[0], []
            continue
        if node not in text.parents:
            return training
        around = text.parents[node]
        if isinstance(around, ast.If) and node is not around.test:
            conditions.append(Condition(around.test, any(node is each for each in around.body)))
        node = around


def enter_phase(
    text: TrainingText, training: Training, loop: Loop, conditions: Sequence[Condition]
) -> bool:
    """Whether a loop is one over phases, of which one trains: that one is noted."""
    cases = [*list_cases(text, loop)] if isinstance(loop, ast.For) else []
    trains = [each for each in cases if meets(text, conditions, each)]
    if len(trains) != 1:
        return False
    note_case(text, training, conditions, trains[0], [one for one in cases if one is not trains[0]])
    return True


def list_cases(text: TrainingText, loop: ast.For) -> Iterator[Values]:
    """What the targets of a loop are, round by round; nothing if that is not seen."""
    walked = take(text, loop.iter, {})
    rounds = walked.elts if isinstance(walked, (ast.Tuple, ast.List)) else []
    if isinstance(walked, ast.Call) and text.called(walked) == "items" and (of := owner_of(walked)):
        items = take(text, of, {})
        if isinstance(items, ast.Dict):
            rounds = [ast.Tuple([key, ast.Subscript(of, key)]) for key in items.keys if key]
    for each in rounds:
        parts = each.elts if isinstance(each, ast.Tuple) else [each]
        targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        if len(parts) == len(targets):
            keys = map(text.key_of, targets)
            yield {key: part for key, part in zip(keys, parts, strict=True) if key}


def note_case(
    text: TrainingText,
    training: Training,
    conditions: Sequence[Condition],
    values: Values,
    others: Sequence[Values],
) -> None:
    """Note what names are in the training, and what tells it from the other cases of its loop."""
    training.values.update(values)
    if not others or not training.batches:
        return
    training.serves_tests = True
    changed = {
        node.id
        for node in ast.walk(training.batches)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    here = text.function_of(training.batches)
    for each in conditions:
        ways = [each.test]
        if isinstance(each.test, ast.BoolOp) and isinstance(each.test.op, ast.And) and each.is_met:
            ways = each.test.values
        for way in ways:
            told = {decide(text, way, one) for one in others}
            if (
                decide(text, way, values) is each.is_met
                and told == {not each.is_met}
                and not names_in(way) & changed
                and text.function_of(way) is here
            ):
                training.switch = text.code(way) if each.is_met else deny(text, way)
                return


def deny(text: TrainingText, test: ast.expr) -> str:
    """The code of the contrary of a condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text.code(test.operand)
    return f"not ({text.code(test)})"


def meets(text: TrainingText, conditions: Sequence[Condition], values: Values) -> bool:
    """Whether all conditions are met, or may be, where names have these values."""
    return all(decide(text, each.test, values) is not (not each.is_met) for each in conditions)


def decide(text: TrainingText, test: ast.expr, values: Values) -> bool | None:
    """Whether a condition is met where names have these values; None if that is not seen."""
    test = take(text, test, values)
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = decide(text, test.operand, values)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        ends = isinstance(test.op, ast.Or)
        told = [decide(text, each, values) for each in test.values]
        return ends if ends in told else None if None in told else not ends
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return compare(text, test, values)
    return True if is_object(text, test) else None


def is_object(text: TrainingText, node: ast.expr) -> bool:
    """Whether it is made by a class, so that it is neither None nor, most often, empty."""
    made = text.makers(node)
    return bool(made) and all(text.called(each)[:1].isupper() for each in made)


def compare(text: TrainingText, test: ast.Compare, values: Values) -> bool | None:
    """Whether one comparison holds; None if that is not seen."""
    left, right = (take(text, each, values) for each in (test.left, test.comparators[0]))
    op, is_known = test.ops[0], isinstance(left, ast.Constant) or is_object(text, left)
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
        among = [each.value for each in right.elts if isinstance(each, ast.Constant)]
        is_seen = isinstance(left, ast.Constant) and len(among) == len(right.elts)
        return (left.value in among) is isinstance(op, ast.In) if is_seen else None  # type: ignore[attr-defined]
    if not (isinstance(right, ast.Constant) and is_known):
        return None
    is_same = isinstance(left, ast.Constant) and left.value == right.value
    if isinstance(op, (ast.Eq, ast.Is)):
        return is_same
    return not is_same if isinstance(op, (ast.NotEq, ast.IsNot)) else None


def take(text: TrainingText, node: ast.expr, values: Values) -> ast.expr:
    """What an expression is where names have these values, as far as the text shows it."""
    return [*follow(text, node, values)][-1]


def follow(text: TrainingText, node: ast.expr, values: Values) -> Iterator[ast.expr]:
    """An expression, then what it is where names have these values, step by step."""
    known = set[int]()
    found: ast.expr | None = node
    while found is not None and id(found) not in known:
        known.add(id(found))
        yield found
        found = step(text, found, values)


def step(text: TrainingText, node: ast.expr, values: Values) -> ast.expr | None:
    """What an expression stands for; None if it stands for itself, or that is not seen."""
    if isinstance(node, ast.IfExp):
        is_met = decide(text, node.test, values)
        return None if is_met is None else node.body if is_met else node.orelse
    if isinstance(node, ast.Subscript):
        return pick_item(take(text, node.value, values), take(text, node.slice, values))
    if isinstance(node, ast.Call):
        if text.called(node) in WALKS and node.args:
            return node.args[0]
        function = text.resolve(node)
        results = find_results(function) if function and function.name != "__init__" else []
        return results[0] if len(results) == 1 else None
    key = text.key_of(node)
    if key is None:
        return None
    if key in values:
        return values[key]
    settings = text.settings.get(key, [])
    return settings[0] if len(settings) == 1 or is_one_name(text, settings) else None


def is_one_name(text: TrainingText, values: Sequence[ast.expr | None]) -> bool:
    """Whether all of these are the same name."""
    keys = {each and text.key_of(each) for each in values}
    return len(keys) == 1 and None not in keys


def pick_item(container: ast.expr, key: ast.expr) -> ast.expr | None:
    """An item of a dictionary that the text shows."""
    if not isinstance(key, ast.Constant):
        return None
    if isinstance(container, ast.DictComp):
        return container.value
    if isinstance(container, ast.Call):  # dict(train=loader)
        return next((each.value for each in container.keywords if each.arg == key.value), None)
    if not isinstance(container, ast.Dict):
        return None
    items = zip(container.keys, container.values, strict=True)
    return next(
        (value for at, value in items if isinstance(at, ast.Constant) and at.value == key.value),
        None,
    )
