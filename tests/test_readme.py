"""What README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_launch import session_ends

from playground.console.lesson import Lesson
from playground.lessons import PATH

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHAPTERS = sorted((ROOT / "playground").rglob("README.md"))
TRAINING = ("sgd", "ladder", "ddp", "prove")
MEASURING = (*TRAINING, "hello", "data-parallel", "bench", "scale")
"""Commands whose numbers differ from run to run."""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """(command, the output that follows it) of every `$ python -m playground …` shown, in any README."""
    for file in (ROOT / "README.md", *CHAPTERS):
        for block in blocks("console", file.read_text(encoding="utf-8")):
            for part in block.split("$ ")[1:]:
                command, *output = part.splitlines()
                yield command, output


def skeleton(line: str) -> str:
    """A line without what differs between machines and runs: its numbers, and the space that they take."""
    return re.sub(r"[\d#,.e+-]+%?", "#", " ".join(re.sub(r"[\d,.]*\d%?", "#", line).split()))


@pytest.mark.parametrize(
    ("command", "output"), list(shown_commands()), ids=lambda value: value if type(value) is str else ""
)
def test_commands_print_what_is_shown(
    command: str, output: list[str], run_cli: Callable[..., Any], data_dir: Path
) -> None:
    """Line for line where every run has the same numbers, else in the same form; `…` stands for lines left out."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "playground"]
    small = ["--dataset", "digits", "--data-dir", data_dir, "--limit", "128"] if words[3] in TRAINING else []
    shown = run_cli(*words[3:], *small)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    if words[3] in MEASURING:  # other data and other times: the first line is another, the rest has the same form
        lines, output = [skeleton(line) for line in lines[1:]], [skeleton(line) for line in output[1:]]
        output = [line for line in output if line != "…"]
        assert [line for line in output if line not in lines] == []
    elif output:
        threads = r"x \d+ threads?"
        assert re.sub(threads, "", shown.out) == re.sub(threads, "", "\n".join(output) + "\n")


def test_the_path_lists_every_lesson_in_order() -> None:
    listed = re.findall(r"^\| \[([\w-]+)\]\((.*?)/?\) \| `python -m playground ([\w-]+)`", README, re.MULTILINE)
    assert listed == [(lesson.name, lesson.path, lesson.name) for lesson in PATH]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.parent.name)
def test_what_a_chapter_points_to_is_there(chapter: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", chapter.read_text(encoding="utf-8")):
        assert (chapter.parent / target).exists(), target


@pytest.mark.parametrize("lesson", PATH, ids=lambda lesson: lesson.name)
def test_every_chapter_shows_a_run_and_has_exercises(lesson: Lesson) -> None:
    text = (ROOT / lesson.path / "README.md").read_text(encoding="utf-8")
    assert f"$ python -m playground {lesson.name}" in text
    exercises = text.split("## Try this")[1].split("\n## ")[0]
    assert len(re.findall(r"^(?:\d+\.|[-*]) ", exercises, re.MULTILINE)) >= 2
    assert "## Sources" in text


def test_the_two_line_difference_is_the_real_one() -> None:
    [diff] = blocks("diff")
    source = {
        sign: (ROOT / "playground" / "lessons" / lesson / "lesson.py").read_text(encoding="utf-8").splitlines()
        for sign, lesson in (("-", "sgd"), ("+", "ddp"))
    }
    for line in diff.splitlines():
        if line[0] in source:
            assert line[1:] in source[line[0]]
            assert line[1:] not in source["+" if line[0] == "-" else "-"]
        else:
            assert all(line[1:] in lines for lines in source.values())


def test_the_script_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script, _ = blocks("python")
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.communicate(timeout=60) == ("[6.0, 6.0, 6.0]\n", "")
    assert session_ends(process.pid, within=5)


def test_the_test_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    _, test = blocks("python")
    pytester.makepyfile(test_readme_example=test)
    pytester.runpytest_inprocess("-q").assert_outcomes(passed=1)
