"""The command `see`: it shows a recorded run, and draws the figures of the field's tutorials, each
from a run on this machine. A run is made once, however many figures are drawn from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.checkpoint.folder import SnapshotSettings
from playground.console.options import FILE, check_writable
from playground.console.session import Session, session_command
from playground.console.tables import Column, Table
from playground.lessons.data_parallel.page import DataParallelSettings
from playground.lessons.experts.page import ExpertsSettings
from playground.lessons.ladder.page import LadderSettings
from playground.lessons.mesh.page import MeshSettings
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.pipeline.page import PipelineSettings
from playground.lessons.zero.page import ZeroSettings
from playground.runtime.errors import UsageError
from playground.runtime.files import temporary_folder
from playground.runtime.host import cores
from playground.runtime.launcher.launch import launch
from playground.runtime.rank.rank import Event as Report
from playground.runtime.remote import ROOT, Remote, remote
from playground.trace import SEE
from playground.trace.analyse.waits import Waits, seconds_by_cause
from playground.trace.files import RENDERED, amount, render, render_steps
from playground.trace.record import Recording
from playground.trace.record.run import RECORDED, read_recording, record_run
from playground.trace.render import Evidence, Scene, collectives, data_parallel as dp, training
from playground.trace.render.renderers import check_ending, render_scene
from playground.trace.render.words import plural, recording_texts
from playground.training import prepare
from playground.training.settings import TrainingSettings

PICTURE = ".svg"
IMAGES, TEST_IMAGES = 1280, 128
"""Numbers of digits that are drawn for training and for its test set."""


@dataclass(frozen=True)
class FigureRun:
    """A function that ranks run."""

    work: Remote
    size: int
    arguments: tuple[object, ...] | Callable[[Path], tuple[object, ...]] = ()
    """Its arguments besides rank and size, or what makes them in a folder for its files."""
    recorded: bool = False
    restarts: int = 0
    """How often new ranks may replace a world that failed."""

    def make(self, name: str, folder: Path) -> Evidence:
        """Run it. Raises what `launch` raises."""
        arguments = self.arguments(folder) if callable(self.arguments) else self.arguments
        if self.recorded:
            results, recording = record_run(
                self.work, self.size, *arguments, command=(name, "-n", str(self.size))
            )
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


@dataclass(frozen=True)
class ChangingRun(FigureRun):
    """A function that worlds of different sizes run, one after the other."""

    ends: tuple[tuple[int, int], ...] = ()
    """The size of each world, and the step at which it ends."""

    def make(self, name: str, folder: Path) -> Evidence:
        """As above; the results are those of rank 0 of each world."""
        file = folder / f"{name}.pt"
        results = [launch(self.work, size, args=(file, end))[0] for size, end in self.ends]
        return Evidence(results=results, arguments=self.ends)


def draw_digits(folder: Path) -> Path:
    """Draw digits into the folder if they are not there. Returns their folder."""
    prepare.find_or_draw_digits(folder, "for the figures", lambda line: None, IMAGES, TEST_IMAGES)
    return prepare.raw_folder(folder, "digits")


def on_digits(
    settings: Callable[..., object], **values: Any
) -> Callable[[Path], tuple[object, ...]]:
    """The arguments of a training with these settings, on digits that are drawn into the folder."""
    return lambda folder: (settings(folder=draw_digits(folder), **values),)


def elastic_arguments(folder: Path) -> tuple[object, ...]:
    """Twenty steps, with two kills and a snapshot every four steps."""
    snapshots = SnapshotSettings(folder=folder / "snapshots", every=4)
    settings = TrainingSettings(
        folder=draw_digits(folder), limit=IMAGES, epochs=2, snapshots=snapshots
    )
    return settings, "sgd", ((1, 7), (0, 14))


DEVICES = tuple(f"cpu:{number}" for number in range(4))
BOTH = tuple((gather, DEVICES[0]) for gather in ("logits", "loss"))
WAYS = DataParallelSettings(devices=DEVICES, batch_size=32, steps=2, ways=BOTH)
ZERO = ZeroSettings(size=4, ways=("ddp", "zero-1", "zero-2", "zero-3"), layers=6)
EXPERTS = ExpertsSettings(size=2, steps=40)
PIPELINE = on_digits(PipelineSettings, size=2, microbatches=4, steps=3)
SERVER = on_digits(ServerSettings, batch_size=384, steps=6, slow_worker=3, staleness=1)
MESH = MeshSettings(shapes=((2, 2, 2, 2),), steps=1)
ALL_REDUCE = remote("playground.trace.render.ranks:all_reduce")
STEPS = remote("playground.trace.render.ranks:training_steps")
BACKWARD = remote("playground.trace.render.ranks:ddp_backward")
SGD = remote("playground.trace.render.ranks:sgd_step")
RUNS = {
    "collectives": FigureRun(
        remote("playground.trace.render.ranks:six_collectives"), 4, recorded=True
    ),
    "send": FigureRun(remote("playground.trace.render.ranks:send_to_last"), 4, recorded=True),
    "reduce-broadcast": FigureRun(ALL_REDUCE, 4, ("reduce-broadcast",), recorded=True),
    "all-to-all": FigureRun(ALL_REDUCE, 4, ("all-to-all",), recorded=True),
    "ring": FigureRun(ALL_REDUCE, 4, ("ring",), recorded=True),
    "sgd": FigureRun(SGD, 4),
    "sgd on three": FigureRun(SGD, 3),
    "flat": FigureRun(STEPS, 2, ("flat",), recorded=True),
    "overlapped": FigureRun(STEPS, 2, ("overlapped",), recorded=True),
    "ladder": FigureRun(
        remote("playground.lessons.ladder.measure:run"), 2, on_digits(LadderSettings, steps=30)
    ),
    "hello": FigureRun(remote("playground.lessons.hello.lesson:who_am_i"), 3),
    "bert": FigureRun(remote("playground.trace.render.ranks:bert_steps"), 2, recorded=True),
    "elastic": FigureRun(
        remote("playground.lessons.elastic.experiment:run"), 3, elastic_arguments, restarts=2
    ),
    "hosts": ChangingRun(
        remote("playground.lessons.elastic.hosts:run"), 2, ends=((2, 10), (1, 21), (2, 32))
    ),
    "reduce-scatter": FigureRun(remote("playground.lessons.collectives.lesson:reduce_scatter"), 4),
    "rpc": FigureRun(remote("playground.lessons.rpc.lesson:remote_call"), 2),
    "parameter-server": FigureRun(remote("playground.trace.render.ranks:server_modes"), 4, SERVER),
    "pipeline": FigureRun(remote("playground.lessons.pipeline.experiment:run"), 2, PIPELINE),
    "zero": FigureRun(remote("playground.lessons.zero.measure:count_ways"), 4, (ZERO,)),
    "tensor": FigureRun(remote("playground.trace.render.ranks:sharded_mlp"), 2),
    "context": FigureRun(remote("playground.lessons.context.experiment:computed_pairs"), 4, (16,)),
    "experts": FigureRun(remote("playground.lessons.experts.experiment:run"), 2, (EXPERTS,)),
    "mesh": FigureRun(remote("playground.lessons.mesh.experiment:run"), 16, (MESH,)),
    "ddp": FigureRun(BACKWARD, 2, ("net",), recorded=True),
    "ddp, four parameters": FigureRun(BACKWARD, 2, ("four",), recorded=True),
    "data-parallel": FigureRun(
        remote("playground.trace.render.ranks:data_parallel_steps"), 1, (WAYS,), recorded=True
    ),
    "data-parallel, memory": FigureRun(
        remote("playground.lessons.data_parallel.experiment:ways"), 1, (WAYS,)
    ),
}


@dataclass(frozen=True)
class Figure:
    path: str
    """The chapter that it is about, a lesson or `trace`, and the name of its file, without the
    ending."""
    run: str
    """The run that it is drawn from: a name of `RUNS`."""
    draw: Callable[[Evidence], Scene]
    in_chapter: bool = True

    @property
    def shows(self) -> str:
        """A description in one line: the docstring of `draw`, after the figure's name."""
        return (self.draw.__doc__ or "").partition(": ")[2].removesuffix(".")


