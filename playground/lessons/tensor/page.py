"""The command `tensor`: its settings, the closed forms beside what is counted, and its text. Does
not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from playground.algorithms.cost_model import times_sent
from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import COMPARED, TRAINED, over_links
from playground.lessons import LESSONS
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag, like
from playground.training.gpt_config import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH
from playground.training.one_process import ComparedTraining, check
from playground.training.settings import TrainingSettings

LESSON = LESSONS["tensor"]
EXPERIMENT = LESSON.remote("run", "experiment")
WAYS = {
    "tensor": "matrices are sharded, tokens are not: two all_reduces forward and two backward for "
    "each block",
    "sequence": "and so are tokens, outside of them: a reduce_scatter and an all_gather in place "
    "of each all_reduce",
}


@dataclass(frozen=True, kw_only=True)
class TensorSettings:
    """Raises `UsageError` if the model cannot be sharded over the ranks."""

    size: int
    """Number of ranks."""
    ways: tuple[str, ...] = flag(tuple(WAYS), "What is sharded", name="--way", choices=WAYS)
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch, which all ranks work on.", least=1)
    steps: int = flag(70, "Number of training steps, for each way.", least=1)
    link: float = like(TrainingSettings, "link")

    def __post_init__(self) -> None:
        check_flags(self)
        if HEADS % self.size:
            raise UsageError(
                f"{self.size} ranks for {HEADS} heads: each gets as many, so choose 1, 2, 3, 4, 6 "
                "or 12"
            )


@dataclass(frozen=True, kw_only=True)
class TensorTraining(ComparedTraining):
    """A rank's training by one way."""

    parameters: int
    """Bytes of this rank's."""


def closed_forms(way: str, settings: TensorSettings) -> dict[str, float]:
    """The counts of a rank in a step, bytes of float32. Activations: of matrices, attention, GELU,
    norms and loss."""
    size, layers, tokens = settings.size, LAYERS, settings.batch_size * LENGTH
    hidden, ring = 4 * tokens * WIDTH, times_sent(size, "all_reduce")
    replicated = 4 * (LENGTH * WIDTH + (6 * layers + 2) * WIDTH)
    sharded = 4 * (2 * VOCABULARY * WIDTH + layers * (12 * WIDTH**2 + 4 * WIDTH))
    entered = (2 * layers + 1) * hidden
    between = (12 * layers * hidden + 2 * 4 * tokens * VOCABULARY) / size
    sequence = way == "sequence"
    return {
        "parameters": replicated + sharded / size,
        "kept": entered + (entered / size if sequence else entered) + between,
        "messages": 8 * layers + 8 if sequence else 4 * layers + 5,
        "sent": ring * ((4 * layers + 2) * hidden + 3 * 4 * tokens + replicated * sequence),
    }


QUANTITIES = {
    "parameters": "parameters, bytes",
    "kept": "kept for backward, bytes",
    "messages": "collectives in a step",
    "sent": "sent in a step, bytes",
}
NUMBER = ("", ",.0f")
COUNTS = {"what": Column("on each rank")} | figures(
    ("counted", "counted", *NUMBER), ("form", "closed form", *NUMBER)
)
COSTS = {"way": Column("way")} | TRAINED


@LESSON.run_by(flags(TensorSettings, "ways", "batch_size", "steps", "link"))
def command(session: Session, **chosen: Any) -> None:
    world = session.world
    settings = TensorSettings(size=world.size, **chosen)
    world.warm_up(EXPERIMENT)
    links = over_links(session, settings.link)
    model = f"a GPT of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, sequences of {LENGTH}"
    session.say(f"{LESSON.name}: {world}, {model}, {settings.batch_size} in a batch{links}")
    found = dict(
        zip(settings.ways, zip(*session.launch(EXPERIMENT, settings), strict=True), strict=True)
    )
    forms = {name: closed_forms(name, settings) for name in settings.ways}
    for name, (first, *_) in found.items():
        rows = (
            {"what": QUANTITIES[key], "counted": float(getattr(first, key)), "form": form}
            for key, form in forms[name].items()
        )
        session.say("", prose(heading(name), f": {WAYS[name]}"), tabulate(rows, COUNTS))
    if world.device == "cpu":  # elsewhere the kernel of attention decides
        more = max(ranks[0].kept / forms[name]["kept"] - 1 for name, ranks in found.items())
        session.say(
            "",
            f"Kept beyond the closed form, {more:.1%} at most: a few numbers for each token, as "
            "the means of LayerNorm, the log-sum-exp of attention, indices.",
        )
    rows = ({"way": name, **vars(ranks[0])} for name, ranks in found.items())
    session.say(
        "", prose(heading("training"), f": a copied sequence; {COMPARED}"), tabulate(rows, COSTS)
    )
    session.print_document(found, closed_forms=forms)
    for name, ranks in found.items():
        for rank in ranks:
            check(name, rank, forms[name], world.device)
    first = {name: ranks[0] for name, ranks in found.items()}
    whole = closed_forms("tensor", replace(settings, size=1))["parameters"]
    shown = LESSON.conclude(
        world.size,
        share=max(each.parameters for each in first.values()) / whole,
        sent=" or ".join(f"{each.sent:,.0f} ({name})" for name, each in first.items()),
        largest=max(each.largest for each in first.values()),
    )
    session.say("", prose("Shown: ", good(shown), "."))
