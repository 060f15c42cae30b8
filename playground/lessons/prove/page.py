"""The page of `prove`: settings, results, what they mean, and how it is told. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from playground.console.options import Finite, RunOptions, flags, run_options
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.tables import Column, Table
from playground.console.text import Prose, good, heading, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import flag, like
from playground.training.partition import share
from playground.training.settings import TrainingSettings

LESSON = LESSONS["prove"]
EXPERIMENT = LESSON.remote("experiment")
BUCKET_CAP_MB = 0.01
"""Capacity of a bucket in MiB, so small that `Net` has several, whose gradients are then added up in another order than
without buckets."""
RECIPE = ("seed", "batch_size", "lr", "momentum", "all_reduce", "limit", "bucket_cap")
"""The settings that the figures depend on, beside the data and the number of steps."""
EXACT = 1e-12
"""How far float64 may be from one process after any step, and float32, in as many epsilons, after the first.

Later, float32 may be further away, and nothing is wrong: of two numbers that differ by rounding, a max-pool may choose
the other one, and gradients jump. (For float64 they must be 2^29 times as close. So float64 is the one that proves.)
"""
EPSILON = 2.0**-52
"""Epsilon of float64."""
UNEXPLAINED = 1e-6
"""Fraction of a break that its explanation may leave open."""
JUMP = 100
"""So many times as many epsilons in float32 as in float64 are more than accumulated rounding."""
ADVICE = "rounding grows from step to step, faster with a larger --lr: try a smaller one, or fewer --steps"
Texts = list[str | Prose | Table]
QUANTITIES = ("gradients", "parameters")


@dataclass(frozen=True, kw_only=True)
class ProveSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` and `sync_every` matter to the failure modes
    only: the proof tries every gradient synchronisation, at every step.

    Raises `UsageError` for what nothing can be proved with.
    """

    steps: int = flag(10, "Number of training steps; after each, everything is compared.", least=1)
    batch_size: int = like(TrainingSettings, "batch_size", 64)
    bucket_cap: int = like(TrainingSettings, "bucket_cap", int(BUCKET_CAP_MB * 2**20))
    """Bytes after which a bucket of gradients is full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise UsageError("lr 0: no step would change anything, so it must be above 0")

    @property
    def recipe(self) -> dict[str, object]:
        """The fields in `RECIPE`, as JSON shows them."""
        return {name: getattr(self, name) for name in RECIPE}


@dataclass(frozen=True, kw_only=True)
class MaxAbs:
    """The largest absolute value of any element."""

    gradients: float | None
    """None in local SGD: every rank steps by a gradient of its own, so none is the mean, and none can be compared."""
    parameters: float


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """One process and the ranks after a step; each figure is the largest on any rank."""

    step: int
    """Number of the step; 1 for the first."""
    largest: MaxAbs
    """Magnitude of what the one process has, against which the differences are to be read."""
    differences: dict[str, MaxAbs]
    """Differences between the ranks and the one process, by gradient synchronisation."""


class Figure(NamedTuple):
    """One difference, and where it is from."""

    step: int
    sync: str
    quantity: str
    """gradients or parameters."""
    difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """N ranks against one process, in one dtype."""

    epsilon: float
    """The distance from 1 to the next number of that dtype."""
    steps: list[ComparedStep]

    def figures(self) -> Iterator[Figure]:
        """Every difference that there is, in order."""
        for step in self.steps:
            for sync, difference in step.differences.items():
                if difference.gradients is not None:
                    yield Figure(step.step, sync, "gradients", difference.gradients)
                yield Figure(step.step, sync, "parameters", difference.parameters)

    @property
    def max_difference(self) -> float:
        """Largest difference of any gradient or parameter, after any step."""
        return max(figure.difference for figure in self.figures())

    @property
    def in_epsilons(self) -> float:
        """`max_difference`, in units of this dtype's epsilon."""
        return self.max_difference / self.epsilon

    @property
    def final_difference(self) -> float:
        """Largest difference of any parameter, after the last step."""
        return max(difference.parameters for difference in self.steps[-1].differences.values())


