"""The bytes of the lesson's run in closed form; and predictions for a cluster: what a rank of each
mesh holds, and what it waits for. Does not import torch.

Predicted times of all-reduces are those of `scale`'s cost model. In mixed precision a weight and
its gradient take two bytes each, and the optimizer twelve, which zero-1 shards over dp and cp;
zero-3 shards all sixteen. Activations are those of sequence parallelism, with attention that stores
no square. Messages between stages are hidden. Sources: Korthikanti et al., 2022, arXiv 2205.05198
(activations); Narayanan et al., 2021, arXiv 2104.04473 (times)
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.algorithms.cost_model import Machine, Task, hierarchical_cost, ring_cost
from playground.training.gpt_config import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH

Shape = tuple[int, int, int, int]
BATCH, MICROBATCHES = 24, 2
"""Sequences in a batch of the run, and microbatches that a replica's are split into."""
MODEL = f"a GPT of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, {BATCH} in a batch"
SHARDED = {
    "pairs of samples": BATCH // 2,
    "layers": LAYERS + 2,
    "pairs of tokens": LENGTH // 2,
    "heads": HEADS,
}
"""Each is sharded over the ranks of an axis; the embedding and the head count as a layer each."""


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def bytes_sent(shape: Shape, stage: int) -> dict[str, float]:
    """Those of float64 that a rank of this stage sends in a step, by axis. With gradients goes the
    loss."""
    dp, pp, cp, tp = shape
    units = range((LAYERS + 2) * stage // pp, (LAYERS + 2) * (stage + 1) // pp)
    embeds, ends = 0 in units, LAYERS + 1 in units
    blocks, tokens = len(units) - embeds - ends, BATCH // dp * LENGTH // cp
    hidden = 8 * tokens * WIDTH
    replicated = (embeds * LENGTH + 6 * blocks + 2 * ends) * WIDTH
    sharded = (embeds + ends) * VOCABULARY * WIDTH + blocks * (12 * WIDTH**2 + 4 * WIDTH)
    return {
        "tp": 2 * (tp - 1) / tp * ((4 * blocks + embeds + ends) * hidden + ends * 3 * 8 * tokens),
        "cp": blocks * (6 * cp - 4) * hidden / tp,
        "pp": (2 - (stage == 0) - (stage == pp - 1)) * hidden,
        "dp x cp": 2 * (dp * cp - 1) / (dp * cp) * 8 * (replicated + sharded / tp + 1),
    }


GPUS = 512
HOST = 8
MEMORY = 80e9
FLOPS = 400e12
"""GPUs of the cluster, those of a host, the bytes of each, and the operations that it sustains in a
second."""
MACHINE = Machine(
    alpha=1e-5, beta=1 / 50e9, ranks_per_node=HOST, inner_alpha=3e-6, inner_beta=1 / 400e9
)
DEEP = 80
WIDE = 8192
LONG = 8192
SEQUENCES = 512
"""Layers and width of its GPT, tokens of a sequence, and sequences of a batch."""
PARAMETERS = 12 * DEEP * WIDE**2
CLUSTER = f"{PARAMETERS / 1e9:.0f} billion parameters on {GPUS} GPUs of {MEMORY / 1e9:.0f} GB"
MESHES: dict[Shape, str] = {
    (512, 1, 1, 1): "zero-3", (64, 1, 8, 1): "zero-3", (64, 1, 1, 8): "zero-1", (32, 1, 1,
    16): "zero-1",
    (32, 2, 1, 8): "zero-1", (8, 8, 1, 8): "zero-1", (16, 2, 2, 8): "zero-1",
}  # fmt: skip
"""Those that are predicted, and how each shards the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes that a rank of a mesh holds, and the seconds of a step: computing, and waiting, by
    cause."""

    grid: str
    state: str
    """How the optimizer's state is sharded: zero-1 or zero-3."""
    held: float
    fits: str
    """Whether a GPU has as many bytes: yes or no."""
    compute: float
    tensor: float
    context: float
    data: float
    bubble: float
    step: float
    """The sum of the five."""


def predict(shape: Shape, state: str) -> Prediction:
    """A microbatch is a sequence."""
    dp, pp, cp, tp = shape
    microbatches, own, hidden = SEQUENCES / dp, PARAMETERS / (pp * tp), 2 * LONG / cp * WIDE
    sharded = 16 if state == "zero-3" else 12
    activations = 17 * hidden / tp * DEEP / pp * min(pp, microbatches)
    held = own * (16 - sharded + sharded / (dp * cp)) + activations
    attention = 6 * DEEP * LONG**2 * WIDE * SEQUENCES / GPUS / FLOPS
    compute = 6 * PARAMETERS * LONG * SEQUENCES / GPUS / FLOPS + attention
    often = DEEP / pp * microbatches
    tensor = 4 * often * all_reduce_seconds(hidden, tp, min(tp, HOST))
    beta = MACHINE.inner_beta if cp * tp <= HOST else MACHINE.beta
    context = max(0.0, (cp > 1) * often * (6 * cp - 4) * hidden / tp * beta - attention)
    in_host = min(cp, max(1, HOST // tp)) * min(dp, max(1, HOST // (tp * cp * pp)))
    sums = all_reduce_seconds(2 * own, dp * cp, in_host)
    data = max(0.0, sums - 2 / 3 * compute / microbatches)  # behind the last microbatch's backward
    # two all-gathers for each microbatch, and a reduce-scatter: each is half an all-reduce
    if state == "zero-3":
        data = max(0.0, (microbatches + 0.5) * sums - compute)
    bubble = (pp - 1) / microbatches * (compute + tensor + context)
    return Prediction(
        grid=name_of(shape),
        state=state,
        held=held,
        fits="yes" if held <= MEMORY else "no",
        compute=compute,
        tensor=tensor,
        context=context,
        data=data,
        bubble=bubble,
        step=compute + tensor + context + data + bubble,
    )


def all_reduce_seconds(nbytes: float, size: int, in_host: int) -> float:
    """By the faster algorithm, in a group of which `in_host` ranks share a host."""
    task = Task(size, int(nbytes), in_host)
    return min(MACHINE.seconds(cost(task)) for cost in (ring_cost, hierarchical_cost))
