"""Surroundings of a process that may be missing: standard streams, closed or full, and its working
folder."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def open_standard_streams() -> None:
    """Open on the null device what is closed of stdin, stdout and stderr: no other file then gets
    its number, and printing does nothing."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (it stays open)


def replace_unencodable() -> None:
    """Let what is printed have `?` for characters that a stream lacks (in latin-1, `…`), where it
    would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def has_working_folder() -> bool:
    """Whether the working folder is still there: relative paths start in it, and so do the
    ranks."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def discard_output() -> None:
    """Drop what is printed from now on, and what has not been written yet: Python tries that again
    when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # not a file
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
