"""An exercise: a judge, and a folder of three files, `exercises/<lesson>/<function>/`. Does not
import torch.

| file            | content                                                                        |
|-----------------|--------------------------------------------------------------------------------|
| `reference.py`  | the solution, 80 columns wide; the stub lacks what is between `# write this`   |
|                 | and `# until here`                                                             |
| `text.md`       | the task, the calls to use and those that are not allowed; hints: the idea,    |
|                 | the place, the code                                                            |
| `mistakes.diff` | wrong solutions, as changes of the reference: a name, a sentence on what goes  |
|                 | wrong, the lines                                                               |

The exercise `token-ring` lies in the folder `token_ring`; the learner writes the function
`token_ring` in `token_ring.py`. Its judge is `token_ring(rank, size, seed)` in the lesson's
`judges.py`: every rank runs it, and it yields inputs and expected results.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from playground.lessons import LESSONS
from playground.runtime.errors import UsageError

PASS = "pass"
FAIL = "fail"
DEADLOCK = "deadlock"
LOOP = "loop"
ERROR = "error"
BLOCKED = "blocked"
"""How a check ends. BLOCKED: without a verdict."""
RETURNED, COMPUTES = ("has returned", None, 0), ("computes", None, 0)
"""Where a rank is that is in no operation: words in the place of its name, its peer and its
line."""
MESSAGES = ("send", "recv", "isend", "irecv")  # all that batch_isend_irecv calls
COLLECTIVES = (
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list", "new_group",
)  # fmt: skip
GAP = re.compile(r"^( *)# write this\n(.*?)^ *# until here\n", re.MULTILINE | re.DOTALL)
MISTAKE = re.compile(r"^# (.+?)(?: \((\w+)\))?\n(?:# (.+)\n)?((?:[-+ @].*\n)+)", re.MULTILINE)
"""Its name, how a check ends (fail, where nothing is said), what goes wrong, and the lines."""
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mistake:
    """A wrong solution, recognised by what it does: the ranks hold, send or wait for the same."""

    name: str
    status: str
    """How a check of it ends."""
    says: str
    """One sentence on what goes wrong; may be empty."""
    text: str
    """The wrong solution."""


@dataclass(frozen=True)
class Exercise:
    """A row of the catalogue; the rest is in its folder."""

    folder: str
    """The lesson's folder and the function's name: p2p/token_ring."""
    worlds: tuple[int, ...] = (2, 3, 1, 5, 4)
    """Numbers of ranks, those first whose failures are easiest to read."""
    builds_on: tuple[str, ...] = ()
    """Exercises whose functions this one may import."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import: the fork server does, once for all ranks."""

    @property
    def lesson(self) -> str:
        return self.folder.partition("/")[0].replace("_", "-")

    @property
    def function(self) -> str:
        return self.folder.partition("/")[2]

    @property
    def name(self) -> str:
        return self.function.replace("_", "-")

    @property
    def file(self) -> str:
        """The name of the learner's file."""
        return f"{self.function}.py"

    @property
    def module(self) -> str:
        """The module of its judge, a function of the exercise's own name."""
        return f"{__package__}.{self.folder.partition('/')[0]}.judges"

    def read(self, file: str) -> str:
        return (FOLDER / self.folder / file).read_text(encoding="utf-8")

    @property
    def solution(self) -> str:
        return GAP.sub(lambda gap: gap[2], self.read("reference.py"))

    @property
    def stub(self) -> str:
        """The learner's first version."""
        return GAP.sub(
            lambda gap: f"{gap[1]}raise NotImplementedError  # write this\n",
            self.read("reference.py"),
        )

    @property
    def title(self) -> str:
        return self.read("text.md").partition("\n")[0].removeprefix("# ")

    @property
    def task(self) -> str:
        """The text before the hints. Its last paragraph names the calls to use, and those that
        would be the answer."""
        return self.read("text.md").partition("\n## Hints\n")[0]

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Functions of torch.distributed that would be the answer; all others may be used."""
        return tuple(re.findall(r"`dist\.(\w+)`", self.task.partition("Not here: ")[2]))

    @property
    def hints(self) -> tuple[str, ...]:
        found = re.split(
            r"^\d\. ", self.read("text.md").partition("\n## Hints\n")[2], flags=re.MULTILINE
        )[1:]
        return tuple(re.sub(r"^   ", "", hint, flags=re.MULTILINE).rstrip() for hint in found)

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        found = MISTAKE.findall(self.read("mistakes.diff"))
        return tuple(
            Mistake(name, end or FAIL, says, patch(self.solution, lines))
            for name, end, says, lines in found
        )

    def digest(self, source: str) -> str:
        """Identity of a solution, however its lines end, and of the judge: another one may not let
        it pass."""
        text = f"{self}{self.forbidden}{self.read('../judges.py')}{normalise(source)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def patch(source: str, changes: str) -> str:
    """The source after changes: lines that go (-), come (+) or stay ( ), in their order; @@ between
    places. Raises `ValueError` if it lacks a place."""
    done = ""
    for change in changes.split("@@\n"):
        lines = change.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] for line in lines if line[0] in kinds) for kinds in ("- ", "+ ")
        )
        before, found, source = source.partition(old)
        if not found:
            raise ValueError(f"the reference has no {old!r}")
        done += before + new
    return done + source


COMPILER, SYMBOLIC = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
"""Imported by DistributedDataParallel and optimizers, and by a backward from a given gradient."""
CATALOGUE = {
    each.name: each
    for each in (
        Exercise("hello/whoami"),
        Exercise("hello/rendezvous"),
        Exercise("hello/share"),
        Exercise("p2p/handover", (2, 3, 5)),
        Exercise("p2p/swap"),
        Exercise("p2p/shift", (2, 3, 5, 4)),
        Exercise("p2p/token_ring", (2, 3, 5, 4)),
        Exercise("p2p/anyone", (2, 3, 5, 4)),
        Exercise("p2p/column", (2, 3)),
        Exercise("collectives/broadcast"),
        Exercise("collectives/gather_uneven"),
        Exercise("collectives/all_to_all"),
        Exercise("collectives/groups", (4, 5)),
        Exercise("allreduce/chain"),
        Exercise("allreduce/reduce_scatter"),
        Exercise("allreduce/all_gather"),
        Exercise("allreduce/ring", builds_on=("reduce-scatter",)),
        Exercise("allreduce/doubling", (2, 4, 3, 6, 1)),
        Exercise("data_parallel/scatter_gather", (3, 2, 1, 5, 4)),
        Exercise("data_parallel/mean"),
        Exercise("sgd/partition"),
        Exercise("sgd/epochs"),
        Exercise("sgd/same_start"),
        Exercise("sgd/average"),
        Exercise("sgd/weighted", builds_on=("average",)),
        Exercise("ladder/flat"),
        Exercise("ladder/buckets", builds_on=("flat",)),
        Exercise("ladder/early"),
        Exercise("ladder/overlap"),
        Exercise("ladder/local_sgd"),
        Exercise("ddp/accumulate", preload=(COMPILER,)),
        Exercise("ddp/hook", (2, 3, 1, 4), preload=(COMPILER,)),
        Exercise("ddp/error_feedback"),
        Exercise("ddp/uneven", builds_on=("average",)),
        Exercise("ddp/accuracy"),
        Exercise("prove/judge", (2, 3, 4), preload=(COMPILER,)),
        Exercise("bert/token_loss", builds_on=("average",)),
        Exercise("elastic/snapshot", (2, 3, 1), preload=(COMPILER,)),
        Exercise("elastic/agree"),
        Exercise("rpc/call", (2, 3, 5)),
        Exercise("parameter_server/sync", (2, 3, 5)),
        Exercise("parameter_server/stale", (3, 2, 5)),
        Exercise("pipeline/gpipe", preload=(SYMBOLIC,)),
        Exercise("pipeline/one_forward_one_backward", preload=(SYMBOLIC,)),
        Exercise("pipeline/clip"),
        Exercise("zero/own_share"),
        Exercise("zero/reduce_hook"),
        Exercise("zero/gather_free"),
        Exercise("tensor/mirrored", (2, 3, 1, 4)),
        Exercise("tensor/heads", (2, 3, 1, 4)),
        Exercise("tensor/vocabulary_loss", (2, 3, 1, 4)),
        Exercise("context/merge", (2, 3, 1, 4)),
        Exercise("context/zigzag", (2, 3, 1, 4)),
        Exercise("experts/dispatch", (2, 3, 1, 4)),
        Exercise("experts/combine", (2, 3, 1, 4)),
        Exercise("mesh/axis_sums", (4, 6, 2)),
        Exercise("mesh/two_by_two", (4, 6, 2)),
    )
}
PLACES = [*LESSONS]
CATALOGUE = dict(sorted(CATALOGUE.items(), key=lambda item: PLACES.index(item[1].lesson)))
"""All exercises by name, in the order of the lessons."""


def find_exercise(file: str) -> Exercise:
    """The exercise whose file, or function, has this name. Raises `UsageError` if there is none."""
    name = file.removesuffix(".py").replace("_", "-")
    if name not in CATALOGUE:
        raise UsageError(f"there is no exercise {name!r}: choose one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def count(number: int, noun: str, ending: str = "s") -> str:
    """The number, and the noun in its plural if need be."""
    return f"{number} {noun}{ending * (number != 1)}"


def normalise(source: str) -> str:
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