FIGURES = {
    "F1": Figure("data_parallel/dp_forward", "data-parallel", dp.forward),
    "F2": Figure("data_parallel/dp_backward", "data-parallel", dp.backward),
    "F3": Figure("ladder/backward_step", "ladder", training.backward_and_step),
    "F4": Figure(
        "data_parallel/dp_training",
        "data-parallel, memory",
        dp.memory_and_utilisation,
        in_chapter=False,
    ),
    "F5": Figure("data_parallel/dp_forward_2", "data-parallel", dp.loss_in_forward),
    "F6": Figure("all_reduce/allreduce", "collectives", collectives.all_reduce_sum),
    "F7": Figure("all_reduce/allreduce_1", "reduce-broadcast", collectives.reduce_broadcast),
    "F8": Figure("all_reduce/allreduce_2", "all-to-all", collectives.all_to_all),
    "F9": Figure("all_reduce/ring", "ring", collectives.ring_chunk),
    "F10": Figure("prove/ring_end", "sgd", collectives.step_everywhere),
    "F11": Figure("sgd/ddp", "sgd on three", training.five_phases),
    "F12": Figure("ladder/after_backward", "flat", training.after_backward),
    "F13": Figure("ladder/inside_backward", "overlapped", training.inside_backward),
    "F14": Figure("ladder/step_parts", "ladder", training.normalised_parts),
    "F15": Figure("ladder/overlap", "ladder", training.with_and_without_overlap),
    "F16": Figure("ddp/buckets", "ddp", training.filling),
    "F17": Figure(
        "data_parallel/dp_criterion", "data-parallel", dp.parallel_criterion, in_chapter=False
    ),
    "F18": Figure("data_parallel/dp_memory", "data-parallel, memory", dp.imbalance),
    "F19": Figure("ddp/bucket", "ddp, four parameters", training.same_on_both),
    "F20": Figure("p2p/p2p", "send", collectives.point_to_point),
    "F21": Figure("collectives/communication", "collectives", collectives.six_collectives),
}
CHAPTERS = {
    "hello": Figure("hello/one_world", "hello", collectives.one_world),
    "bert": Figure("bert/step", "bert", training.bert_step),
    "elastic": Figure("elastic/attempts", "elastic", training.attempts),
    "hosts": Figure("elastic/hosts", "hosts", training.hosts),
    "reduce-scatter": Figure(
        "collectives/reduce_scatter", "reduce-scatter", collectives.reduce_scatter
    ),
    "rpc": Figure("rpc/call", "rpc", collectives.remote_call),
    "parameter-server": Figure("parameter_server/modes", "parameter-server", training.server_modes),
    "pipeline": Figure("pipeline/schedules", "pipeline", training.schedules),
    "zero": Figure("zero/step", "zero", training.bytes_over_a_step),
    "tensor": Figure("tensor/sharded_mlp", "tensor", collectives.sharded_mlp),
    "context": Figure("context/causal_square", "context", collectives.causal_square),
    "experts": Figure("experts/rows", "experts", training.routed_tokens),
    "mesh": Figure("mesh/cube", "mesh", collectives.cube),
    "see": Figure("trace/ring", "ring", collectives.ring),
    "moving": Figure("trace/moving", "ring", collectives.moving),
}
"""Figures of chapters that none of the tutorials' figures is about."""
ALL = FIGURES | CHAPTERS


