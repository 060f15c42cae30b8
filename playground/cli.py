"""The command line: parse, check, launch, show. Importing it does not import torch."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from playground.lessons import LESSONS, PATH, Lesson, about, run_steps, run_training
from playground.runtime import devices, server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible, PlaygroundError
from playground.runtime.launch import MOST_RANKS
from playground.runtime.rendezvous import DEFAULT_TIMEOUT
from playground.show import results
from playground.show.progress import TrainingProgress
from playground.training import prepare as preparing
from playground.training.files import NoData

AVERAGING = ("per-parameter", "flat")


class Finite(click.FloatRange):
    """A number in a range; neither NaN nor infinite, which a range alone lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, in the order given."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


world_options = options(
    click.option("-n", "--world-size", "size", type=click.IntRange(1, MOST_RANKS), help="Number of ranks."),
    click.option(
        "--backend", type=click.Choice(devices.BACKENDS), default="gloo", show_default=True,
        help="gloo: CPU; nccl: GPUs.",
    ),
    click.option(
        "--timeout", type=Finite(0, 1e6, min_open=True, max_open=True), default=DEFAULT_TIMEOUT, show_default=True,
        help="Seconds without a sign of life from any rank after which the run is ended.",
    ),
    click.option(
        "--seed", type=click.IntRange(0, 2**32), default=1234, show_default=True, help="Of all random numbers."
    ),
    click.option(
        "--init-method", metavar="URL",
        help="How ranks meet, instead of at our own store: env://, tcp://HOST:PORT or file:///PATH.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
)  # fmt: skip

training_options = options(
    click.option("--epochs", type=click.IntRange(1), default=10, show_default=True),
    click.option("--batch-size", type=click.IntRange(1), default=128, show_default=True, help="Of all ranks together."),
    click.option("--lr", type=Finite(0), default=0.01, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True),
    click.option(
        "--dataset", type=click.Choice(preparing.DATASETS), default="auto", show_default=True,
        help="auto: MNIST if it is here or can be downloaded, else generated digits.",
    ),
    click.option(
        "--data-dir", type=click.Path(path_type=Path), default=preparing.default_data_dir, envvar="PLAYGROUND_DATA_DIR",
        show_default="~/.cache/playground", help="Where the data lies or is to be put.",
    ),
    click.option(
        "--mirror", envvar="PLAYGROUND_MNIST_MIRROR", metavar="URL",
        help="Folder or address (file://, http://, https://) with MNIST's four .gz files.",
    ),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Train on the first N samples only."),
)  # fmt: skip


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="playground")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn, test and measure distributed data parallelism, one primitive at a time."""
    if ctx.invoked_subcommand is None:
        width = max(len(lesson.name) for lesson in PATH)
        click.echo("The path, in order:\n")
        for number, lesson in enumerate(PATH, 1):
            click.echo(f"  {number}. {lesson.name:{width}}  {lesson.teaches}")
        click.echo(f"\nStart with: python -m playground {PATH[0].name}")
        click.echo("Then read its module in playground/lessons/, and run it again with other options (--help).")


def add_steps(lesson: Lesson) -> None:
    """The command of a lesson that is a row of steps."""

    @cli.command(lesson.name, help=about(lesson.name)[""], short_help=lesson.teaches)
    @world_options
    @click.option("--only", type=click.Choice(lesson.steps), multiple=True, help="Run only this step; may be repeated.")
    def command(
        size: int | None, backend: str, timeout: float, seed: int, init_method: str | None, as_json: bool,
        only: tuple[str, ...],
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        world = World(
            size, usual_size=lesson.ranks, least=lesson.least, backend=backend, timeout=timeout, init_method=init_method
        )
        say = speaker(world, silent=as_json)
        say(f"{lesson.name}: {world}")
        names = [step for step in lesson.steps if not only or step in only]
        by_rank = world.run(run_steps, lesson.name, names, seed)
        by_step = dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))
        for name, ranks in by_step.items():
            say("\n" + results.step_text(name, about(lesson.name)[name], ranks, lesson.says))
        say(f"\nShown: {lesson.shown.format(size=world.size)}.")
        if as_json and world.speaks:
            click.echo(results.document(lesson.name, world, started, by_step))


def add_training(lesson: Lesson, *more_options: Callable[[Any], Any]) -> None:
    """The command of a lesson that trains: prepare the data, train, show every epoch and that the replicas agree."""

    @cli.command(lesson.name, help=about(lesson.name)[""], short_help=lesson.teaches)
    @world_options
    @training_options
    @options(*more_options)
    def command(
        size: int | None, backend: str, timeout: float, seed: int, init_method: str | None, as_json: bool,
        dataset: str, data_dir: Path, mirror: str | None, limit: int | None, batch_size: int, **recipe: Any,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        world = World(size, usual_size=lesson.ranks, backend=backend, timeout=timeout, init_method=init_method)
        if batch_size < world.size:
            raise Impossible(
                f"--batch-size {batch_size} for {world.size} ranks: it is for all together, so at least one each"
            )
        server.preload("playground.training.loop")
        world.warm_up()
        source = preparing.prepare(dataset, data_dir, mirror, say=lambda line: click.echo(line, err=True))
        train, test = preparing.samples(source, "train"), preparing.samples(source, "t10k")
        if limit and limit > train:
            raise Impossible(f"--limit {limit}: {source.name} has {train} samples to train on")
        data = {"name": source.name, "train": limit or train, "test": test, "why": source.why}
        say = speaker(world, silent=as_json)
        say(f"{lesson.name}: {world}, {results.data_text(data)}")
        with TrainingProgress(say) as progress:
            recipe |= {"dataset": source.name, "limit": limit, "batch_size": batch_size, "seed": seed}
            outcome = world.run(run_training, lesson.name, {"folder": source.folder, **recipe}, on_report=progress)[0]
        best = max(outcome["epochs"], key=lambda epoch: epoch["test_accuracy"])
        say(f"best test accuracy {best['test_accuracy']:.2%}, after epoch {best['epoch']}")
        if not math.isfinite(outcome["epochs"][-1]["loss"]):
            click.echo("the loss is not a finite number any more: training diverged, try a smaller --lr", err=True)
        if outcome["replicas_max_difference"] != 0:
            raise PlaygroundError(
                f"the replicas differ by up to {outcome['replicas_max_difference']}: they must not at all"
            )
        say(f"Shown: {lesson.shown.format(size=world.size)}; all replicas are bit-identical (largest difference 0.0).")
        if as_json and world.speaks:
            steps = {"run": [{"loss": outcome["epochs"][-1]["loss_per_rank"][rank]} for rank in range(world.size)]}
            click.echo(results.document(lesson.name, world, started, steps, dataset=data, best=best, **outcome))


def speaker(world: World, silent: bool) -> Callable[[str], None]:
    """Prints, if this process is to speak and text is wanted."""
    return click.echo if world.speaks and not silent else lambda text: None


sync_option = click.option(
    "--sync", type=click.Choice(AVERAGING), default="flat", show_default=True, help="How gradients are averaged."
)
add_steps(LESSONS["hello"])
add_steps(LESSONS["p2p"])
add_steps(LESSONS["collectives"])
add_training(LESSONS["sgd"], sync_option)
add_training(LESSONS["ddp"])


def main() -> NoReturn:
    """Run the command line as a program of its own, and end it."""
    try:
        run()
    finally:
        server.dismiss()


def run() -> NoReturn:
    """Run the command line and exit: 0 done, 2 asked for the impossible, 1 a rank failed, 130 interrupted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # What torch logs in C++ it also raises, and then it is told once, by us. Setting the variable brings the log back.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        leave(cli.main(prog_name="playground", standalone_mode=False) or 0)
    except click.ClickException as error:
        leave(error.exit_code, " ".join(error.format_message().split()))
    except PlaygroundError as error:
        leave(error.exit_code, str(error))
    except NoData as error:
        leave(Impossible.exit_code, str(error))
    except (click.Abort, KeyboardInterrupt):
        leave(130, "interrupted")


def leave(code: int, why: str = "") -> NoReturn:
    """Say why, and exit. A rank leaves a broken group hard: beside peers that are gone, an orderly exit can hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if why:
        click.echo(f"playground: {why}", err=True)
    distributed = sys.modules.get("torch.distributed")
    if code and distributed and distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
