"""The command `ddp`: train, or take DDP apart. The lab's hooks and parts by name, its settings, and its text. Does not
import torch.

A new hook is a function `register(model)` and a row in `HOOKS`: the choices of --comm-hook, its help and the lab derive
from that table. A new part is a function `part(rank, size, settings)` in lab.py that returns rows, a column in
`COLUMNS` for each new key of theirs, and a row in `PARTS`: the choices of --lab, the options of each part, and the
order of the lab derive from that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from playground.console.options import ALL, Finite, flags, pack_options, read_names, refuse, select_names, take_names
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.console.training import (
    DataOptions,
    SnapshotOptions,
    announce_data,
    data_options,
    snapshot_options,
    train_and_show,
)
from playground.lessons import LESSONS
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag, flags_of
from playground.runtime.remote import Remote, remote
from playground.training.settings import TrainingSettings

WARM_UP = 2
"""Backward passes that precede every comparison. In the first, DDP has not arranged its buckets yet; a hook that keeps
something per bucket begins after them."""
STEPS = 5
"""Steps with each hook in the part hooks, before and after the part checkpoint."""


@dataclass(frozen=True)
class CommHookSpec:
    """A way to average a bucket of gradients in place of DDP's own all-reduce."""

    name: str
    dtype: str
    """The type of what it sends, as torch calls it: where the backend cannot add that up, the hook is refused."""
    summary: str
    """Its messages, in one line."""
    code: Remote
    """Called as `register(model)`: registers the hook, with a new state, with a DistributedDataParallel."""


HOOKS = {
    name: CommHookSpec(name, dtype, summary, remote(f"playground.lessons.ddp.{code}"))
    for name, dtype, summary, code in (
        ("none", "float32", "the gradients as they are, as DDP sends them without a hook", "lab:register_none"),
        ("fp16", "float16", "the gradients cast to float16", "lab:register_fp16"),
        ("bf16", "bfloat16", "the gradients cast to bfloat16", "lab:register_bf16"),
        ("powersgd", "float32", "each matrix as the product of two thin ones", "lab:register_power_sgd"),
    )
}
BASELINE = "none"
"""The hook that the others are compared with."""


@dataclass(frozen=True)
class LabPart:
    """An experiment that every rank runs: the function of its name in lab.py."""

    name: str
    shown: str
    """Its conclusion, in the last line of the lab's output."""
    about: str
    """How to read its table, in one line."""
    options: tuple[str, ...] = ()
    """Options of the command that change something in it but not in every part, by parameter name."""

    @property
    def code(self) -> Remote:
        """Called as `part(rank, size, settings)`. Its docstring says what the part is about."""
        return remote(f"playground.lessons.ddp.lab:{self.name}")


EVERY = ("batch_size", "limit", "bucket_caps")
"""Options for every part that trains."""
PARTS = {
    part.name: part
    for part in (
        LabPart("buckets", "the buckets that DDP built", "gradients ready: of 8, when the bucket is sent", EVERY),
        LabPart(
            "hooks",
            "what communication hooks save and what they cost",
            "messages, sent: what a rank passes to all_reduce in a step; rel. error: norm of the error / norm",
            (*EVERY, "comm_hooks", "lr", "momentum"),
        ),
        LabPart(
            "accumulation",
            "the messages that no_sync saves",
            "errors: of the gradients, compared with those of one large batch",
            (*EVERY, "accumulate"),
        ),
        LabPart(
            "uneven_inputs",
            "how Join lets ranks finish at different times",
            "difference: the largest of any parameter from rank 0, at the end; early end: the steps that a rank takes "
            "with throw_on_early_termination=True",
            EVERY,
        ),
        LabPart(
            "checkpoint",
            "a checkpoint that one rank writes and all read",
            f"errors: of the parameters, after {STEPS} steps, the checkpoint, and {STEPS} steps more, compared with "
            f"{2 * STEPS} steps on end",
            (*EVERY, "lr", "momentum"),
        ),
        LabPart("sampler", "who gets which sample", "the positions of each rank's samples, in order"),
    )
}
CAPS = (0.001, 0.02, 25.0)
"""MiB with which `Net` has several buckets, few, and as many as with DistributedDataParallel's default."""
MAX_ACCUMULATED = 256
"""Batches: all of them are held in memory, and once more as a single one."""


