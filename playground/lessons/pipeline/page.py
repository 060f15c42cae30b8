"""The command `pipeline`: the schedules by name, with the theory of each, settings, results and text. Does not import
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click

from playground.console import terminal
from playground.console.options import ALL, flags, select_names
from playground.console.session import Session
from playground.console.tables import GAP, RANK_COLUMN, Column, Table, Texts, numbers
from playground.console.text import good, heading, prose
from playground.console.training import RUN_TRAINING, announce_data
from playground.console.training_options import DataOptions, data_options
from playground.lessons import LESSONS
from playground.measurement import Fields, format_seconds
from playground.runtime import host
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_at_least_one, check_choice, check_flags, flag
from playground.runtime.remote import Remote


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule and what it promises, as functions and as papers write these: S is the number of stages, M that of
    microbatches, s the stage, 0 for the first."""

    name: str
    code: Remote
    """Called as `schedule(stage, microbatches)`, by every stage."""
    bubble_rule: str
    bubble: Callable[[int, int], float]
    """The share of the time for which stages idle, given S and M, if every forward takes equally long, every backward
    does, and messages take no time."""
    held_rule: str
    held: Callable[[int, int, int], int]
    """Microbatches whose activations a stage holds at most, given s, S and M."""


def pipelined_bubble(stages: int, microbatches: int) -> float:
    """The last stage waits S - 1 slots for its first microbatch, and all stages have M + S - 1 of them."""
    return (stages - 1) / (microbatches + stages - 1)


LESSON = LESSONS["pipeline"]
NAIVE, GPIPE, ONE_FORWARD_ONE_BACKWARD = map(LESSON.remote, ("naive", "gpipe", "one_forward_one_backward"))
EXPERIMENT = LESSON.remote("run", "experiment")
PIPELINED = ("(S-1)/(M+S-1)", pipelined_bubble)
SCHEDULES = {
    spec.name: spec
    for spec in (
        ScheduleSpec("naive", NAIVE, "(S-1)/S", lambda n, m: (n - 1) / n, "1", lambda s, n, m: 1),
        ScheduleSpec("gpipe", GPIPE, *PIPELINED, "M", lambda s, n, m: m),
        ScheduleSpec("1f1b", ONE_FORWARD_ONE_BACKWARD, *PIPELINED, "min(M, S-s)", lambda s, n, m: min(m, n - s)),
    )
}
"""By name; n is S, and m is M."""
BLOCKS = 24
"""Equal blocks that the model is made of, so that it can be cut into equal stages."""
WIDTH = 28 * 28
"""Features that each block takes and gives: an image's pixels."""
WARM_UP = 1
"""Training steps that are not timed: the first one opens connections and fetches memory."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Raises `UsageError` for a grid, stages or microbatches that do not fit."""

    size: int
    """Number of ranks: stages x replicas."""
    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """Their kind: mnist or digits."""
    limit: int | None = None
    """Number of samples to train on, the first; None for all."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names of `SCHEDULES`, in the order of running."""
    microbatches: int = flag(
        8, "Number of microbatches that each replica's part of a batch is cut into.", least=1, metavar="M"
    )
    data_parallel: int = flag(1, "Number of replicas of the pipeline: -n is stages x D.", least=1, metavar="D")
    batch_size: int = flag(512, "Global batch size: samples per step, over all replicas.", least=1)
    steps: int = flag(5, "Number of training steps that are timed, with each schedule.", least=1)
    lr: float = 0.02
    momentum: float = 0.9
    seed: int = 1234

    def __post_init__(self) -> None:
        check_at_least_one(self, "size")
        check_flags(self)
        for name in self.schedules:
            check_choice("schedule", name, SCHEDULES)
        replicas, multiple = self.data_parallel, f"choose a multiple of {self.data_parallel}"
        if self.size % replicas:
            grid = "a grid has stages x replicas ranks"
            raise UsageError(f"--data-parallel {replicas} on {self.size} ranks: {grid}, so {multiple} as -n")
        if BLOCKS % self.stages:
            raise UsageError(
                f"{self.stages} stages: the model's {BLOCKS} equal blocks can be cut into {either_divisor(BLOCKS)} "
                f"equal stages, so choose one of these, times --data-parallel, as -n"
            )
        if self.batch_size % replicas:
            asked = f"--batch-size {self.batch_size} for {replicas} replicas"
            raise UsageError(f"{asked}: each gets an equal part, so {multiple}")
        part = self.batch_size // replicas
        if part % self.microbatches:
            of = f"a replica's {part} of the {self.batch_size} samples" if replicas > 1 else f"{part} samples"
            raise UsageError(
                f"--microbatches {self.microbatches}: microbatches are equal, and {of} in a batch make "
                f"{either_divisor(part)} of them: choose one of these, or another --batch-size"
            )

    @property
    def stages(self) -> int:
        return self.size // self.data_parallel

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.batch_size // self.data_parallel // self.microbatches

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(f"--batch-size {self.batch_size}: there are {samples} samples to train on, choose no more")

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: everything but the folder, which is each host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def either_divisor(number: int) -> str:
    """The divisors of a number, in words: 1, 2 or 4."""
    *others, last = (str(each) for each in range(1, number + 1) if number % each == 0)
    return f"{', '.join(others)} or {last}" if others else last


