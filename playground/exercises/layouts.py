"""Layouts of a GPT on a cluster: what a GPU holds, and what a step takes.

In mixed precision a parameter and its gradient take two bytes each, and the optimizer's state
twelve. Activations are those of sequence parallelism, with attention that stores no square. Times
of all-reduces are those of the cost model that `scale` uses; messages between stages are hidden.
These are the formulas of the lesson mesh, without context parallelism, and with microbatches of any
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from playground.algorithms.cost_model import Machine, Task, hierarchical_cost, ring_cost
from playground.exercises.cases import Case

SHARDED = {0: 0, 1: 12, 2: 14, 3: 16}
"""Bytes of a parameter's sixteen that each stage of ZeRO shards over the replicas."""
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Ranks along an axis."""
ENOUGH = 1.05
"""How many times as long as the fastest layout that fits an accepted one may take."""


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
    host: int
    """GPUs of a host."""
    memory: float
    """Bytes of a GPU."""
    flops: float
    """Operations that a GPU sustains in a second."""
    machine: Machine

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.width**2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis, ZeRO's stage, and sequences of a microbatch."""

    dp: int
    pp: int = 1
    tp: int = 1
    zero: int
    microbatch: int = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a GPU holds, and the seconds of a step: computing, and waiting, by cause."""

    held: float
    compute: float
    tensor: float
    data: float
    bubble: float

    @property
    def step(self) -> float:
        return self.compute + self.tensor + self.data + self.bubble


def cost_of(layout: Layout, task: Training) -> Cost:
    dp, pp, tp, size = layout.dp, layout.pp, layout.tp, layout.microbatch
    microbatches, own = task.sequences / dp / size, task.parameters / (pp * tp)
    hidden, sharded = 2 * size * task.length * task.width, SHARDED[layout.zero]
    activations = 17 * hidden / tp * task.layers / pp * min(pp, microbatches)
    tokens = task.length * task.sequences / task.gpus
    attention = 6 * task.layers * task.length * task.width * tokens / task.flops
    compute = 6 * task.parameters * tokens / task.flops + attention
    often = task.layers / pp * microbatches
    tensor = 4 * often * all_reduce_seconds(hidden, tp, min(tp, task.host), task.machine)
    in_host = min(dp, max(1, task.host // (tp * pp)))
    sums = all_reduce_seconds(2 * own, dp, in_host, task.machine)
    # behind backward of the last microbatch; from zero-2 on each microbatch reduces its gradients,
    # and with zero-3 gathers parameters twice: each is half an all-reduce
    data = max(0.0, sums - 2 / 3 * compute / microbatches)
    if layout.zero == 2:  # what the step has changed is gathered after it
        data = max(0.0, microbatches / 2 * sums - 2 / 3 * compute) + sums / 2
    if layout.zero == 3:
        data = max(0.0, (microbatches + 0.5) * sums - compute)
    return Cost(
        held=own * (16 - sharded + sharded / dp) + activations,
        compute=compute,
        tensor=tensor,
        data=data,
        bubble=(pp - 1) / microbatches * (compute + tensor),
    )


def all_reduce_seconds(nbytes: float, size: int, in_host: int, machine: Machine) -> float:
    """By the faster algorithm, in a group of which `in_host` ranks share a host."""
    task = Task(size, int(nbytes), in_host)
    return min(machine.seconds(cost(task)) for cost in (ring_cost, hierarchical_cost))


def find_fault(layout: Layout, task: Training) -> str:
    """Why a layout is none for this model and cluster; empty if it is one."""
    dp, pp, tp = layout.dp, layout.pp, layout.tp
    if dp * pp * tp != task.gpus:
        return f"{dp} x {pp} x {tp} = {dp * pp * tp} ranks for {task.gpus} GPUs"
    if task.layers % pp:
        return f"{task.layers} layers in {pp} stages"
    if task.sequences % (dp * layout.microbatch):
        return f"{task.sequences} sequences in microbatches of {layout.microbatch} on {dp} replicas"
    return "" if layout.zero in SHARDED else f"ZeRO has no stage {layout.zero}"


def layouts(task: Training, choices: Mapping[str, tuple[int, ...]]) -> Iterator[Layout]:
    """All layouts that these choices allow."""
    for values in product(*choices.values()):
        layout = new_layout(dict(zip(choices, values, strict=True)), task)
        if not find_fault(layout, task):
            yield layout


def new_layout(answer: Mapping[str, int], task: Training) -> Layout:
    """The layout of an answer; all GPUs are replicas where it names none."""
    return Layout(**({"dp": task.gpus, "zero": 1} | {name: int(answer[name]) for name in answer}))


def choose(about: str, task: Training, choices: Mapping[str, tuple[int, ...]]) -> Case:
    """A choice of a layout. The notes show what it holds and takes beside the fastest that fits."""
    notes: list[str] = []
    costs = {layout: cost_of(layout, task) for layout in layouts(task, choices)}
    fitting = {layout: cost for layout, cost in costs.items() if cost.held <= task.memory}
    best = min(fitting, key=lambda layout: fitting[layout].step)
    right = {"memory": "fits", "ranks": "fits", "step": "within 5 % of the fastest"}

    def run(function: Callable[[], Any]) -> object:
        answer = function()
        if not isinstance(answer, dict) or {*answer} != {*choices}:
            return right | {"ranks": f"the answer's keys are to be {', '.join(choices)}"}
        layout = new_layout(answer, task)
        if fault := find_fault(layout, task):
            return right | {"ranks": fault}
        mine = cost_of(layout, task)
        notes[:] = [*compare(mine, fitting[best])]
        if mine.held > task.memory:
            return right | {"memory": f"{mine.held / 1e9:.1f} of {task.memory / 1e9:.0f} GB"}
        if mine.step > ENOUGH * fitting[best].step:
            notes.append(f"better: {show(best, choices)}")
            return right | {"step": f"{mine.step / fitting[best].step:.2f} times the fastest"}
        return right

    return Case(about, (), right, is_coded=False, run=run, gives_rank=False, notes=notes)


def compare(mine: Cost, best: Cost) -> Iterator[str]:
    """A table of two costs."""
    yield f"{'':24}{'chosen':>10}{'fastest':>10}"
    yield f"{'GB held':24}{mine.held / 1e9:10.1f}{best.held / 1e9:10.1f}"
    for name in ("compute", "tensor", "data", "bubble", "step"):
        unit = f"s {name}" if name == "step" else f"s of it: {name}"
        yield f"{unit:24}{getattr(mine, name):10.2f}{getattr(best, name):10.2f}"


def show(layout: Layout, choices: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {getattr(layout, name)}" for name in choices)
