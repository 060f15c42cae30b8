"""What tests of the fork server and of its client share: `begin` of tests/runtime/conftest.py, and
what is seen of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from processes import ENOUGH

from playground.runtime.launcher.server import ForkServerClient

Begin = Callable[..., ForkServerClient]


def is_gone(pid: int) -> bool:
    """Whether that child of ours ends, soon."""
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        except ChildProcessError:  # whoever ended it has waited for it
            return True
        time.sleep(0.01)
    return False


def state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
