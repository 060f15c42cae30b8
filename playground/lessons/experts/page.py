"""The command `experts`: its settings, the closed forms beside what is counted, and its text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from playground.console.options import ALL, flags, select_names
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.lessons import LESSONS
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_choice, check_flags, flag

LESSON = LESSONS["experts"]
EXPERIMENT = LESSON.remote("run", "experiment")
WAYS = {"free": 0.0, "balanced": 0.02}
"""The weight of the balance loss."""
LAYERS, WIDTH, LENGTH, VOCABULARY, EXPERTS, K = 2, 96, 48, 48, 8, 2
"""The size of the model, and how many of the experts see a token."""
EXACT_STEPS, EXACT = 5, 1e-12
"""Steps in float64, and how far losses and parameters may then be from one process's: sums are rounded differently."""
CLOSE = 0.05
"""Fraction by which a count may differ from its closed form."""
SEEN_STEP = 40
"""The step whose rows and bytes are counted, or the last one: by then the ways differ."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSettings:
    """Raises `UsageError` if a rank would have no experts, or other ranks more sequences."""

    size: int
    """Number of ranks."""
    ways: tuple[str, ...] = tuple(WAYS)
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch, of which each rank has as many.", least=1)
    steps: int = flag(70, "Number of training steps, for each way.", least=1)
    capacity: float = flag(0.0, "Rows that a rank may send to an expert, times the mean; 0: any number.", least=0.0)

    def __post_init__(self) -> None:
        check_flags(self)
        for way in self.ways:
            check_choice("way", way, WAYS)
        if self.size > EXPERTS:
            raise UsageError(f"{self.size} ranks for {EXPERTS} experts: each needs one, so choose at most {EXPERTS}")
        if self.batch_size % self.size:
            raise UsageError(f"{self.batch_size} sequences on {self.size} ranks: --batch-size must be a multiple of -n")

    @property
    def seen_step(self) -> int:
        return min(SEEN_STEP, self.steps) - 1


def owners(size: int) -> list[int]:
    """The rank of each expert: as `Tensor.tensor_split` cuts."""
    return [rank for rank in range(size) for _ in range(EXPERTS // size + (rank < EXPERTS % size))]


def closed_forms(kept: Sequence[Sequence[Sequence[int]]], rank: int, settings: ExpertsSettings) -> Fields:
    """The counts of a rank in a step: `computed` and `sent_rows` follow from `kept` [blocks, ranks, experts], and from
    these the bytes of float32; `sent_if_balanced`: if each expert got as many rows."""
    size = settings.size
    sources = [(source, row) for block in kept for source, row in enumerate(block)]
    flows = [(source, owner, rows) for source, row in sources for owner, rows in zip(owners(size), row, strict=True)]
    leaving = sum(rows for source, owner, rows in flows if source == rank != owner)
    coming = sum(rows for source, owner, rows in flows if source != rank == owner)
    block = 4 * WIDTH**2 + WIDTH + 4 * WIDTH + EXPERTS * WIDTH
    shared = 4 * ((2 * VOCABULARY + LENGTH + 2) * WIDTH + LAYERS * block)
    others = 2 * (size - 1) / size * shared + LAYERS * 8 * EXPERTS * (size - 1)  # gradients; tables of int64
    per_rank = 4 * settings.batch_size * LENGTH * WIDTH / size
    return {
        "computed": sum(rows for _, owner, rows in flows if owner == rank),
        "sent_rows": leaving,
        "messages": 5 * LAYERS + 1,
        "sent": 2 * (leaving + coming) * 4 * WIDTH + others,
        "sent_if_balanced": LAYERS * 4 * K * per_rank * (size - 1) / size + others,
    }


NUMBER = ("", ",.0f")
WHO = {"way": Column("way"), "rank": RANK_COLUMN}
ROWS = WHO | figures(
    ("own_rows", "of own\ntokens", *NUMBER),
    ("sent_rows", "sent\naway", *NUMBER),
    ("computed", "computed\nhere", *NUMBER),
    ("fullest", "fullest\nexpert", *NUMBER),
    ("dropped", "dropped", *NUMBER),
)
BYTES = WHO | figures(
    ("sent", "counted", *NUMBER), ("form", "closed form", *NUMBER), ("sent_if_balanced", "if balanced", *NUMBER)
)
COSTS = {"way": Column("way")} | figures(
    ("step_seconds", "step", "ms", ".1f", 1000),
    ("first", "first\nloss", "", ".3f"),
    ("last", "last\nloss", "", ".3f"),
    ("most_over_mean", "fullest\n/ mean", "", ".2f"),
    ("loss_difference", "loss, from\none process", "", ".1e"),
    ("parameter_difference", "parameters, from\none process", "", ".1e"),
)


def check(way: str, rank: int, found: Fields, settings: ExpertsSettings) -> None:
    """Raise `PlaygroundError` if the way is not one process's training, or a count is not that of its closed form."""
    if not (largest := max(found["loss_difference"], found["parameter_difference"])) <= EXACT:
        raise PlaygroundError(f"{way}: differs by {largest:.1e} from one process, more than rounding ({EXACT:.0e})")
    expected = closed_forms(found["kept"], rank, settings)
    for key in ("messages", "sent", "computed"):
        if abs(found[key] - expected[key]) > CLOSE * expected[key]:
            raise PlaygroundError(f"{way}: {key}: counted {found[key]:,.0f}, the closed form is {expected[key]:,.0f}")


@LESSON.run_by(
    click.option("--way", type=click.Choice([*WAYS, ALL]), default=ALL, show_default=True, help="With balance loss?"),
    flags(ExpertsSettings, "batch_size", "steps", "capacity"),
)
def command(session: Session, way: str, **chosen: Any) -> None:
    world, ways = session.world, select_names(WAYS, (way,))
    settings = ExpertsSettings(size=world.size, ways=ways, seed=session.run.seed, **chosen)
    world.warm_up(EXPERIMENT)
    limit = f", at most {settings.capacity:g} times the mean to one of them" if settings.capacity else ""
    model = f"a GPT of {LAYERS} blocks, width {WIDTH}, sequences of {LENGTH}, {settings.batch_size} in a batch"
    session.say(f"{LESSON.name}: {world}, {model}, {EXPERTS} experts for a block, {K} for a token{limit}")
    found = dict(zip(ways, zip(*session.launch(EXPERIMENT, settings), strict=True), strict=True))
    rows = []
    for name, ranks in found.items():
        for rank, counted in enumerate(ranks):
            forms = closed_forms(counted["kept"], rank, settings)
            rows.append({"way": name, "rank": rank} | forms | counted | {"form": forms["sent"]})
    about = f": in step {settings.seen_step + 1}, both blocks; a row is a token's hidden vector on its way to an expert"
    session.say("", prose(heading("rows"), about), tabulate(rows, ROWS))
    about = ": bytes sent in that step: rows there and back, forward and backward, and gradients of what is not expert"
    session.say("", prose(heading("bytes"), about), tabulate(rows, BYTES))
    about = f": a copied sequence; differences are those after {EXACT_STEPS} steps of AdamW in float64"
    costs = ({"way": name, **ranks[0]} for name, ranks in found.items())
    session.say("", prose(heading("training"), about), tabulate(costs, COSTS))
    session.print_document(found, rows=rows)
    for name, ranks in found.items():
        for rank, counted in enumerate(ranks):
            check(name, rank, counted, settings)
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), "."))
