"""Layouts of a GPT on a cluster, costed as in the chapter mesh; what makes one a good choice."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from playground.exercises.cases import ENOUGH, Case, describe_keys
from playground.training import mesh_costs as costs
from playground.training.formulas import STAGES
from playground.training.mesh_costs import Cost, TrainingTask

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Ranks along an axis."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis, ZeRO's stage, sequences of a microbatch, and whether backward computes
    activations again."""

    dp: int
    pp: int = 1
    tp: int = 1
    zero: int
    microbatch: int = 1
    recompute: int = 0


def cost_of(layout: Layout, task: TrainingTask) -> Cost:
    shape = layout.dp, layout.pp, 1, layout.tp
    recompute = bool(layout.recompute)
    return costs.cost_of(shape, layout.zero, task, layout.microbatch, recompute=recompute)


def find_fault(
    layout: Layout, task: TrainingTask, names: Container[str] = ("dp",)
) -> dict[str, str]:
    """Why a layout is none for this model and cluster, by what is to be chosen otherwise; empty if
    it is one. `names`: the choices."""
    dp, pp, tp = layout.dp, layout.pp, layout.tp
    if dp * pp * tp != task.gpus:
        return {"ranks": f"{dp} x {pp} x {tp} = {dp * pp * tp} ranks for {task.gpus} GPUs"}
    if task.layers % pp:
        return {"ranks": f"{task.layers} layers in {pp} stages"}
    if task.sequences % (dp * layout.microbatch):
        least = f"{dp} replicas x {layout.microbatch} in a microbatch = {dp * layout.microbatch}"
        chosen = "ranks" if "dp" in names else "microbatch"
        return {chosen: f"{task.sequences} sequences, no multiple of {least}"}
    if layout.recompute not in (0, 1):
        return {"recompute": f"{layout.recompute}, which is 0 or 1"}
    return {} if layout.zero in STAGES else {"zero": f"ZeRO has no stage {layout.zero}"}


def layouts(task: TrainingTask, choices: Mapping[str, tuple[int, ...]]) -> Iterator[Layout]:
    """All layouts that these choices allow."""
    for values in product(*choices.values()):
        layout = new_layout(dict(zip(choices, values, strict=True)), task)
        if not find_fault(layout, task):
            yield layout


def new_layout(answer: Mapping[str, int], task: TrainingTask) -> Layout:
    """The layout of an answer; all GPUs are replicas where it names none."""
    return Layout(**({"dp": task.gpus, "zero": 1} | {name: int(answer[name]) for name in answer}))


def choose(about: str, task: TrainingTask, choices: Mapping[str, tuple[int, ...]]) -> Case:
    """A choice of a layout. The notes show what it holds and takes beside the fastest that fits."""
    notes: list[str] = []
    costed = {layout: cost_of(layout, task) for layout in layouts(task, choices)}
    fitting = {layout: cost for layout, cost in costed.items() if cost.held <= task.memory}
    best = min(fitting, key=lambda layout: fitting[layout].step)
    right = dict.fromkeys(("answer", "memory", "ranks", "microbatch", "recompute", "zero"), "fits")
    right["step"] = "within 5 % of the fastest"

    def run(function: Callable[[], Any]) -> object:
        answer = function()
        if not isinstance(answer, dict) or {*answer} != {*choices}:
            return right | {"answer": describe_keys(choices)}
        layout = new_layout(answer, task)
        if fault := find_fault(layout, task, choices):
            return right | fault
        mine = cost_of(layout, task)
        notes[:] = [*compare(mine, fitting[best])]
        if mine.held > task.memory:
            return right | {"memory": f"{mine.held / 1e9:.1f} of {task.memory / 1e9:.0f} GB"}
        if mine.step > ENOUGH * fitting[best].step:
            return right | {"step": f"{mine.step / fitting[best].step:.2f} times the fastest"}
        return right

    return Case(about, (), right, is_coded=False, run=run, gives_rank=False, notes=notes)


PARTS = {
    "compute": "s computing",
    "tensor": "s waiting for tensor parallelism",
    "data": "s waiting for replicas",
    "bubble": "s waiting in the bubble",
    "step": "s of a step",
}
"""Names of the times in a cost, as the table has them."""
NAMES = 34
"""The width of the table's names."""


def compare(mine: Cost, best: Cost) -> Iterator[str]:
    """A table of two costs, but for the parts that take no time in either."""
    yield f"{'':{NAMES}}{'chosen':>10}{'fastest':>10}"
    yield f"{'GB held':{NAMES}}{mine.held / 1e9:10.1f}{best.held / 1e9:10.1f}"
    for name, words in PARTS.items():
        shown = [f"{getattr(each, name):10.2f}" for each in (mine, best)]
        if any(float(each) for each in shown):
            yield f"{words:{NAMES}}{''.join(shown)}"
