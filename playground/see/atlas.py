"""The figures of the field's tutorials, each drawn from a run on this machine. Does not import torch.

A run is what figures are drawn from: it is made once, whatever is drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from playground.lessons.data_parallel.page import DataParallelSettings, Way
from playground.lessons.elastic.page import Kill
from playground.lessons.ladder.page import LadderSettings
from playground.lessons.pipeline.page import PipelineSettings
from playground.runtime.launch import launch
from playground.runtime.rank import Event as Report
from playground.runtime.remote import ROOT, Remote, remote
from playground.runtime.temporary_folder import temporary_folder
from playground.see.paint import collectives, data_parallel, training
from playground.see.paint.painters import paint_scene
from playground.see.paint.results import Evidence
from playground.see.paint.scene import Scene
from playground.see.play.moving import moving
from playground.see.record.run import record_run
from playground.survival.settings import SnapshotSettings
from playground.training import prepare
from playground.training.settings import TrainingSettings

DEVICES = tuple(f"cpu:{number}" for number in range(4))
IMAGES, TEST_IMAGES = 1280, 128
"""Digits that are drawn for those who train on them, and for the test set that goes with them."""
WAYS = DataParallelSettings(
    devices=DEVICES,
    output_device=DEVICES[0],
    batch_size=32,
    steps=2,
    ways=tuple(Way(gather=gather, output_device=DEVICES[0]) for gather in ("logits", "loss")),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A function that ranks run."""

    name: str
    work: Remote
    size: int
    arguments: Callable[[Path], tuple[object, ...]] = lambda folder: ()
    """What it gets besides rank and size; the folder is for what it needs on the disk."""
    recorded: bool = False
    restarts: int = 0
    """How often new ranks may take the place of a world that failed."""

    def make(self, folder: Path) -> Evidence:
        """Run it. Raises what `launch` raises."""
        arguments = self.arguments(folder)
        if self.recorded:
            results, recording = record_run(self.work, self.size, *arguments, command=(self.name, "-n", str(self.size)))
            return Evidence(results=results, recording=recording, arguments=arguments)
        reports: list[tuple[int, Report]] = []
        results = launch(
            self.work,
            self.size,
            args=arguments,
            restarts=self.restarts,
            on_restart=lambda failure, count: None,
            on_report=lambda rank, event: reports.append((rank, event)),
        )
        return Evidence(results=results, arguments=arguments, reports=tuple(reports))


def with_name(name: str) -> Callable[[Path], tuple[object, ...]]:
    """Arguments that are a name alone."""
    return lambda folder: (name,)


def draw_digits(folder: Path) -> Path:
    """Digits, drawn into the folder if they are not there. Returns where they are."""
    prepare.find_or_draw_digits(folder, "for the figures", lambda line: None, IMAGES, TEST_IMAGES)
    return prepare.raw_folder(folder, "digits")


def ladder_settings(folder: Path) -> tuple[LadderSettings]:
    """Twenty steps of each rung."""
    return (LadderSettings(folder=draw_digits(folder), steps=20),)


def elastic_settings(folder: Path) -> tuple[TrainingSettings, str, tuple[Kill, ...]]:
    """Twenty steps, with two kills and a snapshot every four steps."""
    snapshots = SnapshotSettings(folder=folder / "snapshots", every=4)
    settings = TrainingSettings(folder=draw_digits(folder), limit=IMAGES, epochs=2, snapshots=snapshots)
    return settings, "sgd", (Kill(rank=1, step=7), Kill(rank=0, step=14))


def pipeline_settings(folder: Path) -> tuple[PipelineSettings]:
    """Two stages and few microbatches, so that each can be seen."""
    return (PipelineSettings(size=2, folder=draw_digits(folder), microbatches=4, steps=3),)


