"""The figures of the ways to train: the closed forms, the tables and the check. Does not import
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from playground.console.one_process import check, check_counts
from playground.console.tables import Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.console.units import format_bytes
from playground.measurement import Fields

HELD: dict[str, tuple[str, Callable[[int], float]]] = {
    "ddp": ("4P", lambda n: 4.0), "zero-1": ("2P + 2P/N", lambda n: 2 + 2 / n),
    "zero-2": ("P + 3P/N", lambda n: 1 + 3 / n), "zero-3": ("4P/N", lambda n: 4 / n),
}  # fmt: skip
"""Parameters, gradients and Adam's two numbers for each, in bytes of the parameters P, on each of N
ranks."""
SENT = {"ddp": 2, "zero-1": 2, "zero-2": 2, "zero-3": 3}
"""Times (N - 1)/N · P."""
TORCH = {"torch-ddp": "ddp", "torch-zero-1": "zero-1", "torch-fsdp": "zero-3"}
"""torch's own, and the way whose closed forms hold for it."""
KINDS = ("parameters", "gradients", "optimizer")


def expected(row: Fields, size: int) -> Fields:
    """The closed forms of a row: what a rank holds before the optimizer's step, and sends in a
    step, in bytes."""
    way, whole = str(row["way"]), row["model_bytes"]
    way = TORCH.get(way, way)
    times = HELD[way][1](size)
    return {"expected_held": times * whole, "expected_sent": SENT[way] * (size - 1) / size * whole}


MIB = ("MiB", ".2f", 2**-20)
FORM = "closed\nform"
HOLDINGS = {"way": Column("way")} | figures(
    *((name, name, *MIB) for name in KINDS),
    ("held", "together", *MIB), ("expected_held", FORM, *MIB), ("peak", "peak", *MIB),
)  # fmt: skip
COSTS = {"way": Column("way")} | figures(
    ("sent", "sent", *MIB), ("expected_sent", FORM, *MIB), ("seconds", "step", "ms", ".1f", 1000),
    ("first_loss", "first\nloss", "", ".4f"), ("last_loss", "last\nloss", "", ".4f"),
    ("difference", "difference from\none process", "", ".1e"),
)  # fmt: skip


def result_texts(rows: Sequence[Fields]) -> Texts:
    """The bytes that each way holds, and its costs."""
    whole, unit = (format_bytes(rows[0][name]) for name in ("model_bytes", "unit_bytes"))
    rules = ", ".join(f"{name} {rule}" for name, (rule, _) in HELD.items())
    held = (
        f"by each rank before the optimizer's step. The parameters are P = {whole}, those of a "
        f"block {unit}; {rules}. "
        f"Peak: the most in a step with one sequence for each rank, activations included"
    )
    sent = "by a rank in a step, 2 (N-1)/N P, and 3 (N-1)/N P by zero-3 (N is the number of ranks)"
    return [
        prose(heading("held"), f": {held}"), tabulate(rows, HOLDINGS), "",
        prose(heading("sent"), f": {sent}"), tabulate(rows, COSTS),
    ]  # fmt: skip


def check_row(row: Fields) -> None:
    """Raise `PlaygroundError` if a way does not train as one process does, or one of ours holds or
    sends other than its closed form."""
    check(row["way"], {"loss_difference": row["difference"]}, {})
    if row["way"] in HELD:
        check_counts(row["way"], row, {name: row[f"expected_{name}"] for name in ("held", "sent")})
