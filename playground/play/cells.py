"""In a rank that stays: run cells in one namespace, and say how each ended.

Sources: https://docs.python.org/3/library/linecache.html, which tracebacks and inspect read, and
https://docs.python.org/3/library/bdb.html. Does not import torch before it is in a rank.
"""

from __future__ import annotations

import ast
import bdb
import builtins
import contextlib
import inspect
import linecache
import os
import pickle
import rlcompleter
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from playground.base.errors import LOST_PEER, GroupGone
from playground.base.frames import RUNNERS, is_program, is_raised_by_torch
from playground.base.remote import Remote, remote
from playground.base.upstream import list_groups
from playground.world.rank.debugger import end_tracing

MOST_COMPLETIONS = 500
OBSERVED = remote("playground.explain.right.observer:checked")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended on one rank."""

    value: object = None
    """The text of the last expression's value, or what a function of ours returned; None: none."""
    html: str = ""
    """The value and the figures as a notebook shows them; empty where text is as good."""
    error: str = ""
    """The traceback of what it raised, from the cell's own line on."""
    is_lost_peer: bool = False
    """Whether that says that another rank has hung up."""
    has_left: bool = False
    """Whether the cell has destroyed the process group."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is, and what it holds."""

    process: int
    resident_bytes: int
    device: str
    groups: int
    """How many process groups there are, the world included."""
    names: tuple[str, ...]
    """Those that cells have defined."""


namespace = ModuleType("__main__")
"""Its names are the cells': what they define is pickled as `__main__`'s on each rank, and found."""
given: set[str] = set()
"""The names that were there from the start."""
observed = contextlib.ExitStack()
"""In it, what cells do is written down."""


build_python_class = builtins.__build_class__
files_of_classes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def build_class(body: Any, name: str, /, *bases: Any, **more: Any) -> Any:
    """In the place of Python's own: note in which cell a class is defined."""
    built = build_python_class(body, name, *bases, **more)
    if isinstance(built, type) and body.__globals__ is vars(namespace):
        files_of_classes[built] = body.__code__.co_filename
    return built


def find_file(value: Any) -> str:
    """In the place of `inspect.getfile`, which knows of no classes without a module's file."""
    known = files_of_classes.get(value) if isinstance(value, type) else None
    return known or find_python_file(value)


find_python_file = inspect.getfile


def begin(rank: int, size: int) -> None:
    """Make the namespace."""
    import torch
    import torch.distributed as dist

    from playground.world.rank.member import members

    builtins.__build_class__ = build_class
    inspect.getfile = find_file  # type: ignore[assignment]
    sys.argv[:] = [""]  # the launcher's words are none of the cells'
    sys.modules["__main__"] = namespace
    vars(namespace).clear()
    vars(namespace).update(
        __name__="__main__", __builtins__=builtins, rank=rank, size=size, torch=torch, dist=dist,
        device=members[0].backend.device(),
    )  # fmt: skip
    given.update(vars(namespace))


def run_cell(rank: int, size: int, number: int, source: str) -> Outcome:
    """Run a cell; the outcome has the text of its last expression's value."""
    return guarded(lambda: execute(f"cell {number}", source))


def run_observed(
    run: Callable[..., Outcome], folder: Path, rank: int, size: int, *cell: Any
) -> Outcome:
    """From now on, write down what cells do, in a log in this folder; and run a cell as `run`
    does."""
    observed.close()
    observed.enter_context(OBSERVED(folder, rank))
    return run(rank, size, *cell)


def call(rank: int, size: int, fn: Callable[..., object], *args: object) -> Outcome:
    """Call a function of ours as a cell is run: what it returns is the outcome's value."""
    return guarded(lambda: fn(*args))


def guarded(run: Callable[[], object]) -> Outcome:
    """What `run()` returns, or what it raises, whatever it is; meanwhile, an interrupt raises
    `KeyboardInterrupt`."""
    rank = os.getpid()
    try:
        # twice: what waited in C has raised, and then the interrupt does, wherever Python stands
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return Outcome(run(), has_left=has_left())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end_tracing()  # or the next cell would be stepped through
            vars(namespace).pop("__return__", None)  # which a debugger has put there
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getpid() != rank:  # forked in the cell: it ends as a process of its own
            raise
        return describe(error)


