"""Findings, and how checks are run; the four tiers of checks lie beside this. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

ERROR, WARNING = "error", "warning"
"""Severities: distributed training fails or is wrong; it is slower or less robust than it could be."""


@dataclass(frozen=True)
class Finding:
    """A fault, in one line each: what was seen, the rule, and the fix."""

    severity: str
    saw: str
    rule: str
    fix: str
    check: str = ""
    """Name of the check that found it."""


error, warning = partial(Finding, ERROR), partial(Finding, WARNING)

Check = Callable[[Any], Iterable[Finding]]
"""From the facts of a tier to what is wrong with them."""


def find_checks(module: Mapping[str, Any]) -> dict[str, Check]:
    """The checks of a module, by name: `check_host_name` is "host-name"."""
    prefix = "check_"
    return {name.removeprefix(prefix).replace("_", "-"): module[name] for name in module if name.startswith(prefix)}


def run_checks(checks: Mapping[str, Check], chosen: Iterable[str], facts: object) -> Iterator[Finding]:
    """Run those of `checks` that are `chosen` on the facts."""
    for name in chosen:
        for finding in checks[name](facts) if name in checks else ():
            yield replace(finding, check=name)
