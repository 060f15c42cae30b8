"""Kills as a table, and what came of them in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from playground.console.tables import Column, Table, cell
from playground.tools.chaos.results import PHASES, RunRecord
from playground.tools.chaos.settings import LAUNCHER

STARTED_AGAIN = "(nothing; it is started again)"


def kills_table(runs: Sequence[RunRecord]) -> Table:
    """One row per kill, in their order."""
    table = Table(
        Column("run", right=True), Column("at", "s", right=True), Column("killed"), Column("phase"),
        Column("newest\nsnapshot", right=True), Column("next\nsnapshot", "s", right=True),
        Column("the command says", wraps=True),
    )  # fmt: skip
    for number, run in enumerate(runs, 1):
        for kill in run.kills:
            said = STARTED_AGAIN if kill.role == LAUNCHER else kill.said or None
            seconds = None if kill.seconds is None else f"{kill.seconds:.2f}"
            step = cell(kill.step or None)
            table.add(str(number), f"{kill.at:.2f}", kill.role, kill.phase, step, cell(seconds), cell(said))
    return table


def recovery_text(runs: Sequence[RunRecord]) -> str:
    """In which phases the kills have come, and how long it took until the next snapshot."""
    kills = [kill for run in runs for kill in run.kills]
    counts = Counter(kill.phase for kill in kills)
    phases = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
    seconds = [kill.seconds for kill in kills if kill.seconds is not None]
    after = (
        f" Until the next snapshot: median {median(seconds):.2f} s, longest {max(seconds):.2f} s." if seconds else ""
    )
    return f"Kills by phase: {phases}.{after}"
