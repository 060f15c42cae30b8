"""The command `zero`: its settings and what it runs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from playground.console.options import ALL, flags, select_names
from playground.console.session import Session
from playground.console.tables import tabulate
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.lessons import LESSONS
from playground.lessons.zero.results import CAPPED, HELD, OUT_OF_MEMORY, TORCH, check, result_texts, summarize
from playground.measurement import Fields, format_bytes
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_flags, flag

LESSON = LESSONS["zero"]
MEASURE, UNDER_CAP, UNDER_LIMIT = (
    LESSON.remote(name, "measure") for name in ("run", "train_under_cap", "train_under_limit")
)


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Raises `UsageError` for what cannot be cut or trained."""

    size: int
    ways: tuple[str, ...] = (*HELD, *TORCH)
    layers: int = flag(2, "Number of the GPT's blocks.", least=1)
    width: int = flag(96, "Width of the GPT, a multiple of its 12 heads.", least=12)
    batch_size: int = flag(24, "Global batch size: sequences per step, over all ranks.", least=1)
    steps: int = flag(60, "Number of training steps, by each way of ours.", least=1)
    cap: int | None = flag(
        None, "Train two steps under a cap on what each rank may hold: whoever holds more dies.",
        least=1, name="--cap-mb", in_megabytes=True, metavar="MB",
    )  # fmt: skip
    seed: int = 1234

    def __post_init__(self) -> None:
        check_flags(self)
        if self.width % 12:
            raise UsageError(f"--width {self.width}: the GPT has 12 heads, so choose a multiple of 12")
        if self.batch_size % self.size:
            asked = f"--batch-size {self.batch_size} for {self.size} ranks"
            raise UsageError(f"{asked}: each gets as many sequences, so choose a multiple of {self.size}")

    def on_all_ranks(self) -> dict[str, object]:
        return asdict(self)


WAY = click.option(
    "--way", type=click.Choice([*HELD, *TORCH, ALL]), default=ALL, show_default=True, help="Train by this way alone."
)
KERNEL = click.option(
    "--kernel", is_flag=True, help="With --cap-mb: the kernel enforces it (RLIMIT_DATA, on Linux), not the count."
)


@LESSON.run_by(WAY, flags(ZeroSettings, "layers", "width", "batch_size", "steps", "cap"), KERNEL)
def command(session: Session, way: str, kernel: bool, **chosen: Any) -> None:
    world, ways = session.world, select_names((*HELD, *TORCH), (way,))
    if kernel and not chosen["cap"]:
        raise UsageError("--kernel has no effect without --cap-mb: add --cap-mb or leave it out")
    settings = ZeroSettings(size=world.size, ways=ways, seed=session.run.seed, **chosen)
    world.warm_up(RUN_TRAINING, MEASURE)
    model = f"model: a GPT of {settings.layers} blocks of width {settings.width}"
    if settings.cap:
        cap = f"a cap of {format_bytes(settings.cap)} on each rank, kept by the {'kernel' if kernel else 'count'}"
        session.say(f"{LESSON.name}: {world}", f"{model}; {cap}", "")
        show_capped(
            session,
            train_by_limit(session, settings) if kernel else session.launch(RUN_TRAINING, UNDER_CAP, settings)[0],
        )
        return
    session.say(f"{LESSON.name}: {world}", f"{model}; batches of {settings.batch_size} sequences to copy", "")
    by_rank = session.launch(RUN_TRAINING, MEASURE, settings)
    rows = [summarize(ranks, world.size) for ranks in zip(*by_rank, strict=True)]
    session.say(*result_texts(rows, world.size), "")
    session.print_document({}, ways=rows)
    for row in rows:
        check(row)
    session.say(prose("Shown: ", good(LESSON.conclude(world.size)), "."))


def train_by_limit(session: Session, settings: ZeroSettings) -> list[Fields]:
    """Each way in a world of its own, which ends when memory is refused to a rank."""
    rows = []
    for name in settings.ways:
        try:
            rows.append(session.launch(RUN_TRAINING, UNDER_LIMIT, settings, (name,))[0])
        except PlaygroundError as error:
            if not error.headline.startswith(OUT_OF_MEMORY):
                raise
            rows.append({"way": name, "died": error.headline})
    return rows


def show_capped(session: Session, rows: Sequence[Fields]) -> None:
    """Raises `PlaygroundError` if no way has trained."""
    session.say(tabulate(rows, CAPPED), "")
    session.print_document({}, ways=rows)
    trained = [row["way"] for row in rows if not row["died"]]
    if not trained:
        raise PlaygroundError(f"{rows[0]['way']}: {rows[0]['died']}")
    session.say(prose("Shown: ", good(f"{', '.join(trained)} trained under the cap"), "."))
