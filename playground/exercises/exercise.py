"""What an exercise is: one folder, `exercises/<lesson>/<name>/`, of three files. Does not import torch.

| file           | what is in it                                                                                   |
|----------------|-------------------------------------------------------------------------------------------------|
| `reference.py` | the solution; what is between `# write this` and `# until here` is not in the stub; 80 columns  |
| `judge.py`     | `EXERCISE`, and `cases(rank, size, seed)`, which every rank runs: inputs and what must come out |
| `text.md`      | the task, and three hints: the idea, the place, nearly the code                                 |

The exercise `token-ring` lies in the folder `token_ring`; the learner writes the function `token_ring` in
`token_ring.py`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from playground.runtime.errors import UsageError

PASS, FAIL, DEADLOCK, LOOP, ERROR, BLOCKED = "pass", "fail", "deadlock", "loop", "error", "blocked"
"""How a check ends. BLOCKED: without a verdict."""
RETURNED, COMPUTES = ("has returned", None, 0), ("computes", None, 0)
"""Where a rank is that is in no operation: words in the place of its name, its peer and its line."""
MESSAGES = ("send", "recv", "isend", "irecv")  # all that batch_isend_irecv calls
COLLECTIVES = (
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list", "new_group",
)  # fmt: skip
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_object")
OWN = "its own tensor"
"""The place of a tensor that stays as it is, where the task says so."""
ORDER = (
    "whoami", "share", "handover", "swap", "shift", "token-ring", "anyone", "column", "broadcast", "gather-uneven",
    "groups", "chain", "reduce-scatter", "all-gather", "ring", "doubling", "scatter-gather", "mean", "epochs",
    "same-start", "average", "weighted", "flat", "buckets", "overlap", "accumulate", "hook", "judge", "token-loss",
    "snapshot", "agree", "call", "sync", "stale", "gpipe", "one-forward-one-backward",
)  # fmt: skip
GAP = re.compile(r"^( *)# write this\n(.*?)^ *# until here\n", re.MULTILINE | re.DOTALL)
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mistake:
    """A wrong solution, recognised by what it does: the ranks hold, send or wait for the same."""

    name: str
    edits: Mapping[str, str]
    """What makes it of the reference: what is replaced there, and by what."""
    says: str = ""
    """One sentence on what goes wrong."""
    status: str = FAIL
    """How a check of it ends."""

    def apply(self, source: str) -> str:
        """The wrong solution. Raises `ValueError` if the reference lacks what is replaced."""
        for old, new in self.edits.items():
            if old not in source:
                raise ValueError(f"{self.name}: the reference has no {old!r}")
            source = source.replace(old, new)
        return source


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """The first half of a judge; the other is its function `cases`."""

    module: str = ""
    """The judge's name; it is given when the exercises are listed."""
    worlds: tuple[int, ...] = (2, 3, 1, 5, 4)
    """Numbers of ranks, those first whose failures are easiest to read."""
    forbidden: tuple[str, ...] = ()
    """Functions of torch.distributed that would be the answer; all others may be used."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import: the fork server does, once for all ranks."""
    builds_on: tuple[str, ...] = ()
    """Exercises whose functions this one may import."""
    mistakes: tuple[Mistake, ...] = ()

    @property
    def function(self) -> str:
        return self.module.split(".")[-2]

    @property
    def name(self) -> str:
        return self.function.replace("_", "-")

    @property
    def lesson(self) -> str:
        return self.module.split(".")[-3].replace("_", "-")

    @property
    def file(self) -> str:
        """What the learner's file is called."""
        return f"{self.function}.py"

    def read(self, file: str) -> str:
        folder = FOLDER.joinpath(*self.module.split(".")[2:-1])
        return (folder / file).read_text(encoding="utf-8")

    @property
    def solution(self) -> str:
        return GAP.sub(lambda gap: gap[2], self.read("reference.py"))

    @property
    def stub(self) -> str:
        """What the learner begins with."""
        return GAP.sub(lambda gap: f"{gap[1]}raise NotImplementedError  # write this\n", self.read("reference.py"))

    @property
    def title(self) -> str:
        return self.read("text.md").partition("\n")[0].removeprefix("# ")

    @property
    def task(self) -> str:
        """What is to be done, and which calls would be the answer."""
        names = ", ".join(f"dist.{name}" for name in self.forbidden)
        return self.read("text.md").partition("\n## Hints\n")[0] + f"\nNot here: {names}.\n" * bool(names)

    @property
    def hints(self) -> tuple[str, ...]:
        found = re.split(r"^\d\. ", self.read("text.md").partition("\n## Hints\n")[2], flags=re.MULTILINE)[1:]
        return tuple(re.sub(r"^   ", "", hint, flags=re.MULTILINE).rstrip() for hint in found)

    def digest(self, source: str) -> str:
        """Identity of a solution, however its lines end, and of the judge: another one may not let it pass."""
        return hashlib.sha256((self.read("judge.py") + normalise(source)).encode()).hexdigest()[:16]


@functools.cache
def exercises() -> dict[str, Exercise]:
    """All exercises by name, in order: those whose folders are here."""
    folders = (judge.parent.relative_to(FOLDER).parts for judge in FOLDER.glob("*/*/judge.py"))
    modules = (importlib.import_module(".".join([__package__, *parts, "judge"])) for parts in folders)
    found = {each.name: each for each in (replace(module.EXERCISE, module=module.__name__) for module in modules)}
    return {name: found[name] for name in sorted(found, key=ORDER.index)}


def find_exercise(file: str) -> Exercise:
    """The exercise whose file, or function, has this name. Raises `UsageError` if there is none."""
    name = file.removesuffix(".py").replace("_", "-")
    if name not in exercises():
        raise UsageError(f"there is no exercise {name!r}: choose one of {', '.join(exercises())}")
    return exercises()[name]


def normalise(source: str) -> str:
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Leaf:
    """A tensor, a number or a text in what a function returned or left."""

    where: str
    """Its place there: "" if it is all there is, else [0] or .weight."""
    kind: str
    """The tensor's dtype, or the name of a Python type."""
    shape: tuple[int, ...]
    values: tuple[object, ...]


@dataclass(frozen=True)
class Observation:
    """What one rank did in one case."""

    about: str
    """The case: its size and dtype, for example."""
    held: tuple[Leaf, ...]
    expected: tuple[Leaf, ...]
    is_coded: bool
    """Whether each digit of a value says how often that rank's share is in it."""
    sent: tuple[tuple[int, int], ...]
    """Receiver and number of elements of each message."""
    received: tuple[int, ...]
    """Number of messages received from each rank."""
    most: int | Mapping[int, float] | None
    """Elements that it may send in all, or to each receiver."""
    problems: tuple[tuple[str, str, int], ...]
    """Rules of torch.distributed that were broken: name, words and line."""
    printed: str
    """The beginning of what it printed."""
