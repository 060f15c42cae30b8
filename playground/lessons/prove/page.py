"""The command `prove`: settings, results, their verdict, and the text. Does not import torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, numbers
from playground.console.text import good, heading, prose
from playground.console.training import RUN_TRAINING, DataOptions, announce_data, data_options
from playground.lessons import LESSONS
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import flag, like
from playground.training.settings import TrainingSettings

LESSON = LESSONS["prove"]
EXPERIMENT = LESSON.remote("experiment", "experiment")
RECIPE = ("seed", "batch_size", "lr", "momentum", "all_reduce", "bucket_cap")
"""The settings that the figures depend on, beside the data and the number of steps."""
EXACT = 1e-12
"""How far float64 may be from one process after any step, and float32, in as many epsilons, after
the first.

Later, float32 may be further away, and nothing is wrong: of two numbers that differ by rounding, a
max-pool may choose the other one, and gradients jump. (For float64 they must be 2^29 times as
close. So float64 is the one that proves.)
"""
UNEXPLAINED = 1e-6
"""Fraction of a break that its explanation may leave open."""
ADVICE = (
    "rounding grows from step to step, faster with a larger --lr: try a smaller one, or fewer "
    "--steps"
)


@dataclass(frozen=True, kw_only=True)
class ProveSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` and `sync_every` matter
    to the failure modes only: the proof tries every gradient synchronisation, at every step. Raises
    `UsageError` for what nothing can be proved with."""

    steps: int = flag(10, "Number of training steps; after each, everything is compared.", least=1)
    batch_size: int = like(TrainingSettings, "batch_size", 64)
    bucket_cap: int = like(TrainingSettings, "bucket_cap", 10_485)
    """Bytes, so few that `Net` has several buckets, whose gradients are then added in another order
    than without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise UsageError("lr 0: no step would change anything, so it must be above 0")


@dataclass(frozen=True)
class ComparedStep:
    """N ranks beside one process, after a training step."""

    step: int
    """Its number, from 1 on."""
    largest: float
    """The largest parameter of the one process."""
    differences: dict[str, float]
    """The largest difference of any parameter on any rank, by gradient synchronisation."""


@dataclass(frozen=True)
class Comparison:
    """N ranks beside one process, in one dtype."""

    epsilon: float
    """Distance from 1 to the next number of the dtype."""
    steps: list[ComparedStep]

    @property
    def in_epsilons(self) -> float:
        """The largest difference after any step, in units of epsilon."""
        largest = max(each for step in self.steps for each in step.differences.values())
        return largest / self.epsilon


Proof = dict[str, Comparison]
"""By dtype: float64 and float32."""


@dataclass(frozen=True)
class Break:
    """One way to break it: differences, each the largest on any rank, by what is compared."""

    breaks: dict[str, float]
    """Those that are wrong."""
    holds: dict[str, float]
    """Those that are rounding, if the way is explained correctly."""

    @property
    def is_broken(self) -> bool:
        return max(self.breaks.values()) > EXACT


def check(proof: Proof, breaks: Mapping[str, Break]) -> None:
    """Raise `PlaygroundError` if N ranks differ from one process by more than rounding, or if the
    explanation of a failure mode leaves more than rounding unexplained."""
    if wrong := failure(proof):
        raise PlaygroundError(wrong)
    for name, found in breaks.items():
        bound = max(EXACT, UNEXPLAINED * max(found.breaks.values()))
        for quantity, difference in found.holds.items():
            if not difference <= bound < math.inf:
                raise PlaygroundError(
                    f"{name}: {quantity}: {difference:.1e} should be rounding (at most "
                    f"{bound:.1e}), so this break is not what it is said to be; {ADVICE}"
                )


def failure(proof: Proof) -> str:
    """The first difference that is more than rounding, in words; empty if N ranks equal one
    process."""
    for dtype, comparison in proof.items():
        bound = EXACT * comparison.epsilon / sys.float_info.epsilon
        for step in comparison.steps if dtype == "float64" else comparison.steps[:1]:
            for sync, difference in step.differences.items():
                if not difference <= bound:
                    return (
                        f"{sync}: in {dtype} the parameters of N ranks and of one process differ "
                        f"by {difference:.1e} after step {step.step}, more than rounding "
                        f"({bound:.1e}); {ADVICE}"
                    )
    return ""


def shares_text(batch_size: int, size: int) -> str:
    """A batch as the ranks share it: 64 = 1 x 22 + 2 x 21."""
    smaller, more = divmod(batch_size, size)
    parts = [
        f"{ranks} x {samples}"
        for ranks, samples in ((more, smaller + 1), (size - more, smaller))
        if ranks
    ]
    return f"{batch_size} = {' + '.join(parts)}"


def proof_texts(proof: Proof) -> Texts:
    """For each dtype a table; then why there are differences, if they are rounding."""
    texts: Texts = []
    for dtype, comparison in proof.items():
        largest = max(step.largest for step in comparison.steps)
        scale = (
            f"the largest of which is {number_text(largest)}; epsilon is "
            f"{number_text(comparison.epsilon)}"
        )
        texts += [
            f"  largest difference of {dtype} parameters ({scale}):",
            steps_table(comparison.steps),
        ]
    exact, single = (comparison.in_epsilons for comparison in proof.values())
    if exact and not failure(proof):
        texts += [
            "Why not 0: N ranks add the numbers that one process adds, but in another order, and "
            f"every addition rounds. The differences come to at most {exact:.2g} epsilon in "
            f"float64 and {single:.2g} in float32."
        ]
    return texts


def steps_table(steps: Sequence[ComparedStep]) -> Table:
    """One row per gradient synchronisation, one column for each of the steps 1, 2, 5, 10, 20, 50 …
    and for the last."""
    shown = [
        each for each in steps if str(each.step).rstrip("0") in ("1", "2", "5") or each is steps[-1]
    ]
    table = Table("after step", *numbers(*(str(each.step) for each in shown)))
    for name in steps[0].differences:
        table.add(name, *(number_text(each.differences[name]) for each in shown))
    return table


def number_text(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def break_table(found: Break) -> Table:
    table = Table(*numbers("difference"), Column("of", wraps=True), "expected")
    for expected, of in (("is broken", found.breaks), ("rounding", found.holds)):
        for what, difference in of.items():
            table.add(number_text(difference), what, expected)
    return table


def ending(proof: Proof, breaks: Mapping[str, Break]) -> str:
    """How far parameters are from one process's after the last step, and how many of the failure
    modes matter."""
    ends = (
        f"{number_text(max(comparison.steps[-1].differences.values()))} in {dtype}"
        for dtype, comparison in proof.items()
    )
    broken = "with one rank nothing can break it"
    if breaks:
        count = sum(found.is_broken for found in breaks.values())
        broken = f"broken in {count} of {len(breaks)} ways"
    return f" (largest difference of parameters after the last step: {', '.join(ends)}); {broken}."


@LESSON.run_by(
    flags(ProveSettings, "batch_size", "steps", "lr", "all_reduce"), data_options("dataset")
)
def command(session: Session, data: DataOptions, **chosen: Any) -> None:
    world = session.world
    asked = ProveSettings(folder=data.folder, seed=session.run.seed, **chosen)
    asked.check_batch(world.size)
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    shares = shares_text(asked.batch_size, world.size)
    work = f"training: {asked.steps} steps, batches of {shares}, without dropout"
    prepared, settings = announce_data(session, data, asked, work)

    proof, breaks = session.launch(RUN_TRAINING, EXPERIMENT, settings)[0]
    head = prose(heading("equal"), f": {LESSON.remote('compare').summary}")
    session.say("", head, *proof_texts(proof))
    for name, found in breaks.items():
        head = prose(heading(name), f": {LESSON.remote(name).summary}")
        session.say("", head, break_table(found))
    samples = [
        {"samples": (asked.batch_size + world.size - 1 - rank) // world.size}
        for rank in range(world.size)
    ]
    recipe = {name: getattr(asked, name) for name in RECIPE}
    about = {"recipe": recipe, "proof": proof, "breaks": breaks}
    session.print_document({"equal": samples}, dataset=prepared.summary, **about)
    check(proof, breaks)
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), ending(proof, breaks)))
