"""The command `context`: its settings, the closed forms beside what is counted, and its text. Does
not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from playground.algorithms.cost_model import times_sent
from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import COMPARED, TRAINED
from playground.lessons import LESSONS
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag
from playground.training.gpt_config import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH
from playground.training.one_process import ComparedTraining, Training, check, check_counts

LESSON = LESSONS["context"]
EXPERIMENT = LESSON.remote("run", "experiment")
ALONE = "alone"
WAYS = ("ring", "ulysses", ALONE)
ORDERS = {"contiguous": False, "zigzag": True}
ROUNDS = 4
"""How often attention alone is timed: the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """Raises `UsageError` if heads or sequences cannot be sharded over the ranks."""

    size: int
    """Number of ranks."""
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch; each rank has its shard of all.", least=1)
    steps: int = flag(60, "Number of training steps, for each way.", least=1)
    lengths: tuple[int, ...] = (384, 768, 1536)
    """Lengths of the sequences for attention alone."""

    def __post_init__(self) -> None:
        check_flags(self)
        if HEADS % self.size:
            raise UsageError(
                f"{self.size} ranks for {HEADS} heads and {LENGTH} tokens: choose 1, 2, 3, 4, 6 or "
                "12"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Attention alone, forward and backward, on one sequence: bytes, and seconds on the slowest
    rank."""

    length: int
    """Tokens of the sequence."""
    square: int
    """Bytes that one process keeps if it stores the square."""
    kept: int
    """Bytes that a rank of the ring keeps."""
    sent: float
    """Bytes that a rank of the ring sends."""
    contiguous: float
    """Seconds of the ring in this order, and in the next."""
    zigzag: float
    ulysses: float
    """Seconds of Ulysses."""


@dataclass(frozen=True)
class ContextResult:
    """A rank's."""

    pairs: dict[str, int]
    """Pairs of a query and a key that it has computed, by order."""
    lengths: list[AttentionCost]
    """One for each length of the settings."""
    ways: dict[str, Training]
    """Training by each way: a `ComparedTraining`, unless tokens are `ALONE`."""


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """Pairs per rank, in one order. The ring is as slow as the rank with most of them: all others
    are idle meanwhile."""

    order: str
    least: int
    most: int
    ratio: float
    """The most over the mean."""
    form: float
    """The closed form of `ratio`."""
    idle: float
    """Fraction of the ranks' time."""


def ring_forms(hidden: float, size: int) -> dict[str, float]:
    """Bytes that attention by a ring sends and keeps; `hidden` are those of all ranks' hidden
    tensor."""
    return {
        "sent": (6 * size - 4) / size * hidden * (size > 1),
        "kept": (4 + HEADS / WIDTH) * hidden / size,
    }


def closed_forms(way: str, settings: ContextSettings) -> dict[str, float]:
    """Bytes that a rank sends in a step, gradients included, and keeps: of attention, norms, MLPs
    and the loss."""
    hidden, size = 4 * settings.batch_size * LENGTH * WIDTH, settings.size
    ring = ring_forms(hidden, size)
    sent = {"ring": ring["sent"], "ulysses": 8 * (size - 1) / size**2 * hidden, ALONE: 0.0}[way]
    parameters = 4 * (
        2 * VOCABULARY * WIDTH + LENGTH * WIDTH + LAYERS * (12 * WIDTH**2 + 9 * WIDTH) + 2 * WIDTH
    )
    # there, attention's output is copied
    others = LAYERS * (13 if way == "ulysses" else 12) + 2 + VOCABULARY / WIDTH
    return {
        "sent": LAYERS * sent + times_sent(size, "all_reduce") * parameters,
        "kept": LAYERS * ring["kept"] + others * hidden / size,
    }


PAIRS = {"order": Column("order")} | figures(
    ("least", "least\non a rank"), ("most", "most\non a rank"), ("ratio", "most,\nover mean", "",
    ".2f"),
    ("form", "closed\nform", "", ".2f"), ("idle", "idle\nshare", "%", ".0f", 100),
)  # fmt: skip
COSTS = figures(
    ("length", "tokens", "", ","), ("square", "square,\nkept", "MB", ",.1f", 1e-6),
    ("kept", "ring,\nkept", "MB", ".2f", 1e-6), ("sent", "ring,\nsent", "MB", ".2f", 1e-6),
    *((name, name, "ms", ".1f", 1e3) for name in (*ORDERS, "ulysses")), ("ratio",
    "zigzag:\ncontiguous", "", ".2f"),
)  # fmt: skip
TRAINING = {"way": Column("way")} | figures(
    ("sent", "sent\na step", "MB", ".2f", 1e-6), ("kept", "kept", "MB", ".2f", 1e-6),
) | TRAINED  # fmt: skip


def pair_rows(ranks: Sequence[ContextResult], size: int) -> list[PairRow]:
    rows = []
    for order, form in (("contiguous", 2 - 1 / size), ("zigzag", 1.0)):
        counts = [rank.pairs[order] for rank in ranks]
        ratio = max(counts) / mean(counts)
        rows.append(
            PairRow(
                order=order,
                least=min(counts),
                most=max(counts),
                ratio=ratio,
                form=form,
                idle=1 - 1 / ratio,
            )
        )
    return rows


def check_all(
    ranks: Sequence[ContextResult], settings: ContextSettings, device: str = "cpu"
) -> None:
    """Raise `PlaygroundError` if a way is not one process's training, or a count is not that of its
    closed form."""
    for row in pair_rows(ranks, settings.size):
        check_counts(row.order, {"ratio": row.ratio}, {"ratio": row.form})
    for rank in ranks:
        for way, found in rank.ways.items():
            forms = closed_forms(way, settings)
            if isinstance(found, ComparedTraining):
                check(way, found, forms, device)
            else:
                check_counts(way, vars(found), forms, device)
        for cost in rank.lengths:
            hidden = 4 * cost.length * WIDTH
            square = (4 * HEADS + 1) * cost.length**2 + 3 * hidden
            forms = {**ring_forms(hidden, settings.size), "square": square}
            check_counts(f"{cost.length} tokens", vars(cost), forms, device)


@LESSON.run_by(flags(ContextSettings, "batch_size", "steps"))
def command(session: Session, **chosen: Any) -> None:
    world = session.world
    settings = ContextSettings(size=world.size, **chosen)
    world.warm_up(EXPERIMENT)
    model = (
        f"a GPT of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, {settings.batch_size} "
        f"sequences of {LENGTH}"
    )
    session.say(f"{LESSON.name}: {world}, {model}")
    ranks = session.launch(EXPERIMENT, settings)
    pairs = pair_rows(ranks, world.size)
    ways = ({"way": way, **vars(found)} for way, found in ranks[0].ways.items())
    lengths = ({**vars(cost), "ratio": cost.zigzag / cost.contiguous} for cost in ranks[0].lengths)
    about = f": one sequence, {HEADS} heads of {WIDTH // HEADS}, forward and backward"
    orders = f" of {LENGTH} tokens, by their order over the ranks"
    session.say("", prose(heading("causal pairs"), orders), tabulate(pairs, PAIRS))
    session.say("", prose(heading("attention alone"), about), tabulate(lengths, COSTS))
    session.say("", prose(heading("training"), f": {COMPARED}"), tabulate(ways, TRAINING))
    session.print_document({}, ranks=ranks, pairs=pairs)
    check_all(ranks, settings, world.device)
    longest = ranks[0].lengths[-1]
    shown = LESSON.conclude(
        world.size,
        idle=", ".join(f"{row.idle:.0%} ({row.order})" for row in pairs),
        length=longest.length, kept=longest.kept / 1e6, square=longest.square / 1e6,
        largest=max(
            found.largest for rank in ranks for found in rank.ways.values()
            if isinstance(found, ComparedTraining)
        ),
    )  # fmt: skip
    session.say("", prose("Shown: ", good(shown), "."))