@dataclass(frozen=True, kw_only=True)
class Proof:
    float64: Comparison
    float32: Comparison

    @property
    def by_dtype(self) -> dict[str, Comparison]:
        return {"float64": self.float64, "float32": self.float32}


@dataclass(frozen=True, kw_only=True)
class BreakResult:
    """The result of a failure mode: the largest differences on any rank, each by what differs from what."""

    breaks: dict[str, float]
    """Differences that are too large."""
    holds: dict[str, float]
    """Differences that must be rounding and no more, if the failure mode is what it is said to be."""


@dataclass(frozen=True, kw_only=True)
class ProveResult:
    proof: Proof
    breaks: dict[str, BreakResult]
    """By failure mode, in order; empty for one rank, which has no other to differ from."""


def check(result: ProveResult) -> None:
    """Raise `PlaygroundError` if N ranks are not one process, or if a failure mode is not what it is said to be."""
    check_proof(result.proof)
    check_breaks(result.breaks)


def check_proof(proof: Proof) -> None:
    """Raise `PlaygroundError` if N ranks differ from one process by more than rounding."""
    if wrong := failure(proof):
        raise PlaygroundError(wrong)


def check_breaks(breaks: Mapping[str, BreakResult]) -> None:
    """Raise `PlaygroundError` if some failure mode's explanation leaves more than rounding unexplained."""
    for name, result in breaks.items():
        bound = max(EXACT, UNEXPLAINED * max(result.breaks.values()))
        for quantity, difference in result.holds.items():
            if not difference <= bound < math.inf:
                raise PlaygroundError(
                    f"{name}: {quantity}: {difference:.1e} should be rounding (at most {bound:.1e}), so this break is "
                    f"not what it is said to be; {ADVICE}"
                )


def failure(proof: Proof) -> str:
    """The first difference that is more than rounding, in words; empty if N ranks equal one process."""
    for dtype, comparison in proof.by_dtype.items():
        bound = EXACT * comparison.epsilon / EPSILON
        at_first: dict[tuple[str, str], float] = {}
        for step, sync, quantity, difference in comparison.figures():
            first = at_first.setdefault((sync, quantity), difference)
            if (step == 1 or dtype == "float64") and not difference <= bound:
                before = f" ({first:.1e} after step 1)" if step > 1 else ""
                return (
                    f"{sync}: in {dtype} the {quantity} of N ranks and of one process differ by {difference:.1e} after "
                    f"step {step}{before}, more than rounding ({bound:.1e}); {ADVICE}"
                )
    return ""


def is_bit_identical(proof: Proof) -> bool:
    """Whether N ranks equal one process in every bit."""
    return all(comparison.max_difference == 0 for comparison in proof.by_dtype.values())


def has_jumps(proof: Proof) -> bool:
    """Whether float32 differs by more than rounding accounts for: gradients jumped, as `EXACT` says."""
    return proof.float32.in_epsilons > JUMP * proof.float64.in_epsilons


def is_broken(result: BreakResult) -> bool:
    """Whether the failure mode did make a difference beyond rounding."""
    return max(result.breaks.values()) > EXACT


class ReportPrinter:
    """Takes what rank 0 reports, and says each part as soon as it is known; `bar` shows how far the next one is."""

    def __init__(self, say: Callable[..., None], bar: Bar, summaries: Mapping[str, str]) -> None:
        self.say, self.bar, self.summaries = say, bar, summaries

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        if rank == 0 and "part" in event:
            name, outcome = event["part"], event["outcome"]
            texts = proof_texts(outcome) if isinstance(outcome, Proof) else break_texts(outcome)
            self.say("", prose(heading(name), f": {self.summaries[name]}"), *texts)
        self.bar(rank, dict(event))


def shares_text(batch_size: int, size: int) -> str:
    """A batch as the ranks share it: 64 = 1 x 22 + 2 x 21."""
    smaller, more = divmod(batch_size, size)
    parts = [f"{ranks} x {samples}" for ranks, samples in ((more, smaller + 1), (size - more, smaller)) if ranks]
    return f"{batch_size} = {' + '.join(parts)}"


