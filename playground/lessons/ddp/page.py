"""The command `ddp`: train, or take DDP apart; and the text of what the parts of the lab found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from playground.console.options import ALL, Finite, flags, pack_options, refuse, select_names, take_names
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.console.training import announce_data, train_and_show
from playground.console.training_options import (
    DataOptions,
    SnapshotOptions,
    data_options,
    snapshot_options,
)
from playground.lessons import LESSONS
from playground.lessons.ddp.settings import (
    BASELINE,
    HOOKS,
    PARTS,
    LabPart,
    LabSettings,
)
from playground.runtime.flags import flag, flags_of
from playground.runtime.remote import remote
from playground.training.models import MODELS
from playground.training.settings import TrainingSettings

COLUMNS = {
    "rank": RANK_COLUMN,
    "doubled": Column("more than\nonce", wraps=True),
    **figures(
        ("bucket_cap_mb", "bucket cap", "MiB", "g"),
        ("bucket",),
        ("bytes", "size", "bytes", ","),
        ("ready", "gradients\nready"),
        ("messages",),
        ("sent", "sent", "bytes", ","),
        ("gradient_rel", "gradient\nrel. error", "", ".1e"),
        ("parameters_rel", "parameters\nrel. error", "", ".1e"),
        ("loss", "loss", "", ".6f"),
        ("batches",),
        ("steps",),
        ("max_error", "max. error", "", ".1e"),
        ("rel_error", "rel. error", "", ".1e"),
        ("difference",),
        ("early_end", "early end"),
        ("read", "read", "bytes", ","),
    ),
    **figures(
        ("gradient_max", "gradient\nmax. error", "", ".1e"),
        ("parameters_max", "parameters\nmax. error", "", ".1e"),
        wide=True,
    ),
}
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
    words = [word.strip() for word in text.split(",")] if text is not None else []
    for word in words:
        if word not in (*PARTS, ALL):
            raise click.BadParameter(f"{word!r} is none of {', '.join(PARTS)}, {ALL}.")
    return select_names(PARTS, words)


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
        return self.lab or tuple(PARTS)

    def settings(self, training: TrainingSettings) -> LabSettings:
        """The lab that is asked for, with that training."""
        words = self.comm_hooks or (ALL,)
        return LabSettings(
            training=training,
            parts=self.parts,
            caps=self.bucket_caps,
            hooks=select_names(HOOKS, (BASELINE, *words)),
            required=tuple(name for name in words if name in HOOKS),
        )


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
    run_and_show_lab(session, data, asked.settings(settings))


def run_and_show_lab(session: Session, data: DataOptions, settings: LabSettings) -> None:
    """Run the parts of the lab and show the results."""
    world, training = session.world, settings.training
    MODELS["net"].check_batch(training.batch_size, world.size)
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
