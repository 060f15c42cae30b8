"""A recording in words, as lines of a file."""

from __future__ import annotations

from playground.console.rendering import render
from playground.recording.recording import Recording
from playground.tools.see.report import recording_texts

WIDTH = 80


def to_words(recording: Recording) -> str:
    """All there is to say of a recording, in lines of at most 80 characters."""
    return render(recording_texts(recording), WIDTH)
