"""The command `experts`: its settings, the closed forms beside what is counted, and its text. Does
not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playground.algorithms.cost_model import times_sent
from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import COMPARED, TRAINED
from playground.lessons import LESSONS
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag
from playground.training.gpt_config import LAYERS, LENGTH, VOCABULARY, WIDTH
from playground.training.one_process import ComparedTraining, check

LESSON = LESSONS["experts"]
EXPERIMENT = LESSON.remote("run", "experiment")
WAYS = {"free": 0.0, "balanced": 0.02}
"""The weight of the balance loss."""
EXPERTS, K = 8, 2
"""The number of experts of a block, and how many of them see a token."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSettings:
    """Raises `UsageError` if a rank would have no experts, or other ranks more sequences."""

    size: int
    """Number of ranks."""
    ways: tuple[str, ...] = flag(
        tuple(WAYS), "Ways to train, free without balance loss", name="--way", choices=WAYS
    )
    seed: int = 1234
    batch_size: int = flag(24, "Sequences in a batch, of which each rank has as many.", least=1)
    steps: int = flag(70, "Number of training steps, for each way.", least=1)
    capacity: float = flag(
        0.0,
        "Tokens that a rank may send to an expert, as a multiple of the mean; 0: any number.",
        least=0.0,
    )

    def __post_init__(self) -> None:
        check_flags(self)
        if self.size > EXPERTS:
            raise UsageError(
                f"{self.size} ranks for {EXPERTS} experts: each needs one, so choose at most "
                f"{EXPERTS}"
            )
        if self.batch_size % self.size:
            raise UsageError(
                f"{self.batch_size} sequences on {self.size} ranks: --batch-size must be a "
                "multiple of -n"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsTraining(ComparedTraining):
    """A rank's training by one way. Token assignments are those of the last step, in all blocks."""

    dropped: int
    """Those of this rank's tokens beyond an expert's capacity."""
    sent_tokens: int
    """Those that this rank sent to other ranks."""
    received_tokens: int
    computed: int
    """Those that this rank's experts computed."""
    most_over_mean: float
    """The fullest expert's number over the mean, before capacity; the mean over blocks."""
    after_capacity: list[list[list[int]]]
    """Tokens [blocks, ranks, experts]."""

    def sent_by(self, settings: ExpertsSettings) -> float:
        """The closed form of the bytes of float32 that this rank sends."""
        return 2 * 4 * WIDTH * (self.sent_tokens + self.received_tokens) + sent_besides(settings)


def sent_besides(settings: ExpertsSettings) -> float:
    """Bytes that a rank sends in a step, beside tokens: gradients, the loss, and tables of
    int64."""
    size = settings.size
    shared = 4 * (WIDTH * (2 * VOCABULARY + LENGTH + 2 + LAYERS * (4 * WIDTH + 5 + EXPERTS)) + 1)
    return times_sent(size, "all_reduce") * shared + LAYERS * 8 * EXPERTS * (size - 1)


def sent_if_balanced(settings: ExpertsSettings) -> float:
    """Bytes that a rank sends in a step, had each expert got as many tokens."""
    size, per_rank = settings.size, 4 * settings.batch_size * LENGTH * WIDTH / settings.size
    return LAYERS * 4 * K * per_rank * (size - 1) / size + sent_besides(settings)


@dataclass(frozen=True, kw_only=True)
class ExpertsRow(ExpertsTraining):
    """A rank's training by one way, and the closed forms of the bytes `sent`."""

    way: str
    rank: int
    form: float
    if_balanced: float
    """Had each expert got as many tokens."""


def check_rank(way: str, found: ExpertsTraining, settings: ExpertsSettings) -> None:
    """Raise `PlaygroundError` as `check` does."""
    check(way, found, {"messages": 5 * LAYERS + 2, "sent": found.sent_by(settings)})


NUMBER = ("", ",.0f")
ASSIGNMENTS = {"way": Column("way"), "rank": RANK_COLUMN} | figures(
    ("sent_tokens", "sent\naway", *NUMBER),
    ("computed", "computed\nhere", *NUMBER),
    ("dropped", "dropped", *NUMBER),
    ("sent", "bytes\nsent", *NUMBER),
    ("form", "closed\nform", *NUMBER),
    ("if_balanced", "if\nbalanced", *NUMBER),
)
COSTS = {"way": Column("way")} | TRAINED | figures(("most_over_mean", "fullest\n/ mean", "", ".2f"))


@LESSON.run_by(flags(ExpertsSettings))
def command(session: Session, **chosen: Any) -> None:
    world = session.world
    settings = ExpertsSettings(size=world.size, seed=session.run.seed, **chosen)
    world.warm_up(EXPERIMENT)
    limit = (
        f", at most {settings.capacity:g} times the mean to one of them"
        if settings.capacity
        else ""
    )
    model = (
        f"a GPT of {LAYERS} blocks, width {WIDTH}, sequences of {LENGTH}, "
        f"{settings.batch_size} in a batch"
    )
    session.say(
        f"{LESSON.name}: {world}, {model}, {EXPERTS} experts for a block, {K} for a token{limit}"
    )
    found = dict(
        zip(settings.ways, zip(*session.launch(EXPERIMENT, settings), strict=True), strict=True)
    )
    rows = [
        ExpertsRow(
            **vars(counted),
            way=name,
            rank=rank,
            form=counted.sent_by(settings),
            if_balanced=sent_if_balanced(settings),
        )
        for name, ranks in found.items()
        for rank, counted in enumerate(ranks)
    ]
    own = f"{K * settings.batch_size * LENGTH * LAYERS // world.size:,}"
    about = f": in step {settings.steps}; each rank has {own}, {K} for each token and block"
    session.say("", prose(heading("token assignments"), about), tabulate(rows, ASSIGNMENTS))
    costs = ({"way": name, **vars(ranks[0])} for name, ranks in found.items())
    session.say(
        "", prose(heading("training"), f": a copied sequence; {COMPARED}"), tabulate(costs, COSTS)
    )
    session.print_document(found, rows=rows)
    for name, ranks in found.items():
        for rank in ranks:
            check_rank(name, rank, settings)
    first = {name: ranks[0] for name, ranks in found.items()}
    fullest = (f"{each.most_over_mean:.2f} ({name})" for name, each in first.items())
    largest = max(each.largest for each in first.values())
    shown = LESSON.conclude(world.size, fullest=" or ".join(fullest), largest=largest)
    session.say("", prose("Shown: ", good(shown), "."))
