"""The verdict on a solution: it is run on worlds of several sizes, and the first failure is put
into words.

Not a sandbox: a solution may do whatever its user may. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from playground.exercises.attempt import BREAKPOINT, Attempt, Solution, attempt
from playground.exercises.exercise import (
    BLOCKED,
    CHOOSE,
    DEADLOCK,
    ERROR,
    FAIL,
    FIND,
    LOOP,
    PASS,
    PREDICT,
    WRITE,
    Exercise,
    normalise,
)  # fmt: skip
from playground.exercises.file_checks import NOT_WRITTEN, find_fault
from playground.exercises.gpus_of_check import find_missing_gpus
from playground.exercises.mistakes import PROBABLY, name_mistake
from playground.exercises.observation import (
    RESULT,
    Failure,
    Observation,
    find_difference,
    name_element,
    name_place,
)
from playground.exercises.repair import CULPRIT
from playground.ui.units import plural

SHOWN_LINES = 3
"""Lines that are shown of what a solution printed."""
ANOTHER_RANK = "the rank at fault is another"


@dataclass(frozen=True, kw_only=True)
class Verdict(Failure):
    """What is said of a solution: its failure, unless it has passed."""

    exercise: str
    file: str
    kind: str = WRITE
    status: str = PASS
    passed: tuple[int, ...] = ()
    """Sizes of the worlds that passed."""
    world: int | None = None
    """The size of the one that failed."""
    seed: int = 0
    notes: tuple[str, ...] = ()
    """What the judge notes beside: a prediction and what was counted, or what would have been
    better."""

    @property
    def exit_code(self) -> int:
        return {PASS: 0, BLOCKED: 2}.get(self.status, 1)


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
    verdict = Verdict(exercise=exercise.name, file=solution.file, kind=exercise.kind, seed=seed)
    if refused := refuse(verdict, exercise, text):
        return refused
    is_report = exercise.kind == FIND and not exercise.repair.find_changes(text)
    made: list[Attempt] = []
    for size in (world,) if world else exercise.worlds:
        last = attempt(solution, before, size, seed, debug)
        made.append(last)
        if found := last.failure:
            if not (is_report or debug):
                found = name_mistake(solution, before, seed, last, found)
            return tell_failure(verdict, exercise, last, found)
        # a note on a program to be repaired is about the data of one case
        notes = () if exercise.kind == FIND else last.notes
        verdict = replace(verdict, passed=(*verdict.passed, size), notes=notes)
    if exercise.kind == FIND and (words := find_fault_in_rank(text, made[0])):
        report = check_solution(replace(solution, text=exercise.stub), before, world)
        shown = ("the program as it was:", *tell_lines(replace(report, file="")))
        return replace(verdict, status=FAIL, mistake=ANOTHER_RANK, words=words, notes=shown)
    if exercise.kind == FIND:
        fault = exercise.repair.fault
        told = f"The fault: {fault.name}. {fault.says[0].upper()}{fault.says[1:]}."
        return replace(verdict, notes=(told,))
    return verdict


def refuse(verdict: Verdict, exercise: Exercise, text: str) -> Verdict | None:
    """The verdict on a solution that is not run; None if it is run."""
    if exercise.gpus and (words := find_missing_gpus(exercise)):
        return replace(verdict, status=BLOCKED, words=words)
    if words := find_fault(exercise, text):
        return replace(verdict, status=FAIL if words == NOT_WRITTEN else ERROR, words=words)
    return None


def tell_failure(verdict: Verdict, exercise: Exercise, made: Attempt, found: Failure) -> Verdict:
    """The verdict on a solution that has failed in this attempt."""
    told = vars(found) | {
        "words": tell_difference(found, exercise.kind),
        "world": made.size,
        "case": found.case or made.about,
        "rank": None if exercise.kind in (PREDICT, CHOOSE) else found.rank,
        "ranks": found.ranks or tell_ranks(made, found, exercise),
        "notes": made.notes,
    }
    return replace(verdict, **told)


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
    if kind == CHOOSE and failure.held:
        return str(failure.held)
    # a mistake that is named and has a sentence says why
    is_told = failure.says and not failure.mistake.startswith(PROBABLY)
    return failure.words if is_told else ": ".join(filter(None, [failure.words, failure.digits]))


def tell_ranks(made: Attempt, failure: Failure, exercise: Exercise) -> tuple[str, ...]:
    """What each rank holds, where the program to be repaired leaves something else than is due."""
    if exercise.kind != FIND or failure.expected is None:
        return ()
    return tuple(tell_rank(rank, seen) for rank, seen in sorted(made.observed[made.case].items()))


def tell_rank(rank: int, seen: Observation) -> str:
    """The first that is wrong on a rank; of values that have names, all that are."""
    pairs = [([mine], [due]) for mine, due in zip(seen.held, seen.expected, strict=False)]
    found = [
        replace(each, where=name_place(each.where, seen.names))
        for pair in (pairs if seen.names else [(seen.held, seen.expected)])
        if (each := find_difference(*pair))
    ]
    told = [tell_words(each, None if number else rank) for number, each in enumerate(found)]
    return "; ".join(told) or f"rank {rank}: right"


def tell_words(failure: Failure, rank: int | None, line: int = 0) -> str:
    """What is wrong, after the rank, the place of what differs and the line, as far as they are
    known."""
    element = name_element(failure.index, failure.shape) if failure.index is not None else ""
    where = "" if failure.where == RESULT else failure.where
    parts = (
        f"rank {rank}" if rank is not None else "",
        " of ".join(filter(None, [element, where])),
        f"line {line}" if line > 0 else "",
    )
    place = ", ".join(filter(None, parts))
    colon = "" if failure.words.startswith(("is ", "returned ")) else ":"
    return f"{place}{colon} {failure.words}" if place else failure.words


def tell_lines(verdict: Verdict) -> list[str]:
    """The verdict as lines of text."""
    file = verdict.file
    sizes = ", ".join(map(str, sorted(verdict.passed)))
    ranks = f"{sizes} rank{'s' if verdict.passed != (1,) else ''}"
    is_run = verdict.kind != CHOOSE  # a choice is costed: nothing runs on ranks
    notes = [f"  {line}" for line in verdict.notes]
    if verdict.status == PASS:
        return [f"{file}  passed{f' on {ranks}' if is_run else ''}", *notes]
    if verdict.world is None or verdict.words == NOT_WRITTEN:
        return [f"{file}  {verdict.words}", *notes]
    passed = f"{ranks} ok, " if sizes else ""
    world = f"{plural(verdict.world, 'rank')}: " if is_run else ""
    ends = {DEADLOCK: "deadlock", BLOCKED: "could not be judged", LOOP: "do not end"}.get(
        verdict.status, "fail"
    )
    if verdict.words == BREAKPOINT:
        ends = "stopped"
    lines = [f"{file}  {passed}{world}{ends}{f' ({verdict.case})' if verdict.case else ''}"]
    if verdict.mistake:
        mistake = f"{verdict.mistake[0].upper()}{verdict.mistake[1:]}"
        lines.append(f"  {mistake}{': ' if verdict.says else ''}{verdict.says}")
    if verdict.words and not verdict.ranks:
        lines.append(f"  {tell_words(verdict, verdict.rank, verdict.line)}")
    lines += [f"  {line}" for line in (*verdict.ranks, *verdict.rows)]
    printed = verdict.printed.splitlines()[:SHOWN_LINES]
    lines += [
        f"  {' ' * 9 if number else 'printed: '}{each}" for number, each in enumerate(printed)
    ]
    return lines + notes
