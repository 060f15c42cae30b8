"""A lesson's file as a program of its own: `python playground/lessons/p2p/lesson.py` is `python -m playground p2p`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def run_lesson(name: str) -> NoReturn:
    """Make this process the command of that name, with the options that it was given.

    A new program, and not a call: ranks import the main script of the process that starts them, and modules that lie
    beside it would come before others of the same name.
    """
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-m", "playground", name, *sys.argv[1:]])
