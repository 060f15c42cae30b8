"""failures: each program goes wrong as the chapter says, and what is said of it is shown there."""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boards import source_of
from fixtures import Run
from programs import SCRIPT, ForkedProgram
from test_readme import consoles, fenced_blocks

from playground.lessons.failures.page import (
    LISTEN_IN_DETAIL,
    PROGRAMS,
    Outcome,
    find_odd,
    find_problem,
    listen,
    run,
    watch,
)
from playground.runtime.launcher.entry import CommandWorld
from playground.site.chapters import CHAPTERS

CHAPTER = CHAPTERS["failures"].read_text(encoding="utf-8")
SIZE = 4
STANDS_FOR_SECONDS = {"save"}
RETURNS = {"count", "average"}
NOTHING = "\N{EN DASH}"


def without_times(line: str) -> str:
    return re.sub(r"\d+\.\d s", "# s", line)


def shown_lines(command: str) -> list[str]:
    """The output that the chapter shows of this command, without what varies."""
    [shown] = [each for group in consoles(CHAPTER) for each in group if each.command == command]
    return [without_times(line) for line in shown.output]


def shown_of(name: str) -> list[str]:
    """The table of the diagnosis of a program, as the chapter shows it."""
    lines = shown_lines(f"python -m playground failures --only {name}")
    return lines[next(n for n, line in enumerate(lines) if line.startswith("rank  does")) : -1]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in STANDS_FOR_SECONDS])
@pytest.mark.parametrize("size", [SIZE, pytest.param(5, marks=pytest.mark.stress)])
def test_our_recorder_names_the_ranks(name: str, size: int) -> None:
    ending, expected = watch(CommandWorld(size), name), PROGRAMS[name]
    found, error = ending.diagnosis, ending.error
    culprits = [*range(size)] if expected.culprits is None else expected.culprits
    assert (type(error).__name__ if error else "") == expected.error
    assert (found.kind if found else None) == expected.kind
    assert [*(found.culprits if found else find_odd(ending.results or []))] == culprits
    if found and size == SIZE and name not in RETURNS:
        assert [without_times(line) for line in found.table.splitlines()][:5] == shown_of(name)