COLUMNS = {
    "rank": RANK_COLUMN,
    "doubled": Column("more than\nonce", wraps=True),
    **figures(
        ("bucket_cap_mb", "bucket cap", "MiB", "g"), ("bucket",), ("bytes", "size", "bytes", ","),
        ("ready", "gradients\nready"), ("messages",), ("sent", "sent", "bytes", ","),
        ("gradient_rel", "gradient\nrel. error", "", ".1e"), ("parameters_rel", "parameters\nrel. error", "", ".1e"),
        ("loss", "loss", "", ".6f"), ("batches",), ("steps",), ("max_error", "max. error", "", ".1e"),
        ("rel_error", "rel. error", "", ".1e"), ("difference",), ("early_end", "early end"),
        ("read", "read", "bytes", ","),
    ),
    **figures(
        ("gradient_max", "gradient\nmax. error", "", ".1e"), ("parameters_max", "parameters\nmax. error", "", ".1e"),
        wide=True,
    ),
}  # fmt: skip
"""Columns of the lab's tables, by the names of values in rows; others are text under their own name."""


def part_texts(part: LabPart, ranks: Sequence[object]) -> Texts:
    """A part: its name, its summary, and its table. `ranks`: the rows of all ranks, which are the same."""
    about: Texts = ["", prose(heading(part.name), f": {part.code.summary}")]
    rows = ranks[0]
    if isinstance(rows, Mapping):
        return [*about, f"  the backend refuses: {rows['refused']}"]
    assert isinstance(rows, list)
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [{name: cell(row.get(name)) for name in names} for row in rows]
    return [*about, f"  {part.about}", tabulate(shown, COLUMNS, Column("", wraps=True))]


def cell(value: object) -> object:
    """Numbers of a list one after the other; of more than four names, the first and the last."""
    if not isinstance(value, list):
        return "" if value is None else value
    if len(value) > 4 and isinstance(value[0], str):
        return f"{value[0]} … {value[-1]} ({len(value)})"
    return " ".join(map(str, value)) or "-"


LESSON = LESSONS["ddp"]
TRAIN = remote("playground.training.loop:train_with_ddp")
RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")
ABOUT_HOOKS = "; ".join(f"{hook.name}: {hook.summary}" for hook in HOOKS.values())
ACCUMULATED = 4
"""The lab's default of --accumulate."""
cap_type = Finite(0, 1e6, min_open=True)


