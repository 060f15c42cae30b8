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


SHARDED_BYTES = {0: 0, 1: 12, 2: 14, 3: 16}
"""Bytes of a parameter's sixteen that each stage of ZeRO shards over dp and cp."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A GPT, its batch, and the cluster that is to train it."""

    layers: int
    width: int
    length: int
    """Tokens of a sequence."""
    sequences: int
    """Those of a batch."""
    gpus: int
    memory: float
    """Bytes of a GPU."""
    flops: float
    """Operations that a GPU sustains in a second."""
    machine: Machine

    @property
    def host(self) -> int:
        """GPUs of a host."""
        return self.machine.ranks_per_node

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.width**2


def hosts_of_eight(between: float, inside: float) -> Machine:
    """Hosts of eight GPUs, by the bytes a second between two hosts, and inside one."""
    return Machine(
        alpha=1e-5, beta=1 / between, ranks_per_node=8, inner_alpha=3e-6, inner_beta=1 / inside
    )


TASK = Training(
    layers=80, width=8192, length=8192, sequences=512,
    gpus=512, memory=80e9, flops=400e12, machine=hosts_of_eight(50e9, 400e9),
)  # fmt: skip
"""What is predicted."""
CLUSTER = (
    f"{TASK.parameters / 1e9:.0f} billion parameters on {TASK.gpus} GPUs of "
    f"{TASK.memory / 1e9:.0f} GB"
)
MESHES: dict[Shape, str] = {
    (512, 1, 1, 1): "zero-3",
    (64, 1, 8, 1): "zero-3",
    (64, 1, 1, 8): "zero-1",
    (32, 1, 1, 16): "zero-1",
    (32, 2, 1, 8): "zero-1",
    (8, 8, 1, 8): "zero-1",
    (16, 2, 2, 8): "zero-1",
}
"""Those that are predicted, and how each shards the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a GPU holds, and the seconds of a step: computing, and waiting, by cause."""

    held: float
    compute: float
    tensor: float
    context: float
    data: float
    bubble: float

    @property
    def step(self) -> float:
        return self.compute + self.tensor + self.context + self.data + self.bubble


def cost_of(shape: Shape, stage: int, task: Training, microbatch: int = 1) -> Cost:
    """Train on a mesh, with this stage of ZeRO and so many sequences in a microbatch."""
    dp, pp, cp, tp = shape
    machine, host, flops = task.machine, task.host, task.flops
    microbatches, own = task.sequences / dp / microbatch, task.parameters / (pp * tp)
    hidden, sharded = 2 * microbatch * task.length / cp * task.width, SHARDED_BYTES[stage]
    activations = 17 * hidden / tp * task.layers / pp * min(pp, microbatches)
    held = own * (16 - sharded + sharded / (dp * cp)) + activations
    squares = task.length**2 * task.width * task.sequences
    attention = 6 * task.layers * squares / task.gpus / flops
    tokens = task.length * task.sequences
    compute = 6 * task.parameters * tokens / task.gpus / flops + attention
    often = task.layers / pp * microbatches
    tensor = 4 * often * all_reduce_seconds(hidden, tp, min(tp, host), machine)
    beta = machine.inner_beta if cp * tp <= host else machine.beta
    context = max(0.0, (cp > 1) * often * (6 * cp - 4) * hidden / tp * beta - attention)
    in_host = min(cp, max(1, host // tp)) * min(dp, max(1, host // (tp * cp * pp)))
    sums = all_reduce_seconds(2 * own, dp * cp, in_host, machine)
    # Behind the last microbatch's backward. From zero-2 on each microbatch reduces its gradients,
    # and with zero-3 gathers parameters twice: each is half an all-reduce.
    data = max(0.0, sums - 2 / 3 * compute / microbatches)
    if stage == 2:  # what the step has changed is gathered after it
        data = max(0.0, microbatches / 2 * sums - 2 / 3 * compute) + sums / 2
    if stage == 3:
        data = max(0.0, (microbatches + 0.5) * sums - compute)
    return Cost(
        held=held,
        compute=compute,
        tensor=tensor,
        context=context,
        data=data,
        bubble=(pp - 1) / microbatches * (compute + tensor + context),
    )


def all_reduce_seconds(
    nbytes: float, size: int, in_host: int, machine: Machine = TASK.machine
) -> float:
    """By the faster algorithm, in a group of which `in_host` ranks share a host."""
    task = Task(size, int(nbytes), in_host)
    return min(machine.seconds(cost(task)) for cost in (ring_cost, hierarchical_cost))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a rank of a mesh holds, and the seconds of a step."""

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
    cost = cost_of(shape, int(state.removeprefix("zero-")), TASK)
    return Prediction(
        grid=name_of(shape),
        state=state,
        fits="yes" if cost.held <= TASK.memory else "no",
        step=cost.step,
        **vars(cost),
    )
