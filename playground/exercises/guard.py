"""In a rank: what ends the check because it takes the place of a solution. It looks into the judge,
which knows the expected results; it reads the exercise's own solution; it starts processes, whose
work nobody counts; it replaces the functions by which it is judged.

Not a sandbox: whoever knows Python well enough gets past it.
"""

from __future__ import annotations

import _posixsubprocess  # by which multiprocessing starts a process: that is no audit event
import builtins
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from operator import is_not
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from playground.exercises.exercise import FOLDER
from playground.exercises.verdict import LEAVES, PEEKS, REPLACES, STARTS
from playground.runtime import tap
from playground.runtime.rank import rank
from playground.runtime.tap.replacement import replaced

PEEKING = (
    "sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace",
    "sys.setprofile",
    "sys.monitoring.register_callback", "gc.get_objects", "gc.get_referrers", "gc.get_referents",
)  # fmt: skip
"""Audit events of calls by which a program gets at other functions' values."""
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
"""Attributes that are such a way, too."""
STARTING = (
    "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system",
    "subprocess.Popen", "pty.spawn",
)  # fmt: skip
"""Audit events of what starts a process."""
LEAVING = "os._exit"
STANDARD = os.path.join(os.path.dirname(os.__file__), "")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
HELPERS = {
    "inspect": None,
    "traceback": ("walk_stack", "walk_tb"),
    "logging": ("currentframe", "<lambda>"),
}
"""Modules of the standard library, and their functions, that hand on frames; None: all."""
OURS = __name__.rpartition(".")[0]


class Judging(Protocol):
    """The record that a solution in `file` is judged by."""

    file: str
    running: bool


class Guard:
    """Watches one solution, from its import on."""

    def __init__(self, record: Judging, stop: Callable[[str, int], NoReturn]) -> None:
        self.record = record
        self.stop = stop
        self.is_on, self.thread = False, threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Guard]:
        """While judges are at work."""
        hear_events()
        self.is_on = True
        _watching.append(self)
        try:
            with (
                replaced(_posixsubprocess, "fork_exec", self.wrap),
                replaced(os, "_exit", self.wrap),
            ):
                self.in_place = list(find_functions())
                yield self
        finally:
            self.is_on = False
            _watching.remove(self)

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event."""
        if not self.is_on or not self.record.running or getattr(self.thread, "looks", False):
            return
        self.thread.looks = True  # what happens from here to the end of this is ours
        try:
            self.judge(event, args)
        finally:
            self.thread.looks = False

    def judge(self, event: str, args: tuple[Any, ...]) -> None:
        if event in PEEKING or (event == "object.__getattr__" and args[1] in FRAMES):
            self.end_if(PEEKS, theirs(self.record.file, is_helper))
        elif (event == "import" and str(args[0]).startswith(OURS)) or (
            event == "open" and is_ours(args[0])
        ):
            self.end_if(PEEKS, theirs(self.record.file, is_standard))
        elif event in STARTING:
            self.end_if(STARTS, theirs(self.record.file, is_standard))
        elif event == LEAVING:
            self.end_if(LEAVES, theirs(self.record.file, is_standard))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that raises no audit event, as one that is looked at all the same."""

        def function(*args: Any) -> Any:
            self.look(LEAVING if real.__name__ == "_exit" else "os.fork", ())
            return real(*args)

        return function

    def end_if(self, words: str, frame: FrameType | None) -> None:
        if frame is not None:
            self.is_on = False
            self.stop(words, frame.f_lineno)

    def find_replaced(self) -> str:
        """A function that the solution has replaced and not put back; empty if there is none."""
        for owner, functions, inherited in self.in_place:
            space = vars(owner)
            names = [*filter(space.__contains__, inherited)]
            # one by one where there is a difference: torch has 2,000 functions
            if any(map(is_not, map(space.get, functions), functions.values())):
                names += [name for name in functions if space.get(name) is not functions[name]]
            for name in names:
                if not is_of_torch(space.get(name)):
                    return f"{owner.__name__}.{name} {REPLACES}"
        return ""


_watching: list[Guard] = []


@functools.cache
def hear_events() -> None:
    """Add the hook that passes audit events on to the guard that watches. Once: Python keeps a hook
    for as long as the process lives, and a world that is kept has had many guards."""

    def pass_on(event: str, args: tuple[Any, ...]) -> None:
        for guard in _watching:
            guard.look(event, args)

    sys.addaudithook(pass_on)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Without the modules of the judges, for what looks them up."""
    package = sys.modules[OURS.rpartition(".")[0]]
    kept = {name: module for name, module in sys.modules.items() if name.startswith(OURS)}
    for name in kept:
        del sys.modules[name]
    exercises = vars(package).pop("exercises")
    try:
        yield
    finally:
        sys.modules.update(kept)
        package.exercises = exercises  # type: ignore[attr-defined]


def find_functions() -> Iterator[tuple[Any, dict[str, object], list[str]]]:
    """What a verdict rests on: modules and classes, their functions, and the names of those that a
    class inherits."""
    owners: list[Any] = [builtins, torch, dist, distributed_c10d, torch.Tensor, torch._C.TensorBase]
    owners += [dist.ProcessGroup, dist.Work]
    for name, module in sys.modules.items():
        if name.startswith((f"{OURS}.", tap.__name__)) or module is rank:
            classes = [
                each for each in vars(module).values() if getattr(each, "__module__", "") == name
            ]
            owners += [module, *(each for each in classes if isinstance(each, type))]
    for owner in owners:
        functions = {name: each for name, each in vars(owner).items() if callable(each)}
        inherited = (
            [name for name in dir(owner) if name not in vars(owner)]
            if isinstance(owner, type)
            else []
        )
        yield owner, functions, inherited


def is_of_torch(function: object) -> bool:
    """Whether it was written by torch, which replaces some of its own when its compiler is
    imported."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH)


def theirs(file: str, skipped: Callable[[FrameType], bool]) -> FrameType | None:
    """The frame of the solution in `file` that has made the call that is under way, itself or
    through what is skipped; None if another has. What is compiled from a text counts as the
    solution's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or skipped(frame)):
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_filename
    return (
        frame if name == file or (name.startswith("<") and not name.startswith("<frozen")) else None
    )


def is_helper(frame: FrameType) -> bool:
    """Whether it hands on frames to its caller."""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    return (
        frame.f_code.co_filename.startswith(STANDARD)
        and module in HELPERS
        and name in (HELPERS[module] or [name])
    )


def is_standard(frame: FrameType) -> bool:
    """Whether it is the standard library's, other than for showing lines."""
    file = frame.f_code.co_filename
    if file.endswith("linecache.py"):
        return False
    of_standard = file.startswith((STANDARD, "<frozen")) and "site-packages" not in file
    return of_standard or file.startswith(os.path.join(TORCH, "multiprocessing", ""))


def is_ours(path: object) -> bool:
    """Whether it is a file of the exercises."""
    return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(
        os.path.join(FOLDER, "")
    )
