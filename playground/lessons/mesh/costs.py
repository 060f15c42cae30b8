"""The bytes of the lesson's run in closed form; and predictions for a cluster: what a rank of each
mesh holds, and what it waits for. Does not import torch.

Predicted times of all-reduces are those of `scale`'s cost model; bytes are memory's formulas, in
mixed precision: zero-1 shards the optimizer's state over dp and cp, zero-3 all. Activations are
those of sequence parallelism. Messages between stages are hidden.
Source: Narayanan et al., 2021, arXiv 2104.04473 (times)
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.algorithms.cost_model import Machine, Task, hierarchical_cost, ring_cost
from playground.training.formulas import MASKS, MIXED, kept_bytes, state_bytes
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


def cost_of(
    shape: Shape, stage: int, task: Training, microbatch: int = 1, *, recompute: bool = False
) -> Cost:
    """Train on a mesh, with this stage of ZeRO and so many sequences in a microbatch. Blocks that
    `recompute` their activations keep their inputs, and backward has those of one block besides."""
    dp, pp, cp, tp = shape
    machine, host, flops = task.machine, task.host, task.flops
    microbatches, own = task.sequences / dp / microbatch, task.parameters / (pp * tp)
    tokens = microbatch * task.length / cp
    hidden, blocks = 2 * tokens * task.width, task.layers / pp * min(pp, microbatches)
    keeping = tokens / tp, task.width
    activations = kept_bytes(*keeping, blocks, 2, MASKS, recompute=recompute)
    if recompute:
        activations += kept_bytes(*keeping, 1, 2, MASKS)
    held = own * state_bytes(MIXED, stage, dp * cp) + activations
    squares = task.length**2 * task.width * task.sequences
    attention = 6 * task.layers * squares / task.gpus / flops
    products = 6 * task.parameters * task.length * task.sequences / task.gpus / flops
    again = int(recompute)  # forward, which is a third of the work, and half of tensor's sums
    attention *= 1 + again / 3
    compute = products * (1 + again / 3) + attention
    backward = (2 + again) / (3 + again) * compute
    often = task.layers / pp * microbatches
    tensor = (4 + 2 * again) * often * all_reduce_seconds(hidden, tp, min(tp, host), machine)
    beta = machine.inner_beta if cp * tp <= host else machine.beta
    rounds = 6 * cp - 4 + again * (2 * cp - 2)
    context = max(0.0, (cp > 1) * often * rounds * hidden / tp * beta - attention)
    in_host = min(cp, max(1, host // tp)) * min(dp, max(1, host // (tp * cp * pp)))
    sums = all_reduce_seconds(2 * own, dp * cp, in_host, machine)
    # Behind the last microbatch's backward. From zero-2 on each microbatch reduces its gradients,
    # and with zero-3 gathers parameters twice: each is half an all-reduce.
    data = max(0.0, sums - backward / microbatches)
    if stage == 2:  # what the step has changed is gathered after it
        data = max(0.0, microbatches / 2 * sums - backward) + sums / 2
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
