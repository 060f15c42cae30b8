"""Every command that an output names as a next step can be pasted: it starts, and does not fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import Run
from next_steps import follow, printed_commands
from terminal import open_terminal
from test_readme import SMALLER

from playground.exercises.exercise import CATALOGUE, Exercise
from playground.exercises.page import show_steps_after
from playground.exercises.workbook import Workbook
from playground.lessons import LESSONS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_is_found_and_a_wrong_one_refused() -> None:
    text = "Again: python -m playground check a.py -n 2\nto list: python -m playground exercise, or"
    assert printed_commands(text) == [["check", "a.py", "-n", "2"], ["exercise"]]
    assert printed_commands("ranks of python -m playground keep it") == []
    for wrong in ("python -m playground helo", "python -m\nplayground hello"):
        with pytest.raises((KeyError, AssertionError)):
            printed_commands(wrong)


@pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(
            each, id=each.name, marks=[pytest.mark.stress] * (each.name != "fit-in-memory")
        )
        for each in CATALOGUE.values()
    ],
)
def test_every_next_step_of_an_exercise_can_be_pasted(
    exercise: Exercise, folder: Path, run_cli: Run
) -> None:
    """In each state that an exercise can be in: not begun, begun, wrong, right."""
    done, file = set[tuple[str, ...]](), folder / exercise.file
    for words in (("check", exercise.name), ("solution", exercise.name), ("exercise", "lesson")):
        assert follow(run_cli, *words, done=done).code == 2
    for name in (exercise.lesson, exercise.name, exercise.name):
        assert follow(run_cli, "exercise", name, done=done).code == 0
    file.write_text(exercise.mistakes[0].text)
    assert follow(run_cli, "check", file.name, done=done).code == 1
    for _ in exercise.hints:
        follow(run_cli, "hint", exercise.name, done=done)
    file.write_text(exercise.solution)
    for options in (["-n", str(exercise.worlds[0])], []):
        assert follow(run_cli, "check", file.name, *options, done=done).code == 0
    assert {words[0] for words in done} == {"exercise", "check", "hint", "solution", "read"}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("exercise",),
        *(
            pytest.param((name, *SMALLER.get(name, ())), marks=pytest.mark.stress, id=name)
            for name in LESSONS
        ),
    ],
    ids=" ".join,
)
def test_every_next_step_of_a_command_can_be_pasted(
    words: tuple[str, ...],
    folder: Path,
    run_cli: Run,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAYGROUND_DATA_DIR", str(data_dir))
    assert follow(run_cli, *words).code == 0


def test_a_lesson_in_a_terminal_ends_with_what_comes_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_terminal() as terminal:
        command = [sys.executable, "-m", "playground", "hello", "-n", "1"]
        subprocess.run(command, check=True, stdout=terminal.stream, stderr=subprocess.DEVNULL)
        shown = terminal.shown
    assert shown.endswith(
        "\n\nChapter:  python -m playground read hello\n"
        "Exercise: python -m playground exercise whoami\n"
    )
    for each in (each for each in CATALOGUE.values() if each.lesson in ("hello", [*LESSONS][-1])):
        (folder / each.file).write_text(each.solution)
        Workbook(folder).note(each, each.digest(each.solution))
    show_steps_after("hello")
    assert capsys.readouterr().out.endswith("\nNext:    python -m playground p2p\n")
    show_steps_after([*LESSONS][-1])
    assert capsys.readouterr().out == f"\nChapter: python -m playground read {[*LESSONS][-1]}\n"
