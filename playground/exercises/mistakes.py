"""The name of a mistake: of the exercise's catalogued ones, that which does the same. Does not
import torch.

One is named if it does the same on all cases in the world that failed, and in one world more. What
a learner wrote has processes of its own in each world; what the catalogue holds may share a world
that is kept.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from playground.exercises.attempt import (
    ANOTHER_ORDER,
    ONLY_MEMBERS,
    SHORT_CUT,
    Attempt,
    Solution,
    attempt,
)
from playground.exercises.exercise import DEADLOCK, FAIL, FIND, PREDICT, Exercise, Mistake
from playground.exercises.file_checks import NOT_WRITTEN
from playground.exercises.guess import (
    RATIOS_OF_FLOATS,
    UNTOUCHED,
    guess_by_places,
    guess_by_prediction,
    guess_by_values,
    guess_by_words,
)
from playground.exercises.observation import (
    SENDS_TOO_MUCH,
    Failure,
    Observation,
    count_elements,
    find_difference,
    find_failure,
)
from playground.exercises.rows import find_by_rows, tell_rows

NAMED = SHORT_CUT, ONLY_MEMBERS, ANOTHER_ORDER
PROBABLY, OR = "probably: ", ", or: "
AS_BEFORE = "as before: your change makes no difference to the result"
VARYING = re.compile(r"no rank \d+|(?<=SIGABRT).*")
"""What differs from run to run in the words of an error: which rank is the first to send to one
that is not there, and where others are when a rank is aborted."""
ALL_THEY_DID, RESULTS, FIRST_RESULT = range(3)
"""By what two worlds are compared: by all that their ranks did, by the results, by those of the
first case that failed."""


@functools.lru_cache(256)
def attempt_mistake(
    exercise: Exercise, text: str, before: tuple[Solution, ...], size: int, seed: int
) -> Attempt:
    """The attempt of a catalogued mistake. It runs once per world size: all wrong solutions of a
    class are compared with the same one."""
    return attempt(Solution(exercise, text, exercise.file), before, size, seed)


def name_mistake(
    solution: Solution, before: Sequence[Solution], seed: int, made: Attempt, found: Failure
) -> Failure:
    """The failure `found`, which has ended `made`, with the name of the catalogued mistake that
    does the same there and in one world more. If there is none, with "probably": one that has the
    same results in the world that failed, else what the failure looks like, else one that has the
    same result in the case that failed; and if there are two, both. A change of a program to be
    repaired that leaves the results as they were is called that."""
    if found.mistake in NAMED or found.words == NOT_WRITTEN:
        return found
    if is_as_before(solution, tuple(before), seed, made):
        return replace(found, mistake=AS_BEFORE, says=describe_rebound(solution))
    run = functools.partial(run_mistake, solution, tuple(before), seed)
    tried = {
        mistake: run(mistake, made.size)
        for mistake in solution.exercise.mistakes
        if mistake.status == found.status and mistake.name not in NAMED
    }
    named = find_name(solution, before, seed, made, found, run, tried)
    if solution.exercise.kind == PREDICT and found.status == FAIL:
        names = named.mistake.removeprefix(PROBABLY).split(OR)
        return replace(named, rows=tuple(tell_rows(made, tried, names)))
    return named


def find_name(
    solution: Solution,
    before: Sequence[Solution],
    seed: int,
    made: Attempt,
    found: Failure,
    run: Callable[[Mistake, int], Attempt],
    tried: Mapping[Mistake, Attempt],
) -> Failure:
    """The failure with the name of a mistake, as `name_mistake` says. `run`: the attempt of a
    mistake in a world of another size. `tried`: those in the world that failed."""
    alike = [mistake for mistake, other in tried.items() if is_alike(made, other)]
    refuted = set[Mistake]()
    # That one is even if the first was odd, as what ranks do in pairs depends on it, and large.
    # Further ones only tell apart mistakes that do the same in both.
    others = {*solution.exercise.worlds} - {made.size}
    for size in sorted(others, key=lambda size: ((size - made.size) % 2, size), reverse=True):
        if not alike:
            break
        there = attempt(solution, before, size, seed)
        refuted |= {mistake for mistake in alike if is_refuted(there, run(mistake, size))}
        alike = [mistake for mistake in alike if is_alike(there, run(mistake, size))]
        if len(alike) == 1:
            break
    if len(alike) == 1:
        return replace(found, mistake=alike[0].name, says=alike[0].says)
    if alike:
        return name_probable(found, alike)
    return found if found.mistake else find_probable(solution, made, found, tried, refuted)


def name_probable(found: Failure, mistakes: Sequence[Mistake]) -> Failure:
    """The failure with a mistake that is probable, or with the first two of several."""
    names = OR.join(mistake.name for mistake in mistakes[:2])
    says = mistakes[0].says if len(mistakes) == 1 else ""
    return replace(found, mistake=f"{PROBABLY}{names}", says=says)


def is_as_before(
    solution: Solution, before: tuple[Solution, ...], seed: int, made: Attempt
) -> bool:
    """Whether a program to be repaired has the results that it had before it was changed. A text
    of the catalogue has a name."""
    exercise = solution.exercise
    if exercise.kind != FIND or solution.text in [each.text for each in exercise.mistakes]:
        return False
    return is_alike(
        made, attempt_mistake(exercise, exercise.stub, before, made.size, seed), RESULTS
    )


def run_mistake(
    solution: Solution, before: tuple[Solution, ...], seed: int, mistake: Mistake, size: int
) -> Attempt:
    """The attempt of a mistake that the catalogue has of this solution's exercise."""
    return attempt_mistake(solution.exercise, mistake.text, before, size, seed)


