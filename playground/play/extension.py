"""The prompt: an extension of IPython, the same in a terminal and in a notebook.

Every cell that does not begin with `%`, `!` or `?` is handed to the ranks, by a transformation of
its text into a cell magic. Sources: IPython's documentation, "Custom input transformation" and
"Defining custom magics"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.display_functions import publish_display_data
from IPython.core.error import UsageError as ShellError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.terminal.prompts import Prompts, Token

from playground.base.errors import PlaygroundError
from playground.explain.right import CERTAIN, OFF
from playground.play import cells
from playground.play.cells import Outcome
from playground.play.html import with_html
from playground.play.lesson_program import run_lesson
from playground.play.text_report import (
    by_rank,
    describe_end,
    describe_values,
    in_cells,
    label,
    table_of_calls,
    values_in_html,
)
from playground.play.world import PlayWorld, Run, check_world, configure
from playground.ui import terminal
from playground.ui.tables import RANK_COLUMN, Column, Table, numbers
from playground.ui.units import plural
from playground.world.backends import BACKENDS

if TYPE_CHECKING:
    from playground.explain.replay.record.recording import Recording

HELP = """\
Every cell runs on all ranks, with rank, size, torch, dist, device; what begins
with % does not:
  %ranks 4 [--backend nccl]  start a world, in the place of the one there is
  %world                     what each rank is: its process, memory, device,
                             groups, names
  %on 0,2   %on all          the ranks of the cells that follow;  %%on 0,2  of one
                             cell
  %%here                     run a cell in this process;  push(x=1) sets x on all
                             ranks there, pull("x") is the list of each rank's x
  %out 2                     all of a rank's value, of which a long one is cut
  %calls                     what each rank called in the last cell, with bytes
                             and milliseconds
  %see   %see run.html       play the last cell, in place or in a file; a cell
                             under %%see is recorded in full: what tensors held,
                             and what was computed
  %why                       what the ranks did when the last cell hung or was
                             interrupted: who waited for whom
  %retry                     run the last cell again
  %lesson zero               run a lesson's program; with other constants:
                             %lesson zero --steps 2
  %exercise ring             a task, and its stub in the next cell, which is
                             judged when it is run
  x?   x??                   what x is on rank 0, and its source
  %%time                     measures a cell
Each rank has its own seed; torch.manual_seed(0) makes them equal.
No rank has a display: plt.savefig("x.png"). At a prompt, two empty lines end a
cell under %%. Ctrl-C ends a cell on every rank, and leaves the variables;
Ctrl-D ends the ranks."""
LOCAL = re.compile(r"[%!?]|(exit|quit)(\(\))?\s*$")
"""Beginnings of cells that are this process's own."""
QUESTION = re.compile(r"\s*([\w.\[\]'\"]+)(\?{1,2})\s*$")


class RankPrompts(Prompts):
    """The prompt says on which ranks a cell runs."""

    magics: PlayMagics

    def in_prompt_tokens(self) -> list[Any]:
        ranks = self.magics.label()
        return [(Token.Prompt, f"{ranks} " if ranks else ""), *super().in_prompt_tokens()]


