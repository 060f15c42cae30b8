"""Ranks import test modules as pytest does: from where it found them, with asserts that show what they compared.

pytest rewrites the asserts of a test module when it imports it, and ranks import the module anew. So a function travels
to them together with what pytest knows, and its module is imported after that has been put to use.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Function = Callable[..., Any]
OPTIONS = (
    "python_files", "enable_assertion_pass_hook", "truncation_limit_lines", "truncation_limit_chars",
    "assertion_text_diff_style",
)  # fmt: skip
"""The options of pytest's configuration file that bear on asserts. Not every version has all of them."""


@dataclass(frozen=True, kw_only=True)
class PytestSettings:
    """What ranks need to know of the configuration of this run of pytest."""

    folders: tuple[str, ...]
    """Where pytest finds modules, beside `sys.path`."""
    rewritten: frozenset[str]
    """Names of the modules whose asserts are rewritten, and of packages all of whose modules are."""
    options: dict[str, object]
    verbosity: int
    """Of assertions: pytest's -v and `verbosity_assertions`."""


@dataclass(frozen=True, kw_only=True)
class ImportedAsByPytest:
    """`fn`, which a rank that unpickles it imports as pytest would."""

    fn: Function
    settings: PytestSettings

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __repr__(self) -> str:
        return repr(self.fn)

    def __reduce__(self) -> tuple[Function, tuple[PytestSettings, bytes]]:
        return load, (self.settings, pickle.dumps(self.fn))  # in bytes: to be unpickled when the settings are in force


def load(settings: PytestSettings, pickled: bytes) -> Function:
    """In a rank: put `settings` in force, then import the function."""
    sys.path += settings.folders
    if settings.rewritten:
        with contextlib.suppress(Exception):  # another pytest than the ones we know: asserts stay plain
            from playground.testing.rewriting import install

            install(settings)
    return pickle.loads(pickled)


def as_pytest_imports(fn: Function, config: pytest.Config) -> ImportedAsByPytest:
    """`fn` such that ranks import its module as this run of pytest does."""
    return ImportedAsByPytest(fn=fn, settings=read_settings(config))


def read_settings(config: pytest.Config) -> PytestSettings:
    options = {}
    for name in OPTIONS:
        with contextlib.suppress(KeyError, ValueError):
            options[name] = config.getini(name)
    return PytestSettings(
        folders=folders_of_importlib_mode(config),
        rewritten=find_rewritten(config),
        options=options,
        verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
    )


def folders_of_importlib_mode(config: pytest.Config) -> tuple[str, ...]:
    """With --import-mode=importlib, pytest names modules from its root folder, without adding that to `sys.path`."""
    return (str(config.rootpath),) if config.getoption("importmode", "") == "importlib" else ()


def find_rewritten(config: pytest.Config) -> frozenset[str]:
    """The modules whose asserts pytest rewrites: none with --assert=plain."""
    with contextlib.suppress(Exception):  # another pytest than the ones we know
        from playground.testing.rewriting import rewritten_modules

        return rewritten_modules(config)
    return frozenset()
