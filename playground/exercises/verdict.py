"""The verdict on a solution: it is run on worlds of several sizes, and the first failure is put into words.

A failure is compared with those of the exercise's catalogued mistakes: one is named if it does the same in all worlds,
on all cases. Each world has processes of its own. Not a sandbox: a solution may do whatever its user may. Does not
import torch.
"""

from __future__ import annotations

import ast
import math
import symtable
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from playground.exercises.exercise import (
    BLOCKED,
    COMPUTES,
    DEADLOCK,
    ERROR,
    FAIL,
    LOOP,
    OWN,
    PASS,
    RETURNED,
    Exercise,
    Leaf,
    Observation,
    exercises,
    normalise,
)
from playground.runtime.errors import PlaygroundError, RankFailed, RankTimeout
from playground.runtime.launcher.launch import launch
from playground.runtime.rank.rank import Event
from playground.runtime.remote import remote

JUDGE = remote("playground.exercises.rank:judge")
DEADLINE = 5.0
"""Seconds that a rank may compute in one case."""
HANGS = 30.0
"""Seconds after which a world without a sign of life is ended: a rank that computes gives one, and a deadlock is proved
before."""
ENDLESS, NOT_WRITTEN = "runs without end", "not written yet"
NAMED = SHORT_CUT, ONLY_MEMBERS, ANOTHER_ORDER = "short cut", "only members create", "another order"
"""Mistakes that are recognised in any exercise."""
POISON = -7777
"""In every element of a tensor into which a message is being received."""


@dataclass(frozen=True)
class Source:
    """A module that ranks are to have."""

    name: str
    text: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    exercise: str
    file: str
    status: str = PASS
    words: str = ""
    """The failure in one line, without its mistake."""
    mistake: str = ""
    says: str = ""
    """What goes wrong with that mistake."""
    passed: tuple[int, ...] = ()
    """Sizes of the worlds that passed."""
    world: int | None = None
    case: str = ""
    number: int | None = None
    """Place of the case among those of this world."""
    rank: int | None = None
    where: str = ""
    """The tensor or value that differs, where there are several: grad[0]."""
    index: int | None = None
    """Place of the first element that differs, in the flattened tensor."""
    held: object = None
    expected: object = None
    line: int = 0
    seed: int = 0
    ranks: tuple[str, ...] = ()
    """Where each rank stands, if they wait for each other."""
    printed: str = ""
    """What the solution printed in this case, on the rank that is named."""

    @property
    def exit_code(self) -> int:
        return {PASS: 0, BLOCKED: 2}.get(self.status, 1)


Found = dict[str, object]
"""Fields of a verdict; none if there is nothing to tell."""


def find_difference(held: Sequence[Leaf], expected: Sequence[Leaf]) -> Found:
    """The first difference that is more than rounding."""
    for mine, due in zip(held, expected, strict=False):
        if (mine.where, mine.kind, mine.shape) != (due.where, due.kind, due.shape):
            is_there = not mine.where or any(leaf.where.startswith(due.where) for leaf in held)
            words = f"{describe(mine)}; should be {describe(due)}" if is_there else f"there is no {due.where}"
            return {"where": due.where, "held": describe(mine), "expected": describe(due), "words": words}
        for index, (value, wanted) in enumerate(zip(mine.values, due.values, strict=True)):
            if not is_close(value, wanted):
                words, place = f"holds {show(value)}, should be {show(wanted)}", index if due.shape else None
                return {"where": due.where, "index": place, "held": value, "expected": wanted, "words": words}
    if len(held) != len(expected):
        return {"held": len(held), "expected": len(expected), "words": f"{len(held)} values; {len(expected)} are due"}
    return {}


def is_close(value: object, wanted: object) -> bool:
    if isinstance(value, float) and isinstance(wanted, float):
        return math.isclose(value, wanted, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(value) and math.isnan(wanted))
    return value == wanted


def describe(leaf: Leaf) -> str:
    if leaf.kind == "NoneType":
        return "nothing (None)"
    shape = f" of shape {leaf.shape}" * bool(leaf.shape)
    return f"{leaf.kind}{shape}{f' at {leaf.where}' * bool(leaf.where)}"


def show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:60]


