"""The command `ladder`: it measures what its chapter tells. Does not import torch."""

from __future__ import annotations

from typing import Any

from playground.console.session import Session
from playground.console.step_times import OPTIONS, measure_steps
from playground.console.text import good, prose
from playground.lessons import LESSONS

LESSON = LESSONS["ladder"]


@LESSON.run_by(*OPTIONS)
def command(session: Session, **chosen: Any) -> None:
    times = measure_steps(session, **chosen)
    shown = LESSON.conclude(session.world.size, fastest=times.fastest, hidden=times.hidden)
    session.say(prose(f"Shown: {shown}; ", good(times.verdict), "."))
    times.print_document(session)
