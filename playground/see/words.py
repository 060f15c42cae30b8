"""A recording in words, as lines of a file."""

from __future__ import annotations

from playground.console.rendering import render
from playground.see.record.recording import Recording
from playground.see.report import recording_texts

WIDTH = 80


def to_words(recording: Recording) -> str:
    """All there is to say of a recording, in lines of at most 80 characters."""
    return render(recording_texts(recording), WIDTH)
