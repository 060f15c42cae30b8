"""Exercises that check themselves: `exercise` hands out a stub, `check` runs what was written on
real ranks.

Begin with `exercise`, then `verdict`. A lesson's folder here has `judges.py`, which gives the cases
of its exercises.

    exercise     what an exercise is, and the catalogue
    changes      changes of a reference that make it wrong
    repair       a program to be repaired, drawn from a seed
    cases        inputs and expected results
    layouts      layouts of a GPT on a cluster, and what makes one a good choice
    workbook     the learner's folder: files, and what has passed
    page         the commands exercise, check, hint and solution

The judgement, in the process of the command:

    verdict        worlds of several sizes, and the first failure in words
    file_checks    what is wrong with a file before it is run
    gpus_of_check  what an exercise on GPUs lacks here
    attempt        one world, and what its ranks report
    observation    what a rank did, and the first thing that is wrong with it
    mistakes       the catalogued mistake that does the same
    rows           what the wrong numbers of a prediction would be the answers to
    guess          what has probably gone wrong, if none does

In a rank:

    rank        the solution is run on the cases
    limits      how long it may compute and sleep, how much it may print
    calls       what it calls of torch.distributed is recorded
    transcript  the record, and a count of what leaves the rank

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
