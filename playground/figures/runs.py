"""The runs that figures are drawn from: each is run once, whatever is drawn from it. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playground.figures.results import Evidence
from playground.lessons.data_parallel.settings import DataParallelSettings, Way
from playground.lessons.ladder.settings import LadderSettings
from playground.recording.run import record_run
from playground.runtime.launch import launch
from playground.runtime.remote import Remote, remote
from playground.training import prepare

DEVICES = tuple(f"cpu:{number}" for number in range(4))
IMAGES, TEST_IMAGES = 1280, 128
"""Digits that are drawn for the ladder, and for the test set that goes with them."""
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

    def make(self, folder: Path) -> Evidence:
        """Run it. Raises what `launch` raises."""
        arguments = self.arguments(folder)
        if not self.recorded:
            return Evidence(results=launch(self.work, self.size, args=arguments), recording=None)
        results, recording = record_run(self.work, self.size, *arguments, command=(self.name, "-n", str(self.size)))
        return Evidence(results=results, recording=recording)


def with_name(name: str) -> Callable[[Path], tuple[object, ...]]:
    """Arguments that are a name alone."""
    return lambda folder: (name,)


def ladder_settings(folder: Path) -> tuple[LadderSettings]:
    """Twenty steps of each rung, on digits that are drawn into the folder."""
    prepare.find_or_draw_digits(folder, "for the figures", lambda line: None, IMAGES, TEST_IMAGES)
    return (LadderSettings(folder=prepare.raw_folder(folder, "digits"), steps=20),)


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
        Run(name="ddp", work=BACKWARD, size=2, arguments=with_name("net")),
        Run(name="ddp, four parameters", work=BACKWARD, size=2, arguments=with_name("four")),
        Run(name="data-parallel", work=DATA_PARALLEL, size=1, arguments=lambda folder: (WAYS,)),
        Run(
            name="data-parallel, memory", work=remote("playground.lessons.data_parallel.lesson:ways"), size=1,
            arguments=lambda folder: (WAYS,),
        ),
    )
}  # fmt: skip
