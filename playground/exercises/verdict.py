"""The verdict on a solution: it is run on worlds of several sizes, and the first failure is put
into words.

A failure is compared with those of the exercise's catalogued mistakes in a world of the same size.
One is named if it does the same on all cases there, and in one world more. What a learner wrote has
processes of its own in each world; what the catalogue holds may share a world that is kept. Not a
sandbox: a solution may do whatever its user may. Does not import torch.
"""

from __future__ import annotations

import ast
import functools
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass, replace

from playground.base.errors import PlaygroundError, RankFailed, RankTimeout
from playground.base.ranks import name_ranks
from playground.base.remote import remote
from playground.exercises.exercise import (
    BLOCKED,
    CHOOSE,
    COMPUTES,
    CULPRIT,
    DEADLOCK,
    ERROR,
    FAIL,
    FIND,
    LOOP,
    MOST_CHANGED,
    PASS,
    PREDICT,
    RETURNED,
    SEED,
    Exercise,
    Mistake,
    normalise,
)
from playground.exercises.gpus_of_check import find_missing_gpus
from playground.exercises.guess import guess_by_places, guess_by_values, guess_by_words
from playground.exercises.observation import (
    RESULT,
    SENDS_TOO_MUCH,
    Failure,
    Observation,
    count_elements,
    find_difference,
    find_failure,
)
from playground.ui.units import plural
from playground.world.launcher.launch import LaunchConfig, launch
from playground.world.rank.reports import Event

JUDGE = remote("playground.exercises.rank:judge")
DEADLINE = 5.0
"""Seconds that a rank may compute in one case."""
HANGS = 30.0
"""Seconds after which a world without a sign of life is ended: a rank that computes gives one, and
a deadlock is proved before."""
ENDLESS, NOT_WRITTEN = "runs without end", "not written yet"
BREAKPOINT = "a breakpoint, which check --debug opens, on one rank after the other"
PROBABLY = "probably: "
NEVER_WAIT = COMPUTES[0], "isend", "irecv"
"""Where a rank that has stopped reporting computes: these calls return at once."""
LEAVES = "has left before its end: return from the function"
OURS: tuple[list[str], ...] = [], ["world"], ["world", "launcher"]
"""Packages of the playground that a solution may import: its own program starts ranks with them."""
NAMED = SHORT_CUT, ONLY_MEMBERS, ANOTHER_ORDER = "short cut", "only members create", "another order"
"""Mistakes that are recognised in any exercise."""
ANOTHER_RANK = "the rank at fault is another"


@dataclass(frozen=True)
class Solution:
    """The learner's answer to an exercise, or the reference: a module that ranks are to have."""

    exercise: Exercise
    text: str
    file: str

    @property
    def is_catalogued(self) -> bool:
        """Whether it is the reference or a mistake of the catalogue. These leave a world as they
        have found it, if they return."""
        mistakes = (each.text for each in self.exercise.mistakes)
        return self.text in (self.exercise.solution, *mistakes)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    exercise: str
    file: str
    status: str = PASS
    words: str = ""
    """The failure in one line, without its mistake."""
    mistake: str = ""
    says: str = ""
    """The consequence of that mistake."""
    passed: tuple[int, ...] = ()
    """Sizes of the worlds that passed."""
    world: int | None = None
    case: str = ""
    rank: int | None = None
    where: str = ""
    """The tensor or value that differs: result, result[1] or grad[0]; empty for the one tensor that
    a task changes."""
    index: int | None = None
    """Place of the first element that differs, in the flattened tensor."""
    held: object = None
    expected: object = None
    line: int = 0
    seed: int = 0
    ranks: tuple[str, ...] = ()
    """Where each rank stands, if they wait for each other."""
    printed: str = ""
    """The solution's output in this case, on the rank that is named."""
    notes: tuple[str, ...] = ()
    """What the judge notes beside: a prediction and what was counted, or what would have been
    better."""

    @property
    def exit_code(self) -> int:
        return {PASS: 0, BLOCKED: 2}.get(self.status, 1)


