"""Exercises that check themselves: `exercise` hands out a stub, `check` runs what was written on
real ranks.

    exercise     what an exercise is, and the catalogue
    cases        inputs and expected results
    rank         in a rank: the solution is run and watched
    transcript   the record of what it does there
    observation  what a rank did, and the first thing that is wrong with it
    verdict      worlds of several sizes; the failure in words, and the mistake by name
    guess        what has probably gone wrong, if no catalogued mistake does the same
    layouts      layouts of a GPT on a cluster, and what makes one a good choice
    workbook     the learner's folder: files, and what has passed
    page         the commands exercise, check, hint and solution

In a notebook, `check(function)` prints the verdict on a function of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from playground.base.remote import remote
from playground.tools import Tool

if TYPE_CHECKING:
    from playground.exercises.verdict import Verdict

EXERCISES = {
    name: Tool(name=name, purpose=purpose, command=remote(f"playground.exercises.page:{name}"))
    for name, purpose in (
        ("exercise", "list the exercises; hand out one: a file to be completed"),
        ("check", "run solutions on worlds of several sizes, and say what is wrong with them"),
        ("hint", "show a hint for an exercise: the idea, the place, nearly the code"),
        ("solution", "show the reference solution of an exercise that has passed"),
    )
}


def check(function: Callable[..., object]) -> Verdict:
    """Judge the function of an exercise, defined in a notebook or in a file, and print the verdict.
    Raises `UsageError` if there is no exercise of its name."""
    from playground.exercises.workbook import check_function

    return check_function(function)
