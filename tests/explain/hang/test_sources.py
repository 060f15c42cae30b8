"""Lines of the program: not ours, torch's or Python's, each with a number and a name of its own."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from playground.base.event_log import NONE
from playground.base.frames import PACKAGE
from playground.explain.hang import sources
from playground.explain.hang.sources import Line, Sources

STDLIB = sysconfig.get_path("stdlib")
TEXT = "def step(call):\n    first = call()\n    return first, call()\n"
Step = Callable[[Callable[[], object]], tuple[int, int]]


def step_in(file: str) -> Step:
    """A function `step` that calls twice, as if it stood in this file."""
    space: dict[str, Step] = {}
    exec(compile(TEXT, file, "exec"), space)
    return space["step"]


@pytest.fixture
def found() -> list[Line]:
    """The lines that were new."""
    return []


@pytest.fixture
def numbering(found: list[Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Numbers lines as they come, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)

    def number(line: Line) -> int:
        found.append(line)
        return len(found) - 1

    return Sources(number)


def test_each_call_of_the_program_has_its_line(numbering: Sources, found: list[Line]) -> None:
    step = step_in("train.py")
    for _ in range(2):  # the second time they are known
        assert step(partial(numbering.find, 1)) == (0, 1)
    path = os.path.abspath("train.py")
    assert found == [("train.py", 2, "step", path), ("train.py", 3, "step", path)]


def test_frames_that_are_not_the_program_s_are_passed_over(
    numbering: Sources, found: list[Line]
) -> None:
    """What the program calls, and what calls us for it."""
    machinery = [f"{PACKAGE}{name}" for name in ("tap/tap.py", "algorithms/messages.py")]
    installed = [f"{STDLIB}/threading.py", "/opt/site-packages/torch/nn.py"]
    program = step_in("train.py")
    for other in map(step_in, ["<string>", *installed, *machinery]):
        program(partial(other, partial(numbering.find, 1)))
    assert {(name, line) for name, line, *_ in found} == {("train.py", 2), ("train.py", 3)}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("models/net.py", "models/net.py"),
        ("/elsewhere/net.py", "/elsewhere/net.py"),
        (f"{PACKAGE}lessons/p2p/lesson.py", "playground/lessons/p2p/lesson.py"),
        (f"{PACKAGE}algorithms/all_reduce.py", "playground/algorithms/all_reduce.py"),
    ],
)
def test_a_file_s_name_is_short_where_that_is_unique(
    file: str, name: str, numbering: Sources, found: list[Line]
) -> None:
    step_in(file)(partial(numbering.find, 1))
    assert {line[0] for line in found} == {name}


def test_a_folder_called_playground_is_not_taken_for_the_package(
    numbering: Sources, found: list[Line], tmp_path: Path
) -> None:
    file = tmp_path / "playground" / "net.py"
    step_in("playground/net.py")(partial(numbering.find, 1))
    assert {line[0] for line in found} == {str(file)}


def test_outside_of_the_program_there_is_none(numbering: Sources, found: list[Line]) -> None:
    with ThreadPoolExecutor(1) as pool:  # a thread begins in Python's own code
        call = partial(numbering.find, 1)
        assert pool.submit(step_in("<string>"), call).result() == (NONE, NONE)
    assert found == []


def test_only_so_many_codes_are_kept(
    numbering: Sources, found: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_CODES", 3)
    for number in range(5):
        step_in(f"{number}.py")(partial(numbering.find, 1))
    assert len(numbering.codes) <= 3
    assert len(numbering.numbers) <= 3, "a later code may get the id of one that is gone"
    assert [line[0] for line in found] == [f"{number}.py" for number in range(5) for _ in "ab"]
