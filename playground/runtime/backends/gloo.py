"""gloo: TCP between CPUs, on any machine; and shm, which is gloo but for what ranks of one host do
in shared memory.

Source: https://github.com/pytorch/gloo; shm: playground/algorithms/backend.py
"""

from __future__ import annotations

import os
import re

from playground.runtime.backends.backend import Backend
from playground.runtime.errors import UsageError
from playground.runtime.upstream import find_older_torch

MISSING_RANK = re.compile(r"[Ww]ait timeout after (\d+)ms, keys: .*/(\d+)")

FIRST_TORCH = (2, 15)
"""The first version in which a backend can be written in Python."""


class Gloo(Backend):
    name = "gloo"
    device_type = "cpu"
    summary = "CPU"
    interface_variable = "GLOO_SOCKET_IFNAME"
    trusts_host_name = True

    def connects_later(self) -> bool:
        return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "t", "true", "y", "yes")

    def explain_init_failure(self, error: Exception) -> str:
        """As in `Backend`. A rank that came to the meeting and no further is named: it is the last
        number of the key that gloo waited for."""
        if missing := MISSING_RANK.search(str(error)):
            return (
                f"rank {missing[2]} came to the meeting, but did not connect within "
                f"{float(missing[1]) / 1000:g} s"
            )
        return super().explain_init_failure(error)


class Shm(Gloo):
    name = "shm"
    summary = "CPUs of one host, by the memory they share"

    def check(self, local_ranks: int, joined: bool = False) -> str:
        if found := find_older_torch(FIRST_TORCH):
            raise UsageError(
                f"--backend shm needs torch {'.'.join(map(str, FIRST_TORCH))}, and here is "
                f"{found}: --all-reduce shared-memory does without"
            )
        return super().check(local_ranks, joined)