def execute(name: str, source: str) -> str | None:
    """Run the source of a cell; the text of its last expression's value, unless ";" ends it."""
    lines = source.splitlines(keepends=True)
    # no time of change: it is no file, and kept for good
    linecache.cache[name] = len(source), None, lines, name
    return evaluate(ast.parse(source, name), name, not source.rstrip().endswith(";"))


def evaluate(tree: ast.Module, name: str, shows_last: bool = True) -> str | None:
    """Run a program; the text of its last expression's value, if that is wanted."""
    last = None
    if shows_last and tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    names = vars(namespace)
    exec(build(tree, name, "exec"), names)
    if last is None or (value := eval(build(last, name, "eval"), names)) is None:
        return None
    names["_"] = value
    return repr(value)


def build(tree: Any, name: str, mode: str) -> CodeType:
    return compile(tree, name, mode, dont_inherit=True)


def describe(error: BaseException) -> Outcome:
    """`error` as its reader sees it: without our own part in it, from the cell's line on."""
    try:
        whole = traceback.TracebackException.from_exception(error)
        parts = [whole]
        for part in parts:
            part.stack = traceback.StackSummary.from_list(theirs(part.stack))
            parts += [each for each in (part.__cause__, part.__context__) if each]
        text = "".join(whole.format()).rstrip()
        # torch looks the group up once more, to tell of what it has raised, and raises again
        cause = error.__context__ if is_raised_by_torch(error) else error
        if isinstance(cause, GroupGone):
            text = f"{find_line(whole.stack)}: {cause}"
        if isinstance(error, NameError) and error.name in ("push", "pull"):
            text += f"\n{error.name}() is called in this process: begin the cell with %%here"
    except Exception:  # its own __str__ raises
        text = type(error).__name__
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(str(error))
    return Outcome(error=text, is_lost_peer=bool(lost), has_left=has_left())


def find_line(stack: traceback.StackSummary) -> str:
    """The innermost line of the program: "cell 3:1"."""
    frames = (frame for frame in reversed(stack) if is_program(frame.filename))
    return next(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)


def has_left() -> bool:
    """Whether the process group has been destroyed. One that a cell has formed is ours from now on:
    another cell may form one, too."""
    from playground.world.rank.member import members

    return not members[0].adopt_group()


def theirs(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames of the cells and of what they call; none of a syntax error, which says where it
    is."""
    ours = (*RUNNERS, ast.__file__, bdb.__file__, "<frozen importlib")
    return [frame for frame in stack if not frame.filename.startswith(ours)]


def define(pickled: bytes) -> None:
    """Set names, from a pickled dictionary."""
    vars(namespace).update(pickle.loads(pickled))


def pickle_name(expression: str) -> bytes:
    """The value of an expression, pickled."""
    return pickle.dumps(eval(expression, vars(namespace)))


def complete(text: str) -> list[str]:
    """Names, or attributes, that begin like this."""
    completer = rlcompleter.Completer(vars(namespace))
    found = completer.attr_matches(text) if "." in text else completer.global_matches(text)
    return [each.rstrip("( ") for each in found[:MOST_COMPLETIONS]]


def explain(expression: str, with_source: bool) -> str:
    """What a value is: its type, its text, its signature, its docstring or its source."""
    value = eval(expression, vars(namespace))
    told = [f"{type(value).__name__}: {repr(value)[:500]}"]
    with contextlib.suppress(TypeError, ValueError):
        told.append(f"{expression}{inspect.signature(value)}")
    if with_source:
        with contextlib.suppress(TypeError, OSError):
            return "\n".join([*told, inspect.getsource(value).rstrip()])
    return "\n".join([*told, inspect.getdoc(value) or ""]).rstrip()


def find_status() -> Status:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return Status(
        process=os.getpid(),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        device=str(vars(namespace)["device"]),
        groups=len(list_groups()),
        names=tuple(
            name for name in vars(namespace) if name not in given and not name.startswith("_")
        ),
    )


def load(function: Remote) -> None:
    """Import what takes time before it is called."""
    function.load()


def stay() -> None:
    """Nothing: a new process group is what it is for."""