EXACT = 1e-12
"""How far gradients in float64 may be from one process's: rounding, for microbatches are added up in another order."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A forward or a backward of one microbatch in one stage. Times are seconds on a clock that all ranks share."""

    kind: str
    """F or B."""
    microbatch: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """Measurements of one schedule on one rank."""

    gradient_difference: float
    """The largest difference of any gradient from one process's, in float64."""
    held: int
    """Microbatches whose activations it held at once, at most."""
    held_bytes: int
    """Bytes that autograd saved for them, in float32, without parameters."""
    losses: list[float]
    """Losses of this replica's part of the batch, step by step, on the last stage; empty on the others."""
    steps: list[list[Slot]]
    """Forwards and backwards of the steps that are timed, in order."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRun:
    """Measurements of one schedule on all ranks."""

    spec: ScheduleSpec
    ranks: Sequence[StageRun]
    """Replica by replica, and within each stage by stage."""
    typical: list[list[Slot]]
    """The slots of every rank in the step whose bubble is the median."""
    summary: Fields
    """As JSON shows it. Of what is held, a number for each stage, in the replica that held most; losses are those of
    the whole batch, step by step."""

    def check(self) -> None:
        """Raise `PlaygroundError` if gradients are not one process's, or more is held than the schedule promises."""
        if not (found := self.summary["gradient_difference"]) <= EXACT:
            differ = f"gradients differ from one process's by {found:.1e}, more than rounding ({EXACT:.0e})"
            raise PlaygroundError(f"{self.spec.name}: {differ}: this must not be")
        pairs = zip(self.summary["held"], self.summary["expected_held"], strict=True)
        for stage, (held, expected) in enumerate(pairs):
            if held != expected:
                what = f"stage {stage} held {held} microbatches, and {self.spec.held_rule} is {expected}"
                raise PlaygroundError(f"{self.spec.name}: {what}: this must not be")


def span(step: Sequence[Sequence[Slot]]) -> float:
    """Seconds from the first start to the last end, on any rank."""
    slots = [slot for rank in step for slot in rank]
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)


def bubble(step: Sequence[Sequence[Slot]]) -> float:
    """The share of the ranks' time in which they neither computed a forward nor a backward."""
    busy = sum(slot.seconds for rank in step for slot in rank)
    return 1 - busy / (len(step) * span(step))


def collect(by_rank: Sequence[Sequence[StageRun]], settings: PipelineSettings) -> list[ScheduleRun]:
    """The results of all ranks, schedule by schedule."""
    specs = (SCHEDULES[name] for name in settings.schedules)
    return [summarize(spec, ranks, settings) for spec, ranks in zip(specs, zip(*by_rank, strict=True), strict=True)]