def proof_texts(proof: Proof) -> Texts:
    """For each dtype a table of gradients and one of parameters; then why they differ, if it is by rounding."""
    texts: Texts = []
    for dtype, comparison in proof.by_dtype.items():
        for quantity in QUANTITIES:
            largest = max(getattr(step.largest, quantity) for step in comparison.steps)
            texts.append(
                f"  largest difference of {dtype} {quantity} (the largest of which is {number_text(largest)}; "
                f"epsilon is {number_text(comparison.epsilon)}):"
            )
            texts.append(steps_table(comparison.steps, quantity))
    return texts if failure(proof) else [*texts, explanation(proof)]


def steps_table(steps: list[ComparedStep], quantity: str) -> Table:
    """One row per gradient synchronisation that has such a quantity, one column for each of the steps 1, 2, 5, 10, 20,
    50 … and for the last."""
    shown = [step for step in steps if str(step.step).rstrip("0") in ("1", "2", "5") or step is steps[-1]]
    table = Table(Column("after step"), *(Column(str(step.step), right=True) for step in shown))
    for name, difference in steps[0].differences.items():
        if getattr(difference, quantity) is not None:
            table.add(name, *(number_text(getattr(step.differences[name], quantity)) for step in shown))
    return table


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def explanation(proof: Proof) -> str:
    """Why the differences are what they are, from the figures themselves."""
    if is_bit_identical(proof):
        return "Why 0: the same numbers are added in the same order as by one process, so every bit is the same."
    text = (
        f"Why not 0: N ranks add the numbers that one process adds, but in another order, and every addition rounds. "
        f"The differences come to at most {proof.float64.in_epsilons:.2g} epsilon in float64 and "
        f"{proof.float32.in_epsilons:.2g} in float32"
    )
    if has_jumps(proof):
        return f"{text}, where rounding decides which of two almost equal numbers a max-pool or ReLU lets through."
    return f"{text}: they shrink with epsilon, as only rounding does."


def break_texts(result: BreakResult) -> Texts:
    """The differences that are broken, and those that hold all the same if the explanation is right."""
    table = Table(Column("difference", right=True), Column("of", wraps=True), Column("expected"))
    for what, value in result.breaks.items():
        table.add(number_text(value), what, "is broken")
    for what, value in result.holds.items():
        table.add(number_text(value), what, "rounding")
    return [table]


def proof_summary(proof: Proof) -> str:
    """How far parameters are from one process's after the last step, in each dtype."""
    ends = (f"{number_text(each.final_difference)} in {name}" for name, each in proof.by_dtype.items())
    return f"largest difference of parameters after the last step: {', '.join(ends)}"


def breaks_summary(breaks: Mapping[str, BreakResult]) -> str:
    """How many of the failure modes made a difference."""
    if not breaks:
        return "with one rank nothing can break it"
    return f"broken in {sum(map(is_broken, breaks.values()))} of {len(breaks)} ways"


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@flags(
    ProveSettings,
    *("batch_size", "steps", "lr", "momentum", "all_reduce", "bucket_cap"),
    changes={"lr": {"type": Finite(0, min_open=True)}, "bucket_cap": {"default": BUCKET_CAP_MB}},
)
@data_options
def command(run: RunOptions, data: DataOptions, **chosen: Any) -> None:
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    asked = ProveSettings(folder=data.folder, limit=data.limit, seed=run.seed, **chosen)
    asked.check_batch(world.size)
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    summaries = LESSON.texts | {"equal": LESSON.texts["compare"]}
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        asked.check_samples(prepared.train)
        shares = shares_text(asked.batch_size, world.size)
        work = f"training: {asked.steps} steps, batches of {shares}, without dropout"
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", work)
        bar.show(f"starting {world.size} ranks")
        printer = ReportPrinter(session.say, bar, summaries)
        settings = prepared.settings(asked)
        result: ProveResult = world.run(RUN_TRAINING, EXPERIMENT, settings, on_report=printer)[0]
    session.print_document(
        {"equal": [{"samples": share(asked.batch_size, rank, world.size)} for rank in range(world.size)]},
        dataset=prepared.summary,
        recipe=asked.recipe,
        proof=result.proof,
        breaks=result.breaks,
    )
    check(result)
    found = f" ({proof_summary(result.proof)}); {breaks_summary(result.breaks)}."
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), found))
