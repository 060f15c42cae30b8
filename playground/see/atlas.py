"""The figures of the field's tutorials, each drawn from a run on this machine. Does not import torch.

A run is made once, however many figures are drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playground.lessons.data_parallel.page import DataParallelSettings, Way
from playground.lessons.elastic.page import Kill
from playground.lessons.ladder.page import LadderSettings
from playground.lessons.pipeline.page import PipelineSettings
from playground.runtime.launcher.launch import launch
from playground.runtime.rank.rank import Event as Report
from playground.runtime.remote import ROOT, Remote, remote
from playground.runtime.temporary_folder import temporary_folder
from playground.see import SEE
from playground.see.paint import Scene, collectives, data_parallel as dp, training
from playground.see.paint.painters import paint_scene
from playground.see.paint.results import Evidence
from playground.see.play.moving import moving
from playground.see.record.run import record_run
from playground.survival.settings import SnapshotSettings
from playground.training import prepare
from playground.training.settings import TrainingSettings

IMAGES, TEST_IMAGES = 1280, 128
"""Numbers of digits that are drawn for training and for its test set."""


@dataclass(frozen=True)
class Run:
    """A function that ranks run."""

    work: Remote
    size: int
    arguments: Callable[[Path], tuple[object, ...]] = lambda folder: ()
    """Its arguments besides rank and size; the folder is for its files."""
    recorded: bool = False
    restarts: int = 0
    """How often new ranks may replace a world that failed."""

    def make(self, name: str, folder: Path) -> Evidence:
        """Run it. Raises what `launch` raises."""
        arguments = self.arguments(folder)
        if self.recorded:
            results, recording = record_run(self.work, self.size, *arguments, command=(name, "-n", str(self.size)))
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


def given(*arguments: object) -> Callable[[Path], tuple[object, ...]]:
    """Arguments that need no folder."""
    return lambda folder: arguments


def draw_digits(folder: Path) -> Path:
    """Draw digits into the folder if they are not there. Returns their folder."""
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


DEVICES = tuple(f"cpu:{number}" for number in range(4))
WAYS = DataParallelSettings(
    devices=DEVICES,
    output_device=DEVICES[0],
    batch_size=32,
    steps=2,
    ways=tuple(Way(gather=gather, output_device=DEVICES[0]) for gather in ("logits", "loss")),
)
ALL_REDUCE = remote("playground.see.paint.ranks:all_reduce")
STEPS = remote("playground.see.paint.ranks:training_steps")
BACKWARD = remote("playground.see.paint.ranks:ddp_backward")
SGD = remote("playground.see.paint.ranks:sgd_step")
RUNS = {
    "collectives": Run(remote("playground.see.paint.ranks:six_collectives"), 4, recorded=True),
    "send": Run(remote("playground.see.paint.ranks:send_to_last"), 4, recorded=True),
    "reduce-broadcast": Run(ALL_REDUCE, 4, given("reduce-broadcast"), recorded=True),
    "all-to-all": Run(ALL_REDUCE, 4, given("all-to-all"), recorded=True),
    "ring": Run(ALL_REDUCE, 4, given("ring"), recorded=True),
    "sgd": Run(SGD, 4),
    "sgd on three": Run(SGD, 3),
    "flat": Run(STEPS, 2, given("flat"), recorded=True),
    "overlapped": Run(STEPS, 2, given("overlapped"), recorded=True),
    "ladder": Run(remote("playground.lessons.ladder.lesson:run"), 2, ladder_settings),
    "hello": Run(remote("playground.lessons.hello.lesson:who_am_i"), 3),
    "bert": Run(remote("playground.see.paint.ranks:bert_steps"), 2, recorded=True),
    "elastic": Run(remote("playground.lessons.elastic.lesson:run"), 3, elastic_settings, restarts=2),
    "pipeline": Run(remote("playground.lessons.pipeline.experiment:run"), 2, pipeline_settings),
    "ddp": Run(BACKWARD, 2, given("net")),
    "ddp, four parameters": Run(BACKWARD, 2, given("four")),
    "data-parallel": Run(remote("playground.see.paint.ranks:data_parallel_steps"), 1, given(WAYS), recorded=True),
    "data-parallel, memory": Run(remote("playground.lessons.data_parallel.experiment:ways"), 1, given(WAYS)),
}


@dataclass(frozen=True)
class Figure:
    path: str
    """The chapter whose README shows it, a lesson or `see`, and the name of its file, without the ending."""
    run: str
    """The run that it is drawn from: a name of `RUNS`."""
    draw: Callable[[Evidence], Scene]
    shows: str
    """A description in one line."""


FIGURES = {
    "F1": Figure("data_parallel/dp_forward", "data-parallel", dp.forward, "DataParallel: forward, in five panels"),
    "F2": Figure("data_parallel/dp_backward", "data-parallel", dp.backward, "DataParallel: backward and step"),
    "F3": Figure(
        "ladder/backward_step",
        "ladder",
        training.backward_and_step,
        "backward computes the gradient, step applies it: what each costs",
    ),
    "F4": Figure(
        "data_parallel/dp_training",
        "data-parallel, memory",
        dp.memory_and_utilisation,
        "DataParallel: memory and utilisation of each device",
    ),
    "F5": Figure(
        "data_parallel/dp_forward_2",
        "data-parallel",
        dp.loss_in_forward,
        "DataParallel with the loss inside forward: reduced twice",
    ),
    "F6": Figure(
        "all_reduce/allreduce", "collectives", collectives.all_reduce_sum, "all-reduce: the same sum on every rank"
    ),
    "F7": Figure(
        "all_reduce/allreduce_1",
        "reduce-broadcast",
        collectives.reduce_broadcast,
        "all-reduce as reduce, then broadcast",
    ),
    "F8": Figure("all_reduce/allreduce_2", "all-to-all", collectives.all_to_all, "all-reduce as all to all"),
    "F9": Figure("all_reduce/ring", "ring", collectives.ring_chunk, "ring all-reduce: the way of one chunk"),
    "F10": Figure(
        "prove/ring_end", "sgd", collectives.step_everywhere, "the end of an all-reduce: the same step everywhere"
    ),
    "F11": Figure("sgd/ddp", "sgd on three", training.five_phases, "synchronous SGD in five phases"),
    "F12": Figure("ladder/after_backward", "flat", training.after_backward, "all-reduce after backward"),
    "F13": Figure("ladder/inside_backward", "overlapped", training.inside_backward, "all-reduce inside backward"),
    "F14": Figure(
        "ladder/step_parts", "ladder", training.normalised_parts, "what a training step's time goes into, rung by rung"
    ),
    "F15": Figure("ladder/overlap", "ladder", training.with_and_without_overlap, "a step without and with overlap"),
    "F16": Figure("ddp/buckets", "ddp", training.filling, "DistributedDataParallel's buckets fill and leave"),
    "F17": Figure(
        "data_parallel/dp_criterion",
        "data-parallel",
        dp.parallel_criterion,
        "DataParallelModel and DataParallelCriterion, in eight panels",
    ),
    "F18": Figure(
        "data_parallel/dp_memory",
        "data-parallel, memory",
        dp.imbalance,
        "DataParallel: memory per device where logits are gathered",
    ),
    "F19": Figure("ddp/bucket", "ddp, four parameters", training.same_on_both, "the same buckets on every rank"),
    "F20": Figure("p2p/p2p", "send", collectives.point_to_point, "point to point: one rank sends, another receives"),
    "F21": Figure(
        "collectives/communication", "collectives", collectives.six_collectives, "six collectives: before and after"
    ),
}
CHAPTERS = {
    "hello": Figure(
        "hello/one_world", "hello", collectives.one_world, "processes meet at the master, and are one world"
    ),
    "bert": Figure("bert/step", "bert", training.bert_step, "a step of BERT: buckets leave while backward goes on"),
    "elastic": Figure(
        "elastic/attempts", "elastic", training.attempts, "ranks are killed, and the training goes on from a snapshot"
    ),
    "pipeline": Figure(
        "pipeline/schedules", "pipeline", training.schedules, "a pipeline's stages at work, by three schedules"
    ),
    "see": Figure("see/ring", "ring", collectives.ring, "a recorded ring all-reduce: ranks, waits and messages"),
    "moving": Figure(
        "see/moving", "ring", moving, "a ring all-reduce that moves: messages on their way, and their sums"
    ),
}
"""Figures of chapters that none of the tutorials' figures is about."""
ALL = FIGURES | CHAPTERS


