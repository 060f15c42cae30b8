"""The command `ddp`: train, or take DDP apart. The lab's parts by name, its settings, and its text.
Does not import torch.

A new part is a function `part(rank, size, settings)` in lab.py that returns rows, a column in
`COLUMNS` for each new field of theirs, and a row in `PARTS`: the choices of --lab and the order of
the lab derive from that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from playground.console.options import ALL, flags, names_option, refuse
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.console.training import (
    RUN_TRAINING,
    DataOptions,
    SnapshotOptions,
    announce_data,
    data_options,
    snapshot_options,
    train_and_show,
)
from playground.lessons import LESSONS
from playground.runtime.remote import Remote, remote
from playground.training.settings import TrainingSettings

STEPS = 5
"""Steps with each hook in the part hooks, before and after the part checkpoint."""


@dataclass(frozen=True)
class LabPart:
    """An experiment that every rank runs: the function of its name in lab.py."""

    name: str
    shown: str
    """Its conclusion, in the last line of the lab's output."""
    about: str
    """How to read its table, in one line."""

    @property
    def code(self) -> Remote:
        """Called as `part(rank, size, settings)`. Its docstring says what the part is about."""
        return remote(f"playground.lessons.ddp.lab:{self.name}")


CONTINUED = (
    f"{STEPS} steps, the checkpoint, and {STEPS} steps more, compared with {2 * STEPS} steps on end"
)
PARTS = {
    name: LabPart(name, shown, about)
    for name, shown, about in (
        ("buckets", "the buckets that DDP built", "gradients ready: of 8, when the bucket is sent"),
        ("hooks", "what communication hooks save and what they cost",
         "messages, sent: what a rank passes to all_reduce in a step; rel. error: norm of the "
         "error / norm"),
        ("accumulation", "the messages that no_sync saves",
         "errors: of the gradients, compared with those of one large batch"),
        ("uneven_inputs", "how Join lets ranks finish at different times",
         "difference: the largest of any parameter from rank 0, at the end"),
        ("checkpoint", "a checkpoint that one rank writes and all read",
         f"errors: of the parameters, after {CONTINUED}"),
        ("sampler", "who gets which sample", "the positions of each rank's samples, in order"),
    )
}  # fmt: skip
CAPS = (0.001, 0.02, 25.0)
"""MiB with which `Net` has several buckets, few, and as many as with DistributedDataParallel's
default."""
ACCUMULATED = 4
"""Batches whose gradients the part accumulation adds up."""


COLUMNS = {
    "rank": RANK_COLUMN,
    "doubled": Column("more than\nonce", wraps=True),
    **figures(
        ("bucket_cap_mb", "bucket cap", "MiB", "g"), ("bucket",), ("bytes", "size", "bytes", ","),
        ("ready", "gradients\nready"), ("messages",), ("sent", "sent", "bytes", ","),
        ("gradient_rel", "gradient\nrel. error", "", ".1e"), ("parameters_rel",
        "parameters\nrel. error", "", ".1e"),
        ("loss", "loss", "", ".6f"), ("batches",),
        ("rel_error", "rel. error", "", ".1e"), ("difference",), ("read", "read", "bytes", ","),
    ),
}  # fmt: skip
"""Columns of the lab's tables, by the names of values in rows; others are text under their own
name."""


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """A bucket as DDP sends it, in one backward, for one cap."""

    bucket_cap_mb: float
    """MiB after which it is full."""
    backward: str
    """The backwards in which it is sent: "1", or from which on: "2 …"."""
    bucket: int
    """Its index."""
    bytes: int
    ready: int
    """Number of gradients that are ready when it is sent."""
    parameters: list[str]
    """Names of the parameters whose gradients it holds."""


