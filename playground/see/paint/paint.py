"""A recording, or a scene, as a file: its ending says what is painted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.remote import remote
from playground.see.paint.chrome import to_chrome
from playground.see.paint.logical import to_logical_time
from playground.see.paint.png import to_png
from playground.see.paint.scene import Scene
from playground.see.paint.svg import to_svg
from playground.see.paint.text import to_text
from playground.see.paint.timeline import lay_out
from playground.see.record.recording import Recording

PAGE, TRACE, TEXT = ".html", ".json", ".txt"
SCENE_PAINTERS: dict[str, Callable[[Scene], str | bytes]] = {".svg": to_svg, ".png": to_png, TEXT: to_text}
"""What paints a scene, by the ending of the file."""
WORDS = remote("playground.see.words:to_words")
"""What says a recording in words: a tool, and so above this."""
PAINTED = (PAGE, *SCENE_PAINTERS, TRACE)
"""Endings that a recording can be painted as."""


def check_ending(file: Path, endings: tuple[str, ...] = PAINTED, flag: str = "") -> None:
    """Raise `UsageError` for an ending that nothing can be painted as."""
    if file.suffix not in endings:
        asked = f"{flag} {file}".strip()
        raise UsageError(f"{asked}: choose an ending from {', '.join(endings)}, it says what is painted")


def paint(recording: Recording, file: Path) -> None:
    """Paint all of a recording. Raises `UsageError` for an ending nobody knows, or a file that cannot be written."""
    check_ending(file)
    if file.suffix == PAGE:
        from playground.see.play.page import write_page

        write_page(recording, file)
    elif file.suffix == TRACE:
        write(to_chrome(recording), file)
    elif file.suffix == TEXT:
        write(f"{to_text(lay_out(recording))}\n{WORDS(recording)}", file)
    else:
        paint_scene(lay_out(recording), file)


def paint_steps(recording: Recording, file: Path) -> None:
    """Paint all of a recording with logical steps in place of seconds. Raises `UsageError` as `paint` does."""
    paint_scene(lay_out(to_logical_time(recording), unit="step"), file)


def paint_scene(scene: Scene, file: Path) -> None:
    """Paint a scene. Raises `UsageError` as `paint` does."""
    check_ending(file, tuple(SCENE_PAINTERS))
    write(SCENE_PAINTERS[file.suffix](scene), file)


def write(contents: str | bytes, file: Path) -> None:
    """Raises `UsageError` if it cannot be written."""
    try:
        file.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
