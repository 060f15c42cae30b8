"""The command `parameter-server`: its settings, results and text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, figures, tabulate
from playground.console.text import good, prose
from playground.console.training import DataOptions, announce_data, data_options
from playground.lessons import LESSONS
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError
from playground.runtime.flags import check_choice, flag, like
from playground.training.results import ROUNDING
from playground.training.settings import TrainingSettings

LESSON = LESSONS["parameter-server"]
RUN = LESSON.remote("run", "experiment")
MODES = {
    "sync": "waits for every worker's gradient, then takes one step with their mean",
    "async": "takes a step with each gradient as it comes, however old",
    "stale-synchronous": "the same, but no worker gets more than --staleness gradients ahead of "
    "the slowest",
}
"""When the server takes a step, and when a worker gets the new parameters."""
ALL_REDUCE = "all-reduce"
"""The same training without a server, to compare with."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. Raises `UsageError` for what
    cannot be."""

    lr: float = like(TrainingSettings, "lr", 0.05)
    batch_size: int = flag(
        128, "Global batch size: samples for a gradient of every worker.", least=1
    )
    modes: tuple[str, ...] = tuple(MODES)
    staleness: int = flag(
        3,
        "Stale-synchronous: number of gradients that a worker may be ahead of the slowest.",
        least=0,
        metavar="K",
    )
    slow_worker: float = flag(
        1.0,
        "Slow the last worker down: its gradients take so many times as long.",
        least=1,
        most=1e6,
        metavar="FACTOR",
    )
    steps: int = flag(100, "Number of gradients of each worker, on average.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for mode in self.modes:
            check_choice("mode", mode, MODES)

    @property
    def early_steps(self) -> int:
        """Number of steps after which the modes are compared, parameter by parameter. Later
        rounding grows, wherever it decides which of two numbers a ReLU or max_pool lets through."""
        return min(5, self.steps)


def steps_verdict(modes: Sequence[Fields]) -> str:
    """The verdict on the synchronous server's steps, or on the number of gradients, if it was not
    one of the modes. Raises `PlaygroundError` if its steps differ from those of all-reduce by more
    than rounding."""
    for difference in (
        each["difference_to_all_reduce"] for each in modes if each["mode"] == "sync"
    ):
        if difference < ROUNDING:
            return (
                f"sync took the first steps as all-reduce did (largest difference {difference:.1e})"
            )
        raise PlaygroundError(
            f"sync went up to {difference:.2g} away from all-reduce: rounding does less"
        )
    return "in every mode the server took as many gradients as all-reduce"


def result_texts(modes: Sequence[Fields]) -> Texts:
    about = "Each worker computes on a copy of its own; the server adds and steps."
    rows = []
    for each in modes:
        counts = each["staleness"]
        mean = sum(steps * count for steps, count in counts.items()) / sum(counts.values())
        rows.append({**each, "mean_staleness": mean})
    return [about, tabulate(rows, COLUMNS)]


COLUMNS = {"mode": Column("mode")} | figures(
    ("speed", "speed", "samples/s", ",.0f"),
    ("seconds", "time", "s", ".2f"),
    ("last_loss", "last\nloss", "", ".3f"),
    ("mean_staleness", "mean\nstaleness", "", ".2f"),
    ("bytes_per_step", "busiest\nrank", "bytes/step", ","),
)


MODE, ABOUT_MODES = click.Choice(tuple(MODES)), "When the server takes a step; may be repeated."


@LESSON.run_by(
    click.option(
        "--mode", "modes", type=MODE, multiple=True, show_default="all of them", help=ABOUT_MODES
    ),
    flags(ServerSettings, "staleness", "slow_worker", "steps", "batch_size", "lr", "momentum"),
    data_options,
)
def command(session: Session, data: DataOptions, modes: tuple[str, ...], **chosen: Any) -> None:
    world, workers = session.world, session.world.size - 1
    chosen["modes"] = tuple(mode for mode in MODES if mode in (modes or MODES))
    asked = ServerSettings(folder=data.folder, limit=data.limit, seed=session.run.seed, **chosen)
    asked.check_batch(workers)
    world.warm_up(RUN)
    shared = f"shared by {workers} worker{'s' * (workers > 1)}"
    work = f"training: {asked.steps} steps of {asked.batch_size} samples, {shared}"
    rows = {ALL_REDUCE: "no server: the workers average their gradients"} | {
        mode: MODES[mode] for mode in asked.modes
    }
    modes_table = Table("mode", Column("what it does", wraps=True), rows=rows.items())
    prepared, settings = announce_data(session, data, asked, work, "", modes_table)
    found, *_ = session.launch(RUN, settings)
    verdict = steps_verdict(found)
    session.say("", *result_texts(found), "")
    session.say(prose(f"Shown: {LESSON.conclude(workers)}; ", good(verdict), "."))
    recipe = {name: getattr(asked, name) for name in ("staleness", "slow_worker", "batch_size")}
    session.print_document({}, dataset=prepared.summary, **recipe, modes=found)
