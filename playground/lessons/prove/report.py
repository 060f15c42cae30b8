"""What `prove` found, as text: how far N ranks are from one process, why, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from playground.console.tables import table
from playground.lessons.prove.results import BreakResult, ComparedStep, Proof
from playground.lessons.prove.verdict import failure, has_jumps, is_bit_identical, is_broken

QUANTITIES = ("gradients", "parameters")


class ReportPrinter:
    """Takes what rank 0 reports, and says each part as soon as it is known."""

    def __init__(self, say: Callable[[str], None], summaries: Mapping[str, str]) -> None:
        self.say, self.summaries = say, summaries

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        if rank == 0 and "part" in event:
            name, outcome = event["part"], event["outcome"]
            text = proof_text(outcome) if isinstance(outcome, Proof) else break_text(outcome)
            self.say(f"\n{name}: {self.summaries[name]}\n{text}")


def shares_text(batch_size: int, size: int) -> str:
    """A batch as the ranks share it: 64 = 1 x 22 + 2 x 21."""
    smaller, more = divmod(batch_size, size)
    parts = [f"{ranks} x {samples}" for ranks, samples in ((more, smaller + 1), (size - more, smaller)) if ranks]
    return f"{batch_size} = {' + '.join(parts)}"


def proof_text(proof: Proof) -> str:
    """For each dtype a table of gradients and one of parameters; then why they differ, if it is by rounding."""
    lines = []
    for dtype, comparison in proof.by_dtype.items():
        for quantity in QUANTITIES:
            largest = max(getattr(step.largest, quantity) for step in comparison.steps)
            lines.append(
                f"  {dtype} {quantity}, of up to {number_text(largest)} (epsilon {number_text(comparison.epsilon)}), "
                f"differ by up to:"
            )
            lines += steps_table(comparison.steps, quantity)
    return "\n".join([*lines, *([] if failure(proof) else [explanation(proof)])])


def steps_table(steps: list[ComparedStep], quantity: str) -> list[str]:
    """One row for each of the steps 1, 2, 5, 10, 20, 50 … and for the last, one column per gradient synchronisation."""
    rows = [["step", *steps[0].differences]]
    for step in steps:
        if str(step.step).rstrip("0") in ("1", "2", "5") or step is steps[-1]:
            differences = (getattr(difference, quantity) for difference in step.differences.values())
            rows.append([str(step.step), *map(number_text, differences)])
    return table(rows, first_right=0)


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def explanation(proof: Proof) -> str:
    """Why the differences are what they are, in one sentence, from the figures themselves."""
    if is_bit_identical(proof):
        return "Why 0: the same numbers are added up in the same order as by one process, so every bit is the same."
    text = (
        f"Why not 0: N ranks add up the numbers that one process adds up, but in another order, and every addition "
        f"rounds: that comes to at most {proof.float64.in_epsilons:.2g} epsilon in float64 and "
        f"{proof.float32.in_epsilons:.2g} in float32, "
    )
    if has_jumps(proof):
        return (
            text + "where of two almost equal numbers a max-pool or ReLU let another one through, and gradients jump."
        )
    return text + "and only rounding shrinks with epsilon."


def break_text(result: BreakResult) -> str:
    """What is broken, and what holds all the same if the explanation is right."""
    lines = [f"  {number_text(value):>7}  {what}" for what, value in result.breaks.items()]
    lines += [f"  {number_text(value):>7}  {what} (rounding)" for what, value in result.holds.items()]
    return "\n".join(lines)


def proof_summary(proof: Proof) -> str:
    """How far parameters are from one process's after the last step, in each dtype."""
    ends = (f"{name}: {number_text(each.final_difference)}" for name, each in proof.by_dtype.items())
    return ", ".join(ends) + " apart at the end"


def breaks_summary(breaks: Mapping[str, BreakResult]) -> str:
    """How many of the failure modes made a difference."""
    if not breaks:
        return "with one rank nothing can break it"
    return f"broken in {sum(map(is_broken, breaks.values()))} of {len(breaks)} ways"
