"""The command `context`: its settings, the closed forms beside what is counted, and its text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.lessons import LESSONS
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_flags, flag

LESSON = LESSONS["context"]
EXPERIMENT = LESSON.remote("run", "experiment")
ALONE = "alone"
WAYS = ("ring", "ulysses", ALONE)
ORDERS = {"contiguous": False, "zigzag": True}
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 96, 12, 48, 48
"""The size of the model."""
EXACT_STEPS, EXACT, CLOSE = 5, 1e-12, 0.05
"""Steps in float64, their largest difference from one process's, and the relative one of counts from closed forms."""
ROUNDS = 4
"""How often attention alone is timed: the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """Raises `UsageError` if heads or sequences cannot be cut over the ranks."""

    size: int
    """Number of ranks."""
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch; each rank has its part of all.", least=1)
    steps: int = flag(60, "Number of training steps, for each way.", least=1)
    lengths: tuple[int, ...] = (384, 768, 1536)
    """Lengths of the sequences for attention alone."""

    def __post_init__(self) -> None:
        check_flags(self)
        if HEADS % self.size:
            raise UsageError(f"{self.size} ranks for {HEADS} heads and {LENGTH} tokens: choose 1, 2, 3, 4, 6 or 12")


def ring_forms(hidden: float, size: int) -> Fields:
    """Bytes that attention by a ring sends and keeps; `hidden` are those of all ranks' hidden tensor."""
    return {"sent": (6 * size - 4) / size * hidden * (size > 1), "kept": (4 + HEADS / WIDTH) * hidden / size}


def closed_forms(way: str, settings: ContextSettings) -> Fields:
    """Bytes that a rank sends in a step, gradients included, and keeps: of attention, norms, MLPs and the loss."""
    hidden, size = 4 * settings.batch_size * LENGTH * WIDTH, settings.size
    ring = ring_forms(hidden, size)
    sent = {"ring": ring["sent"], "ulysses": 8 * (size - 1) / size**2 * hidden, ALONE: 0.0}[way]
    parameters = 4 * (2 * VOCABULARY * WIDTH + LENGTH * WIDTH + LAYERS * (12 * WIDTH**2 + 9 * WIDTH) + 2 * WIDTH)
    others = LAYERS * (13 if way == "ulysses" else 12) + 2 + VOCABULARY / WIDTH  # there, attention's output is copied
    return {
        "sent": LAYERS * sent + 2 * (size - 1) / size * parameters,
        "kept": LAYERS * ring["kept"] + others * hidden / size,
    }


PAIRS = {"order": Column("order")} | figures(
    ("least", "least\non a rank"), ("most", "most\non a rank"), ("ratio", "most,\nover mean", "", ".2f"),
    ("form", "closed\nform", "", ".2f"), ("idle", "idle\nshare", "%", ".0f", 100),
)  # fmt: skip
COSTS = figures(
    ("length", "tokens", "", ","), ("square", "square,\nkept", "MB", ",.1f", 1e-6),
    ("kept", "ring,\nkept", "MB", ".2f", 1e-6), ("sent", "ring,\nsent", "MB", ".2f", 1e-6),
    *((name, name, "ms", ".1f", 1e3) for name in (*ORDERS, "ulysses")), ("ratio", "zigzag:\ncontiguous", "", ".2f"),
)  # fmt: skip
TRAINING = {"way": Column("way")} | figures(
    ("sent", "sent\na step", "MB", ".2f", 1e-6), ("kept", "kept", "MB", ".2f", 1e-6),
    ("step_seconds", "step", "ms", ".1f", 1e3), ("first", "first\nloss", "", ".3f"), ("last", "last\nloss", "", ".3f"),
    ("losses_difference", "loss, from\none process", "", ".1e"),
    ("parameters_difference", "parameters, from\none process", "", ".1e"),
)  # fmt: skip


def pair_rows(ranks: Sequence[Fields], size: int) -> list[Fields]:
    """The ranks' numbers of pairs. The ring is as slow as the rank with most of them: all others are idle meanwhile."""
    rows = []
    for order, form in (("contiguous", 2 - 1 / size), ("zigzag", 1.0)):
        counts = [rank["pairs"][order] for rank in ranks]
        ratio = max(counts) / mean(counts)
        row = {"order": order, "least": min(counts), "most": max(counts), "ratio": ratio}
        rows.append({**row, "form": form, "idle": 1 - 1 / ratio})
    return rows


def check(ranks: Sequence[Fields], settings: ContextSettings, device: str = "cpu") -> None:
    """Raise `PlaygroundError` if a way is not one process's training, or a count is not that of its closed form."""
    counts = [(f"{row['order']}: most over mean", row["ratio"], row["form"]) for row in pair_rows(ranks, settings.size)]
    for rank in ranks:
        for way, found in rank["ways"].items():
            largest = max(found.get("losses_difference", 0), found.get("parameters_difference", 0))
            if not largest <= EXACT:
                raise PlaygroundError(
                    f"{way}: differs by {largest:.1e} from one process, more than rounding ({EXACT:.0e})"
                )
            counts += [(f"{way}: {key}", found[key], form) for key, form in closed_forms(way, settings).items()]
        for row in rank["lengths"]:
            hidden = 4 * row["length"] * WIDTH
            forms = ring_forms(hidden, settings.size) | {"square": (4 * HEADS + 1) * row["length"] ** 2 + 3 * hidden}
            counts += [(f"{row['length']} tokens: {key}", row[key], form) for key, form in forms.items()]
    for what, count, form in counts:
        if abs(count - form) > CLOSE * form and ("kept" not in what or device == "cpu"):  # elsewhere kernels decide
            raise PlaygroundError(f"{what}: counted {count:,.2f}, and the closed form is {form:,.2f}")


@LESSON.run_by(flags(ContextSettings, "batch_size", "steps"))
def command(session: Session, **chosen: Any) -> None:
    world = session.world
    settings = ContextSettings(size=world.size, seed=session.run.seed, **chosen)
    world.warm_up(EXPERIMENT)
    model = f"a GPT of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, {settings.batch_size} sequences of {LENGTH}"
    session.say(f"{LESSON.name}: {world}, {model}")
    ranks = session.launch(EXPERIMENT, settings)
    pairs, ways = pair_rows(ranks, world.size), [{"way": way, **found} for way, found in ranks[0]["ways"].items()]
    lengths = [{**row, "ratio": row["zigzag"] / row["contiguous"]} for row in ranks[0]["lengths"]]
    about = f": one sequence, {HEADS} heads of {WIDTH // HEADS}, forward and backward"
    session.say("", prose(heading("causal pairs"), f" of {LENGTH} tokens, by their order over the ranks"))
    session.say(tabulate(pairs, PAIRS), "", prose(heading("attention alone"), about), tabulate(lengths, COSTS), "")
    about = f": differences are those after {EXACT_STEPS} steps of AdamW in float64"
    session.say(prose(heading("training"), about), tabulate(ways, TRAINING))
    session.print_document({}, ranks=ranks, pairs=pairs)
    check(ranks, settings, world.device)
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), "."))
