"""What a check is, how it is run, and the faults that it finds. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from playground.base.errors import PlaygroundError

ERROR, WARNING, NOTE = "error", "warning", "note"
"""Severities: distributed training fails or is wrong; it is slower or less robust than it could be;
or it is to be changed for other machines than this one."""


class Undecided(PlaygroundError):
    """What was examined was stopped before it could be judged."""

    exit_code = 3


@dataclass(frozen=True)
class Fault:
    """What is wrong, in one line each: what was seen, the rule, and the fix. A note is one line."""

    severity: str
    saw: str
    rule: str = ""
    fix: str = ""
    check: str = ""
    """Name of the check that found it: "host-name" of `check_host_name`."""


error, warning, note = (partial(Fault, severity) for severity in (ERROR, WARNING, NOTE))

Check = Callable[[Any], Iterable[Fault]]
"""From the facts of a tier to what is wrong with them."""


def run_checks(checks: Iterable[Check], facts: object) -> Iterator[Fault]:
    """Run the checks on the facts."""
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", "-")
        yield from (replace(fault, check=name) for fault in check(facts))