@dataclass(frozen=True, kw_only=True)
class PaintedFigure:
    """A figure on the disk."""

    name: str
    shows: str
    run: str
    file: Path


def paint_figures(files: dict[str, Path], show: Callable[[str, int, int], None]) -> list[PaintedFigure]:
    """Paint figures, given by name, into these files, in the order of the runs they are drawn from.

    `show` is called with the current activity, the number of runs done, and their total. Raises `UsageError` for a file
    that cannot be written, and what `launch` raises.
    """
    runs = [*dict.fromkeys(ALL[name].run for name in files)]
    with temporary_folder("figures") as folder:
        for number, run in enumerate(runs):
            show(f"running {run}", number, len(runs))
            evidence = RUNS[run].make(run, folder)
            for name, file in files.items():
                if ALL[name].run == run:
                    paint_scene(ALL[name].draw(evidence), file)
    return [
        PaintedFigure(name=name, shows=ALL[name].shows, run=ALL[name].run, file=file) for name, file in files.items()
    ]


def all_files(folder: Path) -> dict[str, Path]:
    """The SVG files of all figures of the tutorials in a folder, by the figure's name."""
    return {name: folder / f"{name}_{Path(figure.path).name}.svg" for name, figure in FIGURES.items()}


def chapter_files(root: Path = ROOT) -> dict[str, Path]:
    """The pictures of the chapters' READMEs, by the figure's name."""
    files = {}
    for name, figure in ALL.items():
        chapter, file = figure.path.split("/")
        folder = root / "playground" / ("" if chapter == SEE.name else "lessons") / chapter
        files[name] = folder / "figures" / f"{file}.svg"
    return files
