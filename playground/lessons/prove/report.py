"""What `prove` found, as text: how far N ranks are from one process, why, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from playground.console.progress import Bar
from playground.console.tables import Column, Table
from playground.console.text import Prose, heading, prose
from playground.lessons.prove.results import BreakResult, ComparedStep, Proof
from playground.lessons.prove.verdict import failure, has_jumps, is_bit_identical, is_broken

Texts = list[str | Prose | Table]
QUANTITIES = ("gradients", "parameters")


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
    """What is broken, and what holds all the same if the explanation is right."""
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
