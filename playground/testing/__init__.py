"""A pytest plugin: real ranks for tests of your own multi-process code.

Installing the package is enough; the fixture `world` is then there:

    def double(rank, size):                  # at the top of the module: the ranks import it
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        assert tensor.item() > rank
        return tensor.item()

    def test_everybody_gets_the_sum(world):
        assert world(3).run(double) == [6.0, 6.0, 6.0]

A rank that fails, also by an assert, fails its test with its own traceback; a rank that hangs, with the stacks of all.
No other test is affected.

The fork server that the ranks come from lives as long as the session (under pytest-xdist, as its worker), so a first
world is up in tens of milliseconds. A world whose function returned on every rank, and left each process as it had
found it, serves the next run too, with a new process group: that takes milliseconds. What a function writes into
modules, as a monkeypatch does, is then still there; `world(3, fresh=True)` has new processes for every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class World:
    """A world of `size` ranks to run functions on."""

    size: int
    backend: str = "gloo"
    timeout: float = 30.0
    """Seconds without a sign of life after which a run counts as hung."""
    fresh: bool = False
    """Whether every run gets new processes."""
    config: pytest.Config = field(repr=False)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(rank, size, *args)` on each rank; return the results in rank order.

        `fn` must stand at the top of a module, and its arguments and results must pickle. A function without
        parameters, written for torchrun, is called without: it finds RANK and WORLD_SIZE in its environment.

        Raises `RankFailed` with the traceback of the rank that failed first, `RankTimeout` with the stacks of all.
        """
        __tracebackhide__ = True
        from playground.runtime.launch import launch
        from playground.testing.ranks import as_pytest_imports

        return launch(
            as_pytest_imports(fn, self.config), self.size, backend=self.backend, args=args, timeout=self.timeout,
            fresh=self.fresh,
        )  # fmt: skip


@dataclass(frozen=True)
class WorldFactory:
    """What the fixture `world` is: called with a size, it returns a world of that many ranks."""

    config: pytest.Config = field(repr=False)

    def __call__(self, size: int, *, backend: str = "gloo", timeout: float = 30.0, fresh: bool = False) -> World:
        return World(size=size, backend=backend, timeout=timeout, fresh=fresh, config=self.config)


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[WorldFactory]:
    """Real ranks: `world(3).run(fn, *args)` runs `fn(rank, size, *args)` on three processes that form one process group
    of torch.distributed, and returns their results in rank order.

    `world(size, backend="gloo", timeout=30.0, fresh=False)`: `backend="nccl"` takes a GPU per rank; `timeout`, in
    seconds, bounds the time without a sign of life from any rank; `fresh` asks for new processes at every run, where
    otherwise those of a run that left them as it found them serve the next, with a new process group. `fn` stands at
    the top of a module; a function without parameters, written for torchrun, works too. A failed assert or another
    exception in a rank fails the test with that rank's traceback. What ranks print is captured as the test's own
    output is.
    """
    from playground.runtime.kept import are_kept, end_worlds, keep_worlds
    from playground.runtime.server import preload
    from playground.testing import ranks, rewriting

    # Where pytest is the program, every rank imports it again.
    preload("pytest", ranks.__name__, rewriting.__name__)
    kept_before = are_kept()  # by a session that this one, of pytester, runs in
    keep_worlds()
    yield WorldFactory(pytestconfig)
    end_worlds()
    if kept_before:
        keep_worlds()
