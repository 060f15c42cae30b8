"""The command that kills processes of another command, and compares how that ends with how it would have ended."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from playground.console.options import RunOptions, json_option, wide_option
from playground.console.paths import FilePath
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.text import good, prose
from playground.runtime.backends import get_backend
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.runtime.remote import remote
from playground.runtime.temporary_folder import temporary_folder
from playground.tools import TOOLS
from playground.tools.chaos.experiment import train_undisturbed, train_with_kills
from playground.tools.chaos.options import chaos_options, check_command
from playground.tools.chaos.processes import require_proc
from playground.tools.chaos.report import kills_table, recovery_text
from playground.tools.chaos.results import RunRecord
from playground.tools.chaos.settings import ChaosSettings, Draws
from playground.training.snapshots.comparison import Comparison, last_snapshot
from playground.training.snapshots.disk import make_folder

TOOL = TOOLS["chaos"]
COMPARE = remote("playground.training.snapshots.compare:compare")


@click.command(TOOL.name, short_help=TOOL.purpose, context_settings={"allow_interspersed_args": False})
@chaos_options
@click.option(
    "--dir", "folder", type=FilePath(), metavar="DIR", help="Empty or new folder to keep the snapshots of all runs in."
)
@wide_option
@json_option
def command(settings: ChaosSettings, folder: Path | None, wide: bool, as_json: bool) -> None:
    """Kill processes of a command that trains at random moments, and compare its end with that of a run that nobody
    disturbs.

    The command is run twice, with snapshots. What is killed is restarted, and goes on from the newest snapshot. If the
    training is over before all kills have happened, it is run once more. Exit code 1 if a single byte differs.

    \b
        python -m playground chaos --kills 20 --seed 7 -- sgd -n 4 --epochs 1
        python -m playground chaos --whom any -- ddp -n 3 --epochs 1
    """
    session = Session(TOOL.name, RunOptions(wide=wide, as_json=as_json, seed=settings.seed), default_size=1)
    if session.world.rank_env:
        raise UsageError(f"{TOOL.name} starts commands of its own: run it without torchrun, RANK and WORLD_SIZE")
    require_proc()
    suspects = get_backend(check_command(settings.words)).may_differ
    session.world.warm_up(COMPARE)
    session.say(f"{TOOL.name}: {shlex.join(settings.words)}", f"kills: {settings.kills}, {settings.whom}")
    with session.bar() as bar, temporary_folder("chaos") as temporary:
        chaos = Chaos(settings, session.world, bar, prepare_folder(folder) if folder else temporary)
        chaos.run(suspects)
    session.say("", kills_table(chaos.runs), "", recovery_text(chaos.runs))
    session.print_document({}, settings=settings, undisturbed=chaos.undisturbed, runs=chaos.runs)
    for run in chaos.runs:
        run.check()
    comparison = chaos.runs[-1].comparison
    times = f" In each of {len(chaos.runs)} runs." if len(chaos.runs) > 1 else ""
    session.say(f"{comparison}{times}", prose("Shown: ", good(f"{settings.kills} kills left no trace"), "."))


def prepare_folder(folder: Path) -> Path:
    """Make the folder. Raises `UsageError` for one that cannot be written to, or is not empty."""
    make_folder(folder)
    if any(folder.iterdir()):
        raise UsageError(f"--dir {folder}: it is not empty; choose a new folder")
    return folder.resolve()


class Chaos:
    """Runs the command undisturbed, and then with kills, until all of them have happened or a run has failed."""

    def __init__(self, settings: ChaosSettings, world: World, bar: Bar, folder: Path) -> None:
        self.settings, self.world, self.bar, self.folder = settings, world, bar, folder
        self.draws = Draws(settings.seed, settings.whom)
        self.undisturbed = RunRecord()
        self.runs: list[RunRecord] = []

    def run(self, suspects: str) -> None:
        """`suspects`: what on the device may end two equal trainings with other bits, if anything; then it is seen
        first whether it does."""
        self.bar.show(f"{self.settings.words[0]}, undisturbed")
        self.undisturbed = train_undisturbed(self.settings.words, self.folder / "undisturbed")
        if suspects:
            self.bar.show(f"{self.settings.words[0]}, undisturbed, once more")
            train_undisturbed(self.settings.words, self.folder / "repeated")
            self.compare(self.folder / "repeated").check_repeatable(suspects)
        left = self.settings.kills
        while left and not (self.runs and self.runs[-1].code):
            folder = self.folder / f"killed-{len(self.runs) + 1}"
            run = train_with_kills(self.settings.words, folder, self.undisturbed, self.draws, left, self.show)
            self.runs.append(run)
            if not run.code:
                run.comparison = self.compare(folder)
            left -= len(run.kills)

    def compare(self, folder: Path) -> Comparison:
        """The end of the run with snapshots in `folder`, against that of the undisturbed one."""
        ends = (last_snapshot(self.folder / "undisturbed"), last_snapshot(folder))
        [comparison] = self.world.run(COMPARE, *ends)
        return comparison

    def show(self, kills: int) -> None:
        """Show how many kills of this run, and of those before, have happened."""
        done = kills + sum(len(run.kills) for run in self.runs)
        self.bar.show(f"{self.settings.words[0]}, killed", done, self.settings.kills)
