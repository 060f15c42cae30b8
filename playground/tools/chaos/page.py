"""The command that kills processes of another command, and compares how that ends with how it would have ended."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.launcher.entry import World
from playground.runtime.launcher.restarts import RESTART
from playground.runtime.remote import remote
from playground.runtime.temporary_folder import temporary_folder
from playground.survival.comparison import Comparison, last_snapshot
from playground.survival.disk import make_folder
from playground.survival.folder import WHOLE, examine, find_steps
from playground.tools import TOOLS
from playground.tools.chaos.processes import (
    CommandProcess,
    Processes,
    find_processes,
    open_process,
    opened_in,
    require_proc,
)
from playground.tools.chaos.results import (
    ENDING,
    LAUNCHER,
    LOADING,
    NO_RANKS,
    PHASES,
    RANK,
    SAVING,
    STARTING,
    TRAINING,
    ChaosSettings,
    Draws,
    Kill,
    RunRecord,
)

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
    text = f"Kills by phase: {phases}."
    if seconds := [kill.seconds for kill in kills if kill.seconds is not None]:
        text += f" Until the next snapshot: median {median(seconds):.2f} s, longest {max(seconds):.2f} s."
    return text


TOOL = TOOLS["chaos"]
COMPARE = remote("playground.survival.snapshots:compare")


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
        if folder:
            make_folder(folder)
            if any(folder.iterdir()):
                raise UsageError(f"--dir {folder}: it is not empty; choose a new folder")
        chaos = Chaos(settings, session.world, bar, folder.resolve() if folder else temporary)
        chaos.run(suspects)
    session.say("", kills_table(chaos.runs), "", recovery_text(chaos.runs))
    session.print_document({}, settings=settings, undisturbed=chaos.undisturbed, runs=chaos.runs)
    for run in chaos.runs:
        run.check()
    comparison = chaos.runs[-1].comparison
    times = f" In each of {len(chaos.runs)} runs." if len(chaos.runs) > 1 else ""
    session.say(f"{comparison}{times}", prose("Shown: ", good(f"{settings.kills} kills left no trace"), "."))


TICK = 0.01
"""Seconds between two looks at the run."""


class Training:
    """One run of the command `words`, with snapshots in `folder`: a context manager that leaves no process behind.
    `steps`: number of steps of the whole training, if known. `restarts`: how many the command may need.

    It is watched from outside: /proc says which processes it has, its folder of snapshots how far it has come, its
    stderr what it makes of the kills.
    """

    def __init__(self, words: tuple[str, ...], folder: Path, *, steps: int = 0, restarts: int = 0) -> None:
        self.words, self.folder, self.steps, self.restarts = words, folder, steps, restarts
        self.record = RunRecord()
        self.processes = Processes(0, None, ())
        self.world: set[int] = set()
        """Ids of the ranks that were started last, those that have ended meanwhile included."""
        self.is_replaced = False
        """Whether others will replace them. (The first to appear may be killed before the second.)"""
        self.step_before = 0
        """Step of the newest whole snapshot when they were started."""
        self.untold: list[Kill] = []
        """Kills of which the command has said nothing yet."""
        self.unrecovered: list[tuple[Kill, set[int]]] = []
        """Kills after which no new ranks have written a snapshot yet, and the ranks of their time."""
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start the command, for the first time or again."""
        self.command = CommandProcess(self.words, self.folder, self.restarts)
        self.record.starts += 1

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.command.end()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def watch(self, act: Callable[[], None] = lambda: None) -> RunRecord:
        """Look at the run until it ends by itself; call `act` after each look."""
        while (code := self.command.poll()) is None or self.was_killed(code):
            if code is not None:
                self.hear(0)
                self.untold.clear()
                self.command.end()
                self.is_replaced = True
                self.start()
            self.look()
            self.hear(TICK)
            act()
        self.look()
        self.hear(0)
        self.record.seconds, self.record.code = self.elapsed, code
        return self.record

    def was_killed(self, code: int) -> bool:
        """Whether the launcher has ended by our hand."""
        return code == -signal.SIGKILL and bool(self.record.kills) and self.record.kills[-1].role == LAUNCHER

    def look(self) -> None:
        """Find the processes there are, and what has been written."""
        self.processes = find_processes(self.command.pid)
        self.record.last_step = self.newest_whole()
        ranks = set(self.processes.ranks)
        if self.world.isdisjoint(ranks):
            self.hear(0)  # a failure is reported before the next ranks are started
            if ranks and self.is_replaced:
                self.world, self.step_before, self.is_replaced = set(), self.record.last_step, False
                self.untold.clear()
        self.world |= ranks
        if self.world and not self.record.ranks_after:
            self.record.ranks_after = self.elapsed
        if self.has_saved:
            self.note_recovery()

    def newest_whole(self) -> int:
        """The step of the newest whole snapshot, by manifests and lengths."""
        for step in find_steps(self.folder):
            if step <= self.record.last_step:
                break
            if examine(self.folder, step, read_contents=False).condition == WHOLE:
                return step
        return self.record.last_step

    @property
    def has_saved(self) -> bool:
        """Whether the ranks that were started last have written a snapshot."""
        return bool(self.world) and self.record.last_step > self.step_before

    def note_recovery(self) -> None:
        """The ranks that were started last have written a snapshot: kills of ranks before them are overcome."""
        if not self.record.first_snapshot_after:
            self.record.first_snapshot_after = self.elapsed
        for kill, ranks in self.unrecovered:
            if self.world.isdisjoint(ranks):
                kill.seconds = self.elapsed - kill.at
        self.unrecovered = [(kill, ranks) for kill, ranks in self.unrecovered if kill.seconds is None]

    def hear(self, seconds: float) -> None:
        """Read what the command says; wait at most `seconds` for any of it."""
        for line in self.command.read_lines(seconds):
            failure, restart, _ = line.partition(RESTART)
            if not restart:
                self.record.notices.append(line)
            elif not self.untold:
                self.record.unexplained.append(line)
            for kill in self.untold if restart else ():
                kill.said = failure
            self.untold = [] if restart else self.untold
            self.is_replaced = self.is_replaced or bool(restart)

    def kill(self, role: str, pid: int) -> bool:
        """Kill one of the processes of the last look; False if it has ended by itself since."""
        pidfd = open_process(pid, role, self.command.pid)
        if pidfd is None:
            return False
        try:
            phase = self.find_phase([pid] if role == RANK else [*self.processes.ranks])
            kill = Kill(role=role, pid=pid, at=self.elapsed, phase=phase, step=self.record.last_step)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        self.record.kills.append(kill)
        self.untold.append(kill)
        self.unrecovered.append((kill, {*self.world}))
        return True

    def find_phase(self, ranks: list[int]) -> str:
        """The phase that these ranks are in."""
        if not ranks:
            return NO_RANKS
        if self.steps and self.record.last_step >= self.steps:
            return ENDING
        opened = [access for rank in ranks for access in opened_in(self.folder, rank)]
        if opened:
            return SAVING if os.O_WRONLY in opened or os.O_DIRECTORY in opened else LOADING
        return TRAINING if self.has_saved else STARTING


