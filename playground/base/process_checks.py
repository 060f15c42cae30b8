"""Surroundings of a process that may be missing: a system on which ranks can be started, standard
streams, closed or full, and its working folder. Imports nothing that only some systems have."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from playground.base.errors import UsageError

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(__file__)), "lessons", "p2p", "lesson.py")
"""A lesson's own file, which needs torch alone."""
NOT_HERE = (
    "ranks need Linux 5.3 or newer. Here, torchrun runs your scripts and every lesson's own file: "
    f"torchrun --nproc-per-node 2 {PROGRAM}. All else runs in WSL 2 (wsl --install), in Docker "
    '(docker run -it -v "${PWD}:/playground" -w /playground python:3.13 bash), and in Colab: '
    "playground/lessons/running.md has the lines"
)


def find_obstacle() -> str:
    """Why no rank can be started on this system, and what works there, in one line; empty where
    the kernel has descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        return NOT_HERE
    except OSError as error:
        return NOT_HERE if error.errno in (errno.ENOSYS, errno.EPERM) else ""
    return ""


def open_standard_streams() -> None:
    """Open on the null device what is closed of stdin, stdout and stderr: no other file then gets
    its number, and printing does nothing."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = io.FileIO(number, "w" if number else "r", closefd=False)
            setattr(sys, name, io.TextIOWrapper(file, encoding="utf-8", write_through=True))


def replace_unencodable() -> None:
    """Let what is printed have `?` for characters that a stream lacks (in latin-1, `…`), where it
    would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def check_working_folder() -> None:
    """Raise `UsageError` if the working folder has been deleted: relative paths start in it, and so
    do the ranks."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been deleted: change to another one") from None


def discard_output() -> None:
    """Drop what is printed from now on, and what has not been written yet: Python tries that again
    when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # not a file
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