@session_command(
    SEE.name,
    click.argument("file", type=FILE, required=False),
    click.option(
        "-o",
        "--output",
        type=FILE,
        metavar="OUT",
        help="Render FILE: .html plays it, .svg is a picture, .txt is words, .json is a trace for "
        "Perfetto.",
    ),
    click.option(
        "--steps", is_flag=True, help="With -o, in a picture: logical steps in place of seconds."
    ),
    click.option(
        "--figure",
        "figures",
        type=(click.Choice(tuple(ALL), case_sensitive=False), FILE),
        multiple=True,
        metavar="NAME OUT",
        help="Run what a figure is drawn from, F1 to F21 of the tutorials or a chapter's, and "
        "render it.",
    ),
    click.option(
        "--chapters", is_flag=True, help="The pictures of the chapters' READMEs, where they stand."
    ),
    only=("wide", "as_json"),
    size=1,
    short_help=SEE.purpose,
)
def command(
    session: Session,
    file: Path | None,
    output: Path | None,
    steps: bool,
    figures: tuple[tuple[str, Path], ...],
    chapters: bool,
) -> None:
    """Look at a run that was recorded with --see, or draw every figure of the tutorials from runs
    on this machine.

    \b
        python -m playground allreduce --algorithm ring --see ring.playground
        python -m playground see ring.playground
        python -m playground see ring.playground -o ring.html
        python -m playground see ring.playground -o ring.svg --steps
        python -m playground see --figure F9 ring.svg
    """
    choices = {"FILE": file, "--figure": figures, "--chapters": chapters}
    asked = [name for name, value in choices.items() if value]
    if len(asked) != 1:
        given = " and ".join(asked) if asked else "nothing"
        raise UsageError(
            f"{given} to be seen: name one of a FILE, --figure NAME OUT and --chapters"
        )
    for option, value in (("-o", output), ("--steps", steps)):
        if value and not file:
            raise UsageError(f"{option} is for a recording, not for {asked[0]}: leave it out")
    if file:
        see_file(session, file, output, steps)
    else:
        see_figures(session, files_of(dict(figures), chapters))


