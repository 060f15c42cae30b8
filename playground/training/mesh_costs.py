"""What a step of a GPT costs on a cluster, by mesh: the bytes that a GPU holds, and the seconds
that it computes and waits. Does not import torch.

Predicted, not measured. Collectives take the time of `scale`'s cost model, and bytes are by the
formulas of gpt, memory and zero, in mixed precision:

- A collective over several hosts is a ring in each host, and then rings between hosts.
- Tensor parallelism is sequence parallelism: activations are divided by all ranks of tp.
- A pipeline works by 1F1B: its first stage holds as many microbatches as there are stages. Messages
  between stages take no time.
- ZeRO divides over dp and cp, whose ranks have the same parameters.
- A ring of keys and values hides behind attention.

Sources: Narayanan et al., 2021, arXiv 2104.04473 (times, interleaved stages); Korthikanti et al.,
2022, arXiv 2205.05198 (activations); Rajbhandari et al., 2020, arXiv 1910.02054 (ZeRO)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from playground.algorithms.cost_model import Machine, Task, ring_cost
from playground.training.formulas import MASKS, MIXED, kept_bytes, state_bytes

Shape = tuple[int, int, int, int]
"""Ranks along dp, pp, cp and tp."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
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
    key_share: float = 1.0
    """Heads of keys and values, by heads of queries."""

    @property
    def host(self) -> int:
        """GPUs of a host."""
        return self.machine.ranks_per_node

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.width**2


def hosts_of_eight(between: float, inside: float) -> Machine:
    """Hosts of eight GPUs, by the bytes a second between two hosts, and inside one. A message has a
    latency of 10 µs, as in lessons/gpus.md."""
    return Machine(
        alpha=1e-5, beta=1 / between, ranks_per_node=8, inner_alpha=1e-5, inner_beta=1 / inside
    )


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


