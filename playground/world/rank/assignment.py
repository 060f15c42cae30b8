"""The work of the ranks of a world, and the surroundings that the launcher asks for."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from playground.base.errors import UsageError
from playground.base.imports import read_again
from playground.base.upstream import find_modules_as_here
from playground.world.rendezvous.environment import RESTART_COUNT
from playground.world.rendezvous.rendezvous import Rendezvous

Function = Callable[..., Any]
BY_NAME = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
"""Kinds of parameters that are given by their names alone."""
RANK_AND_SIZE = {("rank", "size"), ("rank", "world_size")}
"""The names by which a function all of whose parameters have defaults asks for the first two."""


@dataclass(frozen=True, kw_only=True)
class Breakpoints:
    """What `breakpoint()`, `pdb.set_trace()` and `input()` do in the ranks of a world."""

    ranks: tuple[int, ...] = ()
    """Those whose breakpoints open a debugger. The others pass theirs by."""
    lifts_timeouts: bool = False
    """Whether ranks may wait for one that is debugged as long as that takes."""
    advice: str = ""
    """What to do, with {rank} in it, where nobody can answer: a breakpoint then raises this."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A function and its arguments, pickled; the launcher's environment variables, working folder
    and `sys.path`, all of which may have changed since the process that is to run it was
    started."""

    pickled: bytes
    environ: dict[str, str]
    folder: str
    path: list[str]
    timeout: float
    """Seconds that an operation of the process group may take."""
    restart_count: int = 0
    stays: bool = False
    """Whether it runs in the process group, and in what the process has become, of the assignment
    before."""
    rendezvous: Rendezvous | None = None
    """Where the ranks meet anew before it, if they do."""
    bare: bool = False
    """Whether the function forms its process group itself, if it wants one."""
    preemptible: bool
    """Whether the launcher passes on the signals that ask the ranks to end soon."""
    breakpoints: Breakpoints | None = None
    """None: they are left to Python, or as they are if it stays."""

    def move_in(self) -> None:
        """Make the launcher's surroundings this process's own."""
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ | {RESTART_COUNT: str(self.restart_count)})
        time.tzset()
        tempfile.tempdir = None  # it is looked for anew
        read_again()
        sys.path[:] = self.path
        with contextlib.suppress(OSError):  # it has been deleted since
            os.chdir(self.folder)

    def load(self) -> tuple[Function, tuple[Any, ...]]:
        """The function and its arguments. Imports the module that the function lies in."""
        return pickle.loads(self.pickled)


class Order(StrEnum):
    """What a launcher asks of a rank in one word; what the rank does then stands in rank.py."""

    WHERE = "where"
    """Say where the main thread stands."""
    OPENED = "opened"
    """The launcher has opened the flight recorder, so that it may go with this process."""
    END = "end"
    """Come to an end soon: the program is asked to."""
    ABORT = "abort"
    """End what waits for other ranks."""
    INTERRUPT = "interrupt"
    """Raise KeyboardInterrupt in the main thread."""
    INTERRUPT_ALL = "interrupt all"
    """Interrupt this process and those that it has started, as a terminal does."""
    LEAVE = "leave"
    """Every rank has its result, or the failure of this one is known: leave."""


class MessageKind(StrEnum):
    """What a rank tells its launcher, the first element of each message; rank.py says what
    follows it."""

    UP = "up"
    REPORT = "report"
    RESULT = "result"
    FAILED = "failed"
    BOX = "box"
    STACK = "stack"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class Answer:
    """The line that a person has typed for a rank that asked; None if there is none."""

    text: str | None
    reason: str = ""
    """Why there is none."""


def require_importable(fn: Function) -> None:
    """Raise `UsageError` if a new process could not import the function."""
    import __main__

    script = getattr(__main__, "__file__", "")
    if getattr(fn, "__module__", None) == "__main__" and not os.path.isfile(script):
        raise UsageError(
            f"{fn.__qualname__} was defined in a notebook, at a prompt or in a script on standard "
            "input, where the ranks, being new processes, cannot see it: write it to a file "
            "(%%writefile ranks.py) and import it"
        )


def prepare_work(fn: Function, args: tuple[Any, ...], **more: Any) -> Assignment:
    """The assignment of `fn` with `args`, and `more` of its fields. Raises `UsageError` if a new
    process could not find the function."""
    require_importable(fn)
    try:
        pickled = pickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"{fn!r} or its arguments cannot be sent to another process ({error}): "
            f"use a function at the top of a module, and plain data"
        ) from None
    environ, folder, path = dict(os.environ), os.getcwd(), find_modules_as_here()
    return Assignment(pickled=pickled, environ=environ, folder=folder, path=path, **more)


def call(fn: Function, rank: int, size: int, *args: Any) -> Any:
    """`fn(rank, size, *args)`; one that can be called without arguments, like the `main()` of a
    script for torchrun, is called without: it finds its rank in the environment."""
    return fn(rank, size, *args) if args or takes_rank(fn) else fn()


def takes_rank(fn: Function) -> bool:
    """Whether a function is to be called as `fn(rank, size)`: it must be given something, or its
    first two parameters have these names."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # a function in C that does not say
        return True
    by_place = [each for each in parameters if each.kind not in BY_NAME]
    names = [each.name for each in by_place]
    return any(each.default is each.empty for each in by_place) or tuple(names[:2]) in RANK_AND_SIZE
