"""pytest's rewriting of asserts, in a process without pytest's configuration: a rank.

This uses private parts of pytest, of versions 8.0 to 9.2. Callers must expect any exception, also
from the import of this module, and continue without it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest import assertion
from _pytest._io import TerminalWriter
from _pytest.assertion import rewrite


def rewritten_modules(config: pytest.Config) -> frozenset[str]:
    """The names of the modules that this run of pytest has rewritten, or will rewrite when they are
    imported."""
    if rewrite.assertstate_key not in config.stash:
        return frozenset()
    hook = config.stash[rewrite.assertstate_key].hook
    return frozenset([*hook._rewritten_names, *hook._must_rewrite]) if hook else frozenset()


def install(rewritten: frozenset[str], verbosity: int) -> None:
    """Rewrite the asserts of these modules when they are imported. A later call only adds names."""
    hook = next((finder for finder in sys.meta_path if isinstance(finder, RankHook)), None)
    if hook is None:
        config = make_config(verbosity)
        hook = RankHook(config)
        # Explain failing comparisons, as pytest does while a test runs. Kept, as its end would end
        # the explanations.
        item: Any = SimpleNamespace(config=config, ihook=HOOKS)
        hook.protocol = assertion.pytest_runtest_protocol(item)
        next(hook.protocol)
        sys.meta_path.insert(0, hook)
    hook.add(rewritten)


class RankHook(rewrite.AssertionRewritingHook):
    """pytest's import hook."""

    protocol: Any

    def add(self, names: Iterable[str]) -> None:
        """Rewrite these, too. (`mark_rewrite` would compare them with all of `sys.modules`, which
        takes milliseconds: in a forked process, reading an object copies its page.)"""
        self._must_rewrite.update(names)
        self._marked_for_rewrite_cache.clear()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        packages = accumulate(name.split("."), "{}.{}".format)
        if self._must_rewrite.isdisjoint(packages):
            return None
        return super().find_spec(name, path, target)


HOOKS = SimpleNamespace(
    pytest_assertrepr_compare=lambda **values: [assertion.pytest_assertrepr_compare(**values)],
    pytest_assertion_pass=SimpleNamespace(get_hookimpls=list),
)


def make_config(verbosity: int) -> Any:
    """The parts of pytest's `Config` that rewriting and comparing need; options of its file have
    their defaults."""
    writer = TerminalWriter(io.StringIO())
    writer.hasmarkup = False  # even with FORCE_COLOR: the text is part of an exception
    config: Any = SimpleNamespace(
        getini={"python_files": (), "assertion_text_diff_style": "ndiff"}.get,
        getvalue={"assertmode": "rewrite"}.__getitem__,
        get_verbosity=lambda kind=None: verbosity,
        get_terminal_writer=lambda: writer,
        pluginmanager=SimpleNamespace(has_plugin=lambda name: False),
        trace=SimpleNamespace(root=SimpleNamespace(get=lambda name: lambda *message: None)),
        stash=pytest.Stash(),
    )
    config.stash[rewrite.assertstate_key] = assertion.AssertionState(config, "rewrite")
    return config
