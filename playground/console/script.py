"""How Python was started: where it looks for modules while `python -m playground` runs, and a lesson's file as a
program of its own. Imports nothing of ours.

`python -m` looks into the working folder before anything else. So a `queue.py`, `random.py` or `torch.py` of the user's
own, in whatever folder they happen to work, would replace the module of that name that the standard library, torch or
we ask for, and would be run. The command line imports nothing of theirs: for it, that folder comes last.
(A script that calls `launch` is different: Python puts its folder first for the sake of what the script imports.)
"""

from __future__ import annotations

import os
import sys

HERE = os.path.join(os.sep, "playground", "console", "script.py")
"""This file, seen from the folder that the package lies in."""
LESSONS = os.path.join(os.sep, "playground", "lessons")


def put_working_folder_last() -> None:
    """Move the folder that `python -m playground` put first on `sys.path` to its end. If it is a clone of the
    playground, and another copy is installed, then just before that one: the ranks are to import what runs here. Does
    nothing in any other program, nor where Python was told to leave that folder out (-P, -I)."""
    if not is_our_command() or getattr(sys.flags, "safe_path", bool(sys.flags.isolated)):
        return
    folder = sys.path.pop(0)
    copies = [place for place, entry in enumerate(sys.path) if os.path.isdir(os.path.join(entry, "playground"))]
    is_clone = os.path.realpath(folder) == os.path.realpath(__file__).removesuffix(HERE)
    sys.path.insert(copies[0] if is_clone and copies else len(sys.path), folder)


def is_our_command() -> bool:
    """Whether Python is about to run `python -m playground`: as long as it looks for the module, `sys.argv` says so."""
    asked = (word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv[1:])
    return sys.argv[:1] == ["-m"] and "playground" in asked


def become_command() -> None:
    """If Python runs the `lesson.py` of a lesson, make this process the command of that lesson, with the options that
    it was given. A new program, and not a call: ranks import the main script of the process that starts them, and what
    lies beside it would come first."""
    if not (sys.argv and os.path.isfile(sys.argv[0])):  # where the working folder has been deleted nothing is
        return
    folder, file = os.path.split(os.path.realpath(sys.argv[0]))
    lessons, lesson = os.path.split(folder)
    if (lessons, file) == (os.path.realpath(__file__).replace(HERE, LESSONS), "lesson.py"):
        flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
        os.execv(sys.executable, [sys.executable, *flags, "-m", "playground", lesson, *sys.argv[1:]])
