"""Whose frame a frame is: the program's, ours that run or record it, torch's or Python's. Does not
import torch."""

from __future__ import annotations

import os
import sysconfig
import traceback

from playground.base.remote import ROOT

PACKAGE = os.path.join(os.path.abspath(ROOT), "playground", "")


def in_package(*parts: str) -> str:
    """The path of one of our files; of a folder, if the last part is empty."""
    return os.path.join(PACKAGE, *parts)


RUNNERS = (
    in_package("base", ""),
    in_package("tap", ""),
    in_package("world", ""),
    in_package("explain", ""),
    in_package("testing", ""),
    in_package("play", ""),
)
"""Modules of ours that run a program or record it: no traceback shows them."""
CARRIERS = (
    in_package("lessons", "devices.py"),
    in_package("algorithms", "background.py"),
    in_package("algorithms", "link.py"),
    in_package("algorithms", "collectives.py"),
    in_package("algorithms", "executor.py"),
    in_package("algorithms", "messages.py"),
    in_package("exercises", "calls.py"),
    in_package("exercises", "transcript.py"),
)
"""Those that carry out what a program or an algorithm calls, and are neither."""
BETWEEN = (in_package("explain", "hang", ""), in_package("tap", ""))
"""Those that stand between torch's functions and what these call."""
STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
INSTALLED = (
    STANDARD,
    *(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")),
)
"""Folders of Python's own modules, and of other packages."""
PACKAGES = tuple(os.path.join(os.sep, name, "") for name in ("site-packages", "dist-packages"))
"""Names of such folders: a virtual environment may also see packages elsewhere, torch among
them."""

_programs: set[str] = set()


def add_program(file: str) -> None:
    """From now on, this file is a program's wherever it lies, in `site-packages` for example."""
    _programs.add(os.path.abspath(file))


def is_program(path: str) -> bool:
    """Whether code of this file is the program's. Lessons are programs."""
    if path.startswith("<"):  # of no file
        return False
    path = os.path.abspath(path)
    if path in _programs:
        return True
    if path.startswith(PACKAGE):
        return not path.startswith((*RUNNERS, *CARRIERS))
    return not path.startswith(INSTALLED) and not is_in_packages(path)


def is_in_packages(path: str) -> bool:
    return any(name in path for name in PACKAGES)


def is_standard(path: str) -> bool:
    """Whether it is of Python's own library."""
    return path.startswith(STANDARD) and not is_in_packages(path)


def is_raised_by_torch(error: BaseException) -> bool:
    """Whether `error` was raised in a module of torch, or in what is written in C++ and was called
    from there."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    others = [each for each in frames if not each.f_code.co_filename.startswith(BETWEEN)]
    module: str = others[-1].f_globals.get("__name__", "") if others else ""
    return module.partition(".")[0] == "torch"
