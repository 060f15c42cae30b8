"""A pytest plugin: real ranks for tests of your own multi-process code.

Installing the package is enough; the fixture `world` is then there:

    def double(rank, size):                  # at the top of the module: the ranks import it
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        assert tensor.item() > rank
        return tensor.item()

    def test_everybody_gets_the_sum(world):
        assert world(3).run(double) == [6.0, 6.0, 6.0]

A rank that fails, also by an assert, fails its test with its own traceback; a rank that hangs, with
the stacks of all. No other test is affected.

The fork server that starts the ranks lives as long as the session (under pytest-xdist, as its
worker). A world whose function returned on every rank, and left each process as it had found it, is
reused for the next run. Changes that a function makes to modules, as a monkeypatch does, are then
still there; `world(3, fresh=True)` has new processes.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import pytest


@dataclass(frozen=True)
class World:
    """A world of `size` ranks to run functions on."""

    size: int
    _: KW_ONLY
    backend: str = "gloo"
    timeout: float = 30.0
    """Seconds without a report of any rank after which a run counts as hung."""
    fresh: bool = False
    """Whether every run gets new processes."""
    config: pytest.Config = field(repr=False)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(rank, size, *args)` on each rank; return the results in rank order.

        `fn` must stand at the top of a module, and its arguments and results must pickle. A
        function without parameters, written for torchrun, is called without: it finds RANK and
        WORLD_SIZE in its environment.

        Nothing looks for silent mistakes, as `playground.launch` does: a test may give a function a
        wrong model on purpose, and says itself what is right.

        Raises `RankFailed` with the traceback of the rank that failed first, `RankTimeout` with the
        stacks of all.
        """
        __tracebackhide__ = True
        from playground.world import launch

        imported = ImportedAsByPytest(fn=fn, settings=read_settings(self.config))
        return launch(
            imported,
            self.size,
            backend=self.backend,
            args=args,
            timeout=self.timeout,
            fresh=self.fresh,
        )


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[Callable[..., World]]:
    """Real ranks: `world(3).run(fn, *args)` runs `fn(rank, size, *args)` on three processes that
    form one process group of torch.distributed, and returns their results in rank order. Options:
    see `World`.

    A failed assert or another exception in a rank fails the test with that rank's traceback. The
    output of ranks is captured like that of the test.
    """
    from playground.testing import rewriting
    from playground.world.launcher.fork_client import preload
    from playground.world.launcher.pool import are_kept, end_worlds, keep_worlds

    # Where pytest is the program, every rank imports it again.
    preload("pytest", __name__, rewriting.__name__)
    kept_before = are_kept()  # by a session that this one, of pytester, runs in
    keep_worlds()
    yield partial(World, config=pytestconfig)
    end_worlds()
    if kept_before:
        keep_worlds()


@dataclass(frozen=True, kw_only=True)
class ImportedAsByPytest:
    """`fn`, whose module is imported as by pytest where it is unpickled.

    pytest rewrites the asserts of a test module when it imports it, and ranks import the module
    again. So a function is sent to them together with the settings of this run of pytest, and its
    module is imported after they were applied.
    """

    fn: Callable[..., Any]
    settings: Mapping[str, Any]
    """Arguments of `load`."""

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __repr__(self) -> str:
        return repr(self.fn)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        # unpickled after the settings are applied
        return partial(load, **self.settings), (pickle.dumps(self.fn),)


def load(
    pickled: bytes,
    *,
    folders: Sequence[str] = (),
    rewritten: frozenset[str] = frozenset(),
    verbosity: int = 0,
) -> Callable[..., Any]:
    """In a rank: apply these settings, then import the function.

    `folders`: where pytest finds modules besides `sys.path`; `rewritten`: names of the modules
    whose asserts are rewritten, and of packages with all their modules; `verbosity`: that of
    asserts.
    """
    sys.path += folders
    if rewritten:
        with contextlib.suppress(Exception):  # an unknown version of pytest: asserts stay plain
            from playground.testing.rewriting import install

            install(rewritten, verbosity)
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def read_settings(config: pytest.Config) -> Mapping[str, Any]:
    """The settings of this run of pytest that ranks need."""
    rewritten: frozenset[str] = frozenset()  # as with --assert=plain
    with contextlib.suppress(Exception):  # an unknown version of pytest
        from playground.testing.rewriting import rewritten_modules

        rewritten = rewritten_modules(config)
    # With --import-mode=importlib, pytest names modules from its root folder, without adding that
    # to `sys.path`.
    folders = [str(config.rootpath)] if config.getoption("importmode", "") == "importlib" else []
    verbosity = config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)
    return {"folders": folders, "rewritten": rewritten, "verbosity": verbosity}
