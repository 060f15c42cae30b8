"""An exercise: a judge, and a folder of three files, `exercises/<lesson>/<function>/`. Does not
import torch.

| file            | content                                                                        |
|-----------------|--------------------------------------------------------------------------------|
| `reference.py`  | the solution, 80 columns wide; the stub lacks what is between `# write this`   |
|                 | and `# until here`                                                             |
| `text.md`       | the task, the calls to use and those that are not allowed, but for what is     |
|                 | said of all exercises of a kind; hints: the idea, the place, the code          |
| `mistakes.diff` | wrong solutions, as changes of the reference: a name, a sentence on what goes  |
|                 | wrong, the lines                                                               |
| `faults.diff`   | of a program to be repaired: the changes that break it, of which a seed takes  |
|                 | one, each with its name and a sentence on what came of it, which are told once |
|                 | it is repaired; and names that change with the seed: see `repair`              |

An exercise is of one of four kinds, which differ in what the learner writes and the judge compares:

| kind    | the learner writes                          | the judge compares                       |
|---------|---------------------------------------------|------------------------------------------|
| write   | a function of the ranks                     | what the ranks hold and send             |
| predict | a function that returns counts of a run,    | the counts with those of that run, on    |
|         | from the run's parameters                   | real ranks                               |
| find    | a repair of a program that fails, and the   | the repaired program with what is due;   |
|         | rank at fault                               | the rank                                 |
| choose  | a function that returns a layout of a model | its memory and time with the best that   |
|         | on a cluster, or settings of a run          | fits                                     |

The exercise `token-ring` lies in the folder `token_ring`; the learner writes the function
`token_ring` in `token_ring.py`. Its judge is `token_ring(rank, size, seed)` in the lesson's
`judges.py`: every rank runs it, and it yields inputs and expected results.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from playground.base.errors import UsageError
from playground.exercises.changes import patch, read_changes
from playground.exercises.repair import Repair, new_seed, seed_of, with_answer_of
from playground.lessons import LESSONS

WRITE, PREDICT, FIND, CHOOSE = "write", "predict", "find", "choose"
"""The kinds of exercises."""
TO_FIND = """\
Run `check` on the unchanged file: it prints a report of the failure. Find the faulty rank, set
`RANK` to it, and fix the program. The bug is in one place; one or two lines are enough. The check
runs the fixed program on 4 ranks, with the data of the report and with other data. Leave `SEED` as
it is: your program and its data are drawn from it."""
"""What the task of each program to be fixed says."""
USE_OF_KIND = {
    PREDICT: "\nUse: arithmetic. Send nothing; compute.\n",
    CHOOSE: "\nUse: arithmetic. Try a choice, read what `check` says, and explain it before you "
    "try another.\n",
}
"""By kind, the last paragraph of each task."""
PASS = "pass"
FAIL = "fail"
DEADLOCK = "deadlock"
LOOP = "loop"
ERROR = "error"
BLOCKED = "blocked"
"""How a check ends. BLOCKED: without a verdict."""


class Place(NamedTuple):
    """Where a rank is: in an operation or, in words, in none."""

    name: str
    peer: int | None = None
    line: int = 0


RETURNED, COMPUTES = Place("has returned"), Place("computes")
AWAITS = "waits for "
"""Before the keys of a store that a rank waits for, in the name of its place."""
MESSAGES = ("send", "recv", "isend", "irecv")  # all that batch_isend_irecv calls
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
GAP = re.compile(r"^( *)# write this\n(.*?)^ *# until here\n", re.MULTILINE | re.DOTALL)
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
    kind: str = WRITE
    builds_on: tuple[str, ...] = ()
    """Exercises whose functions this one may import."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import: the fork server does, once for all ranks."""
    minutes: int = 15
    """What a stranger who has read the chapter needs, all in all."""
    seed: int = 0
    """What the fault and the data of a program to be repaired are drawn from."""
    gpus: int = field(default=0, repr=False)
    """The number of simulated GPUs that its ranks see."""

    @property
    def grade(self) -> str:
        """Easy, medium or hard, by its minutes."""
        if self.minutes <= 10:
            return "●○○"
        return "●●○" if self.minutes <= 20 else "●●●"

    @property
    def effort(self) -> str:
        return f"{self.kind}, {self.grade}, about {self.minutes} minutes"

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
    def written(self) -> str:
        """The reference without the marks of its gaps."""
        return GAP.sub(lambda gap: gap[2], self.read("reference.py"))

    @property
    def repair(self) -> Repair:
        """The program, where it is to be repaired."""
        return Repair(self.written, self.read("faults.diff"), self.seed)

    def draw_names(self, text: str) -> str:
        """A version of the program with the names that go with the seed, where it is to be
        repaired; the text of another exercise as it is."""
        return self.repair.draw_names(text) if self.kind == FIND else text

    @property
    def solution(self) -> str:
        """The reference; of a program to be repaired, the rank at fault is right with the seed 0
        alone."""
        return self.draw_names(self.written)

    @property
    def stub(self) -> str:
        """The learner's first version: the reference without its gap, or the program with a
        fault."""
        if self.kind == FIND:
            return self.repair.broken
        return GAP.sub(
            lambda gap: f"{gap[1]}raise NotImplementedError  # write this\n",
            self.read("reference.py"),
        )

    def new_stub(self) -> str:
        """The stub that is handed out: a program to be repaired has a seed of its own."""
        return replace(self, seed=new_seed() if self.kind == FIND else 0).stub

    def with_seed_of(self, text: str) -> Exercise:
        """The exercise whose program this text is a repair of."""
        seed = seed_of(text) if self.kind == FIND else None
        return self if seed is None else replace(self, seed=seed)

    def solution_for(self, text: str) -> str:
        """The solution beside the learner's file: the repair of that program, whose rank at fault
        only its check knows."""
        own = self.with_seed_of(text)
        return with_answer_of(text, own.solution) if own.seed else own.solution

    @property
    def title(self) -> str:
        return self.read("text.md").partition("\n")[0].removeprefix("# ")

    @property
    def task(self) -> str:
        """The text before the hints, with what is said of all exercises of its kind. Its last
        paragraph names the calls to use, and those that would be the answer."""
        text = self.read("text.md").partition("\n## Hints\n")[0]
        if self.kind == FIND:
            about, _, use = text.rpartition("\nUse: ")
            return f"{about}\n{TO_FIND}\n\nUse: {use}"
        return text + USE_OF_KIND.get(self.kind, "")

    def describe_hint(self, number: int) -> str:
        """Which one it is, and whether it gives the answer away."""
        last = len(self.hints)
        return f"{number} of {last}{', nearly the answer' if number == last else ''}"

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Functions of torch.distributed that would be the answer; all others may be used."""
        if self.kind in (PREDICT, CHOOSE):
            return (*MESSAGES, *COLLECTIVES)
        _, *after = re.split(r"\bNot here:\s", self.task)
        return tuple(re.findall(r"`dist\.(\w+)`", "".join(after)))

    @property
    def hints(self) -> tuple[str, ...]:
        found = re.split(
            r"^\d\. ", self.read("text.md").partition("\n## Hints\n")[2], flags=re.MULTILINE
        )[1:]
        return tuple(re.sub(r"^   ", "", hint, flags=re.MULTILINE).rstrip() for hint in found)

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        return tuple(
            Mistake(
                name=change.name,
                status=change.status or FAIL,
                says=change.says,
                text=self.draw_names(patch(self.written, change.lines)),
            )
            for change in read_changes(self.read("mistakes.diff"))
        )

    def digest(self, source: str) -> str:
        """Identity of a solution, however its lines end, and of the judge: another one may not let
        it pass."""
        text = f"{self}{self.forbidden}{self.read('../judges.py')}{normalise(source)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


COMPILER, SYMBOLIC = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
"""Imported by DistributedDataParallel and optimizers, and by a backward from a given gradient."""
CATALOGUE = {
    each.name: each
    for each in (
        Exercise("hello/whoami", minutes=5),
        Exercise("hello/rendezvous", minutes=10),
        Exercise("hello/share", minutes=10),
        Exercise("p2p/handover", (2, 3, 5), minutes=5),
        Exercise("p2p/swap", minutes=10),
        Exercise("p2p/shift", (2, 3, 5, 4), minutes=10),
        Exercise("p2p/token_ring", (2, 3, 5, 4), minutes=15),
        Exercise("p2p/column", (2, 3), minutes=10),
        Exercise("failures/lost_token", (4,), FIND, minutes=10),
        Exercise("collectives/broadcast", minutes=10),
        Exercise("collectives/gather_uneven", minutes=15),
        Exercise("collectives/all_to_all", minutes=15),
        Exercise("collectives/groups", (4, 5), minutes=10),
        Exercise("collectives/lost_sum", (4,), FIND, minutes=10),
        Exercise("failures/stuck", (4,), FIND, minutes=10),
        Exercise("failures/wrong_offset", (4,), FIND, minutes=10),
        Exercise("allreduce/chain", minutes=15),
        Exercise("allreduce/reduce_scatter", minutes=20),
        Exercise("allreduce/all_gather", minutes=15),
        Exercise("allreduce/ring", builds_on=("reduce-scatter",), minutes=15),
        Exercise("allreduce/doubling", (2, 4, 3, 6, 1), minutes=25),
        Exercise("allreduce/hierarchical", (4, 6), minutes=15),
        Exercise("allreduce/ring_traffic", (3, 2, 4), PREDICT, minutes=10),
        Exercise("data_parallel/replicas", (1,), minutes=15),
        Exercise("sgd/epochs", minutes=15),
        Exercise("sgd/same_start", minutes=10),
        Exercise("sgd/average", minutes=5),
        Exercise("sgd/late_load", (4,), FIND, minutes=10),
        Exercise("sgd/own_order", (4,), FIND, minutes=15),
        Exercise("failures/not_a_number", (4,), FIND, minutes=10),
        Exercise("failures/mixed_gradients", (4,), FIND, minutes=10),
        Exercise("ladder/flat", minutes=15),
        Exercise("ladder/buckets", builds_on=("flat",), minutes=20),
        Exercise("ladder/early", minutes=20),
        Exercise("ladder/overlap", minutes=30),
        Exercise("ladder/local_sgd", minutes=10),
        Exercise("ladder/rung_traffic", (2, 3, 4), PREDICT, minutes=15),
        Exercise("failures/slow_rank", (4,), FIND, minutes=10),
        Exercise("ddp/accumulate", preload=(COMPILER,), minutes=15),
        Exercise("ddp/hook", (2, 3, 1, 4), preload=(COMPILER,), minutes=15),
        Exercise("bytes/error_feedback", minutes=20),
        Exercise("bytes/outer_step", (2, 3, 1), preload=(COMPILER,), minutes=15),
        Exercise("bytes/top_k", minutes=15),
        Exercise("bytes/compressed_traffic", (2, 3, 4), PREDICT, minutes=15),
        Exercise("bytes/slow_link", (1,), CHOOSE, minutes=15),
        Exercise("ddp/uneven", builds_on=("average",), minutes=20),
        Exercise("ddp/accuracy", minutes=10),
        Exercise("ddp/counted_twice", (4,), FIND, minutes=10),
        Exercise("ddp/sync_batch_norm", minutes=20),
        Exercise("ddp/drift", (4,), FIND, minutes=15),
        Exercise("prove/judge", (2, 3, 4), preload=(COMPILER,), minutes=30),
        Exercise("prove/scaled_rate", (2, 3, 1, 4), minutes=10),
        Exercise("prove/noise_scale", (2, 3, 1, 4), minutes=20),
        Exercise("prove/short_batch", (4,), FIND, minutes=15),
        Exercise("scaling/rank_work", (2, 3, 4), PREDICT, preload=(COMPILER,), minutes=15),
        Exercise("scaling/lost_speedup", (4,), FIND, minutes=15),
        Exercise("scaling/choose_batch", (1,), CHOOSE, minutes=20),
        Exercise("gpt/gated_mlp", (1,), PREDICT, preload=(COMPILER,), minutes=10),
        Exercise("bert/token_loss", builds_on=("average",), minutes=20),
        Exercise("elastic/snapshot", (2, 3, 1), preload=(COMPILER,), minutes=30),
        Exercise("elastic/agree", minutes=10),
        Exercise("elastic/reshard", minutes=20),
        Exercise("elastic/resumed", (4,), FIND, minutes=10),
        Exercise("checkpoint/commit", (2, 3, 1, 4), minutes=10),
        Exercise("checkpoint/fill_block", (2, 3, 1, 4), minutes=25),
        Exercise("checkpoint/elements_written", (2, 3, 4), PREDICT, minutes=15),
        Exercise("checkpoint/repeated", (4,), FIND, minutes=10),
        Exercise("checkpoint/how_often", (1,), CHOOSE, minutes=15),
        Exercise("rpc/call", (2, 3, 5), minutes=25),
        Exercise("parameter_server/sync", (2, 3, 5), minutes=20),
        Exercise("parameter_server/stale", (3, 2, 5), minutes=30),
        Exercise("pipeline/gpipe", preload=(SYMBOLIC,), minutes=25),
        Exercise("pipeline/one_forward_one_backward", preload=(SYMBOLIC,), minutes=30),
        Exercise("pipeline/clip", minutes=15),
        Exercise("memory/recompute", (1,), preload=(SYMBOLIC,), minutes=25),
        Exercise("memory/checkpoint_peak", (1,), PREDICT, preload=(SYMBOLIC,), minutes=15),
        Exercise("memory/lost_gradients", (4,), FIND, minutes=10),
        Exercise("memory/fit_with_recompute", (1,), CHOOSE, minutes=20),
        Exercise("pipeline/activations_held", (3, 2, 4), PREDICT, preload=(SYMBOLIC,), minutes=15),
        Exercise("pipeline/fit_the_stages", (1,), CHOOSE, minutes=20),
        Exercise("zero/own_share", minutes=20),
        Exercise("zero/reduce_hook", minutes=20),
        Exercise("zero/gather_free", minutes=30),
        Exercise("memory/master_weights", (2, 3, 1, 4), minutes=10),
        Exercise("zero/bytes_held", (2, 3, 4), PREDICT, preload=(COMPILER,), minutes=15),
        Exercise("zero/leak", (4,), FIND, minutes=15),
        Exercise("zero/fit_in_memory", (1,), CHOOSE, minutes=15),
        Exercise("tensor/mirrored", (2, 3, 1, 4), minutes=15),
        Exercise("tensor/heads", (2, 3, 1, 4), minutes=20),
        Exercise("tensor/vocabulary_loss", (2, 3, 1, 4), minutes=20),
        Exercise("tensor/mlp_traffic", (2, 3, 4), PREDICT, minutes=15),
        Exercise("context/merge", (2, 3, 1, 4), minutes=15),
        Exercise("context/zigzag", (2, 3, 1, 4), minutes=10),
        Exercise("context/ring_backward", (2, 3, 1, 4), preload=(SYMBOLIC,), minutes=25),
        Exercise("context/attention_traffic", (2, 3, 4), PREDICT, minutes=20),
        Exercise("experts/dispatch", (2, 3, 1, 4), minutes=20),
        Exercise("experts/combine", (2, 3, 1, 4), minutes=20),
        Exercise("experts/expert_gradients", (2, 3, 1, 4), minutes=10),
        Exercise("experts/token_traffic", (2, 3, 4), PREDICT, minutes=15),
        Exercise("mesh/axis_sums", (4, 6, 2), minutes=20),
        Exercise("mesh/two_by_two", (4, 6, 2), minutes=30),
        Exercise("mesh/gradient_factor", (4, 2, 6), PREDICT, minutes=15),
        Exercise("mesh/fit_the_mesh", (1,), CHOOSE, minutes=20),
        Exercise("gpus/missing_wait", (2,), gpus=2, minutes=15),
        Exercise("gpus/read_too_early", (1,), gpus=1, minutes=10),
        Exercise("gpus/own_gpu", (4, 2), gpus=2, minutes=5),
        Exercise("gpus/wrong_device", (4,), FIND, gpus=2, minutes=10),
        Exercise("gpus/does_it_fit", (1,), PREDICT, preload=(COMPILER,), gpus=2, minutes=15),
    )
}
CORE = {
    "whoami", "swap", "token-ring", "broadcast", "groups", "epochs", "average", "reduce-scatter",
    "ring", "lost-token", "stuck", "flat", "early", "rank-work", "scaled-rate", "accumulate",
    "judge", "master-weights", "recompute", "own-share", "gather-free", "gpipe", "mirrored",
    "gated-mlp", "merge", "dispatch", "axis-sums", "fit-the-mesh", "commit",
    "snapshot", "error-feedback",
}  # fmt: skip
"""Those of the shorter path through the course."""
SUFFIX = re.compile(r"(\.\d+)?(\.py)?$")
"""The end of a file's name, with the number that it has if `exercise --reset` has kept it."""
SIMILAR = 0.7
"""From this similarity on, of 1, another name is taken for the one that is meant."""
LIST = "python -m playground exercise"
PLACES = [*LESSONS, "gpus"]
"""The lessons and the page that have exercises, in their order."""
CATALOGUE = dict(sorted(CATALOGUE.items(), key=lambda item: PLACES.index(item[1].lesson)))
"""All exercises by name, in the order of the lessons."""


def find_exercise(name: str, others: Iterable[str] = ()) -> Exercise:
    """The exercise of this name, which may be that of its function, or of its file in any folder.
    Raises `UsageError`, with the name that is meant probably, of an exercise or of `others`, if
    there is none."""
    name = SUFFIX.sub("", Path(name).name).replace("_", "-")
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, [*CATALOGUE, *others], 1, SIMILAR)
        advice = f"did you mean {near[0]}?" if near else f"list all of them: {LIST}"
        raise UsageError(f"there is no exercise {name!r}: {advice}")
    return CATALOGUE[name]


def normalise(source: str) -> str:
    return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
