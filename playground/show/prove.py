"""What the lesson `prove` has to tell: how far N ranks are from one process, why, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from playground.show.data_parallel import part, right

EXACT = 1e-12
"""How far float64 may be from one process after any step, and float32, in as many epsilons, after the first.

Later, float32 may be further away, and nothing is wrong: of two numbers that differ by rounding a max-pool may choose
the other one, and gradients jump. (For float64 they must be 2^29 times as close. So it is the one that proves.)
"""
EPSILON = 2.0**-52
"""Of float64."""
WHAT = ("gradients", "parameters")
GROWN = "rounding grows from step to step, faster with a larger --lr: try a smaller one, or fewer --steps"
JUMP = 100
"""So many times as many epsilons in float32 as in float64 are more than rounding added up."""


class Telling:
    """Takes what rank 0 reports, and says each part as soon as it is known."""

    def __init__(self, say: Callable[[str], None], texts: dict[str, str]) -> None:
        self.say, self.texts = say, texts

    def __call__(self, rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and "part" in event:
            show = proof_text if event["part"] == "equal" else break_text
            self.say(part(event["part"], self.texts, show(event["outcome"])))


def shared(batch_size: int, size: int) -> str:
    """A batch as the ranks share it: 64 = 1 x 22 + 2 x 21."""
    least, more = divmod(batch_size, size)
    parts = [f"{ranks} x {samples}" for ranks, samples in ((more, least + 1), (size - more, least)) if ranks]
    return f"{batch_size} = {' + '.join(parts)}"


def proof_text(proof: dict[str, Any]) -> str:
    """A table for each type, of gradients and of parameters; then why there are differences, if they may be there."""
    lines = []
    for name, outcome in proof.items():
        for what in WHAT:
            size = max(step["largest"][what] for step in outcome["steps"])
            about = f"{what}, of up to {number(size)} (epsilon {number(outcome['epsilon'])}), differ by up to"
            lines += [f"  {name} {about}:", *steps_table(outcome["steps"], what)]
    return "\n".join([*lines, *([] if failure(proof) else [why(proof)])])


def steps_table(steps: list[dict[str, Any]], what: str) -> list[str]:
    """A row for steps 1, 2, 5, 10, 20, 50 … and the last, a column for each way."""
    rows = [["step", *steps[0]["differences"]]]
    for step in steps:
        if str(step["step"]).rstrip("0") in ("1", "2", "5") or step is steps[-1]:
            rows.append([str(step["step"]), *(number(each[what]) for each in step["differences"].values())])
    return right(rows, 0)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def figures(outcome: dict[str, Any]) -> Iterator[tuple[int, str, str, float]]:
    """(step, way, gradients or parameters, difference): all there are, in order."""
    for step in outcome["steps"]:
        for way, differences in step["differences"].items():
            for what, difference in differences.items():
                if difference is not None:
                    yield step["step"], way, what, difference


def largest(outcome: dict[str, Any]) -> float:
    return max(difference for *_, difference in figures(outcome))


def why(proof: dict[str, Any]) -> str:
    """In one sentence, from the figures themselves."""
    if not any(map(largest, proof.values())):
        return "Why 0: the same numbers are added up in the same order as by one process, so every bit is the same."
    exact, single = (largest(proof[name]) / proof[name]["epsilon"] for name in ("float64", "float32"))
    text = (
        f"Why not 0: N ranks add up the numbers that one process adds up, but in another order, and every addition "
        f"rounds: that comes to at most {exact:.2g} epsilon in float64 and {single:.2g} in float32, "
    )
    if single > JUMP * exact:
        return (
            text + "where of two almost equal numbers a max-pool or ReLU let another one through, and gradients jump."
        )
    return text + "and only rounding shrinks with epsilon."


def failure(proof: dict[str, Any]) -> str:
    """What is more than rounding: the first of it, in words; empty if N ranks do equal one process."""
    for name, outcome in proof.items():
        bound = EXACT * outcome["epsilon"] / EPSILON
        for step, way, what, difference in figures(outcome):
            if (step == 1 or name == "float64") and not difference <= bound:
                first = number(outcome["steps"][0]["differences"][way][what])
                before = f" ({first} after step 1)" if step > 1 else ""
                return (
                    f"{way}: in {name} the {what} of N ranks and of one process differ by {number(difference)} after "
                    f"step {step}{before}, more than rounding ({number(bound)}); {GROWN}"
                )
    return ""


def summary(proof: dict[str, Any]) -> str:
    """How far parameters are from one process's after the last step, in each type."""
    ends = {name: outcome["steps"][-1] for name, outcome in proof.items()}
    apart = {name: max(way["parameters"] for way in end["differences"].values()) for name, end in ends.items()}
    return ", ".join(f"{name}: {number(difference)}" for name, difference in apart.items()) + " apart at the end"


def broken(breaks: dict[str, Any]) -> str:
    """How many of the ways to break it did."""
    did = [name for name, outcome in breaks.items() if max(outcome["breaks"].values()) > EXACT]
    return f"; broken in {len(did)} of {len(breaks)} ways" if breaks else "; with one rank nothing can break it"


def break_text(outcome: dict[str, Any]) -> str:
    """What is broken, and what holds all the same if the explanation is right."""
    lines = [f"  {number(value):>7}  {what}" for what, value in outcome["breaks"].items()]
    return "\n".join(lines + [f"  {number(value):>7}  {what} (rounding)" for what, value in outcome["holds"].items()])
