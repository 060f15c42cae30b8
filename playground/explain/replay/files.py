"""A recording as a file, in the format of its ending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from playground.base.errors import UsageError
from playground.base.files import write_file
from playground.explain.replay.analyse.logical_time import to_logical_time
from playground.explain.replay.play.player import render_page
from playground.explain.replay.record.recording import Recording
from playground.explain.replay.render.chrome import to_chrome
from playground.explain.replay.render.scene import Scene
from playground.explain.replay.render.svg import to_svg
from playground.explain.replay.render.text_report import to_words
from playground.explain.replay.render.timeline import lay_out
from playground.ui.units import plural

RENDERERS: dict[str, Callable[[Recording], str]] = {
    ".html": render_page,
    ".svg": lambda recording: to_svg(lay_out(recording)),
    ".txt": to_words,
    ".json": to_chrome,
}
RENDERED = tuple(RENDERERS)
"""Endings of the formats in which a recording can be rendered."""


def render(recording: Recording, file: Path) -> None:
    """Render a recording in the format of the file's ending. Raises `UsageError` if it cannot be
    written."""
    write(RENDERERS[file.suffix](recording), file)


def render_steps(recording: Recording, file: Path) -> None:
    """Render a recording with logical steps in place of seconds. Raises `UsageError` if it cannot
    be written."""
    render_scene(lay_out(to_logical_time(recording), unit="step"), file)


def render_scene(scene: Scene, file: Path) -> None:
    """Render a scene as SVG. Raises `UsageError` if it cannot be written."""
    write(to_svg(scene), file)


def check_ending(file: Path, endings: Sequence[str], flag: str) -> None:
    """Raise `UsageError` for an ending that is not among `endings`."""
    if file.suffix not in endings:
        raise UsageError(
            f"{flag} {file}: the ending says what is written: choose one of {', '.join(endings)}"
        )


def write(contents: str, file: Path) -> None:
    """Write a file. Raises `UsageError` if it cannot be written."""
    try:
        write_file(file, contents.encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def amount(recording: Recording) -> str:
    """The numbers of events and of ranks."""
    return (
        f"{plural(sum(len(rank.events) for rank in recording.ranks), 'event')} of "
        f"{plural(recording.size, 'rank')}"
    )
