"""The figures of the ways to train: the closed forms, over all ranks, and as text. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from playground.console.tables import Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.measurement import Fields, format_bytes
from playground.runtime.errors import PlaygroundError

HELD: dict[str, tuple[str, Callable[[int], float]]] = {
    "ddp": ("4P", lambda n: 4.0), "zero-1": ("2P + 2P/N", lambda n: 2 + 2 / n),
    "zero-2": ("P + 3P/N", lambda n: 1 + 3 / n), "zero-3": ("4P/N", lambda n: 4 / n),
}  # fmt: skip
"""Parameters, gradients and Adam's two numbers for each, in bytes of the parameters P, on each of N ranks."""
SENT = {"ddp": 2, "zero-1": 2, "zero-2": 2, "zero-3": 3}
"""Times (N - 1)/N · P."""
TORCH = {"torch-ddp": "ddp", "torch-zero-1": "zero-1", "torch-fsdp": "zero-3"}
"""torch's own, and the way whose closed forms hold for it."""
WARM_UP, TIMED_STEPS, CAPPED_STEPS, EXACT_STEPS = 3, 10, 2, 5
OUT_OF_MEMORY = "out of memory"
CAPPED = {"way": Column("way"), "steps": Column("steps", right=True), "died": Column("what ended it", wraps=True)}
EXACT, CLOSE = 1e-12, 0.05
"""How far float64 may be from one process, and a count from its closed form, as a share of it."""


def summarize(ranks: Sequence[Fields], size: int) -> Fields:
    """A way's figures over all ranks: of bytes the most that one has, with their closed forms."""
    row = {name: value for name, value in ranks[0].items() if name != "series"}
    row |= {name: max(each[name] for each in ranks) for name in (*KINDS, "peak", "sent", "difference")}
    way, whole = TORCH.get(row["way"], row["way"]), row["model_bytes"]
    return row | {
        "held": max(sum(each[name] for name in KINDS) for each in ranks),
        "expected_held": HELD[way][1](size) * whole, "rule": HELD[way][0],
        "expected_sent": SENT[way] * (size - 1) / size * whole,
        "first_loss": row["losses"][0], "last_loss": row["losses"][-1],
    }  # fmt: skip


KINDS = ("parameters", "gradients", "optimizer")
HOLDINGS = {"way": Column("way")} | figures(
    *((name, name, "MiB", ".2f", 2**-20) for name in KINDS),
    ("held", "together", "MiB", ".2f", 2**-20),
    ("expected_held", "closed\nform", "MiB", ".2f", 2**-20),
    ("peak", "peak", "MiB", ".2f", 2**-20),
)
COSTS = {"way": Column("way")} | figures(
    ("sent", "sent", "MiB", ".2f", 2**-20),
    ("expected_sent", "closed\nform", "MiB", ".2f", 2**-20),
    ("seconds", "step", "ms", ".1f", 1000),
    ("first_loss", "first\nloss", "", ".4f"),
    ("last_loss", "last\nloss", "", ".4f"),
    ("difference", "difference from\none process", "", ".1e"),
)


def check(row: Fields) -> None:
    """Raise `PlaygroundError` if a way of ours does not train as one process does, or holds or sends more than it
    should."""
    if not row["difference"] <= EXACT:
        raise PlaygroundError(
            f"{row['way']}: {row['difference']:.1e} from one process, more than rounding: {EXACT:.0e}"
        )
    for what in ("held", "sent") if row["way"] in HELD else ():
        found, expected = row[what], row[f"expected_{what}"]
        if abs(found - expected) > CLOSE * expected:
            raise PlaygroundError(f"{row['way']}: {found:,} bytes {what}, and the closed form is {expected:,.0f}")


def result_texts(rows: Sequence[Fields], size: int) -> Texts:
    """The bytes that each way holds, and its costs."""
    whole, unit = (format_bytes(rows[0][name]) for name in ("model_bytes", "unit_bytes"))
    rules = ", ".join(f"{name} {rule}" for name, (rule, _) in HELD.items())
    held = (
        f"by each rank before the optimizer's step. The parameters are P = {whole}, those of a block {unit}; {rules}. "
        f"Peak: the most in a step with one sequence for each rank, activations included"
    )
    sent = "by a rank in a step, 2 (N-1)/N P, and 3 (N-1)/N P by zero-3 (N is the number of ranks)"
    return [
        prose(heading("held"), f": {held}"), tabulate(rows, HOLDINGS), "",
        prose(heading("sent"), f": {sent}"), tabulate(rows, COSTS),
    ]  # fmt: skip
