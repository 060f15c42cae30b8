"""The path: one idea a module, in reading order.

Each lesson is a module of this package; each of its steps is a function `step(rank, size)` that every rank calls and
that returns plain data. This table is all the command line needs to know before torch is imported.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Lesson:
    name: str
    """Its command; its module here too (see `module_of`)."""
    teaches: str
    """One line for the path."""
    shown: str
    """What the last line of its output says has been shown."""
    ranks: int
    """World size unless the user asks for another."""
    least: int = 1
    """Smallest world in which it makes sense."""
    steps: tuple[str, ...] = ("run",)
    """Functions of the module, in order."""
    says: str = ""
    """A line each rank has to say after a step that leaves it with `before` and `after`, as tutorials print it."""


PATH = (
    Lesson(
        name="hello",
        teaches="N processes become one world: who am I?",
        shown="{size} processes met and know their rank",
        ranks=4,
        steps=("who_am_i",),
    ),
    Lesson(
        name="p2p",
        teaches="point to point: send, recv, isend, irecv",
        shown="messages between ranks: blocking, immediate, from anyone, in a batch, round a ring",
        ranks=2,
        least=2,
        says="Rank {rank} has data {after}",
        steps=("blocking", "immediate", "any_source", "exchange", "ring"),
    ),
    Lesson(
        name="collectives",
        teaches="groups, and what each collective leaves on every rank",
        shown="what each collective leaves on every rank",
        ranks=4,
        steps=(
            "groups", "scatter", "gather", "reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter",
            "all_to_all", "barrier", "monitored_barrier", "broadcast_object", "scatter_object", "gather_object",
            "all_gather_object", "reduce_operations",
        ),
    ),
    Lesson(
        name="allreduce",
        teaches="our own all-reduce, seven ways, message by message",
        shown="the same sum on every rank, and what each way there costs",
        ranks=4,
        least=2,
        steps=(
            "reduce_broadcast", "all_to_all", "tutorial_ring", "ring", "recursive_doubling", "halving_doubling",
            "binary_tree",
        ),
    ),
    Lesson(
        name="data-parallel",
        teaches="DataParallel by its parts: one process, many devices, and where that ends",
        shown="the parts of DataParallel, what fills a device and what cures it, and why the path goes on to processes",
        ranks=1,
        steps=("split", "one_step", "ways", "two_means", "run"),
    ),
    Lesson(
        name="sgd",
        teaches="synchronous SGD by hand: partition the data, average the gradients",
        shown="{size} ranks trained one model by averaging gradients",
        ranks=2,
    ),
    Lesson(
        name="ladder",
        teaches="from average_gradients to what DDP does, rung by rung, each measured",
        shown="what each rung brings",
        ranks=2,
    ),
    Lesson(
        name="ddp",
        teaches="the same training, with DistributedDataParallel doing the averaging",
        shown="{size} ranks trained one model with DistributedDataParallel",
        ranks=2,
    ),
    Lesson(
        name="prove",
        teaches="do N ranks equal one process with the whole batch? The proof, and four ways to break it",
        shown="{size} ranks equal one process with the whole batch",
        ranks=4,
    ),
)  # fmt: skip

LESSONS = {lesson.name: lesson for lesson in PATH}


def module_of(lesson: str) -> str:
    """The name of a lesson's module in this package: that of its command, with no hyphen in it."""
    return lesson.replace("-", "_")


@functools.cache
def about(lesson: str) -> dict[str, str]:
    """What a lesson says about itself (under "") and, in one paragraph each, about its steps; without importing it."""
    module = ast.parse((Path(__file__).parent / f"{module_of(lesson)}.py").read_text(encoding="utf-8"))
    texts = {"": ast.get_docstring(module) or ""}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            first_paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
            texts[node.name] = " ".join(first_paragraph.split())
    return texts


def run_steps(
    rank: int, size: int, lesson: str, steps: list[str], seed: int = 1234, more: tuple[Any, ...] = ()
) -> list[Any]:
    """What this rank gets from each of a lesson's steps; {"refused": words} for what the backend cannot do.

    Each step is called as `step(rank, size, *more)`.
    """
    import torch

    from playground.runtime.backends import refusal

    torch.manual_seed(seed)
    module = import_module(f"playground.lessons.{module_of(lesson)}")
    outcomes: list[Any] = []
    for step in steps:
        try:
            outcomes.append(getattr(module, step)(rank, size, *more))
        except (RuntimeError, ValueError) as error:
            if not refusal(error):
                raise
            outcomes.append({"refused": refusal(error)})
    return outcomes


def by_step(steps: list[str], by_rank: list[list[Any]]) -> dict[str, list[Any]]:
    """What `run_steps` returned on each rank, turned over: for each step what it left, in rank order."""
    return dict(zip(steps, map(list, zip(*by_rank, strict=True)), strict=True))


def run_training(rank: int, size: int, lesson: str, settings: dict[str, Any], more: tuple[Any, ...] = ()) -> Any:
    """What `run` of a training lesson returns. `settings` are those of `playground.training.settings.Settings`; `more`
    follows them.

    Raises `Impossible` if the ranks were not all given the same (but for the folder, which is each host's own).
    """
    from playground.runtime import host
    from playground.runtime.agreement import check_agreed
    from playground.training.settings import Settings

    check_agreed({name: value for name, value in settings.items() if name != "folder"})
    host.keep_to_one_core()
    return import_module(f"playground.lessons.{module_of(lesson)}").run(rank, size, Settings(**settings), *more)
