"""The command `parameter-server`: its settings, results and text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, figures, tabulate
from playground.console.text import good, prose
from playground.console.training import DataOptions, announce_data, data_options
from playground.console.units import plural
from playground.lessons import LESSONS
from playground.runtime.errors import PlaygroundError
from playground.runtime.flags import flag, like
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
    modes: tuple[str, ...] = flag(
        tuple(MODES),
        "When the server takes a step",
        name="--mode",
        choices=MODES,
    )
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

    @property
    def early_steps(self) -> int:
        """Number of steps after which the modes are compared, parameter by parameter. Later
        rounding grows, wherever it decides which of two numbers a ReLU or max_pool lets through."""
        return min(5, self.steps)


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """A training in one mode, or by all-reduce."""

    mode: str
    seconds: float
    samples: int
    speed: float
    """Samples per second."""
    last_loss: float
    """Mean over the samples of the last tenth of the gradients, with dropout on."""
    staleness: dict[int, int]
    """Number of gradients, by how often the parameters had changed since the worker got them."""
    gradients_by_worker: list[int]
    bytes_per_step: int
    """Bytes that the busiest rank sends and receives for a gradient of every worker; by all-reduce
    in a ring."""
    difference_to_all_reduce: float
    """The largest difference of any parameter after the gradients of the first `early_steps`."""

    @property
    def mean_staleness(self) -> float:
        total = sum(steps * count for steps, count in self.staleness.items())
        return total / sum(self.staleness.values())


def steps_verdict(results: Sequence[ModeResult]) -> str:
    """The verdict on the synchronous server's steps, or on the number of gradients, if it was not
    one of the modes. Raises `PlaygroundError` if its steps differ from those of all-reduce by more
    than rounding."""
    for result in results:
        if result.mode == "sync":
            difference = result.difference_to_all_reduce
            if difference < ROUNDING:
                return (
                    "sync took the first steps as all-reduce did "
                    f"(largest difference {difference:.1e})"
                )
            raise PlaygroundError(
                f"sync went up to {difference:.2g} away from all-reduce: rounding does less"
            )
    return "in every mode the server took as many gradients as all-reduce"


def result_texts(results: Sequence[ModeResult]) -> Texts:
    about = "Each worker computes on a copy of its own; the server adds and steps."
    rows = [{**vars(each), "mean_staleness": each.mean_staleness} for each in results]
    return [about, tabulate(rows, COLUMNS)]


COLUMNS = {"mode": Column("mode")} | figures(
    ("speed", "speed", "samples/s", ",.0f"),
    ("seconds", "time", "s", ".2f"),
    ("last_loss", "last\nloss", "", ".3f"),
    ("mean_staleness", "mean\nstaleness", "", ".2f"),
    ("bytes_per_step", "busiest\nrank", "bytes/step", ","),
)


@LESSON.run_by(
    flags(
        ServerSettings, "modes", "staleness", "slow_worker", "steps", "batch_size", "lr", "momentum"
    ),
    data_options("dataset"),
)
def command(session: Session, data: DataOptions, **chosen: Any) -> None:
    world, workers = session.world, session.world.size - 1
    asked = ServerSettings(folder=data.folder, **chosen)
    asked.check_batch(workers)
    world.warm_up(RUN)
    shared = f"shared by {plural(workers, 'worker')}"
    work = f"training: {asked.steps} steps of {asked.batch_size} samples, {shared}"
    rows = {ALL_REDUCE: "no server: the workers average their gradients"} | {
        mode: MODES[mode] for mode in asked.modes
    }
    modes_table = Table("mode", Column("what it does", wraps=True), rows=rows.items())
    prepared, settings = announce_data(session, data, asked, work, "", modes_table)
    found: list[ModeResult] = session.launch(RUN, settings)[0]
    verdict = steps_verdict(found)
    session.say("", *result_texts(found), "")
    plain, *servers = found
    fastest = max(servers, key=lambda each: each.speed)
    shown = LESSON.conclude(
        world.size, mode=fastest.mode, ratio=fastest.speed / plain.speed,
        staleness=fastest.mean_staleness,
    )  # fmt: skip
    session.say(prose(f"Shown: {shown}; ", good(verdict), "."))
    recipe = {name: getattr(asked, name) for name in ("staleness", "slow_worker", "batch_size")}
    session.print_document({}, dataset=prepared.summary, **recipe, modes=found)
