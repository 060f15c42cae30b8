"""A pytest plugin: real ranks for tests of your own multi-process code.

Installing the package is enough; the fixture `world` is then there:

    def double(rank, size):                  # at the top of the module: the ranks import it
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_everybody_gets_the_sum(world):
        assert world(3).run(double) == [6.0, 6.0, 6.0]

The fork server that the ranks come from lives as long as the session, so a world is up in tens of milliseconds. Every
test gets new processes: a rank that hangs fails its own test, with its stack, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from playground.runtime.launch import launch
from playground.runtime.server import preload


@dataclass(frozen=True, kw_only=True)
class World:
    """A world of `size` ranks, started anew at each `run`."""

    size: int
    backend: str = "gloo"
    timeout: float = 30.0
    """Seconds without a sign of life after which a run counts as hung."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn(rank, size, *args)` returned on each rank, in rank order.

        Raises `RankFailed` with the traceback of the rank that failed first, `RankTimeout` with the stacks of all.
        """
        return launch(fn, self.size, backend=self.backend, args=args, timeout=self.timeout)


@pytest.fixture(scope="session")
def world() -> Callable[..., World]:
    """`world(size, backend="gloo", timeout=30.0)`: a world of that many ranks, to run functions on."""
    preload("pytest")  # where pytest is the program, every rank imports it again

    def of(size: int, *, backend: str = "gloo", timeout: float = 30.0) -> World:
        return World(size=size, backend=backend, timeout=timeout)

    return of
