"""shm: gloo, and the memory of one host for its collectives. See `playground.algorithms.backend`."""

from __future__ import annotations

from importlib.metadata import entry_points, version

from playground.runtime.backends.gloo import Gloo
from playground.runtime.errors import UsageError

FIRST_TORCH = (2, 15)
"""The first version in which a backend can be written in Python."""


class Shm(Gloo):
    name = "shm"
    summary = "CPUs of one host, by the memory they share"

    def check(self, local_ranks: int, joined: bool = False) -> str:
        found = version("torch")
        if tuple(map(int, found.split(".")[:2])) < FIRST_TORCH:
            raise UsageError(
                f"--backend shm needs torch {'.'.join(map(str, FIRST_TORCH))}, and here is {found}: "
                "--all-reduce shared-memory does without"
            )
        if not entry_points(group="torch.distributed.backends", name=self.name):
            raise UsageError(f"--backend {self.name} is not installed yet: pip install -e . once more")
        return super().check(local_ranks, joined)
