"""Exercises on simulated GPUs: the process that judges them has to begin with these. Does not
import torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from playground.base.errors import UsageError
from playground.exercises.exercise import Exercise
from playground.ui.gpus import start_again
from playground.world.simulated_gpu.build import CannotBeBuilt
from playground.world.simulated_gpu.environment import GPUS, environment_with, has_begun_with


def start_with_gpus(exercises: Iterable[Exercise]) -> None:
    """If one of the exercises needs simulated GPUs, run this program again from its beginning, with
    these. Where they cannot be built, the verdict on the exercise says so. Raises `UsageError`
    where starting again is of no use."""
    gpus = max((each.gpus for each in exercises), default=0)
    if not gpus or os.environ.get(GPUS):
        return
    with contextlib.suppress(CannotBeBuilt):
        environ = environment_with(gpus)
        if not has_begun_with(environ):
            start_again(environ)


def find_missing_gpus(exercise: Exercise) -> str:
    """Why this process cannot judge the exercise; empty if it can."""
    if int(os.environ.get(GPUS) or 0) >= exercise.gpus:
        return ""
    try:
        environment_with(exercise.gpus)
    except UsageError as error:
        return str(error)
    return (
        f"{exercise.name} needs simulated GPUs from the start of its process: give the command "
        f"check {exercise.file} in a shell"
    )