def see_file(session: Session, file: Path, output: Path | None, steps: bool) -> None:
    """Print a recording in words, or render it. Raises `UsageError`, before it is read, if it could
    not be rendered."""
    if steps and (output is None or output.suffix != PICTURE):
        raise UsageError(f"--steps is for a picture, so -o must name one that ends in {PICTURE}")
    if output:
        check_ending(output, RENDERED, "-o")
        check_writable("-o", output)
    recording = read(file)
    session.say(f"{SEE.name}: {file}", "")
    if output:
        (render_steps if steps else render)(recording, output)
    else:
        session.say(*recording_texts(recording), "")
    session.say(f"Shown: {amount(recording)}{f', in {output}' if output else ''}.")
    if session.run.as_json:
        session.print_document({}, file=output, **document_of(recording))


def read(file: Path) -> Recording:
    """Read a recording. Raises `UsageError` if it is none, or cannot be read."""
    try:
        return read_recording(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def document_of(recording: Recording) -> dict[str, object]:
    """The recording as JSON."""
    waits, ranks = Waits(recording), []
    for rank in recording.ranks:
        its = [wait for wait in waits.all if wait.event.rank == rank.rank]
        waited = None if rank.runs_ahead else seconds_by_cause(its)
        about = {
            "rank": rank.rank,
            "events": len(rank.events),
            "dropped": rank.dropped,
            "is_cut_off": rank.is_cut_off,
        }
        ranks.append({**about, "waits": waited})
    return {
        "command": recording.command,
        "versions": recording.versions,
        "seconds_recorded": recording.end,
        "ranks": ranks,
    }


def files_of(figures: dict[str, Path], chapters: bool) -> dict[str, Path]:
    """The files of the figures that were asked for. Raises `UsageError` if one cannot be
    written."""
    flag, files = "--figure", figures
    if chapters:
        load = os.getloadavg()[0]
        if load > cores() / 2:
            raise UsageError(
                f"this machine is busy (load {load:.1f} on {cores()} cores), and figures show "
                "times: wait"
            )
        flag, files = "--chapters", chapter_files()
    for file in files.values():
        check_ending(file.absolute(), (PICTURE,), flag)
        check_writable(flag, file.absolute())
    return {name: file.absolute() for name, file in files.items()}


def chapter_files() -> dict[str, Path]:
    """The pictures of the chapters' READMEs, by the figure's name."""
    shown = {name: figure.path for name, figure in ALL.items() if figure.in_chapter}
    paths = {
        name: Path("" if path.startswith("trace/") else "lessons", path)
        for name, path in shown.items()
    }
    return {
        name: ROOT / "playground" / path.parent / "figures" / f"{path.name}.svg"
        for name, path in paths.items()
    }


def see_figures(session: Session, files: dict[str, Path]) -> None:
    """Make the runs of these figures, render them, and print their files. Raises `UsageError` in a
    joined world or for a file that cannot be written, and what `launch` raises."""
    if session.world.rank_env:
        raise UsageError(
            "figures are drawn from worlds of their own: start this as one process, not as a rank"
        )
    runs = [*dict.fromkeys(ALL[name].run for name in files)]
    count = plural(len(files), "figure")
    session.say(f"{SEE.name}: {plural(len(runs), 'run')} on this machine, for {count}", "")
    session.world.warm_up(RECORDED, *(RUNS[run].work for run in runs))
    with session.bar as bar, temporary_folder("figures") as folder:
        for number, run in enumerate(runs):
            bar.show(f"running {run}", number, len(runs))
            evidence = RUNS[run].make(run, folder)
            for name, file in files.items():
                if ALL[name].run == run:
                    render_scene(ALL[name].draw(evidence), file)
    common = Path(os.path.commonpath([file.parent for file in files.values()]))
    table = Table(Column("figure"), Column("shows", wraps=True), Column("file"))
    for name, file in files.items():
        table.add(name, ALL[name].shows, str(file.relative_to(common)))
    session.say(table, "", f"Shown: {count}, in {common}.")
    shown = ((name, ALL[name], file) for name, file in files.items())
    rendered = [
        {"name": name, "shows": figure.shows, "run": figure.run, "file": file}
        for name, figure, file in shown
    ]
    session.print_document({}, figures=rendered)
