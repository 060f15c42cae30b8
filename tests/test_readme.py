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

from playground.lessons import PATH, module_of

pytest_plugins = ["pytester"]

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """(command, the output that follows it) of every `$ python -m playground …` shown."""
    for block in blocks("console"):
        for part in block.split("$ ")[1:]:
            command, *output = part.splitlines()
            yield command, output


def skeleton(line: str) -> str:
    """A line without what differs between machines and runs: its numbers."""
    return re.sub(r"[\d,.]*\d%?", "#", line)


@pytest.mark.parametrize(
    ("command", "output"), list(shown_commands()), ids=lambda value: value if type(value) is str else ""
)
def test_commands_print_what_is_shown(
    command: str, output: list[str], run_cli: Callable[..., Any], data_dir: Path
) -> None:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "playground"]
    training = words[3] in ("sgd", "ladder", "ddp", "prove")
    small = ["--dataset", "digits", "--data-dir", data_dir, "--limit", "128"] if training else []
    shown = run_cli(*words[3:], *small)
    assert shown.code == 0, shown.err
    if training:  # other data, so other numbers: the first line is another, the rest has the same form
        assert [skeleton(line) for line in shown.out.splitlines()[1:]] == [
            skeleton(line) for line in output[1:]
        ] or not output
    elif output:
        threads = r"x \d+ threads?"
        assert re.sub(threads, "", shown.out) == re.sub(threads, "", "\n".join(output) + "\n")


def test_the_path_lists_every_lesson_in_order() -> None:
    listed = re.findall(r"^\| \[([\w-]+)\]\((.*?)\) \| `python -m playground ([\w-]+)`", README, re.MULTILINE)
    assert listed == [(lesson.name, f"playground/lessons/{module_of(lesson.name)}.py", lesson.name) for lesson in PATH]


def test_the_two_line_difference_is_the_real_one() -> None:
    [diff] = blocks("diff")
    lessons = Path(__file__).parents[1] / "playground" / "lessons"
    source = {"-": (lessons / "sgd.py").read_text().splitlines(), "+": (lessons / "ddp.py").read_text().splitlines()}
    for line in diff.splitlines():
        assert line[1:] in source[line[0]]
        assert line[1:] not in source["+" if line[0] == "-" else "-"]


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
