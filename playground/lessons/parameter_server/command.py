"""The command `parameter-server`: the published mistake, all-reduce, and a server in every mode."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.failures import echo_loss
from playground.console.options import Finite, RunOptions, options, plot_option, run_options
from playground.console.session import Session
from playground.console.text import good, prose
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.lessons.parameter_server import report
from playground.lessons.parameter_server.results import ServerResult, steps_verdict
from playground.lessons.parameter_server.settings import MAX_SLOW, MODES, ServerSettings
from playground.remote.agents import AGENTS
from playground.runtime.remote import remote

LESSON = LESSONS["parameter-server"]
RUN = remote("playground.lessons.parameter_server.experiment:run")


def format_workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def in_order(ctx: click.Context, param: click.Parameter, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The modes that were asked for, each once; all of them by default."""
    return tuple(mode for mode in MODES if mode in chosen or not chosen)


server_options = options(
    click.option(
        "--mode", type=click.Choice(tuple(MODES)), multiple=True, callback=in_order, show_default="all of them",
        help="When the server takes a step; may be repeated.",
    ),
    click.option(
        "--staleness", type=click.IntRange(0), default=3, show_default=True, metavar="K",
        help="Stale-synchronous: number of gradients that a worker may be ahead of the slowest.",
    ),
    click.option(
        "--slow-worker", type=Finite(1, MAX_SLOW), default=1.0, show_default=True, metavar="FACTOR",
        help="Slow the last worker down: its gradients take so many times as long.",
    ),
    click.option(
        "--over", type=click.Choice(tuple(AGENTS)), default="send-recv", show_default=True,
        help="What carries the remote calls: our own agent over send and recv, or torch.distributed.rpc.",
    ),
    click.option(
        "--steps", type=click.IntRange(1), default=100, show_default=True,
        help="Number of gradients of each worker, on average.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(1), default=128, show_default=True,
        help="Global batch size: samples for a gradient of every worker.",
    ),
    click.option("--lr", type=Finite(0), default=0.05, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True, help="Momentum of SGD."),
    data_options,
    plot_option("the loss against time"),
)  # fmt: skip


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@server_options
def command(
    run: RunOptions, data: DataOptions, mode: tuple[str, ...], staleness: int, slow_worker: float, over: str,
    steps: int, batch_size: int, lr: float, momentum: float, plot: Path | None,
) -> None:  # fmt: skip
    session = Session(LESSON.name, run, default_size=LESSON.default_size, min_size=LESSON.min_size)
    world, workers = session.world, session.world.size - 1
    asked = ServerSettings(
        folder=data.folder, limit=data.limit, seed=run.seed, modes=mode, staleness=staleness,
        slow_worker=slow_worker, over=over, steps=steps, batch_size=batch_size, lr=lr, momentum=momentum,
    )  # fmt: skip
    asked.check_batch(workers)
    if plot:
        plots.check(plot)
    world.warm_up(RUN)
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        asked.check_samples(prepared.train)
        settings = prepared.settings(asked)
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}")
        shared = f"shared by {format_workers(workers)}, over {over}"
        session.say(f"training: {steps} steps of {batch_size} samples, {shared}")
        session.say("", report.modes_table(settings.modes))
        expendable = range(1, world.size) if over == "send-recv" else ()  # torch's RPC does not tell who is lost
        results = world.run(RUN, settings, on_report=bar, expendable=expendable, on_loss=echo_loss)
    survivors: list[ServerResult] = [each for each in results if each]
    mistakes, modes = [each.mistake for each in survivors if each.mistake], survivors[0].modes
    verdict = steps_verdict(modes)
    session.say("", *report.mistake_texts(mistakes), "", *report.result_texts(modes), "")
    session.say(prose(f"Shown: {LESSON.conclude(workers)}; ", good(verdict), "."))
    if plot and world.is_main:
        report.plot(modes, f"{LESSON.name}, {world}", plot)
    session.print_document(
        {"mistake": mistakes}, dataset=prepared.summary, over=over, staleness=staleness, slow_worker=slow_worker,
        batch_size=batch_size, modes=[{**vars(each), "speed": each.samples_per_second} for each in modes],
    )  # fmt: skip
