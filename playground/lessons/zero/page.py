"""The command `zero`: settings, the closed forms, and the text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from playground.console.options import ALL, flags, select_names
from playground.console.session import Session
from playground.console.tables import Column, Texts, figures, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import RUN_TRAINING
from playground.lessons import LESSONS
from playground.measurement import Fields, format_bytes
from playground.runtime.errors import PlaygroundError, RankFailed, UsageError
from playground.runtime.flags import check_flags, flag

LESSON = LESSONS["zero"]
MEASURE, UNDER_CAP, UNDER_LIMIT = (
    LESSON.remote(name, "measure") for name in ("run", "train_under_cap", "train_under_limit")
)
HELD = {
    "ddp": ("4P", lambda n: 4.0), "zero-1": ("2P + 2P/N", lambda n: 2 + 2 / n),
    "zero-2": ("P + 3P/N", lambda n: 1 + 3 / n), "zero-3": ("4P/N", lambda n: 4 / n),
}  # fmt: skip
"""Parameters, gradients and Adam's two numbers for each, in bytes of the parameters P, on each of N ranks."""
SENT = {"ddp": 2, "zero-1": 2, "zero-2": 2, "zero-3": 3}
"""Times (N - 1)/N · P."""
TORCH = {"torch-ddp": "ddp", "torch-zero-1": "zero-1", "torch-fsdp": "zero-3"}
"""torch's own, and the way whose closed forms hold for it."""
WARM_UP, TIMED_STEPS, CAPPED_STEPS, EXACT_STEPS = 3, 10, 2, 5
OUT_OF_MEMORY = "out of memory"
CAPPED = {"way": Column("way"), "steps": Column("steps", right=True), "died": Column("what ended it", wraps=True)}
EXACT, CLOSE = 1e-12, 0.05
"""How far float64 may be from one process, and a count from its closed form, as a share of it."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Raises `UsageError` for what cannot be cut or trained."""

    size: int
    ways: tuple[str, ...] = (*HELD, *TORCH)
    layers: int = flag(4, "Number of the GPT's blocks.", least=1)
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


def summarize(ranks: Sequence[Fields], size: int) -> Fields:
    """A way's figures over all ranks: of bytes the most that one has, with their closed forms."""
    row = {**ranks[0], **{name: max(each[name] for each in ranks) for name in (*KINDS, "peak", "sent", "difference")}}
    way, whole = TORCH.get(row["way"], row["way"]), row["model_bytes"]
    return row | {
        "held": max(sum(each[name] for name in KINDS) for each in ranks),
        "expected_held": HELD[way][1](size) * whole, "rule": HELD[way][0],
        "expected_sent": SENT[way] * (size - 1) / size * whole,
        "first_loss": row["losses"][0], "last_loss": row["losses"][-1],
    }  # fmt: skip


KINDS = ("parameters", "gradients", "optimizer")
HOLDINGS = {"way": Column("way")} | figures(
    *((name, name, "MiB", ".2f", 2**-20) for name in KINDS),
    ("held", "together", "MiB", ".2f", 2**-20),
    ("expected_held", "closed\nform", "MiB", ".2f", 2**-20),
    ("peak", "peak", "MiB", ".2f", 2**-20),
)
COSTS = {"way": Column("way")} | figures(
    ("sent", "sent", "MiB", ".2f", 2**-20),
    ("expected_sent", "closed\nform", "MiB", ".2f", 2**-20),
    ("seconds", "step", "ms", ".1f", 1000),
    ("first_loss", "first\nloss", "", ".4f"),
    ("last_loss", "last\nloss", "", ".4f"),
    ("difference", "difference from\none process", "", ".1e"),
)


def check(row: Fields) -> None:
    """Raise `PlaygroundError` if a way of ours does not train as one process does, or holds or sends more than it
    should."""
    if not row["difference"] <= EXACT:
        raise PlaygroundError(
            f"{row['way']}: {row['difference']:.1e} from one process, more than rounding: {EXACT:.0e}"
        )
    for what in ("held", "sent") if row["way"] in HELD else ():
        found, expected = row[what], row[f"expected_{what}"]
        if abs(found - expected) > CLOSE * expected:
            raise PlaygroundError(f"{row['way']}: {found:,} bytes {what}, and the closed form is {expected:,.0f}")


def result_texts(rows: Sequence[Fields], size: int) -> Texts:
    """What each way holds, and what it costs."""
    whole, unit = (format_bytes(rows[0][name]) for name in ("model_bytes", "unit_bytes"))
    rules = ", ".join(f"{name} {rule}" for name, (rule, _) in HELD.items())
    held = (
        f"by each rank before the optimizer's step. The parameters are P = {whole}, those of a block {unit}; {rules}. "
        f"Peak: the most in a step with one sequence for each rank, activations included"
    )
    sent = "by a rank in a step, 2 (N-1)/N P, and 3 (N-1)/N P by zero-3 (N is the number of ranks)"
    return [
        prose(heading("held"), f": {held}"), tabulate(rows, HOLDINGS), "",
        prose(heading("sent"), f": {sent}"), tabulate(rows, COSTS),
    ]  # fmt: skip


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
        show_capped(session, train_by_limit(session, settings) if kernel else train_by_count(session, settings))
        return
    session.say(f"{LESSON.name}: {world}", f"{model}; batches of {settings.batch_size} sequences to copy", "")
    by_rank = session.launch(RUN_TRAINING, MEASURE, settings)
    rows = [summarize(ranks, world.size) for ranks in zip(*by_rank, strict=True)]
    session.say(*result_texts(rows, world.size), "")
    session.print_document({}, ways=rows)
    for row in rows:
        check(row)
    session.say(prose("Shown: ", good(LESSON.conclude(world.size)), "."))


def train_by_count(session: Session, settings: ZeroSettings) -> list[Fields]:
    rows: list[Fields] = session.launch(RUN_TRAINING, UNDER_CAP, settings)[0]
    return rows


def train_by_limit(session: Session, settings: ZeroSettings) -> list[Fields]:
    """Each way in a world of its own, which ends when memory is refused to a rank."""
    rows = []
    for name in settings.ways:
        try:
            rows.append(session.launch(RUN_TRAINING, UNDER_LIMIT, settings, (name,))[0])
        except RankFailed as failure:
            if OUT_OF_MEMORY not in failure.reason:
                raise
            rows.append({"way": name, "died": failure.headline, "steps": 0})
    return rows


def show_capped(session: Session, rows: Sequence[Fields]) -> None:
    """Raises `PlaygroundError` if no way has trained."""
    session.say(tabulate(rows, CAPPED), "")
    session.print_document({}, ways=rows)
    trained = [row["way"] for row in rows if not row["died"]]
    if not trained:
        raise PlaygroundError(f"{rows[0]['way']}: {rows[0]['died']}")
    session.say(prose("Shown: ", good(f"{', '.join(trained)} trained under the cap"), "."))
