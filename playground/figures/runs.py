"""The recorded runs that the pages of `site` play: they travel with the project. Does not import
torch.

python -m playground.figures.runs              # records what is missing or stale
python -m playground.figures.runs ring sgd     # records these
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from playground.base.errors import PlaygroundError, RankFailed, RankTimeout
from playground.base.files import temporary_folder
from playground.base.remote import ROOT, remote
from playground.explain.replay.record.layout import EVENTS, TEXT, VALUES, write_zip
from playground.explain.replay.record.reading import merge, read_recording
from playground.explain.replay.record.recording import Recording
from playground.explain.replay.record.run import Recorded, collect, describe_run, note_failure
from playground.figures.catalogue import FIGURES, RUNS
from playground.figures.figure import ChangingRun, FigureRun, work_of
from playground.figures.training import elastic_run
from playground.tools.failures.page import SIZE
from playground.tools.failures.programs import PROGRAMS, find
from playground.world.launcher.launch import launch

FOLDER = Path(__file__).parent / "recordings"
LARGEST = 30_000
"""Bytes of a recording: of a larger one the lines are kept and not the events."""
PROGRAM_TIMEOUT, TIMEOUT = 8, 120
"""Seconds of silence after which a program of `break`, or a figure's run, is ended."""


def lesson_run(lesson: str, function: str, size: int, *arguments: object) -> FigureRun:
    """A function of a lesson's program, on few ranks and with little to do."""
    work = remote(f"playground.lessons.{lesson.replace('-', '_')}.lesson:{function}")
    return FigureRun(f"{lesson} board", work, size, arguments)


FAILURES = {
    each.name: each
    for each in (
        *(FigureRun(f"break {name}", find(name), SIZE) for name in PROGRAMS),
        lesson_run("failures", "wait_in_a_circle", 4),
    )
}
PLAYED = {
    each.name: each
    for each in (
        FigureRun("memory board", work_of("memory_gradients"), 2),
        FigureRun("gpt board", remote("playground.lessons.inside_gpt.lesson:run"), 2),
        FigureRun("scaling board", work_of("scaling_steps"), 3),
        FigureRun("zero board", work_of("zero_stages"), 2),
        FigureRun("pipeline board", work_of("pipeline_schedules"), 3),
        FigureRun("context board", work_of("context_rings"), 3),
        FigureRun("experts board", work_of("routed_layer"), 3),
        FigureRun(
            "mesh board",
            work_of("train_on_mesh"),
            4,
            ({"dp": 2, "pp": 2, "cp": 1, "tp": 1}, 1),
        ),
        elastic_run("elastic board", 2, 192, epochs=1, every=2, kill=3, restarts=1),
        FigureRun("checkpoint board", work_of("saved_blocks"), 4),
        FigureRun("bytes board", work_of("sent_gradients"), 2),
    )
}
"""Runs that are small enough to be recorded whole: a chapter whose figure's run is not, or that has
no figure, names one where it is to be played."""
RECORDABLE = FAILURES | PLAYED | {
    name: run for name, run in RUNS.items() if not (isinstance(run, ChangingRun) or run.restarts)
}  # fmt: skip
FIGURE_OF = {figure.path: figure for figure in FIGURES.values()}


def file_of_run(name: str) -> Path:
    return FOLDER / f"{name.replace(', ', ' ').replace(' ', '-')}.playground"


def record(name: str) -> Path:
    """Record a run into its file; of one that is restarted, the last start. Raises what `launch`
    raises, but for `FAILURES`."""
    run, file = RECORDABLE[name], file_of_run(name)
    with (
        temporary_folder("recording") as folder,
        temporary_folder("data") as data,
        contextlib.chdir(data),
    ):
        about = describe_run(name.split(), "gloo", run.size)
        recorded = Recorded(run.work, folder, about)
        try:
            launch(
                recorded,
                run.size,
                args=run.arguments_in(data),
                timeout=PROGRAM_TIMEOUT if name in FAILURES else TIMEOUT,
                restarts=run.restarts,
                on_restart=lambda failure, count: None,
            )
        except (RankFailed, RankTimeout) as failure:
            if name not in FAILURES:
                raise
            note_failure(folder / "0", failure, about)
        files = {
            each: part.replace(f"{ROOT}/".encode(), b"")
            for each, part in collect(folder / f"{run.restarts}").items()
        }
    sources = merge(files).sources
    # of it only lines that are shown, and their equals
    for program in {source.file for source in sources}:
        lines = files[f"{TEXT}{program}"].splitlines()
        kept = {lines[source.line - 1] for source in sources if source.file == program}
        files[f"{TEXT}{program}"] = b"\n".join(line if line in kept else b"" for line in lines)
    write_zip(file, files)
    if file.stat().st_size > LARGEST:
        write_zip(
            file,
            {
                name: content
                for name, content in files.items()
                if not name.endswith((EVENTS, VALUES))
            },
        )
    return file


def find_run(name: str) -> Recording | None:
    """The recording of a run with the lines of today's program, where equal lines keep their order;
    None if there is none. Raises `PlaygroundError` if the program has changed there."""
    if not (file := file_of_run(name)).is_file():
        return None
    recording, sources = read_recording(file), []
    moved: dict[tuple[str, str], str] = {}
    files = {each: ROOT / each for each in recording.texts}
    today = {
        each: file.read_text(encoding="utf-8") if file.is_file() else ""
        for each, file in files.items()
    }
    for source in recording.sources:
        then, now = (texts[source.file].splitlines() for texts in (recording.texts, today))
        line = then[source.line - 1]
        before, after = (
            [number for number, each in enumerate(lines, 1) if each == line]
            for lines in (then, now)
        )
        if len(before) != len(after):
            raise PlaygroundError(
                f"the run {name!r} was recorded with another {source.file}, line {source.line} "
                f"({line.strip()}): "
                f'record it again with python -m playground.figures.runs "{name}"'
            )
        line_today = after[before.index(source.line)]
        moved[Path(source.file).name, f"{source.line}"] = f"{line_today}"
        sources.append(replace(source, line=line_today))
    standstill = recording.standstill and recording.standstill._replace(
        sentence=move_lines(recording.standstill.sentence, moved),
        cure=move_lines(recording.standstill.cure, moved),
    )
    return replace(recording, sources=tuple(sources), texts=today, standstill=standstill)


def move_lines(words: str, moved: Mapping[tuple[str, str], str]) -> str:
    """The words of a diagnosis with the lines of today. `moved`: by file and line. A line without
    its file is in the one that was named before."""
    file = ""

    def move(found: re.Match[str]) -> str:
        nonlocal file
        file = found["file"] or file
        return f"{found['file'] or ''}:{moved.get((file, found['line']), found['line'])}"

    return re.sub(r"(?P<file>[\w-]+\.py)?:(?P<line>\d+)\b", move, words)


def is_current(name: str) -> bool:
    """Whether a run is recorded, and with today's program."""
    with contextlib.suppress(PlaygroundError):
        return find_run(name) is not None
    return False


if __name__ == "__main__":
    for each in sys.argv[1:] or [name for name in RECORDABLE if not is_current(name)]:
        print(record(each))