@magics_class
class PlayMagics(Magics):
    """The magics, and the world that they are about."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.world: PlayWorld | None = None
        self.on_ranks: tuple[int, ...] = ()
        """The ranks of the cells to come."""
        self.is_here = False
        """Whether cells are this process's own at the moment."""
        self.last = Run(number=0)
        self.recording: Recording | None = None
        """That of the last cell, if it was recorded in full."""
        self.is_notebook = not hasattr(shell, "prompts")
        shell.user_ns |= {"push": self.push, "pull": self.pull}
        shell.input_transformers_cleanup.append(self.transform)
        # or a cell would be complete only with an empty line below it
        vars(type(self))["transform"].has_side_effects = True
        shell.set_custom_completer(lambda completer, text: self.complete(text))

    def start(self, size: int, *, checks: bool = True, **how: Any) -> str:
        """Start a world, in the place of the one there is. Returns a line about it. Raises
        `UsageError`, and leaves the world that there is, if it cannot be."""
        check_world(configure(**how), size)
        self.close()
        self.world = world = PlayWorld(size, checks=checks, **how)
        self.on_ranks = tuple(range(size))
        self.last = Run(number=0)
        self.recording = None
        notice = f" ({world.notice})" if world.notice else ""
        return (
            f"{plural(size, 'rank')} on {world.config.backend}{notice}, each with rank, size, "
            "torch, dist. %help lists the rest."
        )

    def close(self) -> None:
        if self.world:
            self.world.close()
        self.world = None

    def label(self) -> str:
        return label(self.on_ranks) if self.world else ""

    def transform(self, lines: list[str]) -> list[str]:
        """Hand a cell to the ranks, by a magic in its first line."""
        text = "".join(lines)
        if self.is_here or not self.world or not text.strip() or LOCAL.match(text.lstrip()):
            return lines
        if found := QUESTION.match(text):
            return [f"%about {len(found[2])} {found[1]}\n"]
        return ["%%cell_on_ranks\n", *lines]

    def complete(self, text: str) -> list[str]:
        return self.world.complete(text) if self.world and not text.startswith("%") else []

    def ask(self, question: Callable[[PlayWorld], Any]) -> Any:
        """What a method of the world returns; errors of ours in a line."""
        if not self.world:
            raise ShellError("there are no ranks: start some with %ranks 4")
        try:
            return question(self.world)
        except PlaygroundError as error:
            if not self.world.ranks:
                self.world = None
            raise ShellError(str(error)) from None

    def show(self, run: Run, recording: Recording | None = None) -> None:
        self.last = run
        self.recording = recording
        size = self.world.size if self.world else 1
        values = "\n".join(describe_values(run, size))
        if html := values_in_html(run):
            self.display(html, values)
        elif values:
            print(values)
        for line in describe_end(run, size):
            print(line)

    def display(self, html: str, text: str) -> None:
        """Show a notebook's output. `text` is for what has no HTML."""
        publish_display_data({"text/html": html, "text/plain": text})

    def push(self, **values: object) -> None:
        """Set these names on the ranks."""
        self.ask(lambda world: world.push(on=self.on_ranks, **values))

    def pull(self, expression: str) -> Any:
        """The value of an expression, a name for example, on each rank."""
        return self.ask(lambda world: world.pull(expression, self.on_ranks))

    @property
    def number(self) -> int:
        """That of the prompt."""
        return len(self.shell.history_manager.input_hist_raw) - 1

    def to_show(self, how: Callable[..., Outcome] = cells.run_cell) -> Callable[..., Outcome]:
        """What a rank calls to run a cell as `how` does, so that it can be shown here."""
        if not self.is_notebook:
            return how
        return partial(with_html, how)

    def run(
        self, source: str, on: Sequence[int], how: Callable[..., Outcome] = cells.run_cell
    ) -> None:
        how = self.to_show(how)
        self.show(self.ask(lambda world: world.run_cell(source, self.number, on, how)))

    @cell_magic
    def cell_on_ranks(self, line: str, cell: str) -> None:
        """Run a cell on the ranks: as every cell that is none of this process's own."""
        self.run(cell, self.on_ranks)

    @line_cell_magic
    def on(self, line: str, cell: str | None = None) -> None:
        """The ranks of this cell or, without one, of the cells that follow: 0,2 or 0-2 or all."""
        ranks = self.ask(lambda world: world.check(parse_ranks(line, world.size)))
        if cell is None:
            self.on_ranks = ranks
        else:
            self.run(cell, ranks)

    @cell_magic
    def here(self, line: str, cell: str) -> None:
        """Run a cell in this process."""
        self.is_here = True
        try:
            self.shell.run_cell(cell)
        finally:
            self.is_here = False

    @line_magic
    def retry(self, line: str) -> None:
        """Run the last cell again."""
        self.show(self.ask(lambda world: world.retry()))

    @magic_arguments()
    @argument("size", type=int, nargs="?", default=4, help="Number of ranks.")
    @argument("--backend", default="gloo", choices=[*BACKENDS])
    @argument("--check", default=CERTAIN, choices=[OFF, CERTAIN], help="Of silent mistakes.")
    @line_magic
    def ranks(self, line: str) -> None:
        """Start a world."""
        given = parse_argstring(self.ranks, line)
        try:
            print(self.start(given.size, backend=given.backend, checks=given.check != OFF))
        except PlaygroundError as error:
            raise ShellError(str(error)) from None

    @line_magic
    def world_(self, line: str) -> None:
        """What each rank is; with a number, as %ranks."""
        if line.strip():
            self.ranks(line)
            return
        found = self.ask(lambda world: world.call(cells.find_status))
        columns = [*numbers("process", ("memory", "MB", ",.0f")), Column("device")]
        columns += [*numbers("groups"), Column("names", wraps=True)]
        rows = [
            (rank, one.process, one.resident_bytes / 1e6, one.device, one.groups,
             ", ".join(one.names))
            for rank, one in enumerate(found)
        ]  # fmt: skip
        terminal.say(Table(RANK_COLUMN, *columns, rows=rows))

    @line_magic
    def out(self, line: str) -> None:
        """All of a rank's value, or of every rank's."""
        on = self.ask(lambda world: world.check(parse_ranks(line or "all", world.size)))
        values = {rank: one.value for rank, one in self.last.outcomes.items() if rank in on}
        texts = {rank: str(value) for rank, value in values.items() if value is not None}
        print(*by_rank(texts, len(self.label()) + 1), sep="\n")

    @line_magic
    def calls(self, line: str) -> None:
        """What each rank called in the last cell."""
        if any(self.last.operations.values()):
            terminal.say(table_of_calls(self.last))
        else:
            print("no rank called an operation of a process group")

    @line_cell_magic
    def see(self, line: str, cell: str | None = None) -> None:
        """Play the last cell, or run and record this one: here, or in a file."""
        from playground.play.recordings import Player, record_cell  # which take a tenth of a second

        player = self.ask(lambda world: Player(line.strip()))
        if cell is not None:
            on, how = self.on_ranks, self.to_show()
            self.show(*self.ask(lambda world: record_cell(world, cell, self.number, on, how)))
        words = self.ask(lambda world: player.play(world, self.last, self.recording))
        if player.html and self.is_notebook:
            self.display(player.html, words)
        else:
            print(words)

    @line_magic
    def lesson(self, line: str) -> None:
        """Run a lesson's program, or a step of it. Its objects are in the namespace then."""
        from playground.play.course_magics import find_program, with_data

        program = self.ask(lambda world: with_data(find_program(shlex.split(line))))
        text = program.file.read_text(encoding="utf-8")
        self.ask(lambda world: world.texts.update({program.file.name: text}))
        self.run(text, self.on_ranks, partial(run_lesson, program))

    @line_cell_magic
    def exercise(self, line: str, cell: str | None = None) -> None:
        """Show a task, and put its stub into the next cell; or judge what was written there."""
        from playground.play.course_magics import begin_exercise, judge

        if cell is not None:
            print(self.ask(lambda world: judge(line.strip(), cell)))
            self.run(cell, self.on_ranks, cells.run_cell)  # what it defines is there from now on
            return
        task, stub = self.ask(lambda world: begin_exercise(line.strip(), self.is_notebook))
        publish_display_data({"text/markdown": task, "text/plain": task})
        self.shell.set_next_input(stub)

    @line_magic
    def why(self, line: str) -> None:
        """What the ranks did when a cell hung or was interrupted."""
        print(in_cells(self.ask(lambda world: world.state), keeps_columns=True))

    @line_cell_magic
    def timeit(self, line: str, cell: str | None = None) -> None:
        """Refused: it would run a cell for every repetition."""
        raise ShellError(
            "%timeit would time the way to the ranks, once for each repetition: use %%time, or "
            "call timeit.timeit(..., number=100) in a cell, with equal numbers on all ranks"
        )

    @line_magic
    def about(self, line: str) -> None:
        """What an expression is on rank 0: `x?` and `x??`."""
        marks, _, expression = line.partition(" ")
        question = cells.explain, expression, marks == "2"
        print(self.ask(lambda world: world.call(*question, on=(0,)))[0])

    @line_magic
    def help(self, line: str) -> None:
        """The magics."""
        print(HELP)


def parse_ranks(text: str, size: int) -> list[int]:
    """The ranks that "0,2", "0-2", "0 2" or "all" names. Raises `ShellError` for another text."""
    if text.strip() == "all":
        return [*range(size)]
    found: list[int] = []
    for word in shlex.split(text.replace(",", " ")):
        first, dash, last = word.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise ShellError(f"{text}: name ranks, as in 0,2 or 0-2, or all")
        found += range(int(first), int(last or first) + 1)
    return found


def load(shell: Any) -> PlayMagics:
    """Give a shell of IPython the magics and the prompt, once."""
    magics = PlayMagics(shell)
    shell.register_magics(magics)
    shell.register_magic_function(magics.world_, "line", "world")
    if hasattr(shell, "prompts"):
        shell.prompts = RankPrompts(shell)
        shell.prompts.magics = magics
    return magics
