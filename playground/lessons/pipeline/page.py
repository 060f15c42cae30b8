"""The command `pipeline`: the schedules by name, with the theory of each, settings, results and
text. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, figures, numbers, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import RUN_TRAINING, DataOptions, announce_data, data_options
from playground.console.units import plural
from playground.lessons import LESSONS
from playground.runtime import host
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_at_least_one, flag
from playground.runtime.remote import Remote
from playground.training.settings import TrainingSettings


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule and what it promises, as functions and as papers write these: S is the number of
    stages, M that of microbatches, s the stage, 0 for the first."""

    code: Remote
    """Called as `schedule(stage, microbatches)`, by every stage."""
    bubble_rule: str
    bubble: Callable[[int, int], float]
    """The share of the time for which stages idle, given S and M, if every forward takes equally
    long, every backward does, and messages take no time."""
    held_rule: str
    held: Callable[[int, int, int], int]
    """Microbatches whose activations a stage holds at most, given s, S and M."""


LESSON = LESSONS["pipeline"]
NAIVE, GPIPE, ONE_FORWARD_ONE_BACKWARD = map(
    LESSON.remote, ("naive", "gpipe", "one_forward_one_backward")
)
EXPERIMENT = LESSON.remote("run", "experiment")
PIPELINED = ("(S-1)/(M+S-1)", lambda n, m: (n - 1) / (m + n - 1))
"""The last stage waits S - 1 of M + S - 1 slots for its first microbatch."""
SCHEDULES = {
    "naive": ScheduleSpec(NAIVE, "(S-1)/S", lambda n, m: (n - 1) / n, "1", lambda s, n, m: 1),
    "gpipe": ScheduleSpec(GPIPE, *PIPELINED, "M", lambda s, n, m: m),
    "1f1b": ScheduleSpec(
        ONE_FORWARD_ONE_BACKWARD, *PIPELINED, "min(M, S-s)", lambda s, n, m: min(m, n - s)
    ),
}
"""By name; n is S, and m is M."""
BLOCKS = 24
"""Equal blocks that the model is made of, so that it can be cut into equal stages."""
WIDTH = 28 * 28
"""Features that each block takes and gives: an image's pixels."""
WARM_UP = 1
"""Training steps that are not timed: the first one opens connections and fetches memory."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. Raises `UsageError` for stages
    or microbatches that do not fit."""

    size: int
    """Number of ranks, each with a stage."""
    schedules: tuple[str, ...] = flag(
        tuple(SCHEDULES),
        "The order in which stages work",
        name="--schedule",
        choices=SCHEDULES,
    )
    """Names of `SCHEDULES`, in the order of running."""
    microbatches: int = flag(
        8, "Number of microbatches that a batch is cut into.", least=1, metavar="M"
    )
    batch_size: int = flag(512, "Batch size: samples per step.", least=1)
    steps: int = flag(5, "Number of training steps that are timed, with each schedule.", least=1)
    lr: float = 0.02
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "size")
        if BLOCKS % self.size:
            equal = (
                f"the model's {BLOCKS} blocks are cut into equal stages, so choose a divisor "
                f"of {BLOCKS} as -n"
            )
            raise UsageError(f"{self.size} stages: {equal}")
        if self.batch_size % self.microbatches:
            equal = (
                f"microbatches are equal, so choose a multiple of {self.microbatches}, which "
                "is --microbatches"
            )
            raise UsageError(f"--batch-size {self.batch_size}: {equal}")


EXACT = 1e-12
"""How far gradients in float64 may be from one process's: rounding, for microbatches are added up
in another order."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A forward or backward of one microbatch on one stage, without its messages."""

    kind: str
    """F for a forward, B for a backward."""
    microbatch: int
    start: float
    """Time in seconds since 1970, as is `end`."""
    end: float


Step = Sequence[Sequence[Slot]]
"""The slots of a training step, by rank, each rank's in order."""


@dataclass(frozen=True)
class StageResult:
    """The training of one stage by one schedule."""

    gradient_difference: float
    """The largest difference of any gradient from one process's, in float64."""
    held: int
    """Microbatches whose activations it held at once, at most."""
    held_bytes: int
    """Bytes that autograd saved for them, in float32, without parameters."""
    losses: list[float]
    """Those of the whole batch, by step; empty but on the last stage."""
    steps: list[list[Slot]]
    """The slots of each step that was timed."""


@dataclass(frozen=True)
class ScheduleResult:
    """The training of all stages by one schedule. Of what is held, a number for each stage."""

    bubble: float
    """Fraction of the ranks' time, in the step for which it is the median."""
    expected_bubble: float
    gradient_difference: float
    losses: list[float]
    step_seconds: float
    """Seconds of the same step."""
    held: list[int]
    expected_held: list[int]
    held_bytes: list[int]


def span(step: Step) -> float:
    """Seconds from the first start to the last end, on any rank."""
    slots = [slot for rank in step for slot in rank]
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)


def bubble(step: Step) -> float:
    """The share of the ranks' time in which they neither computed a forward nor a backward."""
    busy = sum(slot.end - slot.start for rank in step for slot in rank)
    return 1 - busy / (len(step) * span(step))


