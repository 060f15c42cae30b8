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
    # a reduce_scatter and an all_gather in place of each all_reduce, which take as long
    tensor = (4 + 2 * again) * often * all_reduce_seconds(hidden, tp, min(tp, host), machine)
    beta = machine.inner_beta if cp * tp <= host else machine.beta
    rounds = 6 * cp - 4 + again * (2 * cp - 2)
    context = max(0.0, (cp > 1) * often * rounds * task.key_share * hidden / tp * beta - attention)
    in_host = min(cp, max(1, host // tp)) * min(dp, max(1, host // (tp * cp * pp)))
    # from zero-2 on, the gradients of a layer are a message
    messages = task.layers / pp if stage >= 2 else 1
    sums = messages * all_reduce_seconds(2 * own / messages, dp * cp, in_host, machine)
    return Cost(
        held=held,
        compute=compute,
        tensor=tensor,
        context=context,
        data=data_seconds(stage, sums, microbatches, backward, compute),
        bubble=(pp - 1) / (parts * microbatches) * (compute + tensor + context),
    )


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
