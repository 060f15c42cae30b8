"""The command that kills processes of another command, and compares how that ends with how it would have ended."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from playground.console.options import RunOptions, flag_of, flags, pack_options, typed_options
from playground.console.paths import FilePath
from playground.console.session import Session
from playground.console.tables import Column, Table, numbers
from playground.console.terminal import Bar
from playground.console.text import good, prose
from playground.console.training_options import MAX_RESTARTS
from playground.runtime.backends import get_backend
from playground.runtime.errors import UsageError
from playground.runtime.launcher.entry import World
from playground.runtime.remote import remote
from playground.runtime.temporary_folder import temporary_folder
from playground.survival.comparison import Comparison, last_snapshot
from playground.survival.disk import make_folder
from playground.tools import TOOLS
from playground.tools.chaos.processes import require_proc
from playground.tools.chaos.results import LAUNCHER, PHASES, ChaosSettings, Draws, RunRecord
from playground.tools.chaos.training import train_undisturbed, train_with_kills

SETS_ITSELF = ("snapshots", "restarts", "resume")
"""Parameters of a command that `chaos` needs for itself."""
SAYS_ITSELF = ("wide", "as_json")
"""Parameters that say how to print results, which are not shown."""

chaos_options = pack_options(
    "settings",
    ChaosSettings,
    flags(RunOptions, "seed"),
    click.argument("words", metavar="-- COMMAND [OPTIONS]", nargs=-1, required=True, type=click.UNPROCESSED),
    changes={"kills": {"type": click.IntRange(1, MAX_RESTARTS)}},
)


def check_command(words: tuple[str, ...]) -> str:
    """Return the backend that the command asks for. Raise `UsageError` for a command that takes no snapshots, or has
    options that `chaos` sets itself, and `click.UsageError` for options it does not know."""
    name, *rest = words
    if not (command := find_trainer(name)):
        known = ", ".join(filter(find_trainer, all_commands().list_commands(click.get_current_context())))
        raise UsageError(f"chaos kills commands that train and take snapshots, and {name} is none: take {known}")
    ctx = command.make_context(name, rest)
    for parameter in typed_options(ctx):
        if parameter in SETS_ITSELF:
            raise UsageError(f"chaos sets {flag_of(ctx, parameter)} of {name} itself: leave it out")
        if parameter in SAYS_ITSELF:
            raise UsageError(f"chaos does not show what {name} prints: put {flag_of(ctx, parameter)} before --")
    return str(ctx.params["backend"])


def find_trainer(name: str) -> click.Command | None:
    """The command of this name, if it can be restarted after a failure and resume."""
    command = all_commands().get_command(click.get_current_context(), name)
    return command if command and {*SETS_ITSELF} <= {param.name for param in command.params} else None


def all_commands() -> click.Group:
    """The group that `chaos` itself is one of."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return group


STARTED_AGAIN = "(nothing; it is started again)"


def kills_table(runs: Sequence[RunRecord]) -> Table:
    """One row per kill, in their order."""
    snapshots = numbers("newest\nsnapshot", ("next\nsnapshot", "s"))
    said = Column("the command says", wraps=True)
    table = Table(*numbers("run", ("at", "s")), "killed", "phase", *snapshots, said)
    for number, run in enumerate(runs, 1):
        for kill in run.kills:
            words = STARTED_AGAIN if kill.role == LAUNCHER else kill.said or "-"
            seconds = "-" if kill.seconds is None else f"{kill.seconds:.2f}"
            table.add(str(number), f"{kill.at:.2f}", kill.role, kill.phase, str(kill.step or "-"), seconds, words)
    return table


def recovery_text(runs: Sequence[RunRecord]) -> str:
    """Number of kills in each phase, and the time until the next snapshot."""
    kills = [kill for run in runs for kill in run.kills]
    counts = Counter(kill.phase for kill in kills)
    phases = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
    seconds = [kill.seconds for kill in kills if kill.seconds is not None]
    text = f"Kills by phase: {phases}."
    if not seconds:
        return text
    return f"{text} Until the next snapshot: median {median(seconds):.2f} s, longest {max(seconds):.2f} s."


TOOL = TOOLS["chaos"]
COMPARE = remote("playground.survival.compare:compare")


@click.command(TOOL.name, short_help=TOOL.purpose, context_settings={"allow_interspersed_args": False})
@chaos_options
@click.option(
    "--dir", "folder", type=FilePath(), metavar="DIR", help="Empty or new folder to keep the snapshots of all runs in."
)
@flags(RunOptions, "wide", "as_json")
def command(settings: ChaosSettings, folder: Path | None, wide: bool, as_json: bool) -> None:
    """Kill processes of a command that trains at random moments, and compare its end with that of a run that nobody
    disturbs.

    The command runs twice, with snapshots. Killed processes are restarted, and resume from the newest snapshot. If the
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
