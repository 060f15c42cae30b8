"""The steps of a lesson."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from playground.runtime import steps
from playground.runtime.remote import Remote
from playground.see.record.hooks.replace import replaced
from playground.see.record.recorder import Recorder
from playground.see.record.recording import PHASE


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """In this block, each step of a lesson is a phase."""

    def wrap(real: Any) -> Any:
        def attempt(step: Remote, *args: Any) -> Any:
            with recorder.span(PHASE, step.name):
                return real(step, *args)

        return attempt

    with replaced(steps, "attempt", wrap):
        yield
