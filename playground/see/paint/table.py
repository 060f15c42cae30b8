"""The figures of the field's tutorials, each drawn from a run on this machine. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playground.see.paint import buckets, chapters, collectives, data_parallel, memory, training
from playground.see.paint.results import Evidence
from playground.see.paint.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    """What it is asked for by: F1 to F21, or its chapter's name."""
    file: str
    """What its file is called, without the ending."""
    shows: str
    """In one line."""
    run: str
    """What it is drawn from: a name of `RUNS`."""
    draw: Callable[[Evidence], Scene]
    chapter: str
    """The folder of the chapter whose README shows it, seen from the top of the repository."""


def lesson(folder: str) -> str:
    return f"playground/lessons/{folder}"


FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            name="F1", file="dp_forward", shows="DataParallel: forward, in five panels",
            run="data-parallel", draw=data_parallel.forward, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F2", file="dp_backward", shows="DataParallel: backward and step",
            run="data-parallel", draw=data_parallel.backward, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F3", file="backward_step", shows="backward computes the gradient, step applies it: what each costs",
            run="ladder", draw=training.backward_and_step, chapter=lesson("ladder"),
        ),
        Figure(
            name="F4", file="dp_training", shows="DataParallel: memory and utilisation of each device",
            run="data-parallel, memory", draw=memory.memory_and_utilisation, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F5", file="dp_forward_2", shows="DataParallel with the loss inside forward: reduced twice",
            run="data-parallel", draw=data_parallel.loss_in_forward, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F6", file="allreduce", shows="all-reduce: the same sum on every rank",
            run="collectives", draw=collectives.all_reduce_sum, chapter=lesson("all_reduce"),
        ),
        Figure(
            name="F7", file="allreduce_1", shows="all-reduce as reduce, then broadcast",
            run="reduce-broadcast", draw=collectives.reduce_broadcast, chapter=lesson("all_reduce"),
        ),
        Figure(
            name="F8", file="allreduce_2", shows="all-reduce as all to all",
            run="all-to-all", draw=collectives.all_to_all, chapter=lesson("all_reduce"),
        ),
        Figure(
            name="F9", file="ring", shows="ring all-reduce: the way of one chunk",
            run="ring", draw=collectives.ring_chunk, chapter=lesson("all_reduce"),
        ),
        Figure(
            name="F10", file="ring_end", shows="the end of an all-reduce: the same step everywhere",
            run="sgd", draw=collectives.step_everywhere, chapter=lesson("prove"),
        ),
        Figure(
            name="F11", file="ddp", shows="synchronous SGD in five phases",
            run="sgd on three", draw=training.five_phases, chapter=lesson("sgd"),
        ),
        Figure(
            name="F12", file="after_backward", shows="all-reduce after backward",
            run="flat", draw=training.after_backward, chapter=lesson("ladder"),
        ),
        Figure(
            name="F13", file="inside_backward", shows="all-reduce inside backward",
            run="overlapped", draw=training.inside_backward, chapter=lesson("ladder"),
        ),
        Figure(
            name="F14", file="step_parts", shows="what a training step's time goes into, rung by rung",
            run="ladder", draw=training.normalised_parts, chapter=lesson("ladder"),
        ),
        Figure(
            name="F15", file="overlap", shows="a step without and with overlap",
            run="ladder", draw=training.with_and_without_overlap, chapter=lesson("ladder"),
        ),
        Figure(
            name="F16", file="buckets", shows="DistributedDataParallel's buckets fill and leave",
            run="ddp", draw=buckets.filling, chapter=lesson("ddp"),
        ),
        Figure(
            name="F17", file="dp_criterion", shows="DataParallelModel and DataParallelCriterion, in eight panels",
            run="data-parallel", draw=data_parallel.parallel_criterion, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F18", file="dp_memory", shows="DataParallel: memory per device where logits are gathered",
            run="data-parallel, memory", draw=memory.imbalance, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F19", file="bucket", shows="the same buckets on every rank",
            run="ddp, four parameters", draw=buckets.same_on_both, chapter=lesson("ddp"),
        ),
        Figure(
            name="F20", file="p2p", shows="point to point: one rank sends, another receives",
            run="send", draw=collectives.point_to_point, chapter=lesson("p2p"),
        ),
        Figure(
            name="F21", file="communication", shows="six collectives: before and after",
            run="collectives", draw=collectives.six_collectives, chapter=lesson("collectives"),
        ),
    )
}  # fmt: skip
CHAPTERS = {
    figure.name: figure
    for figure in (
        Figure(
            name="hello", file="one_world", shows="processes meet at the master, and are one world",
            run="hello", draw=chapters.one_world, chapter=lesson("hello"),
        ),
        Figure(
            name="bert", file="step", shows="a step of BERT: buckets leave while backward goes on",
            run="bert", draw=chapters.bert_step, chapter=lesson("bert"),
        ),
        Figure(
            name="elastic", file="attempts", shows="ranks are killed, and the training goes on from a snapshot",
            run="elastic", draw=chapters.attempts, chapter=lesson("elastic"),
        ),
        Figure(
            name="pipeline", file="schedules", shows="a pipeline's stages at work, by three schedules",
            run="pipeline", draw=chapters.schedules, chapter=lesson("pipeline"),
        ),
        Figure(
            name="see", file="ring", shows="a recorded ring all-reduce: ranks, waits and messages",
            run="ring", draw=chapters.ring, chapter="playground/see",
        ),
    )
}  # fmt: skip
"""Of chapters that none of the tutorials' figures is about."""
ALL = FIGURES | CHAPTERS
