"""The programs of `break`: what is expected of each, and its fix."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from playground.base.errors import Deadlock, RankFailed, RankTimeout
from playground.base.remote import Remote, file_of, remote
from playground.explain.hang import Kind

DEADLOCK = "deadlock"
TIMEOUT = "timeout"
FAILURE = "failure"
SILENT = "wrong values"
SILENT_TRAINING = "silent"
"""The module of the programs that are checked for silent mistakes."""
ERRORS = {DEADLOCK: Deadlock, TIMEOUT: RankTimeout, FAILURE: RankFailed}
"""Exceptions that `launch` raises, by symptom: of several that fit, the first."""
Ranks = Callable[[int], Sequence[int]]
Values = Callable[[int], Sequence[object]]
"""A value for each rank of a world of this size."""


def only(rank: int) -> Ranks:
    return lambda size: [rank]


def all_but_first(size: int) -> Sequence[int]:
    return range(1, size)


def on_all(value: Callable[[int], object]) -> Values:
    """The same value on each rank."""
    return lambda size: [value(size)] * size


TOTAL = on_all(lambda size: size * (size + 1) / 2)
"""The sum of rank + 1 over all ranks."""


@dataclass(frozen=True)
class Expected:
    """How a program goes wrong, and what each rank of its cure returns."""

    symptom: str
    right: Values
    words: str = ""
    """The kind of the diagnosis; of a failure, words of it; of silent training, the rule that names
    the mistake."""
    culprits: Ranks = range
    """The ranks that are named; of a failure, those that may be the first to fail."""
    restarts: int = 0
    """How often the cure is restarted."""
    module: str = ""
    """The file of the program, beside this one."""

    @property
    def is_silent_training(self) -> bool:
        """Whether only a check of its training tells what is wrong."""
        return self.module == SILENT_TRAINING


EXPECTED_BY_MODULE = {
    "calls": {
        "other-order": Expected(DEADLOCK, TOTAL, Kind.COLLECTIVES, only(1)),
        "absent-rank": Expected(DEADLOCK, TOTAL, Kind.ENDED, all_but_first),
        "unequal-batches": Expected(DEADLOCK, on_all(lambda n: sum(range(2 * n))), Kind.ENDED,
                                    all_but_first),
        "other-shape": Expected(DEADLOCK, on_all(lambda n: 4 * n - 1), Kind.SHAPES, only(1)),
        "other-dtype": Expected(SILENT, on_all(lambda n: 7 * n), Kind.DTYPES, only(1)),
        "wrong-root": Expected(DEADLOCK, on_all(lambda n: 1), Kind.ROOTS, range),
        "partial-group": Expected(DEADLOCK, TOTAL, Kind.PARTIAL_GROUP, lambda n: [n - 1]),
        "send-send": Expected(DEADLOCK, lambda n: [n, *range(1, n)], Kind.SENDS, range),
        "wrong-tag": Expected(DEADLOCK, lambda n: [1, 1, *range(3, n + 1)], Kind.WRONG_TAG,
                              lambda n: [0, 1]),
        "message-size": Expected(FAILURE, lambda n: [4, 4, *range(12, 4 * n + 1, 4)], "SIGABRT",
                                 only(1)),
    },
    "training": {
        "unused-parameters": Expected(FAILURE, on_all(lambda n: (n + 1) / 2),
                                      "the loss does not depend on"),
        "forgotten-set-epoch": Expected(SILENT, on_all(lambda n: 3)),
        "same-seed": Expected(SILENT, on_all(lambda n: n)),
        "all-download": Expected(SILENT, on_all(lambda n: 4000)),
        "nan": Expected(SILENT, on_all(lambda n: (n * (n + 1) / 2 - 2) / (n - 1))),
    },
    SILENT_TRAINING: {
        "bypassed-wrapper": Expected(SILENT, on_all(lambda n: 0.0), "D1-bypass"),
        "no-sync-last": Expected(SILENT, on_all(lambda n: 0.0), "D2-nosync-last"),
        "unfrozen-late": Expected(SILENT, on_all(lambda n: 0.0), "D3-unfrozen"),
        "other-start": Expected(SILENT, on_all(lambda n: 0.0), "M1-start"),
        "reduce-to-one": Expected(SILENT, on_all(lambda n: 0.0), "M6-reduce"),
        "summed-again": Expected(SILENT, on_all(lambda n: -1.0), "M11-twice"),
        "not-divided": Expected(SILENT, on_all(lambda n: -1.0), "M9-sum"),
        "optimizer-of-a-copy": Expected(SILENT, on_all(lambda n: True), "O1-nograd"),
        "sampler-seeds": Expected(SILENT, on_all(lambda n: 12 * n), "S2-seed"),
        "lost-result": Expected(SILENT, on_all(lambda n: 6.0 * n), "L0-lost"),
    },
    "processes": {
        "killed": Expected(FAILURE, on_all(lambda n: 2 * n * (n + 1)), "SIGKILL", only(1),
                           restarts=1),
        "stopped": Expected(TIMEOUT, TOTAL, Kind.SUSPENDED, only(1)),
        "straggler": Expected(TIMEOUT, on_all(lambda n: 20 * n), Kind.STRAGGLER, only(1)),
        "collective-in-finally": Expected(DEADLOCK, on_all(lambda n: n - 1), Kind.IN_FINALLY,
                                          only(1)),
    },
}  # fmt: skip
"""Expectations of the programs of each module on n ranks, by the name that the command takes."""
PROGRAMS = {
    name: replace(expected, module=module)
    for module, rows in EXPECTED_BY_MODULE.items()
    for name, expected in rows.items()
}


def find(name: str, suffix: str = "") -> Remote:
    """The function of a program; with the suffix "_cured", of its cure."""
    function = f"{name.replace('-', '_')}{suffix}"
    return remote(f"playground.tools.failures.{PROGRAMS[name].module}:{function}")


def read_body(function: Remote) -> dict[int, str]:
    """Its lines of code, by number: without its head and its docstring."""
    text = file_of(function.module).read_text(encoding="utf-8")
    node = next(each for each in ast.parse(text).body if getattr(each, "name", "") == function.name)
    assert isinstance(node, ast.FunctionDef)
    first = node.body[ast.get_docstring(node) is not None].lineno
    return dict(enumerate(text.splitlines()[first - 1 : node.end_lineno], first))