def find_probable(
    solution: Solution,
    made: Attempt,
    found: Failure,
    tried: Mapping[Mistake, Attempt],
    refuted: Container[Mistake],
) -> Failure:
    """The failure with a mistake that is probable, or as it is. `tried`: what the mistakes do in
    the world that failed. `refuted`: those that have other results in another world, which may
    still explain a row of a prediction."""
    possible = {mistake: other for mistake, other in tried.items() if mistake not in refuted}
    same_results, same_first = (
        [mistake for mistake, other in possible.items() if is_alike(made, other, by)]
        for by in (RESULTS, FIRST_RESULT)
    )
    if same_results:
        return name_probable(found, same_results)
    if solution.exercise.kind == PREDICT:
        if rows := find_by_rows(made, found, tried):
            return name_probable(found, rows)
        same_first = []  # other cases contradict it
    guess = guess_mistake(solution, made, found)
    if same_first and (not guess or guess in RATIOS_OF_FLOATS):
        return name_probable(found, same_first)
    if guess:
        return replace(found, mistake=f"{PROBABLY}{guess}")
    told = [mistake for mistake, other in possible.items() if is_told_alike(found, other.failure)]
    return name_probable(found, told) if len(told) == 1 else found


def is_told_alike(one: Failure, other: Failure | None) -> bool:
    """Whether a judge says the same of the first that is wrong, in words: of ranks that have made
    this mistake and others."""
    return (
        other is not None
        and isinstance(one.held, str)
        and (one.case, one.where, one.words) == (other.case, other.where, other.words)
    )


def guess_mistake(solution: Solution, made: Attempt, failure: Failure) -> str:
    """What a failure looks like; empty if like nothing known."""
    if failure.status == DEADLOCK:
        return guess_by_places(made.at, made.size, made.are_first)
    if failure.status == FAIL:
        observed = made.observed.get(made.case, {})
        if solution.exercise.kind == PREDICT:
            return guess_by_prediction(observed)
        guess = guess_by_values(observed)
        return (guess == UNTOUCHED and describe_rebound(solution)) or guess
    return guess_by_words(failure.words)


def describe_rebound(solution: Solution) -> str:
    """That the solution binds a parameter's name to another tensor; empty if it does not."""
    name = find_rebound(solution.text, solution.exercise.function)
    return (
        f"{name} = … gives the name another tensor: fill the one given, {name}.copy_(…)"
        if name
        else ""
    )


def find_rebound(text: str, function: str) -> str:
    """A parameter, other than rank and size, or an item of one in a loop, that a function assigns
    to; empty if there is none. A slice of the parameter is no other tensor."""
    for defined in ast.walk(ast.parse(text)):
        if isinstance(defined, ast.FunctionDef) and defined.name == function:
            names = {each.arg for each in defined.args.args} - {"rank", "size"}
            names |= {
                node.target.id
                for node in ast.walk(defined)
                if isinstance(node, ast.For)
                and isinstance(node.target, ast.Name)
                and isinstance(node.iter, ast.Name)
                and node.iter.id in names
            }
            targets = (
                target
                for node in ast.walk(defined)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if not (
                    isinstance(node.value, ast.Subscript)
                    and ast.unparse(node.value.value) == ast.unparse(target)
                )
            )
            return next(
                (each.id for each in targets if isinstance(each, ast.Name) and each.id in names), ""
            )
    return ""


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
    if status != FAIL:
        return len({VARYING.sub("", each.words) for each in (one.failure, other.failure)}) == 1
    cases = one.observed.keys() & other.observed.keys()
    if by == FIRST_RESULT:
        cases &= {one.case}
    return all(is_alike_in_case(one, other, case, by) for case in cases)


def is_refuted(one: Attempt, other: Attempt) -> bool:
    """Whether a world shows that its solution has not made the mistake of the other: one of them
    passes, or both leave wrong results, which differ."""
    if not (one.failure and other.failure):
        return one.failure is not other.failure
    return one.failure.status == other.failure.status == FAIL and not is_alike(one, other, RESULTS)


def is_alike_in_case(one: Attempt, other: Attempt, case: int, by: int) -> bool:
    """Whether the ranks of two worlds did the same in a case, if it failed in one of them."""
    fails = [bool(find_failure(each.observed[case], each.size)) for each in (one, other)]
    if not any(fails):
        return True
    # what is wrong is how much was sent, by whatever they called
    is_too_much = one.failure is not None and one.failure.mistake == SENDS_TOO_MUCH
    theirs = other.observed[case]
    return all(fails) and all(
        rank in theirs and did_alike(mine, theirs[rank], by, is_too_much)
        for rank, mine in one.observed[case].items()
    )


def did_alike(mine: Observation, theirs: Observation, by: int, is_too_much: bool) -> bool:
    """Whether two ranks hold the same and broke the same rules. By all that they did, they also
    sent as many elements; if one sent too much, as many have left them."""
    if find_difference(mine.held, theirs.held):
        return False
    if [each.rule for each in mine.problems] != [each.rule for each in theirs.problems]:
        return False
    if by == ALL_THEY_DID and count_elements(mine.sent) != count_elements(theirs.sent):
        return False
    return not is_too_much or round(mine.moved) == round(theirs.moved)
