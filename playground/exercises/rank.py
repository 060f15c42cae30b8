"""In a rank: run a solution on the cases of its judge, and report to the parent what it does."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from playground.exercises.attempt import Solution
from playground.exercises.calls import judged
from playground.exercises.cases import ANYTHING, Case, flatten
from playground.exercises.exercise import RETURNED
from playground.exercises.limits import solving
from playground.exercises.observation import RESULT, Leaf, Observation, Problem, count_messages
from playground.exercises.transcript import Transcript
from playground.ui.units import plural
from playground.world.rank.reports import BREAKPOINT, Event, hearing, report

LEFT_RUNNING = "a thread left running"
SHOWN_VALUE = 80
"""Characters that are shown of an input."""
LAST_WORDS = 2.0
"""Seconds that threads may go on after the solution has returned."""


def import_solution(solution: Solution) -> ModuleType:
    """The module that it is, under its name."""
    module = ModuleType(solution.exercise.function)
    module.__file__ = file = solution.file
    sys.modules[module.__name__] = module
    linecache.cache[file] = (
        len(solution.text),
        None,
        solution.text.splitlines(keepends=True),
        file,
    )
    exec(compile(solution.text, file, "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Find the modules in this folder too, after all others, and write nothing beside them."""
    path, writes_nothing = list(sys.path), sys.dont_write_bytecode
    sys.path.append(folder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = writes_nothing


def judge(
    rank: int, size: int, solutions: tuple[Solution, ...], seed: int, is_debugged: bool = False
) -> int:
    """Run the last of `solutions` on the cases of its exercise, for as long as ranks and messages
    come out even. Those before it are what it may import. What comes of it is reported:
    `Observation`s, one a case. Returns the number of cases."""
    solution, exercise = solutions[-1], solutions[-1].exercise
    record = Transcript(solution.file, size, exercise.forbidden, is_debugged)
    cases = getattr(importlib.import_module(exercise.module), exercise.function)
    with (
        importing_from(os.path.dirname(os.path.abspath(solution.file))),
        record.catching_output(),
        judged(record),
    ):
        record.group = dist.new_group()
        with solving(record):
            functions = [import_solution(each) for each in solutions][-1]
        function = getattr(functions, exercise.function)
        seed_generator(seed)  # so that a mistake to compare with is given the same first case
        number = 0
        for number, case in enumerate(cases(rank, size, seed), 1):
            observation = run_case(rank, seed, number - 1, case, function, record)
            report(case=number - 1, observed=observation)
            check_balance(rank, observation, record)
    return number


def seed_generator(seed: int) -> None:
    """Seed the CPU's generator. (torch.manual_seed formats the stack for each kind of device.)"""
    torch.default_generator.manual_seed(seed)


def run_case(
    rank: int, seed: int, place: int, case: Case, function: Callable[..., Any], record: Transcript
) -> Observation:
    """Run one case, and say what was observed."""
    record.begin(case.actions)
    record.counts = case.counts
    given = tuple(
        leaf for each in case.args if isinstance(each, torch.Tensor) for leaf in flatten(each)
    )
    seed_generator(seed + place)
    report(number=place, about=case.about)
    time.sleep(case.delay)
    title = f"case {place + 1} on {plural(record.size, 'rank')}: {case.about}"
    with hearing(Announcement(title, function)):
        returned = call_solution(rank, case, function, record)
    note_problems(case, returned, record)
    held, expected = compare(case, returned, record)
    return Observation(
        about=case.about,
        held=held,
        expected=expected,
        is_coded=case.is_coded,
        sent=tuple(record.actions.sent),
        received=tuple(record.actions.received.count(sender) for sender in range(record.size)),
        most=case.most,
        moved=record.actions.moved,
        most_moved=limit_of(case.most) if case.most_moved is None else case.most_moved,
        problems=tuple(dict.fromkeys(record.actions.problems)),
        printed=record.read_printed(),
        given=given,
        names=tuple(case.names),
        is_shared=shares_memory(returned, case.args),
        culprit=case.culprit,
        notes=tuple(case.notes),
    )


@dataclass
class Announcement:
    """Where a person answers breakpoints: before the first one of a case, which case it is, and
    what the function has been given, as that is now."""

    title: str
    function: Callable[..., Any]
    is_made: bool = False

    def __call__(self, event: Event) -> None:
        if BREAKPOINT in event and not self.is_made:
            self.is_made = True
            print("\n".join([self.title, *self.tell_inputs()]), flush=True)

    def tell_inputs(self) -> Iterator[str]:
        code = getattr(self.function, "__code__", None)
        frames = (each for each, _ in traceback.walk_stack(None) if each.f_code is code)
        if frame := next(frames, None):
            names, _, _, values = inspect.getargvalues(frame)
            for name in names:
                text = " ".join(repr(values[name]).split())
                yield f"  {name} = {text[:SHOWN_VALUE]}{' …' * (len(text) > SHOWN_VALUE)}"


def call_solution(
    rank: int, case: Case, function: Callable[..., Any], record: Transcript
) -> object:
    """What the solution returns. A thread that it leaves running is noted."""
    before = threading.enumerate()
    with solving(record):
        if case.run:
            returned = case.run(function)
        elif case.gives_rank:
            returned = function(rank, record.size, *case.args)
        else:
            returned = function(*case.args)
        own = [each for each in threading.enumerate() if each not in before and not each.daemon]
        for thread in own:
            thread.join(LAST_WORDS)
    report(at=RETURNED)
    for thread in [each for each in own if each.is_alive()][:1]:
        words = f"{thread.name} goes on after the end"
        record.actions.problems.append(Problem(LEFT_RUNNING, words))
    return returned


def note_problems(case: Case, returned: object, record: Transcript) -> None:
    """Note the rules that are broken in what the solution has left behind."""
    record.actions.problems += [
        Problem("no wait", f"nobody waits for this {each.kind}", each.line)
        for each in record.pending
    ]
    if case.returns_a_copy and shares_argument(returned, case.args):
        words = "returned the tensor that it was given, not a copy"
        record.actions.problems.append(Problem("returns no copy", words))


def compare(
    case: Case, returned: object, record: Transcript
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """What is looked at: what the solution returned and left, and what is due. All ranks call this
    if one does."""
    left = case.held() if callable(case.held) else case.held
    if case.combine:
        everyones: list[Any] = [None] * record.size
        dist.all_gather_object(everyones, left, group=record.group)
        left = case.combine(everyones)
    held, expected = (*flatten(left),), (*flatten(case.expected),)
    if case.returns is ANYTHING:
        return held, expected
    root = "" if isinstance(case.returns, dict) else RESULT
    of_result, due = (
        put_in_order(flatten(each, root), case.returns) for each in (returned, case.returns)
    )
    return (*of_result, *held), (*due, *expected)


def put_in_order(leaves: Iterable[Leaf], due: object) -> list[Leaf]:
    """The leaves of a dictionary in the order of the one that is due, as the notes show them."""
    names = [str(name) for name in due] if isinstance(due, dict) else []

    def find_place(leaf: Leaf) -> int:
        name = re.split(r"[.[]", leaf.where)[0]
        return names.index(name) if name in names else len(names)

    return sorted(leaves, key=find_place)


def check_balance(rank: int, observation: Observation, record: Transcript) -> None:
    """Raises `RuntimeError` where nothing else can run after a case."""
    balance = torch.zeros(record.size, record.size, dtype=torch.int64)
    balance[rank] += torch.tensor(
        [count_messages(record.actions.sent, receiver) for receiver in range(record.size)]
    )
    balance[:, rank] -= torch.tensor(observation.received)
    dist.all_reduce(balance, group=record.group)
    if (
        balance.any()
        or record.pending
        or any(each.rule == LEFT_RUNNING for each in record.actions.problems)
    ):
        raise RuntimeError("messages or threads are left over: this world cannot run anything else")


def limit_of(most: int | Mapping[int, float] | None) -> float | None:
    """The elements that may leave a rank in all, where there is a limit to its messages: a
    collective is no way round it."""
    return sum(most.values()) if isinstance(most, Mapping) else most


def shares_memory(returned: object, args: Sequence[object]) -> bool:
    """Whether tensors of a list, or of its lists, are the same memory, which is none of an
    argument's."""
    places = [each.data_ptr() for each in tensors_in(returned) if each.numel()]
    given = {each.data_ptr() for each in tensors_in(args)}
    own = [each for each in places if each not in given]
    return len({*own}) < len(own)


def shares_argument(returned: object, args: Sequence[object]) -> bool:
    """Whether the tensor that was returned is the memory of an argument."""
    result = returned.get(RESULT) if isinstance(returned, dict) else returned
    if not (isinstance(result, torch.Tensor) and result.numel()):
        return False
    place = result.untyped_storage().data_ptr()
    return any(each.untyped_storage().data_ptr() == place for each in tensors_in(args))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