def read_parts(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Names of parts with commas between them, in the order of the lab."""
    return select_names(PARTS, () if text is None else read_names(PARTS, [text]))


def read_caps(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Numbers with commas between them, each once."""
    words = dict.fromkeys(text.split(",")) if text is not None else ()
    return tuple(cap_type.convert(word.strip(), param, ctx) for word in words)


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """The options of the lab. If every value is empty, the lab is not asked for."""

    lab: tuple[str, ...] = flag(
        (),
        f"Take DDP apart instead of training, or only these parts: {', '.join(PARTS)}. Implied by the options below.",
        metavar="[PART,…]",
        click={"callback": read_parts, "type": str, "is_flag": False, "flag_value": ALL},
    )
    bucket_caps: tuple[float, ...] = flag(
        (),
        "Bucket sizes to compare; the other parts use the last one.",
        name="--bucket-cap-mb",
        metavar="MB,…",
        click={"callback": read_caps, "type": str, "show_default": "by model"},
    )
    comm_hooks: tuple[str, ...] = flag(
        (),
        f"Hooks to compare in the part hooks ({ABOUT_HOOKS}), by name: {', '.join(HOOKS)} or {ALL}.",
        name="--comm-hook",
        click=take_names(HOOKS, (ALL,)),
    )

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of `PARTS` to run."""
        return self.lab or tuple(PARTS)

    @property
    def caps(self) -> tuple[float, ...]:
        """MiB after which a bucket is full: all are compared in the part buckets, the last holds for the others."""
        return self.bucket_caps or CAPS

    @property
    def hooks(self) -> tuple[str, ...]:
        """Names of `HOOKS` to compare, that of the baseline first."""
        return select_names(HOOKS, (BASELINE, *(self.comm_hooks or (ALL,))))

    @property
    def required(self) -> tuple[str, ...]:
        """Those of them that were asked for by name, and must not be refused."""
        return tuple(name for name in self.comm_hooks if name in HOOKS)


@dataclass(frozen=True, kw_only=True)
class LabSettings(LabOptions):
    """Raises `UsageError` for more batches to accumulate than memory is meant to hold."""

    training: TrainingSettings
    """Data, batch size, learning rate, seed; `accumulate` is the number of batches in the part of that name."""

    def __post_init__(self) -> None:
        if self.training.accumulate > MAX_ACCUMULATED:
            raise UsageError(f"--accumulate {self.training.accumulate}: the lab adds up {MAX_ACCUMULATED} at most")

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"caps": self.caps, "hooks": self.hooks, "required": self.required}

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: everything but the folder, which is each host's own."""
        return {**self.training.on_all_ranks(), **self.document, "parts": self.parts}


def asks_lab(given: Mapping[str, Any]) -> bool:
    """Whether the lab is asked for: by name, or by an option of its own."""
    return any(given[name] for name in flags_of(LabOptions))


def refuse_by_part(name: str) -> Callable[[Any], Any]:
    """Refuse an option that changes nothing in the parts of the lab that are asked for."""
    meant = [part.name for part in PARTS.values() if name in part.options]

    def why(given: Mapping[str, Any]) -> str:
        parts = given["lab"] or tuple(PARTS)
        if not asks_lab(given) or set(meant) & set(parts):
            return ""
        return f"changes nothing in {' and '.join(parts)}: it is for {', '.join(meant)}"

    return refuse(name, why=why)


@LESSON.run_by(
    flags(TrainingSettings, changes={"accumulate": {"default": None, "show_default": f"1, in the lab {ACCUMULATED}"}}),
    data_options,
    snapshot_options,
    pack_options("asked", LabOptions),
    *map(refuse_by_part, dict.fromkeys(name for part in PARTS.values() for name in part.options)),
    refuse(
        *("snapshots", "restarts", "epochs"),
        why=lambda given: "is for training, the lab does without: leave it out" if asks_lab(given) else "",
    ),
)
def command(
    session: Session,
    data: DataOptions,
    survival: SnapshotOptions,
    asked: LabOptions,
    accumulate: int | None,
    **training: Any,
) -> None:
    if not any(vars(asked).values()):
        train_and_show(session, LESSON, TRAIN, data, survival, accumulate=accumulate or 1, **training)
        return
    seed = session.run.seed
    settings = TrainingSettings(
        folder=data.folder, limit=data.limit, seed=seed, accumulate=accumulate or ACCUMULATED, **training
    )
    run_and_show_lab(session, data, LabSettings(**vars(asked), training=settings))


def run_and_show_lab(session: Session, data: DataOptions, settings: LabSettings) -> None:
    """Run the parts of the lab and show the results."""
    world, training = session.world, settings.training
    training.check_batch(world.size)
    parts = [PARTS[name] for name in settings.parts]
    hooks = [HOOKS[name].code for name in settings.hooks] if "hooks" in settings.parts else []
    world.warm_up(RUN_LAB, *(part.code for part in parts), *hooks)
    prepared, training = announce_data(session, data, training, "lab: on the model net")
    settings = replace(settings, training=training)
    by_part = dict(zip(settings.parts, zip(*session.launch(RUN_LAB, settings), strict=True), strict=True))
    for part in parts:
        session.say(*part_texts(part, by_part[part.name]))
    session.say("", f"Shown: {', '.join(part.shown for part in parts)}.")
    session.print_document(by_part, dataset=prepared.summary, lab=settings.document)
