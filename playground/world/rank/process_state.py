"""The state of a rank's process: put back before each function, and compared after it."""

from __future__ import annotations

import contextlib
import decimal
import gc
import locale
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from playground.base.process_attributes import read_inheritance
from playground.base.upstream import print_options
from playground.world.rank.generators import is_seeded_by_program, seed_generators
from playground.world.rank.process import has_children

TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
OWNERS = torch, torch.nn.functional, dist, dist.distributed_c10d, torch.Tensor, torch.nn.Module
"""Modules and classes whose functions a test may replace."""
SUBNORMAL = 1e-40
"""A float32 that is 0 where such numbers are flushed to zero."""


class ProcessState:
    """The state of this process when it was new.

    Nearly every function draws random numbers, and a rank that trains keeps to one core. So `renew`
    seeds the generators afresh, as a new process does, and puts the cores back. Other changes stay,
    and `find_changes` names them: threads, child processes, environment, handlers, limits, torch's
    switches, functions of torch's that were replaced. Neither sees what is written into other
    modules.
    """

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0)
        self.is_new = True
        # as `begin` has found them:
        self.is_seeded = False
        """Whether the program's import has seeded a generator."""
        self.threads: set[threading.Thread] = set()
        self.settings: dict[str, object] = {}
        self.attributes: dict[Any, dict[str, object]] = {}
        """Of `OWNERS`."""

    def renew(self) -> None:
        """To be called before each function is loaded: its module may seed generators."""
        if not self.is_new:
            seed_generators()
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        self.is_new = False

    def begin(self) -> None:
        """To be called before each function."""
        self.is_seeded = is_seeded_by_program()
        self.threads = set(threading.enumerate())
        self.settings = read_settings()
        self.attributes = {owner: dict(vars(owner)) for owner in OWNERS}

    def find_changes(self) -> list[str]:
        """To be called after each function: what it, or the import of its module, has left here
        that it would not find in a new process."""
        changes = {
            "threads": not self.threads.issuperset(threading.enumerate()),
            "child processes": has_children(os.P_ALL),
            "a generator seeded by an import": self.is_seeded,
        }
        now = read_settings()
        changes |= {name: now[name] != value for name, value in self.settings.items()}
        for owner, before in self.attributes.items():
            after = vars(owner)
            changes |= {
                f"{owner.__name__}.{name}": True
                for name, value in before.items()
                if after.get(name) is not value and callable(value)
            }
        return [name for name, is_changed in changes.items() if is_changed]


def read_settings() -> dict[str, object]:
    """The settings of a process that the next function to run there would notice."""
    root, numpy, decimals = logging.getLogger(), sys.modules.get("numpy"), decimal.getcontext()
    sharing = torch.multiprocessing.get_sharing_strategy()
    found = {} if numpy is None else {
        "numpy's errors": numpy.geterr(),
        "numpy's printing": repr(numpy.get_printoptions()),
    }  # fmt: skip
    return found | {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "users, umask, limits, niceness": replace(read_inheritance(), cores=frozenset()),
        "sys.path": list(sys.path),
        "socket timeout": socket.getdefaulttimeout(),
        "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "timers": [signal.getitimer(timer)[1] for timer in TIMERS],
        "standard streams": [
            (stream, getattr(stream, "closed", False))
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "hooks": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "recursion limit": sys.getrecursionlimit(),
        "warning filters": list(warnings.filters),
        "logging": (root.level, list(root.handlers), list(root.filters), root.manager.disable),
        "garbage collector": (
            gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks),
        ),
        "decimal context": (
            decimals.prec, decimals.rounding, decimals.Emin, decimals.Emax, decimals.capitals,
            decimals.clamp, dict(decimals.traps),
        ),
        "locale": locale.setlocale(locale.LC_ALL),
        "torch's printing": repr(print_options()),
        "torch's sharing": sharing,
        "torch's switches": [
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            torch.tensor(SUBNORMAL, device="cpu").mul(1.0).item(),
        ],
    }  # fmt: skip