def typical_step(ranks: Sequence[StageResult]) -> Step:
    """The step whose bubble is the median."""
    steps = sorted(zip(*(rank.steps for rank in ranks), strict=True), key=bubble)
    return steps[len(steps) // 2]


def summarize(
    name: str, ranks: Sequence[StageResult], settings: PipelineSettings
) -> ScheduleResult:
    """The figures of a schedule over all ranks."""
    spec = SCHEDULES[name]
    stages = settings.size
    microbatches = settings.microbatches
    step = typical_step(ranks)
    return ScheduleResult(
        bubble=bubble(step),
        expected_bubble=spec.bubble(stages, microbatches),
        gradient_difference=max(rank.gradient_difference for rank in ranks),
        losses=ranks[-1].losses,
        step_seconds=span(step),
        held=[rank.held for rank in ranks],
        expected_held=[spec.held(stage, stages, microbatches) for stage in range(stages)],
        held_bytes=[rank.held_bytes for rank in ranks],
    )


def check(name: str, found: ScheduleResult) -> None:
    """Raise `PlaygroundError` if gradients are not one process's, or more is held than the schedule
    promises."""
    if not found.gradient_difference <= EXACT:
        raise PlaygroundError(
            f"{name}: gradients differ from one process's by {found.gradient_difference:.1e}, "
            f"more than rounding ({EXACT:.0e}): this must not be"
        )
    for stage, (held, expected) in enumerate(zip(found.held, found.expected_held, strict=True)):
        if held != expected:
            raise PlaygroundError(
                f"{name}: stage {stage} held {held} microbatches, and "
                f"{SCHEDULES[name].held_rule} is {expected}: this must not be"
            )


def model_text(settings: PipelineSettings) -> str:
    return (
        f"model: {BLOCKS} equal blocks (linear {WIDTH} x {WIDTH}, ReLU), "
        f"{BLOCKS // settings.size} in each of {plural(settings.size, 'stage')}; "
        f"batches of {settings.batch_size} samples, in {settings.microbatches} microbatches of "
        f"{settings.batch_size // settings.microbatches}"
    )


def held_texts(found: Mapping[str, ScheduleResult]) -> Texts:
    table = Table(*numbers("stage", *(f"{name}\n{SCHEDULES[name].held_rule}" for name in found)))
    held = [zip(each.held, each.held_bytes, strict=True) for each in found.values()]
    for stage, row in enumerate(zip(*held, strict=True)):
        table.add(
            str(stage),
            *(f"{microbatches} = {nbytes / 2**20:.3g} MiB" for microbatches, nbytes in row),
        )
    return [
        prose(heading("activations"), ": microbatches held at once, at most, and what they take"),
        table,
    ]


COSTS = {"schedule": Column("schedule")} | figures(
    ("bubble", "bubble", "%", ".1f", 100),
    ("expected_bubble", "formula", "%", ".1f", 100),
    ("step_seconds", "step", "ms", ".1f", 1000),
    ("first", "first\nloss", "", ".4f"),
    ("last", "last\nloss", "", ".4f"),
    ("gradient_difference", "difference from\none process", "", ".1e"),
)


def cost_texts(found: Mapping[str, ScheduleResult]) -> Texts:
    rows = (
        {"schedule": name, **vars(each), "first": each.losses[0], "last": each.losses[-1]}
        for name, each in found.items()
    )
    rules = ", ".join(f"{name} {SCHEDULES[name].bubble_rule}" for name in found)
    about = (
        "bubble is the share of the time in which ranks idle, in the step that is the median; "
        f"the formulas are {rules}. Difference is the largest of any gradient, in float64"
    )
    return [prose(heading("cost"), f": {about}"), tabulate(rows, COSTS)]


@LESSON.run_by(
    flags(PipelineSettings, "schedules", "microbatches", "batch_size", "steps"),
    data_options("dataset"),
)
def command(session: Session, data: DataOptions, **chosen: Any) -> None:
    world = session.world
    asked = PipelineSettings(size=world.size, folder=data.folder, **chosen)
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    prepared, settings = announce_data(session, data, asked, model_text(asked))
    if world.local_size > (cores := host.cores()) and world.device == "cpu":
        session.say(
            f"{world.local_size} ranks share {plural(cores, 'core')}: while one stage "
            "waits, another uses its core, so the bubble that is measured says little; gradients, "
            "activations and losses hold all the same"
        )
    by_rank = session.launch(RUN_TRAINING, EXPERIMENT, settings)
    ranks = dict(zip(settings.schedules, zip(*by_rank, strict=True), strict=True))
    found = {name: summarize(name, each, settings) for name, each in ranks.items()}
    session.say("", *held_texts(found), "", *cost_texts(found))
    about = {"stages": world.size, "microbatches": settings.microbatches, "schedules": found}
    session.print_document(ranks, dataset=prepared.summary, **about)
    for name, result in found.items():
        check(name, result)
    idle = ", ".join(f"{each.bubble:.0%} ({name})" for name, each in found.items())
    largest = max(each.gradient_difference for each in found.values())
    shown = LESSON.conclude(world.size, idle=idle, largest=largest)
    session.say("", prose("Shown: ", good(shown), "."))