@pytest.mark.parametrize("name", sorted(RETURNS))
def test_torch_returns_wrong_values_and_says_so_in_detail_or_never(name: str) -> None:
    [detail] = listen(CommandWorld(SIZE), LISTEN_IN_DETAIL, [name])
    if name == "count":
        assert all("Detected mismatch between collectives on ranks" in said for said in detail)
        assert "TensorShape=[3, 2]" in detail[1]
        assert "options" not in "".join(detail).lower()
    else:
        assert find_odd(detail) == PROGRAMS[name].culprits
        for rank, said in enumerate(detail):
            assert f"Rank {rank}, average: {said}\n" in CHAPTER


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of all programs, what the command finds out."""
    return {each.name: each for each in run(CommandWorld(SIZE), [*PROGRAMS])}


def counted(calls: Sequence[str]) -> list[int]:
    return [int(each.split()[0]) if each != "no call" else 0 for each in calls]


@pytest.mark.stress
def test_the_table_of_the_four_voices_is_true(outcomes: dict[str, Outcome]) -> None:
    """What torch says is classified by the words of its messages; who is named, by the numbers."""
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", CHAPTER, re.MULTILINE)
    rows = {name: cells.split(" | ") for name, cells in lines}
    assert [*rows] == [*PROGRAMS]
    for name, found in outcomes.items():
        assert find_problem(found) == ""
        timeout, detail, recorder, _ = rows[name]
        waited = [said for said in found.torch if "Timed out waiting 2000ms for" in said]
        assert bool(waited) == (timeout == "names no rank")
        assert not any(re.search(r"[Rr]anks? \d", said) for said in found.torch)
        absent = "received errors while waiting for send/recv from rank 0"
        if detail == "names rank 0":
            assert all(absent in said for said in found.detail[1:])
        elif detail == "names rank 1 of each pair":
            assert any("Ranks 1 failed to pass monitoredBarrier" in each for each in found.detail)
        elif detail == NOTHING:
            assert found.detail == found.torch
        groups = {call.partition(" of ")[2] for call in found.recorder}
        counts = counted(found.recorder)
        assert (len(groups) > 1) == (recorder == "four groups, one line")
        assert (len({*counts}) > 1) == (recorder == "one call less on rank 0")
        assert counts[0] == counts[1] - (recorder == "one call less on rank 0")


@pytest.mark.stress
def test_torch_says_what_the_chapter_quotes(outcomes: dict[str, Outcome]) -> None:
    quoted = {
        "fit": ["Timed out waiting 2000ms for recv operation to complete"],
        "gossip": ["Ranks 1 failed to pass monitoredBarrier"],
        "save": ["typically caused by a remote worker crashing"],
    }
    for name, quotes in quoted.items():
        found = outcomes[name]
        for quote in quotes:
            assert f"`{quote}`" in " ".join(CHAPTER.split())
            assert any(quote in said for said in (*found.torch, *found.detail))
    for rank, calls in enumerate(outcomes["gossip"].recorder):
        assert f"    rank {rank}: {calls}\n" in CHAPTER
    first, *_, last = outcomes["fit"].recorder
    assert f"    rank 0: {first}\n    ranks 1-3: {last}\n" in CHAPTER


@pytest.mark.stress
@pytest.mark.parametrize("size", [3, 5])
def test_the_command_takes_other_worlds(size: int, run_cli: Run) -> None:
    shown = run_cli("failures", "-n", size, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert [each["name"] for each in document["programs"]] == [*PROGRAMS]
    assert all(len(each["torch"]) == size for each in document["programs"])


def test_the_lines_of_the_outcomes_are_those_of_the_programs() -> None:
    lines = source_of("failures").splitlines()
    expected = {"count": "as its file has it", "average": "sorted(", "save": "while rank == 0"}
    named = re.findall(r"`(\w+)`: line (\d+)", CHAPTER)
    assert [name for name, _ in named] == [*expected]
    for name, number in named:
        assert expected[name] in lines[int(number) - 1]


WRONG = Outcome(
    name="fit",
    torch=["returned 1"] * SIZE,
    detail=["returned 1"] * SIZE,
    recorder=["no call"] * SIZE,
    error="Deadlock",
    told="",
    diagnosis="a rank that has finished",
    culprits=(0,),
    results=None,
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"error": ""}, "fit: expected the error Deadlock, found none"),
        ({"culprits": (1, 2)}, "fit: expected the ranks [0], found [1, 2]"),
        ({"diagnosis": ""}, "fit: expected the diagnosis a rank that has finished, found none"),
        (
            {"name": "average"},
            "average: expected the error none, found Deadlock",
        ),
    ],
)
def test_what_is_not_as_expected_is_said(change: dict[str, Any], problem: str) -> None:
    assert find_problem(replace(WRONG, **change)) == problem


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        (("-n", "2"), {}, "a world of 2 is too small: this needs at least 3 ranks"),
        (("--only", "fits"), {}, "'fits' is not one of"),
        (("--see", "a.html"), {}, "--see records one program: name it with --only"),
        (
            (),
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
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
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    shown = run_cli("failures", *words)
    assert (shown.code, shown.out) == (2, "")
    assert why in shown.err


SLOW = """
    import time

    import torch.distributed as dist
    from playground import launch


    def run(rank, size):
        for epoch in range(3):
            dist.barrier()
            if rank == 0:
                time.sleep(20)


    if __name__ == "__main__":
        launch(run, 3)
"""


@pytest.mark.stress
def test_a_run_that_is_slow_is_asked_why(
    fork_program: Callable[..., ForkedProgram],
    run_cli: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = shown_lines("python -m playground why 4711")
    (tmp_path / f"{SCRIPT}.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.syspath_prepend(tmp_path)
    program = fork_program(SCRIPT)
    for _ in range(100):
        told = run_cli("why", program.pid)
        if "is in the program while ranks 1-2 are in barrier" in told.out:
            break
        time.sleep(0.1)
    varying = re.compile(r" +|\w+\.py:\d+|--pid \d+")
    form = [varying.sub(" ", line).strip() for line in shown]
    assert [varying.sub(" ", without_times(line)).strip() for line in told.out.splitlines()] == form


def test_the_first_program_is_a_deadlock_that_names_rank_2(
    run_script: Callable[..., Any],
) -> None:
    done = run_script(fenced_blocks(CHAPTER, "python")[0])
    assert (done.code, done.err) == (0, "")
    assert "rank 2 has finished" in done.out
