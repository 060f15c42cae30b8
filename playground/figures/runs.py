"""The runs that figures are drawn from: each is run once, whatever is drawn from it. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playground.figures.results import Evidence
from playground.lessons.data_parallel.page import DataParallelSettings, Way
from playground.lessons.elastic.settings import Kill
from playground.lessons.ladder.settings import LadderSettings
from playground.lessons.pipeline.page import PipelineSettings
from playground.recording.run import record_run
from playground.runtime.launch import launch
from playground.runtime.rank import Event as Report
from playground.runtime.remote import Remote, remote
from playground.training import prepare
from playground.training.settings import TrainingSettings
from playground.training.snapshots.settings import SnapshotSettings

DEVICES = tuple(f"cpu:{number}" for number in range(4))
IMAGES, TEST_IMAGES = 1280, 128
"""Digits that are drawn for those who train on them, and for the test set that goes with them."""
WAYS = DataParallelSettings(
    devices=DEVICES, output_device=DEVICES[0], batch_size=32, steps=2,
    ways=tuple(Way(gather=gather, output_device=DEVICES[0]) for gather in ("logits", "loss")),
)  # fmt: skip


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
            self.work, self.size, args=arguments, restarts=self.restarts, on_restart=lambda failure, count: None,
            on_report=lambda rank, event: reports.append((rank, event)),
        )  # fmt: skip
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


SIX = remote("playground.figures.ranks:six_collectives")
ALL_REDUCE = remote("playground.figures.ranks:all_reduce")
SEND = remote("playground.figures.ranks:send_to_last")
SGD = remote("playground.figures.ranks:sgd_step")
STEPS = remote("playground.figures.ranks:training_steps")
BACKWARD = remote("playground.figures.ranks:ddp_backward")
DATA_PARALLEL = remote("playground.figures.ranks:data_parallel_steps")
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
        Run(name="bert", work=remote("playground.figures.ranks:bert_steps"), size=2, recorded=True),
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
