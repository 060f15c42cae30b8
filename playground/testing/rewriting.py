"""pytest's rewriting of asserts, in a process without pytest's configuration: a rank.

This uses private parts of pytest, of versions 8.0 to 9.2. Callers must expect any exception, also from the import of
this module, and continue without it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest import assertion
from _pytest._io import TerminalWriter
from _pytest.assertion import rewrite, util


def rewritten_modules(config: pytest.Config) -> frozenset[str]:
    """The names of the modules that this run of pytest has rewritten, or will rewrite when they are imported."""
    hook = config.stash[rewrite.assertstate_key].hook if rewrite.assertstate_key in config.stash else None
    return frozenset([*hook._rewritten_names, *hook._must_rewrite]) if hook else frozenset()


def install(rewritten: frozenset[str], options: Mapping[str, object], verbosity: int) -> None:
    """Rewrite the asserts of these modules when they are imported, as these settings of pytest ask for. A later call
    only adds names."""
    hook = next((finder for finder in sys.meta_path if isinstance(finder, RankHook)), None)
    if hook is None:
        config = RankConfig(options, verbosity)
        hook = RankHook(config)  # type: ignore[arg-type]
        config.explain_comparisons()
        sys.meta_path.insert(0, hook)
    hook.add(rewritten)


class RankHook(rewrite.AssertionRewritingHook):
    """pytest's import hook; if it fails, modules are imported as they are."""

    def add(self, names: Iterable[str]) -> None:
        """Rewrite these, too. (`mark_rewrite` would compare them with all of `sys.modules`, which takes milliseconds:
        in a forked process, reading an object copies its page.)"""
        self._must_rewrite.update(names)
        self._marked_for_rewrite_cache.clear()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        packages = accumulate(name.split("."), "{}.{}".format)
        try:
            return super().find_spec(name, path, target) if not self._must_rewrite.isdisjoint(packages) else None
        except Exception:
            return None

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception:
            if "__builtins__" in vars(module):  # its code has started: the exception is its own
                raise
            assert module.__file__
            SourceFileLoader(module.__name__, module.__file__).exec_module(module)


class RankConfig:
    """The parts of pytest's `Config` that rewriting and comparing need."""

    def __init__(self, options: Mapping[str, object], verbosity: int) -> None:
        self.options, self.verbosity = options, verbosity
        self.trace = SimpleNamespace(root=SimpleNamespace(get=lambda name: lambda *message: None))
        self.pluginmanager = SimpleNamespace(has_plugin=lambda name: False)
        self.stash = pytest.Stash()
        self.stash[rewrite.assertstate_key] = assertion.AssertionState(self, "rewrite")  # type: ignore[arg-type]
        self.writer = TerminalWriter(io.StringIO())
        self.writer.hasmarkup = False  # even with FORCE_COLOR: the text is part of an exception

    def getini(self, name: str) -> object:
        if name not in self.options:
            raise ValueError(f"unknown configuration value: {name!r}")
        return self.options[name]

    def getvalue(self, name: str) -> object:
        return {"assertmode": "rewrite"}[name]

    def get_verbosity(self, kind: str | None = None) -> int:
        return self.verbosity

    def get_terminal_writer(self) -> TerminalWriter:
        return self.writer

    def explain_comparisons(self) -> None:
        """Explain failing comparisons, as pytest does while a test runs."""
        hooks = SimpleNamespace(
            pytest_assertrepr_compare=lambda **values: [assertion.pytest_assertrepr_compare(**values)],
            pytest_assertion_pass=SimpleNamespace(get_hookimpls=list),
        )
        item: Any = SimpleNamespace(config=self, ihook=hooks)
        self.test = assertion.pytest_runtest_protocol(item)  # kept, as its end would end the explanations
        next(self.test)
        compare = util._reprcompare
        assert compare is not None
        util._reprcompare = lambda op, left, right: call_or_none(compare, op, left, right)


def call_or_none(explain: Callable[..., str | None], *values: object) -> str | None:
    """The result of `explain`, or None if it fails: the failed assert is more important."""
    try:
        return explain(*values)
    except Exception:
        return None