class Ended(Exception):
    """A rank has reported what ends the check."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Attempt:
    """The reports of the ranks of one world of `size`, and the conclusions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.case = -1
        """The latest that has begun; in the end, the number of the one that failed."""
        self.about = ""
        self.observed: dict[int, dict[int, Observation]] = {}
        """By case and rank."""
        self.at: dict[int, tuple[str, int | None, int]] = {}
        """The operation that each rank called last, its peer and its line."""
        self.groups: dict[int, list[tuple[int, ...]]] = {}
        """The groups that each rank has made."""
        self.printed: dict[int, str] = {}
        """What each rank had printed in this case when it called its last operation."""
        self.failure: Failure | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the case that failed, or of the last one."""
        observed = self.observed.get(self.case, {})
        return observed[0].notes if 0 in observed else ()

    @property
    def places(self) -> dict[int, tuple[str, int | None]]:
        """Where the ranks are, whatever their lines are and the keys that they wait for."""
        return {
            rank: (re.sub("(?<=^waits for ).*", "", name), peer)
            for rank, (name, peer, _) in self.at.items()
        }

    def take(self, rank: int, event: Event) -> None:
        """A report. Raises `Ended` for one that ends the check."""
        if "at" in event:
            self.at[rank] = event["at"]
            self.printed[rank] = event.get("printed", self.printed.get(rank, ""))
        elif "observed" in event:
            self.observed.setdefault(event["case"], {})[rank] = event["observed"]
        elif "number" in event:
            self.at[rank] = COMPUTES
            self.printed.pop(rank, None)
            if event["number"] > self.case:
                self.case = event["number"]
                self.about = event["about"]
        elif "group" in event:
            self.groups.setdefault(rank, []).append(event["group"])
        elif "standstill" in event:
            self.at = event["standstill"]
            raise Ended(self.find_standstill())
        elif event.get("status") in (FAIL, ERROR, LOOP):
            line, printed = event["line"], event.get("printed", "")
            words, status = event["words"], event["status"]
            raise Ended(Failure(status=status, rank=rank, words=words, line=line, printed=printed))

    def find_standstill(self) -> Failure:
        # computes in C code, or between calls that do not wait
        if endless := [rank for rank, (name, *_) in self.at.items() if name in NEVER_WAIT]:
            return Failure(status=LOOP, rank=endless[0], words=ENDLESS)
        ranks = [
            f"rank {rank}: {describe_place(*self.at.get(rank, RETURNED))}"
            for rank in range(self.size)
        ]
        lines = [
            f"rank {rank}: {line}"
            for rank, text in sorted(self.printed.items())
            for line in text.splitlines()[-1:]
        ]
        return Failure(status=DEADLOCK, ranks=tuple(ranks), printed="\n".join(lines))

    def find_missing(self, cases: Sequence[object]) -> Failure | None:
        """A rank that has returned without having been observed in all cases. `cases`: how many
        there were, by rank; a rank that has ended its process has returned None."""
        for rank, number in enumerate(cases):
            if not isinstance(number, int) or any(
                rank not in self.observed.get(case, {}) for case in range(number)
            ):
                return Failure(status=ERROR, rank=rank, words=LEAVES)
        return None

    def find_groups(self) -> Failure | None:
        """Groups that ranks made differently. What comes of it differs from run to run."""
        made = [self.groups.get(rank, []) for rank in range(self.size)]
        for place, group in enumerate(made[0] or made[1 % self.size]):
            for rank, groups in enumerate(made):
                if groups[place : place + 1] != [group]:
                    by_members = all(
                        rank in each for rank, groups in enumerate(made) for each in groups
                    )
                    mistake = ONLY_MEMBERS if by_members else ANOTHER_ORDER
                    words = f"has not made the group of {name_ranks(group)} when others did"
                    says = "new_group takes all ranks of the world, in one order"
                    return Failure(mistake=mistake, says=says, words=words, rank=rank)
        return None

    def end(self, failure: Failure | None) -> None:
        """The world has ended, with `failure` if it did not return. What was observed before is
        what is told."""
        for case in sorted(self.observed):
            if found := find_failure(self.observed[case], self.size):
                self.case = case
                failure = found
                break
        if failure is None or failure.status in (FAIL, DEADLOCK):
            failure = self.find_groups() or failure
        self.failure = failure


def describe_place(name: str, peer: int | None, line: int) -> str:
    """Where a rank is."""
    if not line:
        return name
    direction = "to" if "send" in name else "from"
    return f"in {name}{f' {direction} rank {peer}' if peer is not None else ''}, line {line}"


def attempt(
    solution: Solution, before: Sequence[Solution], size: int, seed: int, debug: bool = False
) -> Attempt:
    """Run a solution in a world of this size, in new processes unless it is a catalogued one."""
    made = Attempt(size)
    solutions = (*before, solution)
    config = LaunchConfig(
        timeout=HANGS,
        fresh=not all(each.is_catalogued for each in solutions),
        on_report=made.take,
        debug=range(size) if debug else (),
    )
    try:
        cases = launch(JUDGE, size, args=(solutions, seed, debug), config=config)
        failure = made.find_missing(cases)
    except Ended as end:
        failure = end.failure
    except RankTimeout:  # a rank that computes without end has reported it
        failure = made.find_standstill()
    except RankFailed as error:
        ask = "; do tensors that meet in a message or a collective have the same size and dtype?"
        words = f"{error.reason}{ask * ('SIGABRT' in error.reason)}"
        killed = Failure(status=ERROR, rank=error.rank, words=words)
        failure = Failure(status=BLOCKED, words=error.headline) if error.traceback else killed
    except PlaygroundError as error:
        failure = Failure(status=BLOCKED, words=error.headline)
    made.end(failure)
    return made


@functools.lru_cache(256)
def attempt_mistake(
    exercise: Exercise, text: str, before: tuple[Solution, ...], size: int, seed: int
) -> Attempt:
    """The attempt of a catalogued mistake. It runs once per world size: all wrong solutions of a
    class are compared with the same one."""
    return attempt(Solution(exercise, text, exercise.file), before, size, seed)


def check_solution(
    solution: Solution,
    before: Sequence[Solution] = (),
    world: int | None = None,
    seed: int = 0,
    debug: bool = False,
) -> Verdict:
    """Run a solution on the worlds of its exercise, or on the one given, until one fails. `before`:
    the solutions that it may import. `debug`: a person answers its breakpoints, and no mistake is
    looked for by running it again."""
    text = normalise(solution.text)
    exercise = solution.exercise.with_seed_of(text)
    solution = replace(solution, exercise=exercise, text=text)
    seed = exercise.seed if exercise.kind == FIND else seed
    verdict = Verdict(exercise=exercise.name, file=solution.file, seed=seed)
    if exercise.gpus and (words := find_missing_gpus(exercise)):
        return replace(verdict, status=BLOCKED, words=words)
    if words := find_fault(exercise, text):
        return replace(verdict, status=FAIL if words == NOT_WRITTEN else ERROR, words=words)
    is_report = exercise.kind == FIND and not exercise.find_changes(text)
    made: list[Attempt] = []
    for size in (world,) if world else exercise.worlds:
        last = attempt(solution, before, size, seed, debug)
        made.append(last)
        if last.failure:
            found = last.failure
            if not (is_report or debug):
                found = name_mistake(solution, before, seed, last, found)
            told = vars(found) | {
                "words": tell_difference(found, exercise.kind),
                "world": size,
                "case": found.case or last.about,
                "rank": None if exercise.kind in (PREDICT, CHOOSE) else found.rank,
                "ranks": found.ranks or tell_ranks(last, found, exercise),
                "notes": last.notes,
            }
            return replace(verdict, **told)
        # a note on a program to be repaired is about the data of one case
        notes = () if exercise.kind == FIND else last.notes
        verdict = replace(verdict, passed=(*verdict.passed, size), notes=notes)
    if exercise.kind == FIND and (words := find_fault_in_rank(text, made[0])):
        report = check_solution(replace(solution, text=exercise.stub), before, world)
        shown = ("the program as it was:", *tell_lines(replace(report, file="")))
        return replace(verdict, status=FAIL, mistake=ANOTHER_RANK, words=words, notes=shown)
    return verdict


def find_fault_in_rank(text: str, made: Attempt) -> str:
    """The fault of the answer to which rank is at fault; empty if it is right."""
    [culprit, *_] = [seen[0].culprit for seen in made.observed.values()]
    named = CULPRIT.search(text)
    answer = named[1].partition("#")[0].strip() if named else ""
    if answer == str(culprit):
        return ""
    if answer.isdecimal():
        return (
            f"the program is right now, but the rank at fault is not rank {answer}: look at the "
            "report"
        )
    return (
        f"the program is right now: write the rank at fault into RANK = …, a number from 0 to "
        f"{made.size - 1}"
    )


def tell_difference(failure: Failure, kind: str) -> str:
    """What is wrong, in the words of this kind of exercise."""
    if kind == PREDICT:
        return failure.words.replace("holds", "predicted").replace("should be", "counted")
    return str(failure.held) if kind == CHOOSE and failure.held else failure.words


def tell_ranks(made: Attempt, failure: Failure, exercise: Exercise) -> tuple[str, ...]:
    """What each rank holds, where the program to be repaired leaves something else than is due."""
    if exercise.kind != FIND or failure.expected is None:
        return ()
    observed = sorted(made.observed[made.case].items())
    found = {rank: find_difference(seen.held, seen.expected) for rank, seen in observed}
    return tuple(
        f"{tell_words(each, rank)}" if each else f"rank {rank}: right"
        for rank, each in found.items()
    )


def tell_words(failure: Failure | Verdict, rank: int | None, line: int = 0) -> str:
    """What is wrong, after the rank, the place of what differs and the line, as far as they are
    known."""
    element = f"element {failure.index}" if failure.index is not None else ""
    where = "" if failure.where == RESULT else failure.where
    parts = (
        f"rank {rank}" if rank is not None else "",
        " of ".join(filter(None, [element, where])),
        f"line {line}" if line > 0 else "",
    )
    place = ", ".join(filter(None, parts))
    colon = "" if failure.words.startswith(("is ", "returned ")) else ":"
    return f"{place}{colon} {failure.words}" if place else failure.words


def name_mistake(
    solution: Solution, before: Sequence[Solution], seed: int, made: Attempt, found: Failure
) -> Failure:
    """The failure `found`, which has ended `made`, with the name of the catalogued mistake that
    does the same there and in one world more. If there is none, with "probably": one that has the
    same results in the world that failed, else what the failure looks like, else one that has the
    same result in the case that failed."""
    if found.mistake in NAMED or found.words == NOT_WRITTEN:
        return found

    def run(mistake: Mistake, size: int) -> Attempt:
        return attempt_mistake(solution.exercise, mistake.text, tuple(before), size, seed)

    tried = {
        mistake: run(mistake, made.size)
        for mistake in solution.exercise.mistakes
        if mistake.status == found.status and mistake.name not in NAMED
    }
    alike = [mistake for mistake, other in tried.items() if is_alike(made, other)]
    # That one is even if the first was odd, as what ranks do in pairs depends on it, and large.
    # Further ones only tell apart mistakes that do the same in both.
    others = {*solution.exercise.worlds} - {made.size}
    for size in sorted(others, key=lambda size: ((size - made.size) % 2, size), reverse=True):
        if not alike:
            break
        there = attempt(solution, before, size, seed)
        alike = [mistake for mistake in alike if is_alike(there, run(mistake, size))]
        if len(alike) == 1:
            break
    if alike:
        return replace(found, mistake=alike[0].name, says=alike[0].says)
    if found.mistake:
        return found
    same_results, same_first = (
        [
            replace(found, mistake=f"{PROBABLY}{mistake.name}", says=mistake.says)
            for mistake, other in tried.items()
            if is_alike(made, other, by)
        ]
        for by in (RESULTS, FIRST_RESULT)
    )
    guess = guess_mistake(made, found)
    looks = [replace(found, mistake=f"{PROBABLY}{guess}")] if guess else []
    return [*same_results[:1], *looks, *same_first[:1], found][0]


def guess_mistake(made: Attempt, failure: Failure) -> str:
    """What a failure looks like; empty if like nothing known."""
    if failure.status == DEADLOCK:
        return guess_by_places(made.at, made.size)
    if failure.status == FAIL:
        return guess_by_values(made.observed.get(made.case, {}))
    return guess_by_words(failure.words)


ALL_THEY_DID, RESULTS, FIRST_RESULT = range(3)


def is_alike(one: Attempt, other: Attempt, by: int = ALL_THEY_DID) -> bool:
    """Whether the ranks of two worlds did the same in the cases that failed; or only had the same
    results, or that of the first one."""
    if not (one.failure and other.failure):
        return one.failure is other.failure
    status = one.failure.status
    if (status, one.case) != (other.failure.status, other.case):
        return False
    if status == DEADLOCK:
        return one.places == other.places
    # which rank is the first to send to one that is not there differs from run to run
    if status != FAIL:
        words = {re.sub(r"no rank \d+", "", each.words) for each in (one.failure, other.failure)}
        return len(words) == 1
    for case in (
        one.observed.keys()
        & other.observed.keys()
        & ({one.case} if by == FIRST_RESULT else {*one.observed})
    ):
        fails = [bool(find_failure(each.observed[case], each.size)) for each in (one, other)]
        for rank, mine in one.observed[case].items() if any(fails) else ():
            theirs = other.observed[case].get(rank)
            if theirs is None or not all(fails) or find_difference(mine.held, theirs.held):
                return False
            if [each[0] for each in mine.problems] != [each[0] for each in theirs.problems]:
                return False
            if by == ALL_THEY_DID and count_elements(mine.sent) != count_elements(theirs.sent):
                return False
            # what is wrong is how much was sent, by whatever they called
            is_too_much = one.failure.mistake == SENDS_TOO_MUCH
            if is_too_much and round(mine.moved) != round(theirs.moved):
                return False
    return True


def find_fault(exercise: Exercise, text: str) -> str:
    """The fault of a file before it is run, in one line; empty if there is none."""
    again = f"begin again: python -m playground exercise {exercise.name} --reset"
    if exercise.kind == FIND:
        if not SEED.search(text):
            return f"there is no line SEED = … in it; {again}"
        changed = len(exercise.find_changes(text))
        if changed > MOST_CHANGED and exercise.is_of_another_seed(text):
            return (
                f"SEED is {exercise.seed}, and this file was drawn with another number: write that "
                f"again, or {again}"
            )
        if changed > MOST_CHANGED:
            return (
                f"{changed} lines are changed, and the fault takes {MOST_CHANGED} at most; {again}"
            )
    elif text == exercise.stub:
        return NOT_WRITTEN
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno or 1}: {error.msg}"
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else modules:
            if name.split(".")[0] == "playground" and name.split(".")[1:3] not in OURS:
                return f"line {getattr(node, 'lineno', 0)} imports {name}: write it yourself"
    names = symtable.symtable(text, exercise.file, "exec").get_symbols()
    if not any(
        name.get_name() == exercise.function and (name.is_assigned() or name.is_imported())
        for name in names
    ):
        return f"there is no function {exercise.function} in it; {again}"
    for node in tree.body:
        called = (
            ast.unparse(node.value.func)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            else ""
        )
        if called.rpartition(".")[2] in ("launch", "spawn"):
            return (
                f"line {node.lineno} starts ranks: put {called}(…) under if __name__ == '__main__':"
            )
    return ""


def tell_lines(verdict: Verdict) -> list[str]:
    """The verdict as lines of text."""
    file = verdict.file
    sizes = ", ".join(map(str, sorted(verdict.passed)))
    notes = [f"  {line}" for line in verdict.notes]
    if verdict.status == PASS:
        return [f"{file}  passed on {sizes} rank{'s' if verdict.passed != (1,) else ''}", *notes]
    if verdict.world is None or verdict.words == NOT_WRITTEN:
        return [f"{file}  {verdict.words}", *notes]
    passed = f"{sizes} rank{'s' if verdict.passed != (1,) else ''} ok, " if sizes else ""
    world = plural(verdict.world, "rank")
    ends = {DEADLOCK: "deadlock", BLOCKED: "could not be judged", LOOP: "do not end"}.get(
        verdict.status, "fail"
    )
    lines = [f"{file}  {passed}{world}: {ends}{f' ({verdict.case})' if verdict.case else ''}"]
    if verdict.mistake:
        mistake = f"{verdict.mistake[0].upper()}{verdict.mistake[1:]}"
        lines.append(f"  {mistake}{': ' if verdict.says else ''}{verdict.says}")
    if verdict.words and not verdict.ranks:
        lines.append(f"  {tell_words(verdict, verdict.rank, verdict.line)}")
    lines += [f"  {line}" for line in verdict.ranks]
    lines += [f"  printed: {line}" for line in verdict.printed.splitlines()[:3]]
    return lines + notes