@dataclass(frozen=True, kw_only=True)
class MeshStep:
    """A step of a task on a mesh, with so many sequences in a microbatch."""

    task: TrainingTask
    shape: Shape
    microbatch: int
    recompute: bool

    @property
    def parameters(self) -> float:
        """Those of a rank."""
        _, pp, _, tp = self.shape
        return self.task.parameters / (pp * tp)

    @property
    def layers(self) -> float:
        """Those of a stage of the pipeline."""
        return self.task.layers / self.shape[1]

    @property
    def microbatches(self) -> float:
        return self.task.sequences / self.shape[0] / self.microbatch

    @property
    def tokens(self) -> float:
        """Those of a microbatch on a rank of cp."""
        return self.microbatch * self.task.length / self.shape[2]

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states of these tokens."""
        return 2 * self.tokens * self.task.width

    @property
    def again(self) -> int:
        """How often forward is computed again."""
        return int(self.recompute)


def cost_of(
    shape: Shape,
    stage: int,
    task: TrainingTask,
    microbatch: int = 1,
    *,
    recompute: bool = False,
    parts: int = 1,
) -> Cost:
    """Train on a mesh, with this stage of ZeRO and so many sequences in a microbatch. Blocks that
    `recompute` their activations keep their inputs, and backward has those of one block besides.
    A rank of the pipeline has so many interleaved `parts`, which shorten the bubble. What they hold
    besides 1F1B is left out."""
    step = MeshStep(task=task, shape=shape, microbatch=microbatch, recompute=recompute)
    attention = attention_seconds(step)
    compute = product_seconds(step) + attention
    backward = (2 + step.again) / (3 + step.again) * compute
    tensor = tensor_seconds(step)
    context = context_seconds(step, attention)
    sums = gradient_seconds(step, stage)
    return Cost(
        held=held_bytes(step, stage),
        compute=compute,
        tensor=tensor,
        context=context,
        data=data_seconds(stage, sums, step.microbatches, backward, compute),
        bubble=(shape[1] - 1) / (parts * step.microbatches) * (compute + tensor + context),
    )


def held_bytes(step: MeshStep, stage: int) -> float:
    """What a rank holds of the states of its parameters, and of activations."""
    dp, pp, cp, tp = step.shape
    keeping = step.tokens / tp, step.task.width
    blocks = step.layers * min(pp, step.microbatches)
    activations = kept_bytes(*keeping, blocks, 2, MASKS, recompute=step.recompute)
    if step.recompute:
        activations += kept_bytes(*keeping, 1, 2, MASKS)
    return step.parameters * state_bytes(MIXED, stage, dp * cp) + activations


def attention_seconds(step: MeshStep) -> float:
    """Computing scores, and sums by them. Forward is a third of the work."""
    task = step.task
    squares = task.length**2 * task.width * task.sequences
    return 6 * task.layers * squares / task.gpus / task.flops * (1 + step.again / 3)


def product_seconds(step: MeshStep) -> float:
    """Computing products with parameters. Forward is a third of the work."""
    task = step.task
    products = 6 * task.parameters * task.length * task.sequences / task.gpus / task.flops
    return products * (1 + step.again / 3)


def tensor_seconds(step: MeshStep) -> float:
    """Waiting for the sums of tensor parallelism, half of which are forward's. A reduce_scatter and
    an all_gather stand in place of each all_reduce, and take as long."""
    tp, machine = step.shape[3], step.task.machine
    one = all_reduce_seconds(step.hidden, tp, min(tp, step.task.host), machine)
    return (4 + 2 * step.again) * step.layers * step.microbatches * one


def context_seconds(step: MeshStep, attention: float) -> float:
    """Waiting for keys and values, and their gradients, as far as `attention` does not hide it."""
    _, _, cp, tp = step.shape
    if cp == 1:
        return 0.0
    task, machine = step.task, step.task.machine
    beta = machine.inner_beta if cp * tp <= task.host else machine.beta
    rounds = 6 * cp - 4 + step.again * (2 * cp - 2)
    often = step.layers * step.microbatches
    return max(0.0, often * rounds * task.key_share * step.hidden / tp * beta - attention)


def gradient_seconds(step: MeshStep, stage: int) -> float:
    """An all_reduce of a rank's gradients, over dp and cp."""
    dp, pp, cp, tp = step.shape
    host = step.task.host
    in_host = min(cp, max(1, host // tp)) * min(dp, max(1, host // (tp * cp * pp)))
    # from zero-2 on, the gradients of a layer are a message
    messages = step.layers if stage >= 2 else 1
    nbytes = 2 * step.parameters / messages
    return messages * all_reduce_seconds(nbytes, dp * cp, in_host, step.task.machine)


def data_seconds(
    stage: int, all_reduce: float, microbatches: float, backward: float, compute: float
) -> float:
    """The seconds that a rank waits for gradients and parameters in a step, by the stage of ZeRO.
    An `all_reduce` of the gradients is a reduce_scatter and an all_gather, each half of it.

    | stage | sends                                                     | hidden behind            |
    |-------|-----------------------------------------------------------|--------------------------|
    | 0     | an all_reduce                                             | the last backward        |
    | 1     | a reduce_scatter, and an all_gather after the step        | the last backward; no    |
    | 2     | a reduce_scatter for each microbatch, and the same        | backward; nothing        |
    | 3     | two all_gathers and a reduce_scatter for each microbatch  | forward and backward     |
    """
    half = all_reduce / 2
    if stage == 0:
        return max(0.0, all_reduce - backward / microbatches)
    if stage == 1:
        return max(0.0, half - backward / microbatches) + half
    if stage == 2:
        return max(0.0, microbatches * half - backward) + half
    return max(0.0, 3 * microbatches * half - compute)


def all_reduce_seconds(nbytes: float, size: int, in_host: int, machine: Machine) -> float:
    """By two rings, in a group of which `in_host` ranks share a host: one in each host, and one
    between hosts for the part of each rank, over a link of its own."""
    inside = ring_cost(Task(in_host, int(nbytes), in_host))
    between = ring_cost(Task(ceil(size / in_host), int(nbytes / in_host)))
    return machine.seconds(inside) + machine.seconds(between)