def explain_digits(held: object, expected: object, size: int) -> str:
    """Whose share is missing, or in it twice, where each digit is that of one of `size` ranks. Empty if that is not the
    difference."""
    values = [int(each) for each in (held, expected) if isinstance(each, (int, float)) and each == each // 1 >= 0]
    if len(values) < 2 or max(values) >= 10**size:
        return ""
    pairs = dict(enumerate(zip(*(map(int, f"{value:020}"[::-1]) for value in values), strict=True)))
    wrong = {rank: pair for rank, pair in pairs.items() if pair[0] != pair[1]}
    missing, twice, foreign = (
        [rank for rank, pair in wrong.items() if rule(*pair)]
        for rule in (lambda has, due: not has, lambda has, due: due and has == 2 * due, lambda has, due: not due)
    )
    if foreign and len(missing) + len(foreign) == len(wrong):
        others = f", {name_ranks(missing)} is missing" if missing else ""
        return f"{name_ranks(foreign)} is in it{others}"
    if missing == list(wrong):
        return f"{name_ranks(missing)} is missing"
    return f"{name_ranks(twice)} is in it twice" if twice == list(wrong) else ""


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s share"
    return f"what ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} gave"


class Ended(Exception):
    """A rank has reported what ends the check."""

    def __init__(self, found: Found) -> None:
        self.found = found


@dataclass
class Attempt:
    """What the ranks of one world reported, and what follows from it."""

    size: int
    verdict: Verdict
    case: int = -1
    """The latest that has begun; in the end, the one that failed."""
    observed: dict[int, dict[int, Observation]] = field(default_factory=dict)
    """By case and rank."""
    at: dict[int, tuple[str, int | None, int]] = field(default_factory=dict)
    """The operation that each rank called last, its peer and its line."""
    groups: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """The groups that each rank has made."""

    def take(self, rank: int, event: Event) -> None:
        """A report. Raises `Ended` for one that ends the check."""
        if "at" in event:
            self.at[rank] = event["at"]
        elif "observed" in event:
            self.observed.setdefault(event["case"], {})[rank] = event["observed"]
        elif "number" in event:
            self.at[rank] = COMPUTES
            if event["number"] > self.case:
                self.case, self.verdict = event["number"], replace(self.verdict, case=event["about"])
        elif "group" in event:
            self.groups.setdefault(rank, []).append(event["group"])
        elif event:
            raise Ended({"rank": rank, **event})

    def find_standstill(self) -> Found:
        if endless := [rank for rank, at in self.at.items() if at == COMPUTES]:  # waits, or computes in C code
            return {"status": LOOP, "rank": endless[0], "words": ENDLESS}
        ranks = [f"rank {rank}: {describe_place(*self.at.get(rank, RETURNED))}" for rank in range(self.size)]
        return {"status": DEADLOCK, "ranks": tuple(ranks)}

    def find_groups(self) -> Found:
        """Groups that ranks made differently. What comes of it differs from run to run."""
        made = [self.groups.get(rank, []) for rank in range(self.size)]
        for place, group in enumerate(made[0] or made[1 % self.size]):
            for rank, groups in enumerate(made):
                if groups[place : place + 1] != [group]:
                    by_members = all(rank in each for rank, groups in enumerate(made) for each in groups)
                    mistake = ONLY_MEMBERS if by_members else ANOTHER_ORDER
                    words = f"has not made the group of ranks {', '.join(map(str, group))} when others did"
                    says = "new_group takes all ranks of the world, in one order"
                    return {"status": FAIL, "mistake": mistake, "says": says, "words": words, "rank": rank}
        return {}

    def find_failure(self, case: int) -> Found:
        """The first failure that was observed in this case."""
        by_rank = self.observed.get(case, {})
        for describe in (describe_problem, describe_difference, describe_messages):
            for rank, seen in sorted(by_rank.items()):
                if len(by_rank) == self.size and (found := describe(seen, rank, by_rank)):
                    return {"status": FAIL, "case": seen.about, "rank": rank, "printed": seen.printed, **found}
        return {}

    def end(self, found: Found) -> None:
        """The world has ended, with `found` if it did not return. What was observed before is what is told."""
        for case in sorted(self.observed):
            if failure := self.find_failure(case):
                self.case, found = case, failure
                break
        if found.get("status", FAIL) in (FAIL, DEADLOCK):
            found = self.find_groups() or found
        self.verdict = replace(self.verdict, **found)  # type: ignore[arg-type]


def describe_problem(seen: Observation, rank: int, by_rank: dict[int, Observation]) -> Found:
    return dict(zip(("mistake", "words", "line"), seen.problems[0], strict=True)) if seen.problems else {}


def describe_difference(seen: Observation, rank: int, by_rank: dict[int, Observation]) -> Found:
    found = find_difference(seen.held, seen.expected)
    if not found:
        return {}
    is_own = found.get("where") == OWN
    why = explain_digits(found["held"], found["expected"], len(by_rank)) if seen.is_coded and not is_own else ""
    mistake = "read before wait" if found["held"] == POISON else "changes its own tensor" if is_own else ""
    return {**found, "words": f"{found['words']}{': ' * bool(why)}{why}", "mistake": mistake}


def describe_messages(seen: Observation, rank: int, by_rank: dict[int, Observation]) -> Found:
    """What is wrong with the messages that this rank sent."""
    sent = count_elements(seen.sent)
    if isinstance(seen.most, int) and (total := sum(sent.values())) > seen.most:
        return {"words": f"sent {count(total, 'element')}; {seen.most} are enough"}
    for receiver, elements in sent.items():
        if isinstance(seen.most, Mapping) and elements > (most := seen.most.get(receiver, 0)):
            return {"words": f"sent {count(elements, 'element')} to rank {receiver}; {most or 'none'} are due there"}
    for receiver, other in by_rank.items():
        if (has := sum(to == receiver for to, _ in seen.sent)) != (got := other.received[rank]):
            return {"words": f"sent {count(has, 'message')} to rank {receiver}, which received {got}"}
    return {}


def count_elements(messages: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The elements sent to each receiver, but for those that got none."""
    sent = dict[int, int]()
    for receiver, elements in sorted(messages):
        sent[receiver] = sent.get(receiver, 0) + elements
    return {receiver: elements for receiver, elements in sent.items() if elements}


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def attempt(exercise: Exercise, sources: Sequence[Source], verdict: Verdict) -> Attempt:
    """Run the last of the sources in the world of this verdict, in new processes."""
    made = Attempt(verdict.world or 1, verdict)
    arguments = (tuple(sources), exercise, verdict.seed, None)
    found: Found = {}
    try:
        launch(JUDGE, made.size, args=arguments, timeout=HANGS, on_report=made.take, fresh=True)
    except Ended as end:
        found = end.found
    except RankTimeout:  # a rank that computes without end has reported it
        found = made.find_standstill()
    except RankFailed as error:
        ask = "; do tensors that meet in a message or a collective have the same size?"
        words = f"{error.reason}{ask * ('SIGABRT' in error.reason)}"
        killed = {"status": ERROR, "rank": error.rank, "words": words}
        found = {"status": BLOCKED, "words": error.headline} if error.traceback else killed
    except PlaygroundError as error:
        found = {"status": BLOCKED, "words": error.headline}
    made.end(found)
    return made


def check_source(
    exercise: Exercise, source: Source, before: Sequence[Source] = (), world: int | None = None, seed: int = 0
) -> Verdict:
    """Run a solution on the worlds of its exercise, or on the one given, until one fails. `before`: the modules that it
    may import."""
    source = replace(source, name=exercise.function, text=normalise(source.text))
    verdict = Verdict(exercise=exercise.name, file=source.file, seed=seed)
    if words := find_fault(exercise, source.text):
        return replace(verdict, status=FAIL if words == NOT_WRITTEN else ERROR, words=words)
    made = dict[int, Attempt]()
    for size in (world,) if world else exercise.worlds:
        made[size] = attempt(exercise, [*before, source], replace(verdict, world=size))
        if made[size].verdict.status != PASS:
            return replace(name_mistake(exercise, source, before, made), number=made[size].case)
        verdict = replace(verdict, passed=(*verdict.passed, size))
    return verdict


def describe_place(name: str, peer: int | None, line: int) -> str:
    """Where a rank is."""
    if not line:
        return name
    direction = "to" if "send" in name else "from"
    return f"in {name}{f' {direction} rank {peer}' if peer is not None else ''}, line {line}"


def name_mistake(exercise: Exercise, source: Source, before: Sequence[Source], made: dict[int, Attempt]) -> Verdict:
    """The verdict on the last world, with the name of the catalogued mistake that does the same in all worlds. `made`:
    the attempts so far, to which further ones are added."""
    *_, verdict = (each.verdict for each in made.values())
    if verdict.mistake in NAMED or verdict.words == NOT_WRITTEN:
        return verdict
    empty = Verdict(exercise=exercise.name, file=source.file, seed=verdict.seed)
    sizes = sorted(exercise.worlds, key=lambda size: (size != verdict.world, size not in made))
    for mistake in exercise.mistakes:
        if mistake.status == verdict.status and mistake.name not in NAMED:
            wrong = replace(source, text=mistake.apply(exercise.solution))
            for size in sizes:
                other = attempt(exercise, [*before, wrong], replace(empty, world=size))
                if size not in made:
                    made[size] = attempt(exercise, [*before, source], replace(empty, world=size))
                if not is_alike(made[size], other):
                    break
            else:
                return replace(verdict, mistake=mistake.name, says=mistake.says)
    return verdict


def is_alike(one: Attempt, other: Attempt) -> bool:
    """Whether the ranks of two worlds did the same in the cases that failed."""
    status = one.verdict.status
    if (status, one.case) != (other.verdict.status, other.case):
        return False
    if status == DEADLOCK:
        return {rank: at[:2] for rank, at in one.at.items()} == {rank: at[:2] for rank, at in other.at.items()}
    if status != FAIL:
        return one.verdict.words == other.verdict.words
    for case in one.observed.keys() & other.observed.keys():
        fails = [bool(each.find_failure(case)) for each in (one, other)]
        for rank, mine in one.observed[case].items() if any(fails) else ():
            theirs = other.observed[case].get(rank)
            if theirs is None or not all(fails) or find_difference(mine.held, theirs.held):
                return False
            if [each[0] for each in mine.problems] != [each[0] for each in theirs.problems]:
                return False
            if count_elements(mine.sent) != count_elements(theirs.sent):
                return False
    return True


def find_fault(exercise: Exercise, text: str) -> str:
    """What is wrong with a file before it is run, in one line. Empty if nothing is."""
    if not text.strip():
        return f"the file is empty: exercise {exercise.name} --reset writes the stub again"
    if text == exercise.stub:
        return NOT_WRITTEN
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno or 1}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be parsed: {error!r}"
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else modules:
            if name.split(".")[0] == "playground" and name.split(".")[1:2] not in ([], ["runtime"]):
                return f"line {getattr(node, 'lineno', 0)} imports {name}: write it yourself"
    names = symtable.symtable(text, exercise.file, "exec").get_symbols()
    defined = {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
    if exercise.function not in defined:
        others = [f"{name}, of another exercise" for name in defined if name.replace("_", "-") in exercises()]
        has = f", but {others[0]}: is the file's name right?" if others else f": define {exercise.function}"
        return f"there is no function {exercise.function} in it{has}"
    for node in tree.body:
        called = ast.unparse(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
        if called.rpartition(".")[2] in ("launch", "spawn"):
            return f"line {node.lineno} starts ranks: put {called}(…) under if __name__ == '__main__':"
    return ""


def is_library(name: str) -> bool:
    """Whether a file of this name would be imported in the place of somebody else's."""
    return name in sys.stdlib_module_names or name in ("torch", "numpy", "playground", "pytest", "click", "rich")


def tell_lines(verdict: Verdict) -> list[str]:
    """The verdict as lines of text."""
    file = verdict.file
    sizes = ", ".join(map(str, verdict.passed))
    if verdict.status == PASS:
        return [f"{file}  passed on {sizes} rank{'s' * (verdict.passed != (1,))}"]
    if verdict.world is None or verdict.words == NOT_WRITTEN:
        return [f"{file}  {verdict.words}"]
    passed = f"{sizes} rank{'s' * (verdict.passed != (1,))} ok, " if sizes else ""
    world = f"{verdict.world} rank{'s' * (verdict.world != 1)}"
    ends = {DEADLOCK: "deadlock", BLOCKED: "could not be judged", LOOP: "do not end"}.get(verdict.status, "fail")
    lines = [f"{file}  {passed}{world}: {ends}{f' ({verdict.case})' if verdict.case else ''}"]
    if verdict.mistake:
        lines.append(f"  {verdict.mistake[0].upper()}{verdict.mistake[1:]}{': ' * bool(verdict.says)}{verdict.says}")
    if verdict.words:
        item = f"item {verdict.where}" if verdict.where.startswith("[") else verdict.where
        element = " of ".join(filter(None, [f"element {verdict.index}" * (verdict.index is not None), item]))
        rank = f"rank {verdict.rank}" * (verdict.rank is not None)
        where = ", ".join(filter(None, [rank, element, f"line {verdict.line}" * (verdict.line > 0)]))
        lines.append(f"  {where}{': ' * bool(where)}{verdict.words}")
    lines += [f"  {line}" for line in verdict.ranks]
    lines += [f"  printed: {line}" for line in verdict.printed.splitlines()[:3]]
    return lines
