"""Every program of `break` goes wrong as it must, and every cure returns the right values."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run

from playground.base.remote import file_of
from playground.explain.replay.record.reading import read_recording
from playground.figures.runs import find_run
from playground.site.texts import CHAPTERS
from playground.tools import failures
from playground.tools.failures.page import Outcome, find_problem, run
from playground.tools.failures.programs import (
    DEADLOCK,
    EXPECTED_BY_MODULE,
    PROGRAMS,
    SILENT,
    TIMEOUT,
    find,
    read_body,
)
from playground.world.command_world import CommandWorld

README = Path(failures.__file__).with_name("README.md")
TAKES_TIME = {
    name for name, expected in PROGRAMS.items() if expected.symptom in (DEADLOCK, TIMEOUT)
}
SLOWER = TAKES_TIME - {"partial-group"} | {"all-download", "killed"}
"""Programs that wait for `make stress`: a look or two of the parent passes before each is
explained. (The kinds of diagnosis have tests of their own, tests/explain/hang/test_diagnosis.py,
and the killed rank is in `test_a_run_as_json`.)"""


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SLOWER])
def test_a_program_goes_wrong_as_expected_and_its_cure_is_right(name: str) -> None:
    outcome = run(CommandWorld(3), name)
    expected = PROGRAMS[name]
    assert (outcome.problem, outcome.symptom) == ("", expected.symptom)
    assert outcome.cured == expected.right(3) != outcome.results


@pytest.mark.stress
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_so_every_time_with_any_number_of_ranks(name: str, size: int) -> None:
    assert [run(CommandWorld(size), name).problem for _ in range(10)] == [""] * 10


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.stress] * (name != "absent-rank"))
        for name in sorted(TAKES_TIME - {"straggler"})
    ],
)
def test_a_page_tells_a_standstill_and_its_fix_as_the_command_does(name: str) -> None:
    recording = find_run(f"break {name}")
    assert recording
    assert recording.standstill
    told = " ".join(run(CommandWorld(3), name).told.split())
    sentence, cure, _ = recording.standstill
    assert told.startswith(sentence)
    assert told.endswith(cure)


def test_the_lines_that_the_readme_quotes_are_those_of_the_programs() -> None:
    quoted = re.findall(r"(\w+)\.py:(\d+) in (\w+)", README.read_text(encoding="utf-8"))
    lines = {
        (file, int(line), function) for file, line, function in quoted if file in EXPECTED_BY_MODULE
    }
    assert lines
    for file, line, function in lines:
        source = read_body(find(function.replace("_", "-")))
        assert "dist." in source[line], (file, line)
    named = re.findall(r"\((calls|training|silent)\.py:(\d+)\)", README.read_text(encoding="utf-8"))
    for file, line in named:
        code = (README.parent / f"{file}.py").read_text(encoding="utf-8").splitlines()
        assert "dist." in code[int(line) - 1], (file, line)
    assert len(named) == 3


@pytest.mark.parametrize("module", EXPECTED_BY_MODULE)
def test_every_program_stands_beside_its_cure_and_has_its_expectation(module: str) -> None:
    file = file_of(find(next(iter(EXPECTED_BY_MODULE[module]))).module)
    functions = [
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and [arg.arg for arg in node.args.args[:2]] == ["rank", "size"]
    ]
    expected = [
        find(name, suffix).name for name in EXPECTED_BY_MODULE[module] for suffix in ("", "_cured")
    ]
    assert functions == expected


def test_a_program_is_short_and_says_what_is_wrong() -> None:
    for name in PROGRAMS:
        assert find(name).summary.endswith(".")
        for suffix, widest in (("", 74), ("_cured", 79)):  # the first beside its number
            lines = read_body(find(name, suffix)).values()
            assert len(lines) < 20
            assert max(map(len, lines)) <= widest


RIGHT = {
    each.symptom: each
    for each in (
        Outcome(
            name="other-order",
            symptom=DEADLOCK,
            error="Deadlock",
            told="deadlock: …",
            diagnosis="different collectives",
            culprits=[1],
            line="",
            results=None,
            cured=[6, 6, 6],
        ),
        Outcome(
            name="same-seed",
            symptom=SILENT,
            error="",
            told="",
            diagnosis="",
            culprits=[],
            line="",
            results=[1, 1, 1],
            cured=[3, 3, 3],
        ),
    )
}


@pytest.mark.parametrize(
    ("symptom", "change", "expected"),
    [
        (DEADLOCK, {}, ""),
        (
            DEADLOCK,
            {"symptom": SILENT, "told": "", "results": [1, 2, 3]},
            "expected deadlock, found [1, 2, 3]",
        ),
        (
            DEADLOCK,
            {"diagnosis": "straggler"},
            "expected the diagnosis different collectives, found straggler",
        ),
        (DEADLOCK, {"culprits": [0, 1]}, "expected the ranks [1], found [0, 1]"),
        (SILENT, {"results": [3, 3, 3]}, "expected wrong values, found [3, 3, 3]"),
        (SILENT, {"cured": [3, 3, 1]}, "expected the fix to return [3, 3, 3], found [3, 3, 1]"),
    ],
)
def test_what_is_not_as_expected_is_told(
    symptom: str, change: dict[str, Any], expected: str
) -> None:
    outcome = RIGHT[symptom]
    problem = find_problem(replace(outcome, **change))
    assert problem == (f"{outcome.name}: {expected}" if expected else "")


def test_a_name_that_is_none_is_answered_with_the_command_that_lists_them(run_cli: Run) -> None:
    refused = run_cli("break", "juggling")
    assert refused.code == 2
    assert "there is no 'juggling': `python -m playground break` lists the names" in refused.err
    assert max(map(len, refused.err.splitlines())) <= 110


def test_the_list_names_every_program(run_cli: Run) -> None:
    shown = run_cli("break")
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[0] for line in shown.out.splitlines() if re.match(r"  \S", line)][1:] == [
        *PROGRAMS
    ]
    names = [name for name, *_ in json.loads(run_cli("break", "--json").out)["programs"]]
    assert names == [*PROGRAMS]


def test_a_run_as_json(run_cli: Run) -> None:
    [program] = json.loads(run_cli("break", "killed", "-n", 4, "--json").out)["programs"]
    assert (program["error"], program["told"]) == (
        "RankFailed",
        "rank 1 of 4 was killed by SIGKILL",
    )
    assert (program["culprits"], program["cured"], program["problem"]) == ([1], [40.0] * 4, "")


def test_the_program_that_goes_wrong_can_be_recorded(run_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "hang.playground"
    assert run_cli("break", "send-send", "--see", file).code == 0
    shown = run_cli("see", file)
    assert shown.code == 0, shown.err
    assert "break send-send" in shown.out
    assert "3 messages of which only one end is recorded" in " ".join(shown.out.split())
    still = read_recording(file).standstill
    assert still
    assert still.sentence.startswith("deadlock: rank 0 is in send to rank 1")
    assert still.waits == ((0, (1,)), (1, (2,)), (2, (0,)))
    refused = run_cli("break", "--see", file)
    assert (refused.code, refused.err) == (2, "playground: --see records one program: name it\n")


def test_a_cure_that_does_not_work_is_a_failure(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        PROGRAMS, "same-seed", replace(PROGRAMS["same-seed"], right=lambda size: [2] * size)
    )
    shown = run_cli("break", "same-seed")
    assert shown.code == 1, shown.err
    said = "expected the fix to return [2, 2, 2], found [3, 3, 3]"
    assert shown.err == f"playground: same-seed: {said}\n"


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        (("wrong-tag", "-n", "2"), {}, "2 is not in the range 3<=x<=128"),
        (("wrong-tog",), {}, "there is no 'wrong-tog': did you mean wrong-tag?"),
        (
            ("nan",),
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
            "without torchrun",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: tuple[str, ...],
    environ: dict[str, str],
    why: str,
    run_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    shown = run_cli("break", *words)
    assert (shown.code, shown.out) == (2, "")
    assert why in shown.err


def test_the_chapter_s_table_has_every_program_and_its_symptom() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\w ]+) \|",
        CHAPTERS["break"].read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert rows == [(name, expected.symptom) for name, expected in PROGRAMS.items()]


def test_what_is_silently_wrong_and_what_is_warned_of_are_shown(run_cli: Run) -> None:
    lines = [line.strip() for line in run_cli("break", "same-seed").out.splitlines()]
    for line in ("No error is raised.", "-    torch.manual_seed(1234)", "0  1      3"):
        assert line in lines
    assert lines[-1].startswith("same-seed went wrong as it must")
    shown = run_cli("break", "other-dtype")
    assert (shown.code, shown.err) == (0, "")
    assert "A warning:\nrank 1 has called all_reduce of int32 (calls.py:" in shown.out