@dataclass(frozen=True, kw_only=True)
class HookResult:
    """A communication hook, compared with none."""

    hook: str
    sends: str
    """The dtypes of its messages."""
    messages: int
    sent: int
    """Bytes that a rank passes to all_reduce in a step."""
    gradient_rel: float
    """Relative error of the first gradient."""
    parameters_rel: float
    """Relative error of the parameters after `STEPS` steps."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """A way to add up the gradients of several batches."""

    way: str
    batches: int
    messages: int
    rel_error: float
    """Relative error of the gradients, compared with those of one large batch."""


@dataclass(frozen=True, kw_only=True)
class JoinedRank:
    """A rank that has finished at its own time."""

    rank: int
    batches: int
    messages: int
    difference: float
    """The largest of any parameter from rank 0, at the end."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A training that was resumed from a part of the checkpoint."""

    loaded: str
    """The part's names."""
    read: int
    """Bytes."""
    rel_error: float
    """Relative error of the parameters, compared with those of a training that was never
    interrupted."""


def part_texts(part: LabPart, rows: Sequence[object]) -> Texts:
    """A part: its name, its summary, and its table."""
    named = [row if isinstance(row, dict) else vars(row) for row in rows]
    shown = [{name: cell(value) for name, value in row.items()} for row in named]
    about = prose(heading(part.name), f": {part.code.summary}")
    return ["", about, f"  {part.about}", tabulate(shown, COLUMNS, Column("", wraps=True))]


def cell(value: object) -> object:
    """Numbers of a list one after the other; of more than four names, the first and the last."""
    if not isinstance(value, list):
        return value
    if len(value) > 4 and isinstance(value[0], str):
        return f"{value[0]} … {value[-1]} ({len(value)})"
    return " ".join(map(str, value)) or "-"


LESSON = LESSONS["ddp"]
TRAIN = remote("playground.training.loop:train_with_ddp")
RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    training: TrainingSettings
    """Data, batch size, learning rate, seed."""
    parts: tuple[str, ...] = tuple(PARTS)
    """Names of `PARTS` to run."""
    caps: tuple[float, ...] = CAPS
    """MiB after which a bucket is full: all are compared in the part buckets, the last holds for
    the others."""

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: everything but the folder, which is each
        host's own."""
        return {**self.training.on_all_ranks(), "caps": self.caps, "parts": self.parts}


@LESSON.run_by(
    flags(TrainingSettings, "epochs", "batch_size", "lr", "momentum", "accumulate"),
    data_options(),
    snapshot_options,
    names_option(
        "--lab",
        known=PARTS,
        help="Take DDP apart instead of training, or only these parts",
        metavar="[PART,…]",
        is_flag=False,
        flag_value=ALL,
    ),
    refuse(
        *("snapshots", "restarts", "epochs", "accumulate"),
        why=lambda given: (
            "is for training, the lab does without: leave it out" if given["lab"] else ""
        ),
    ),
)
def command(
    session: Session,
    data: DataOptions,
    checkpoint: SnapshotOptions,
    lab: tuple[str, ...],
    **training: Any,
) -> None:
    if lab:
        asked = TrainingSettings(
            folder=data.folder, limit=data.limit, seed=session.run.seed, **training
        )
        run_and_show_lab(session, data, LabSettings(training=asked, parts=lab))
    else:
        train_and_show(session, LESSON, TRAIN, data, checkpoint, **training)


def run_and_show_lab(session: Session, data: DataOptions, settings: LabSettings) -> None:
    """Run the parts of the lab and show the results."""
    world, training = session.world, settings.training
    training.check_batch(world.size)
    world.warm_up(RUN_TRAINING, RUN_LAB)
    prepared, training = announce_data(session, data, training, "lab: on the model net")
    settings = replace(settings, training=training)
    by_rank = session.launch(RUN_TRAINING, RUN_LAB, settings)
    by_part = dict(zip(settings.parts, zip(*by_rank, strict=True), strict=True))
    for name, (rows, *_) in by_part.items():
        session.say(*part_texts(PARTS[name], rows))
    session.say("", f"Shown: {', '.join(PARTS[name].shown for name in by_part)}.")
    session.print_document(by_part, dataset=prepared.summary, lab={"caps": settings.caps})
