"""What tests of the fork server and of its client share: `begin` of tests/world/conftest.py, and
what is seen of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from processes import ENOUGH

from playground.world.launcher.fork_client import ForkServerClient

Begin = Callable[..., ForkServerClient]


def is_gone(pid: int) -> bool:
    """Whether that process ends, soon."""
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        try:
            if state_of(pid) in "ZX":  # nobody has waited for it yet
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