def summarize(spec: ScheduleSpec, ranks: Sequence[StageRun], settings: PipelineSettings) -> ScheduleRun:
    stages, microbatches = settings.stages, settings.microbatches
    steps = [list(step) for step in zip(*(rank.steps for rank in ranks), strict=True)]
    typical = sorted(steps, key=bubble)[len(steps) // 2]
    replicas = [ranks[stage::stages] for stage in range(stages)]
    losses = zip(*(rank.losses for rank in ranks if rank.losses), strict=True)
    summary = {
        "bubble": bubble(typical),
        "expected_bubble": spec.bubble(stages, microbatches),
        "gradient_difference": max(rank.gradient_difference for rank in ranks),
        "losses": [mean(parts) for parts in losses],
        "step_seconds": span(typical),
        "held": [max(rank.held for rank in each) for each in replicas],
        "expected_held": [spec.held(stage, stages, microbatches) for stage in range(stages)],
        "held_bytes": [max(rank.held_bytes for rank in each) for each in replicas],
    }
    return ScheduleRun(spec=spec, ranks=ranks, typical=typical, summary=summary)


FILL = {"F": "-", "B": "="}
"""Filler after the name of a forward or backward."""
IDLE = "."


def draw(step: Sequence[Sequence[Slot]], width: int) -> list[str]:
    """A line of `width` characters for each rank, all on one scale: F0-- and B0== are the forward and the backward of
    microbatch 0, dots are idle time. What takes less than a character may not be seen."""
    first, scale = min(slot.start for rank in step for slot in rank), width / span(step)
    lines = []
    for rank in step:
        line = IDLE * width
        for slot in rank:
            start, end = (round((time - first) * scale) for time in (slot.start, slot.end))
            line = line[:start] + label(slot, end - start) + line[end:]
        lines.append(line)
    return lines


def label(slot: Slot, length: int) -> str:
    """The name of a slot, or of its kind where that does not fit, as long as the slot is."""
    name = f"{slot.kind}{slot.microbatch}"
    return (name if len(name) <= length else slot.kind).ljust(length, FILL[slot.kind])[:length]


def model_text(settings: PipelineSettings) -> str:
    """The model, and how it is cut."""
    each = BLOCKS // settings.stages
    replicas = f" on each of {settings.data_parallel} replicas" if settings.data_parallel > 1 else ""
    return (
        f"model: {BLOCKS} equal blocks (linear {WIDTH} x {WIDTH}, ReLU), {each} in each of {settings.stages} "
        f"stage{'s' * (settings.stages > 1)}; batches of {settings.batch_size} samples, in {settings.microbatches} "
        f"microbatches of {settings.microbatch_size}{replicas}"
    )


def crowded_text(ranks: int, cores: int) -> str:
    """Why bubbles do not show where ranks share cores."""
    return (
        f"{ranks} ranks share {cores} core{'s' * (cores > 1)}: while one stage waits, another uses its core, so the "
        f"bubble that is measured says little; gradients, activations and losses hold all the same"
    )


def timeline_texts(run: ScheduleRun, stages: int, width: int) -> Texts:
    """One step, a row for each rank. `width`: characters that the text may take."""
    several = len(run.ranks) > stages
    columns = [RANK_COLUMN, Column("stage", right=True)][: 1 + several]
    taken = sum(GAP + len(column.heading) for column in columns) + GAP
    about = f"one step of {format_seconds(span(run.typical))}: F forward, B backward, . idle"
    table = Table(*columns, Column(about))
    for rank, line in enumerate(draw(run.typical, max(len(about), width - taken))):
        table.add(*[str(rank), str(rank % stages)][: 1 + several], line)
    return [prose(heading(run.spec.name), f": {run.spec.code.summary}"), table]


def held_texts(runs: Sequence[ScheduleRun]) -> Texts:
    """Microbatches held by every stage with each schedule, against the rule."""
    table = Table(*numbers("stage", *(f"{run.spec.name}\n{run.spec.held_rule}" for run in runs)))
    held = [zip(run.summary["held"], run.summary["held_bytes"], strict=True) for run in runs]
    for stage, row in enumerate(zip(*held, strict=True)):
        table.add(str(stage), *(f"{microbatches} = {nbytes / 2**20:.3g} MiB" for microbatches, nbytes in row))
    return [prose(heading("activations"), ": microbatches held at once, at most, and what they take"), table]


def cost_texts(runs: Sequence[ScheduleRun]) -> Texts:
    """All schedules side by side."""
    times = ("bubble", "%"), ("formula", "%"), ("step", "ms")
    table = Table("schedule", *numbers(*times, "first\nloss", "last\nloss", "difference from\none process"))
    for run in runs:
        found = run.summary
        bubbles = f"{100 * found['bubble']:.1f}", f"{100 * found['expected_bubble']:.1f}"
        losses = f"{found['losses'][0]:.4f}", f"{found['losses'][-1]:.4f}"
        figures = *bubbles, f"{found['step_seconds'] * 1000:.1f}", *losses, f"{found['gradient_difference']:.1e}"
        table.add(run.spec.name, *figures)
    rules = ", ".join(f"{run.spec.name} {run.spec.bubble_rule}" for run in runs)
    about = (
        f"bubble is the share of the time in which ranks idle, in the step that is the median; the formulas are "
        f"{rules}. Difference is the largest of any gradient, in float64"
    )
    return [prose(heading("cost"), f": {about}"), table]


def same_losses_text(runs: Sequence[ScheduleRun]) -> str:
    """The conclusion from the losses."""
    losses = [run.summary["losses"] for run in runs]
    steps = len(losses[0])
    if all(each == losses[0] for each in losses):
        return f"the losses of all {steps} steps have the same bits in every schedule"
    return f"the losses of {steps} steps differ by rounding"


ORDERS, ABOUT_ORDERS = click.Choice([*SCHEDULES, ALL]), "The order in which stages work."


@LESSON.run_by(
    click.option("--schedule", type=ORDERS, default=ALL, show_default=True, help=ABOUT_ORDERS),
    flags(PipelineSettings),
    data_options,
)
def command(session: Session, data: DataOptions, schedule: str, **chosen: Any) -> None:
    world = session.world
    chosen |= {"limit": data.limit, "seed": session.run.seed, "schedules": select_names(SCHEDULES, (schedule,))}
    asked = PipelineSettings(size=world.size, folder=data.folder, **chosen)
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    prepared, settings = announce_data(session, data, asked, model_text(asked))
    if (crowd := world.local_size) > host.cores() and world.device == "cpu":
        session.say(crowded_text(crowd, host.cores()))
    by_rank: list[list[StageRun]] = session.launch(RUN_TRAINING, EXPERIMENT, settings)
    runs = collect(by_rank, settings)
    for each in runs:
        session.say("", *timeline_texts(each, settings.stages, terminal.width()))
    session.say("", *held_texts(runs), "", *cost_texts(runs))
    grid = {name: getattr(settings, name) for name in ("stages", "microbatches", "data_parallel")}
    summaries = {each.spec.name: each.summary for each in runs}
    ranks = {each.spec.name: each.ranks for each in runs}
    session.print_document(ranks, dataset=prepared.summary, **grid, schedules=summaries)
    for each in runs:
        each.check()
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), f"; {same_losses_text(runs)}."))