SIX = remote("playground.see.paint.ranks:six_collectives")
ALL_REDUCE = remote("playground.see.paint.ranks:all_reduce")
SEND = remote("playground.see.paint.ranks:send_to_last")
SGD = remote("playground.see.paint.ranks:sgd_step")
STEPS = remote("playground.see.paint.ranks:training_steps")
BACKWARD = remote("playground.see.paint.ranks:ddp_backward")
DATA_PARALLEL = remote("playground.see.paint.ranks:data_parallel_steps")
RUNS = {
    run.name: run
    for run in (
        Run(name="collectives", work=SIX, size=4, recorded=True),
        Run(name="send", work=SEND, size=4, recorded=True),
        *(
            Run(name=name, work=ALL_REDUCE, size=4, arguments=with_name(name), recorded=True)
            for name in ("reduce-broadcast", "all-to-all", "ring")
        ),
        Run(name="sgd", work=SGD, size=4),
        Run(name="sgd on three", work=SGD, size=3),
        *(
            Run(name=name, work=STEPS, size=2, arguments=with_name(name), recorded=True)
            for name in ("flat", "overlapped")
        ),
        Run(
            name="ladder", work=remote("playground.lessons.ladder.lesson:run"), size=2, arguments=ladder_settings
        ),
        Run(name="hello", work=remote("playground.lessons.hello.lesson:who_am_i"), size=3),
        Run(name="bert", work=remote("playground.see.paint.ranks:bert_steps"), size=2, recorded=True),
        Run(
            name="elastic", work=remote("playground.lessons.elastic.lesson:run"), size=3, restarts=2,
            arguments=elastic_settings,
        ),
        Run(
            name="pipeline", work=remote("playground.lessons.pipeline.experiment:run"), size=2,
            arguments=pipeline_settings,
        ),
        Run(name="ddp", work=BACKWARD, size=2, arguments=with_name("net")),
        Run(name="ddp, four parameters", work=BACKWARD, size=2, arguments=with_name("four")),
        Run(name="data-parallel", work=DATA_PARALLEL, size=1, arguments=lambda folder: (WAYS,), recorded=True),
        Run(
            name="data-parallel, memory", work=remote("playground.lessons.data_parallel.experiment:ways"), size=1,
            arguments=lambda folder: (WAYS,),
        ),
    )
}  # fmt: skip


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
            run="data-parallel, memory", draw=data_parallel.memory_and_utilisation, chapter=lesson("data_parallel"),
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
            run="ddp", draw=training.filling, chapter=lesson("ddp"),
        ),
        Figure(
            name="F17", file="dp_criterion", shows="DataParallelModel and DataParallelCriterion, in eight panels",
            run="data-parallel", draw=data_parallel.parallel_criterion, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F18", file="dp_memory", shows="DataParallel: memory per device where logits are gathered",
            run="data-parallel, memory", draw=data_parallel.imbalance, chapter=lesson("data_parallel"),
        ),
        Figure(
            name="F19", file="bucket", shows="the same buckets on every rank",
            run="ddp, four parameters", draw=training.same_on_both, chapter=lesson("ddp"),
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
            run="hello", draw=collectives.one_world, chapter=lesson("hello"),
        ),
        Figure(
            name="bert", file="step", shows="a step of BERT: buckets leave while backward goes on",
            run="bert", draw=training.bert_step, chapter=lesson("bert"),
        ),
        Figure(
            name="elastic", file="attempts", shows="ranks are killed, and the training goes on from a snapshot",
            run="elastic", draw=training.attempts, chapter=lesson("elastic"),
        ),
        Figure(
            name="pipeline", file="schedules", shows="a pipeline's stages at work, by three schedules",
            run="pipeline", draw=training.schedules, chapter=lesson("pipeline"),
        ),
        Figure(
            name="see", file="ring", shows="a recorded ring all-reduce: ranks, waits and messages",
            run="ring", draw=collectives.ring, chapter="playground/see",
        ),
        Figure(
            name="moving", file="moving", shows="a ring all-reduce that moves: messages on their way, and their sums",
            run="ring", draw=moving, chapter="playground/see",
        ),
    )
}  # fmt: skip
"""Of chapters that none of the tutorials' figures is about."""
ALL = FIGURES | CHAPTERS


Show = Callable[[str, int, int], None]
"""Is called with what is being done, how many runs are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class PaintedFigure:
    """A figure that is on the disk."""

    name: str
    shows: str
    run: str
    file: Path


def paint_figures(files: dict[str, Path], show: Show) -> list[PaintedFigure]:
    """Paint figures, given by name, into these files, in the order of the runs they are drawn from.

    Raises `UsageError` for a file that cannot be written, and what `launch` raises.
    """
    chosen = [ALL[name] for name in files]
    runs = [*dict.fromkeys(figure.run for figure in chosen)]
    with temporary_folder("figures") as folder:
        for number, run in enumerate(runs):
            show(f"running {run}", number, len(runs))
            evidence = RUNS[run].make(folder)
            paint_from(evidence, [figure for figure in chosen if figure.run == run], files)
    return [
        PaintedFigure(name=figure.name, shows=figure.shows, run=figure.run, file=files[figure.name])
        for figure in chosen
    ]


def paint_from(evidence: Evidence, figures: Sequence[Figure], files: dict[str, Path]) -> None:
    for figure in figures:
        paint_scene(figure.draw(evidence), files[figure.name])


def all_files(folder: Path) -> dict[str, Path]:
    """Where all figures of the tutorials go to in a folder, as SVG."""
    return {figure.name: folder / f"{figure.name}_{figure.file}.svg" for figure in FIGURES.values()}


def chapter_files(root: Path = ROOT) -> dict[str, Path]:
    """Where the pictures of the chapters' READMEs are, by the figure's name."""
    return {figure.name: root / figure.chapter / "figures" / f"{figure.file}.svg" for figure in ALL.values()}
