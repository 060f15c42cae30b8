"""Predictions for a cluster: what each grid of ranks holds, and what it waits for. Does not import torch.

Times of all-reduces are those of `scale`'s cost model. Bytes are those of mixed precision: two each for a weight and
its gradient, twelve for the optimizer's state, which zero-1 shares over dp and cp; zero-3 shares all sixteen.
Activations are those of sequence parallelism and of attention that stores no square.
Sources: Korthikanti et al., 2022, arXiv 2205.05198 (activations); Narayanan et al., 2021, arXiv 2104.04473 (time)
"""

from __future__ import annotations

from playground.algorithms.cost_model import Machine, Task, hierarchical_cost, ring_cost
from playground.measurement import Fields

LAYERS, WIDTH, LENGTH, SEQUENCES = 80, 8192, 8192, 512
"""A GPT of 64 billion parameters, and sequences in a batch: 4 million tokens."""
GPUS, HOST, MEMORY, FLOPS = 512, 8, 80e9, 400e12
"""GPUs, those of a host, and of each its bytes and the operations that it sustains in a second."""
CLUSTER = Machine(alpha=1e-5, beta=1 / 50e9, ranks_per_node=HOST, inner_alpha=3e-6, inner_beta=1 / 400e9)
PARAMETERS = 12 * LAYERS * WIDTH**2
GRIDS = (
    ("zero-1", (512, 1, 1, 1)),
    ("zero-3", (512, 1, 1, 1)),
    ("zero-3", (64, 1, 8, 1)),
    ("zero-1", (64, 1, 1, 8)),
    ("zero-1", (32, 1, 1, 16)),
    ("zero-1", (32, 2, 1, 8)),
    ("zero-1", (8, 8, 1, 8)),
    ("zero-1", (16, 2, 2, 8)),
)


def all_reduce_seconds(nbytes: float, size: int, in_host: int) -> float:
    """`in_host`: how many ranks of the group share a host."""
    task = Task(size, int(nbytes), in_host)
    return min(CLUSTER.seconds(cost(task)) for cost in (ring_cost, hierarchical_cost))


def predict(state: str, shape: tuple[int, int, int, int]) -> Fields:
    """Bytes that a rank holds, and seconds of a step: computing, and what it waits for, which is not hidden behind it.
    Microbatches are single sequences; messages between stages hide."""
    dp, pp, cp, tp = shape
    microbatches, replicas, own = SEQUENCES / dp, dp * cp, PARAMETERS / (pp * tp)
    tokens = LENGTH / cp
    held = 16 * own / replicas if state == "zero-3" else 4 * own + 12 * own / replicas
    activations = 34 * tokens * WIDTH / tp * LAYERS / pp * min(pp, microbatches)
    attention = 6 * LAYERS * LENGTH**2 * WIDTH * SEQUENCES / GPUS / FLOPS
    compute = 6 * PARAMETERS * LENGTH * SEQUENCES / GPUS / FLOPS + attention
    often = LAYERS / pp * microbatches
    tensor = 4 * often * all_reduce_seconds(2 * tokens * WIDTH, tp, min(tp, HOST))
    beta = CLUSTER.inner_beta if cp * tp <= HOST else CLUSTER.beta
    context = often * (6 * cp - 4) * 2 * tokens * WIDTH / tp * beta if cp > 1 else 0.0
    in_host = min(cp, max(1, HOST // tp)) * min(dp, max(1, HOST // (tp * cp * pp)))
    sums = all_reduce_seconds(2 * own, replicas, in_host)
    if state == "zero-3":  # two all-gathers in each microbatch and a reduce-scatter, each half an all-reduce
        data = max(0.0, (microbatches + 0.5) * sums - compute)
    else:  # behind the last microbatch's backward
        data = max(0.0, sums - 2 / 3 * compute / microbatches)
    waits = {"tensor": tensor, "context": max(0.0, context - attention), "data": data}
    waits["bubble"] = (pp - 1) / microbatches * (compute + tensor + waits["context"])
    return {
        "grid": " x ".join(map(str, shape)),
        "state": state,
        "held": held + activations,
        "fits": held + activations <= MEMORY,
        "compute": compute,
        **waits,
        "step": compute + sum(waits.values()),
    }