def train_undisturbed(words: tuple[str, ...], folder: Path) -> RunRecord:
    """Run the command to its end. Raises `UsageError` or `PlaygroundError` with what it said, if it fails."""
    with Training(words, folder) as training:
        record = training.watch()
    if record.code:
        said = (record.notices or [f"exit code {record.code}"])[-1].removeprefix("playground: ")
        raise (UsageError if record.code == UsageError.exit_code else PlaygroundError)(f"{words[0]}: {said}")
    return record


class Killer:
    """Kills processes of a training, one after the other, `kills` at most, and tells `show` how many have happened. The
    time between two depends on the undisturbed run, and on the work that is left: so they spread over the whole run."""

    def __init__(
        self, training: Training, undisturbed: RunRecord, draws: Draws, kills: int, show: Callable[[int], None]
    ) -> None:
        self.training, self.undisturbed, self.draws, self.kills, self.show = training, undisturbed, draws, kills, show
        self.choose_next()

    def choose_next(self) -> None:
        self.role = self.draws.role()
        self.due: float | None = None
        """Time of the next kill; None until there is a process of that role."""

    def kill_if_due(self) -> None:
        """Kill the next process when its time has come; to be called often."""
        done = len(self.training.record.kills)
        targets = self.training.processes.of_role(self.role)
        if done == self.kills or not targets:
            return
        if self.due is None:
            whole, record = self.undisturbed, self.training.record
            starting = whole.first_snapshot_after - (whole.ranks_after if self.role == RANK else 0)
            left = (whole.seconds - whole.first_snapshot_after) * (1 - record.last_step / whole.last_step)
            self.due = time.monotonic() + self.draws.delay(starting, left / (self.kills - done + 1))
        elif time.monotonic() >= self.due and self.training.kill(self.role, self.draws.process(targets)):
            self.choose_next()
            self.show(done + 1)


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
            steps = self.undisturbed.last_step
            with Training(self.settings.words, folder, steps=steps, restarts=left) as training:
                run = training.watch(Killer(training, self.undisturbed, self.draws, left, self.show).kill_if_due)
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
