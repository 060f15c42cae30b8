"""Whether a function has left its process as it found it, so that the next one may run there as in a new one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

import torch

from playground.runtime.surroundings import working_folder


class ProcessState:
    """The state of this process when it was new.

    Nearly every function draws random numbers, and a rank that trains keeps to one core: `begin` puts torch's generator
    and the cores back. (Python's and numpy's generators start afresh in every process.) Other changes
    stay, and `is_unchanged` says whether there are any: threads, child processes, environment, handlers, torch's
    switches. Neither sees what is written into modules.
    """

    def __init__(self) -> None:
        self.random_state = torch.get_rng_state()
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def begin(self) -> None:
        """To be called before each function."""
        torch.set_rng_state(self.random_state)
        if self.cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        self.threads = set(threading.enumerate())
        self.settings = read_settings()

    def is_unchanged(self) -> bool:
        """To be called after each function."""
        return (
            read_settings() == self.settings and self.threads.issuperset(threading.enumerate()) and not has_children()
        )


def read_settings() -> list[Any]:
    """The settings of a process that the next function to run there would notice."""
    return [
        dict(os.environ),
        working_folder(),
        list(sys.path),
        [signal.getsignal(number) for number in signal.valid_signals()],
        (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile(), sys.getrecursionlimit()),
        [(stream, getattr(stream, "closed", False)) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()),
        (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")),
    ]


def has_children() -> bool:
    """Whether this process has child processes, ended ones that were not waited for included."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
