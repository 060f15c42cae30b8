"""The results of the ways to train: the closed forms, the tables and the check. Does not import
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from playground.algorithms.cost_model import times_sent
from playground.console.tables import Column, Texts, figures, tabulate
from playground.console.text import heading, prose
from playground.console.units import format_bytes
from playground.training.formulas import FLOAT32, kept_bytes, state_bytes
from playground.training.gpt_config import HEADS, LENGTH, VOCABULARY
from playground.training.one_process import check_counts, check_exact
from playground.training.settings import BFLOAT16


def times_held(stage: int, size: int) -> float:
    return state_bytes(FLOAT32, stage, size) / FLOAT32[0]


RULES = {"ddp": "4P", "zero-1": "2P + 2P/N", "zero-2": "P + 3P/N", "zero-3": "4P/N"}
HELD: dict[str, tuple[str, Callable[[int], float]]] = {
    way: (rule, partial(times_held, stage)) for stage, (way, rule) in enumerate(RULES.items())
}
"""Parameters, gradients and Adam's two numbers for each, in bytes of the parameters P, on each of N
ranks."""
SENT = {
    "ddp": ("all_reduce",),
    "zero-1": ("reduce_scatter", "all_gather"),
    "zero-2": ("reduce_scatter", "all_gather"),
    "zero-3": ("all_gather", "all_gather", "reduce_scatter"),
}
"""The collectives in which P are sent."""
TORCH = {"torch-ddp": "ddp", "torch-zero-1": "zero-1", "torch-fsdp": "zero-3"}
"""torch's own, and the way whose closed forms hold for it."""
CASTING = ("zero-3", "torch-fsdp")
"""The ways that can compute in bfloat16, beside float32 shards."""
BYTES = {"float32": 4, BFLOAT16: 2}
KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Bytes in a step with one sequence for each rank, so that activations are few."""

    parameters: float
    """Held before the optimizer's step, as are the next three."""
    gradients: float
    optimizer: float
    """Its state."""
    held: float
    """All three together."""
    peak: float
    """The most that is held at any moment of the step."""
    sent: float
    model_bytes: float
    """Those of the model's parameters."""
    unit_bytes: float
    """Those of the parameters of its largest unit."""


@dataclass(frozen=True, kw_only=True)
class CountedStep(Counts):
    """A step by one way, on one rank."""

    way: str
    series: dict[str, list[int]]
    """Bytes held after each operation of "forward", of backward until "synced", and of the
    "step"."""


@dataclass(frozen=True, kw_only=True)
class WayResult(Counts):
    """A way on all ranks together; counts are the largest of any rank."""

    way: str
    difference: float
    """The largest difference of a loss or parameter from one process. Shards, their optimizer and
    sums over ranks are float64, and all else unless it computes in bfloat16."""
    kept: float
    """Bytes that autograd keeps for backward of a sequence."""
    expected_kept: float
    """The closed form of `kept`."""
    seconds: float
    """Median of a step, on its slowest rank."""
    losses: list[float]
    """Those of whole batches, by step."""
    first_loss: float
    last_loss: float
    expected_held: float
    """The closed form of `held`."""
    expected_sent: float
    """The closed form of `sent`."""


def closed_forms(
    way: str, model_bytes: float, size: int, dtype: str = "float32", reduce_dtype: str = "float32"
) -> dict[str, float]:
    """The bytes that a rank holds before the optimizer's step ("held") and sends in a step
    ("sent"). Parameters are gathered in `dtype`, gradients reduced in `reduce_dtype`."""
    way = TORCH.get(way, way)
    _, times = HELD[way]
    sent = {"all_gather": BYTES[dtype] / 4, "reduce_scatter": BYTES[reduce_dtype] / 4}
    parts = (sent.get(call, 1.0) * times_sent(size, call) for call in SENT[way])
    return {"held": times(size) * model_bytes, "sent": sum(parts) * model_bytes}


def expect_kept(layers: int, width: int, dtype: str, *, recompute: bool) -> float:
    """Bytes that autograd keeps for backward of a sequence: the blocks' activations, those of the
    head and the loss, the statistics of norms and attention, and token ids."""
    blocks = kept_bytes(LENGTH, width, layers, BYTES[dtype], recompute=recompute)
    head = BYTES[dtype] * (2 * width + 2) + 4 * VOCABULARY
    statistics = 0 if recompute else layers * (4 * BYTES[dtype] + 4 * HEADS)
    return blocks + LENGTH * (head + statistics + 3 * 8)


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


SENT_RULE = "2 (N-1)/N P, and 3 (N-1)/N P by zero-3"
CAST_RULE = "(N-1)/N (P/2 + P/2 + {}): gathers in bfloat16, reduces in {}"


def result_texts(ways: Sequence[WayResult], sent_rule: str = SENT_RULE, saving: str = "") -> Texts:
    """The bytes that each way holds, and its costs. `saving`: what would be kept without it."""
    whole = format_bytes(round(ways[0].model_bytes))
    unit = format_bytes(round(ways[0].unit_bytes))
    rules = ", ".join(f"{name} {rule}" for name, (rule, _) in HELD.items())
    held = (
        f"by each rank before the optimizer's step. The parameters are P = {whole}, those of a "
        f"block {unit}; {rules}. "
        f"Peak: the most in a step with one sequence for each rank, activations included"
    )
    sent = f"by a rank in a step, {sent_rule} (N is the number of ranks)"
    kept, form = (format_bytes(round(each)) for each in (ways[0].kept, ways[0].expected_kept))
    kept = f"{kept} of a sequence, kept for backward; closed form {form}{saving}"
    return [
        prose(heading("activations"), f": {kept}"), "",
        prose(heading("held"), f": {held}"), tabulate(ways, HOLDINGS), "",
        prose(heading("sent"), f": {sent}"), tabulate(ways, COSTS),
    ]  # fmt: skip


def check_way(way: str, counts: Counts, difference: float, size: int, *dtypes: str) -> None:
    """Raise `PlaygroundError` if a way does not train as one process does, or one of ours holds or
    sends other than its closed form. `dtypes`: those of `closed_forms`."""
    check_exact(way, difference)
    if way in HELD:
        check_counts(way, vars(counts), closed_forms(way, counts.model_bytes, size, *dtypes))
