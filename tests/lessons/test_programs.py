"""Lessons that are programs: what the command prints, torchrun prints, and the chapter shows; and
their checks see what is wrong."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures import Run

from playground.console.lesson import Lesson
from playground.lessons import LESSONS, PATH
from playground.runtime.remote import file_of

PROGRAMS = [lesson for lesson in PATH if lesson.is_program]
SMALLER: dict[str, tuple[str, ...]] = {}
"""By lesson, constants with which its program is quick, as options of its command."""
VARIES: set[str] = set()
"""Lessons that print what differs from run to run, such as times."""


@dataclass(frozen=True, kw_only=True)
class KeyLine:
    """The line on which the idea of a program depends."""

    line: str
    """As it stands in the file, once, without its indentation."""
    check: str
    """A regular expression: its group is the difference that the program prints."""
    size: int = 2


KEY_LINES = {
    "p2p": KeyLine(line="token += 1", check=r"largest difference from the expected data (\S+)"),
}
"""By lesson."""
ROUNDING = 1e-16
"""A difference that is as good as none."""


def source_of(lesson: Lesson) -> Path:
    return file_of(lesson.module())


def form(line: str, exact: bool) -> str:
    """A line with # for each number, unless the numbers are the same in every run."""
    spaced = " ".join(line.split())
    return spaced if exact else re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", spaced)


def shown_in_chapter(lesson: Lesson) -> tuple[list[str], list[str]]:
    """The first run of the command that the chapter shows: its words, and the lines below."""
    chapter = (source_of(lesson).parent / "README.md").read_text(encoding="utf-8")
    pattern = rf"```console\n\$ python -m playground ({lesson.name}\b[^\n]*)\n(.*?)```"
    shown = re.search(pattern, chapter, re.DOTALL)
    assert shown, "the chapter shows no run"
    return shlex.split(shown[1], comments=True)[1:], shown[2].splitlines()


def run_by_torchrun(lesson: Lesson, size: int, folder: Path) -> list[str]:
    """The lines that the lesson's file prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    done = subprocess.run(
        [*command, "--standalone", str(source_of(lesson))],
        cwd=folder, capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def size_of(words: Sequence[str], lesson: Lesson) -> int:
    return int(words[words.index("-n") + 1]) if "-n" in words else lesson.default_size


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
def test_command_chapter_and_torchrun_print_one_text(
    lesson: Lesson, run_cli: Run, tmp_path: Path
) -> None:
    exact = lesson.name not in VARIES
    words, shown = shown_in_chapter(lesson)
    ran = run_cli(lesson.name, *words)
    assert (ran.code, ran.err) == (0, "")
    printed = [form(line, exact) for line in ran.out.splitlines()]
    ending = iter(printed)
    for line in (form(line, exact) for line in shown if line.strip() != "…"):
        assert line in ending, f"{line}: not printed, or not in this place"
    by_torchrun = run_by_torchrun(lesson, size_of(words, lesson), tmp_path)
    assert sorted(form(line, exact) for line in by_torchrun) == sorted(printed)


@pytest.mark.parametrize("name", [lesson.name for lesson in PROGRAMS])
def test_without_its_key_line_the_check_of_a_program_fails(
    name: str, run_cli: Run, tmp_path: Path
) -> None:
    """The difference that it prints is 10^6 times as large, or it does not come to its end."""
    key, file = KEY_LINES[name], tmp_path / "lesson.py"
    text = source_of(LESSONS[name]).read_text(encoding="utf-8")
    broken, count = re.subn(rf"^( *){re.escape(key.line)}.*$", r"\1pass", text, flags=re.MULTILINE)
    assert count == 1, f"{key.line} stands there {count} times"
    file.write_text(broken, encoding="utf-8")
    right = run_cli(name, "-n", key.size, *SMALLER.get(name, ()))
    assert right.code == 0
    wrong = run_cli("run", "-n", key.size, *sets_of(name), file)
    if wrong.code == 0:
        before, after = (largest(key.check, ran.out) for ran in (right, wrong))
        assert after >= 1e6 * max(before, ROUNDING)


def sets_of(name: str) -> list[str]:
    """The constants of `SMALLER`, for `run`."""
    words = SMALLER.get(name, ())
    pairs = zip(words[::2], words[1::2], strict=True)
    sets = (f"{option[2:].replace('-', '_').upper()}={value}" for option, value in pairs)
    return [word for each in sets for word in ("--set", each)]


def largest(check: str, printed: str) -> float:
    """The largest difference that a program has printed."""
    return max(float(each) for each in re.findall(check, printed, re.MULTILINE))


P2P = LESSONS["p2p"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--letter", "x"), 2, "Invalid value for '--letter': 'x' is not a valid integer."),
        (("--lettre", "3"), 2, "No such option '--lettre'."),
        (("--letter", "3", "4"), 2, "Got unexpected extra argument (4)"),
        (("--timeout", "0"), 2, "Invalid value for '--timeout'"),
        (("-n", "1"), 1, "a message needs two ranks: start 2 or more (lesson.py:"),
    ],
)
def test_what_a_lesson_cannot_do_is_one_line(
    words: tuple[str, ...], code: int, said: str, run_cli: Run
) -> None:
    ran = run_cli("p2p", *words)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(f"playground: {said}")
    assert ran.err.count("\n") == 1


def test_its_constants_are_options_with_their_comments(run_cli: Run) -> None:
    shown = " ".join(run_cli("p2p", "--help").out.split())
    tag = "a tag: a receive with a tag takes only a message with the same tag"
    assert f"--parcel INTEGER {tag} [default: 1] --letter INTEGER another tag [default: 2]" in shown


def test_a_constant_has_the_value_that_is_given(run_cli: Run) -> None:
    """With one tag for both, messages keep their order."""
    same = run_cli("p2p", "--letter", 1)
    assert "Rank 1 has data -4.0 after tags, expected 4.0\n" in same.out
    assert "Rank 1: largest difference from the expected data 8.0\n" in same.out
