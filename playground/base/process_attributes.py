"""What a process has from the one that starts it, besides its files, its folder and its
environment. Does not import torch.

Source: https://man7.org/linux/man-pages/man2/fork.2.html and execve.2.html
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Inheritance:
    """Whose rights a process has, what it may use, and how its files are made."""

    users: tuple[int, ...]
    """Real, effective and saved user."""
    groups: tuple[int, ...]
    """Real, effective and saved group, then the others."""
    umask: str
    """The permissions that new files do not get; empty where the system does not tell."""
    limits: tuple[tuple[int, int], ...]
    """Soft and hard limit of each of `LIMITS` (ulimit)."""
    niceness: int
    cores: frozenset[int]


def read_inheritance() -> Inheritance:
    """What a process would have now that this one starts."""
    return Inheritance(
        users=os.getresuid(),
        groups=(*os.getresgid(), *sorted(os.getgroups())),
        umask=read_umask(),
        limits=tuple(resource.getrlimit(limit) for limit in LIMITS),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        cores=frozenset(os.sched_getaffinity(0)),
    )


def read_umask() -> str:
    """The file mode creation mask of this process. (To read it by `os.umask` is to set it.)"""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("Umask")), "")
