"""Right solutions pass, every mistake is called by its name, and whatever a learner writes gets a
verdict."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Run, Worlds

from playground.exercises import (
    calls,
    check,
    mistakes as mistakes_module,
    verdict as verdict_module,
)
from playground.exercises.attempt import Attempt, Solution, attempt
from playground.exercises.changes import patch, read_changes
from playground.exercises.exercise import (
    BLOCKED,
    CATALOGUE,
    CHOOSE,
    COLLECTIVES,
    CORE,
    DEADLOCK,
    ERROR,
    FAIL,
    FIND,
    FOLDER,
    GAP,
    LOOP,
    MESSAGES,
    PASS,
    WRITE,
    Exercise,
    Mistake,
    Place,
)
from playground.exercises.failures.judges import stuck
from playground.exercises.layouts import PARTS, Layout, compare, cost_of
from playground.exercises.limits import LOGGED, leave_out, solving
from playground.exercises.mistakes import NAMED, attempt_mistake
from playground.exercises.observation import Failure, explain_digits, name_element
from playground.exercises.repair import CULPRIT
from playground.exercises.scaling import judges as scaling
from playground.exercises.transcript import TICK, Transcript
from playground.exercises.verdict import (
    Verdict,
    check_solution,
    tell_difference,
    tell_lines,
)
from playground.exercises.workbook import Workbook, progress_file
from playground.site.texts import CHAPTERS
from playground.training import mesh_costs as costs
from playground.ui import terminal
from playground.world.launcher import pool as kept
from playground.world.rank.reports import Event, hearing, report
from playground.world.simulated_gpu.environment import GPUS

ALL = list(CATALOGUE.values())
MISTAKES = [(exercise, mistake.name) for exercise in ALL for mistake in exercise.mistakes]


def read_solutions(name: str) -> list[tuple[Exercise, str, str]]:
    """Exercise, difference from the reference, and text of each."""
    return [
        (CATALOGUE[title.partition(": ")[0]], title.partition(": ")[2], text.removesuffix("```\n"))
        for section in Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n## ")[1:]
        for title, text in [section.split("\n\n```python\n")]
    ]


OTHERS, WRONG = read_solutions("right_solutions.md"), read_solutions("wrong_solutions.md")
IMPORTS = """\
import copy, datetime, math, os, threading
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
"""
TENTH = int(os.environ["PLAYGROUND_TEST_TENTH"])
CHOSEN = [name for place, name in enumerate(CATALOGUE) if place % 10 == TENTH % 10]
"""The exercises whose strangers' solutions are judged in every run of the suite; `make stress`
judges all."""


def judge(exercise: Exercise, text: str, world: int | None = None) -> Verdict:
    before = Workbook(Path("nowhere")).solutions_before(exercise)
    return check_solution(Solution(exercise, text, exercise.file), before, world)


def complete(exercise: Exercise, text: str) -> str:
    """The solution as a file: a repaired program is one already."""
    return text if exercise.kind == FIND else IMPORTS + text


def of_the_tenth(solutions: Iterable[tuple[Exercise, str, str]]) -> list[Any]:
    """Those of a tenth of the exercises, with PLAYGROUND_TEST_TENTH in their names, and all of
    them, for `make stress`."""
    return [
        pytest.param(*each, id=f"PLAYGROUND_TEST_TENTH={TENTH}-{each[0].name}-{each[1]}")
        for each in solutions
        if each[0].name in CHOSEN
    ] + [
        pytest.param(*each, id=f"{each[0].name}-{each[1]}", marks=pytest.mark.stress)
        for each in solutions
    ]


@pytest.mark.parametrize("exercise", ALL, ids=CATALOGUE)
def test_the_reference_passes_in_its_first_world(exercise: Exercise) -> None:
    verdict = judge(exercise, exercise.solution, exercise.worlds[0])
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds[:1]), tell_lines(verdict)


def choose_mistake(exercise: Exercise) -> Mistake:
    """The first whose verdict comes soon: after wrong values the world can be used again, while a
    deadlock takes half a second to prove, and the next solution needs a new world."""
    mistakes = [each for each in exercise.mistakes if each.name not in NAMED]
    return min(mistakes, key=lambda each: (FAIL, ERROR, DEADLOCK).index(each.status))


OTHER_ENDS = [("swap", "both send first"), ("column", "a view that is not contiguous")]
"""Mistakes that end in a deadlock and in an error."""


IN_ANY_ORDER = {"stale"}
"""Exercises in which messages may come in another order when the machine is busy: a mistake then
need not do the same in all worlds, and is named as a probable one."""


@pytest.mark.parametrize(
    ("exercise", "mistake"),
    [
        *(pytest.param(each, choose_mistake(each), id=each.name) for each in ALL),
        *(
            pytest.param(each, mistake, id=f"{each.name}-{mistake.name}")
            for each in ALL
            for mistake in each.mistakes
            if (each.name, mistake.name) in OTHER_ENDS
        ),
    ],
)
def test_a_mistake_is_called_by_its_name_in_the_first_world_that_shows_it(
    exercise: Exercise, mistake: Mistake
) -> None:
    for size in exercise.worlds:
        verdict = judge(replace(exercise, worlds=(size,)), mistake.text)
        if verdict.status != PASS:
            break
    names = [verdict.mistake]
    if exercise.name in IN_ANY_ORDER or ", or: " in verdict.mistake:  # here it has one world only
        names = verdict.mistake.removeprefix("probably: ").split(", or: ")
    assert mistake.name in names, tell_lines(verdict)
    assert verdict.status == mistake.status


@pytest.mark.usefixtures("_strangers_share_worlds")
def test_a_mistake_of_the_catalogue_runs_once_for_a_class() -> None:
    exercise = replace(CATALOGUE["share"], worlds=(2,))
    mistake = choose_mistake(exercise)
    number = sum(each.status == mistake.status for each in exercise.mistakes)
    attempt_mistake.cache_clear()
    for student in ("ann", "ben"):
        verdict = judge(exercise, f"{mistake.text}\n# {student}\n")
        assert (verdict.mistake, verdict.status) == (mistake.name, FAIL)
    assert (attempt_mistake.cache_info().misses, attempt_mistake.cache_info().hits) == (
        number,
        number,
    )


@pytest.mark.usefixtures("_strangers_share_worlds")
def test_a_mistake_is_named_from_the_world_that_failed_and_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, int]] = []

    def run(solution: Solution, before: Sequence[Solution], size: int, *how: Any) -> Attempt:
        started.append((solution.text, size))
        return attempt(solution, before, size, *how)

    for module in (verdict_module, mistakes_module):
        monkeypatch.setattr(module, "attempt", run)
    exercise = CATALOGUE["share"]
    mistake = choose_mistake(exercise)
    attempt_mistake.cache_clear()
    assert judge(exercise, f"{mistake.text}\n# ann\n").mistake == mistake.name
    last = max(exercise.worlds)
    assert [size for text, size in started if "# ann" in text] == [2, last]
    alike = [each for each in exercise.mistakes if each.status == mistake.status]
    assert sorted(size for text, size in started if "# ann" not in text) == sorted(
        [*[2] * len(alike), last]
    )


def test_mistakes_that_do_the_same_in_one_world_are_told_apart_in_another() -> None:
    exercise = CATALOGUE["axis-sums"]
    for name in ("the first coordinate changes fastest", "the last axis first"):
        [mistake] = [each for each in exercise.mistakes if each.name == name]
        assert judge(exercise, mistake.text).mistake == name


NO_CHANGE = "your change makes no difference to the result"


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        (
            "slow-rank", "max(documents)", "max(0, *documents)",
            f"  As before: {NO_CHANGE}",
        ),
        (
            "lost-sum", "        largest = max(", "        table = dense\n        largest = max(",
            f"  As before: {NO_CHANGE}: table = … gives the name another tensor: fill the one "
            "given, table.copy_(…)",
        ),
        (
            "wrong-offset", "rank * sizes[0]", "rank * sizes[rank]",
            "  Probably: a share is in another place",
        ),
    ],
)  # fmt: skip
def test_a_change_of_a_program_that_does_not_repair_it_is_told(
    name: str, old: str, new: str, told: str
) -> None:
    exercise = CATALOGUE[name]
    assert old in exercise.stub
    assert tell_lines(judge(exercise, exercise.stub.replace(old, new)))[1] == told


def test_mistakes_that_do_the_same_everywhere_are_both_named() -> None:
    exercise = CATALOGUE["share"]
    first, *_ = exercise.mistakes
    found = Failure(words="holds 1, should be 2")
    one, both = (
        mistakes_module.name_probable(found, mistakes)
        for mistakes in ([first], [first, replace(first, name="another")])
    )
    assert (one.mistake, one.says) == (f"probably: {first.name}", first.says)
    assert (both.mistake, both.says) == (f"probably: {first.name}, or: another", "")


def change_solution(name: str, changes: dict[str, str]) -> str:
    """The solution of an exercise, with these parts of its text replaced."""
    text = CATALOGUE[name].solution
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "ring-traffic",
            {"2 * (ranks - 1)": "(ranks - 1)", '"root_bytes": (': '"root_bytes": 2 * ('},
            "Probably: one phase only: each rank has one sum, and an all-gather has to follow",
        ),
        (
            "bytes-held",
            {"2 * whole + 2 * shard": "whole + 3 * shard", " 4 * shard": " whole + 2 * shard"},
            "Probably: ZeRO-1 as ZeRO-2: it shards the optimizer's state alone",
        ),
        (
            "token-traffic",
            {
                "(sum(rows[r]) - rows[r][r])": "sum(rows[r])",
                "(arrived[r] - rows[r][r])": "arrived[r]",
                "[out[r] + back[r] for r in ranks]": "out",
            },
            "Probably: what stays is sent, too: rows for a rank's own experts do not leave it",
        ),
        (
            "gated-mlp",
            {"3 * channels": "2 * channels", "4 * inner": "3 * inner"},
            "Probably: the MLP of this chapter: a gated MLP has three matrices",
        ),
    ],
)
def test_a_prediction_with_two_mistakes_is_told_the_first(
    name: str, changes: dict[str, str], told: str
) -> None:
    exercise, text = CATALOGUE[name], change_solution(name, changes)
    assert tell_lines(judge(exercise, text))[1] == f"  {told}"


def test_a_broadcast_of_a_group_without_this_rank_is_right_and_told() -> None:
    groups = CATALOGUE["groups"]
    both = (
        f"{IMPORTS}\ndef groups(rank, size, tensor):\n"
        "    made = [dist.new_group([*range(first, size, 2)]) for first in range(2)]\n"
        "    for root, group in enumerate(made):\n"
        "        dist.broadcast(tensor, src=root, group=group)\n"
    )
    verdict = judge(groups, both, 4)
    assert (verdict.status, verdict.notes) == (
        PASS,
        ("right, but ranks call a broadcast of a group that they are not in: torch warns",),
    )
    assert judge(groups, groups.solution, 4).notes == ()


@pytest.mark.stress
@pytest.mark.parametrize("exercise", ALL, ids=CATALOGUE)
def test_the_reference_passes_in_all_worlds_and_the_stub_is_not_written_yet(
    exercise: Exercise,
) -> None:
    verdict = judge(exercise, exercise.solution)
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
    for stub in (exercise.stub, f"{exercise.stub}\n# I do not know how\n"):
        assert judge(exercise, stub).words == "not written yet" or exercise.kind == FIND


@pytest.fixture
def _strangers_share_worlds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the catalogue's solutions do, but for `make stress`, where each has processes of its own:
    that takes three times as long. One that breaks its world gets a new one all the same."""
    if not request.node.get_closest_marker("stress"):
        monkeypatch.setattr(Solution, "is_catalogued", True)


@pytest.mark.usefixtures("_strangers_share_worlds")
@pytest.mark.parametrize(("exercise", "way", "text"), of_the_tenth(OTHERS))
def test_another_way_is_right_too(
    exercise: Exercise, way: str, text: str, request: pytest.FixtureRequest
) -> None:
    """In its first two worlds, and for `make stress` in all."""
    worlds = exercise.worlds[: None if request.node.get_closest_marker("stress") else 2]
    verdict = judge(replace(exercise, worlds=worlds), complete(exercise, text))
    assert (verdict.status, verdict.passed) == (PASS, worlds), tell_lines(verdict)


@pytest.mark.usefixtures("_strangers_share_worlds")
@pytest.mark.parametrize(("exercise", "what", "text"), of_the_tenth(WRONG))
def test_a_stranger_s_mistake_is_refused_and_told(exercise: Exercise, what: str, text: str) -> None:
    verdict = judge(exercise, complete(exercise, text))
    assert verdict.status != PASS
    assert what.partition("(")[2].rstrip(")").lower() in "\n".join(tell_lines(verdict)).lower(), (
        tell_lines(verdict)
    )


@pytest.mark.stress
@pytest.mark.parametrize(
    ("exercise", "name"),
    [pytest.param(exercise, name, id=f"{exercise.name}-{name}") for exercise, name in MISTAKES],
)
def test_a_mistake_is_called_by_its_name(exercise: Exercise, name: str) -> None:
    mistake = next(each for each in exercise.mistakes if each.name == name)
    verdict = judge(exercise, mistake.text)
    assert (verdict.mistake, verdict.status) == (name, mistake.status), tell_lines(verdict)
    assert len(tell_lines(verdict)) <= 12


def test_a_look_at_a_solution_waits_for_no_report_of_its_own_thread() -> None:
    line, took = threading.Lock(), list[bool]()

    def send(event: Event) -> None:
        took.append(line.acquire(blocking=False))
        if took[-1]:
            signal.raise_signal(signal.SIGALRM)  # as the timer does, at any place
            line.release()

    with hearing(send), solving(Transcript("swap.py", 2, ())):
        end = time.process_time() + 10 * TICK / 100
        while time.process_time() < end:  # a look is reported where the solution has computed
            pass
        report(at=("send", 1, 1))
    assert took
    assert all(took)


def test_an_exercise_on_gpus_is_refused_in_one_line_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = CATALOGUE["own-gpu"]
    monkeypatch.setenv(GPUS, "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict = judge(own, own.solution)
    assert (verdict.status, verdict.exit_code) == (BLOCKED, 2)
    assert verdict.words.startswith("simulated GPUs are compiled with g++: ")
    assert "\n" not in verdict.words


@pytest.mark.gpu
def test_a_notebook_is_told_that_its_process_began_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = CATALOGUE["own-gpu"]
    monkeypatch.setenv(GPUS, "")
    verdict = judge(own, own.solution)
    assert verdict.status == BLOCKED
    assert verdict.words.endswith(": give the command check own_gpu.py in a shell")


WAITS_FOR_ALL = """
import torch

def missing_wait(rank, size, gradient, handle, side):
    handle.wait()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        gradient /= size
    torch.cuda.synchronize()

def read_too_early(losses, queue_step):
    here = torch.zeros(losses.shape, pin_memory=True)
    here.copy_(losses, non_blocking=True)
    queue_step()
    torch.cuda.synchronize()
    return here.tolist()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "text", "notes"),
    [
        ("missing-wait", WAITS_FOR_ALL, "Python has waited for the GPU"),
        ("read-too-early", WAITS_FOR_ALL, "Python has waited for the next step, too"),
        (
            "read-too-early",
            "def read_too_early(losses, queue_step):\n"
            "    values = losses.tolist()\n    queue_step()\n    return values\n",
            "Python has waited for the losses before it queued the next step",
        ),
    ],
)
def test_more_than_the_necessary_wait_is_right_and_told(name: str, text: str, notes: str) -> None:
    exercise = CATALOGUE[name]
    verdict = judge(exercise, text, exercise.worlds[0])
    assert verdict.status == PASS, tell_lines(verdict)
    assert [line.partition(notes)[1] for line in verdict.notes] == [notes]
    assert judge(exercise, exercise.solution, exercise.worlds[0]).notes == ()


def test_every_exercise_has_its_parts() -> None:
    for exercise in ALL:
        assert len(exercise.hints) == 3
        assert "\nUse: " in exercise.task
        assert {*exercise.forbidden} <= {*MESSAGES, *COLLECTIVES}
        assert exercise.forbidden or "Not here:" not in exercise.task
        assert exercise.title.partition(": ")[2]
        assert max(map(len, exercise.solution.splitlines())) <= 80
        assert ("NotImplementedError" in exercise.stub) == (exercise.kind != FIND)
        assert "NotImplementedError" not in exercise.solution
        assert exercise.mistakes
        assert {mistake.status for mistake in exercise.mistakes} <= {FAIL, DEADLOCK, ERROR}
        assert exercise.solution not in [mistake.text for mistake in exercise.mistakes]
        if exercise.kind == FIND:
            assert all(fault.says for fault in read_changes(exercise.read("faults.diff")))


def test_a_mistake_is_a_change_of_its_reference() -> None:
    assert patch("one\ntwo\none\n", " two\n+and\n@@\n-one\n+three\n") == "one\ntwo\nand\nthree\n"
    with pytest.raises(ValueError, match="the reference has no 'three"):
        patch("one\ntwo\n", "-three\n")


@pytest.mark.parametrize("lesson", sorted({exercise.lesson for exercise in ALL}))
def test_chapters_name_their_exercises(lesson: str) -> None:
    chapter = CHAPTERS[lesson].read_text(encoding="utf-8")
    for named in re.findall(
        r"\[checked\]\(../../exercises/README.md\): (.*?)\.\n", chapter, re.DOTALL
    ):
        found = [CATALOGUE[name] for name in re.findall(r"`([\w-]+)`", named)]
        assert found
        assert {exercise.lesson for exercise in found} == {lesson}
    for name, grade, minutes in re.findall(r"`([\w-]+)`\s\(([●○]{3}),\s(\d+)\sminutes", chapter):
        assert (grade, int(minutes)) == (CATALOGUE[name].grade, CATALOGUE[name].minutes), name


ALREADY_SHOWN = {
    "handover": "asks for the tutorial's message in a world of any size",
    "average": "asks for the tutorial's mean where a rank lacks a gradient",
    "one-forward-one-backward": "asks for an order that no loop of the chapter has yet",
}
"""Exercises that ask for more than the program with which their chapter begins."""


@pytest.mark.parametrize("lesson", sorted({exercise.lesson for exercise in ALL}))
def test_a_chapter_names_an_exercise_before_it_shows_the_answer(lesson: str) -> None:
    """The answer: a third of all runs of four words of what is to be written."""
    chapter = CHAPTERS[lesson].read_text(encoding="utf-8")
    for exercise in (each for each in ALL if each.lesson == lesson and each.kind == WRITE):
        named = re.search(rf"`{exercise.name}`", chapter)
        assert named, exercise.name
        answer = runs_of_four(
            "".join(gap[2] for gap in GAP.finditer(exercise.read("reference.py")))
        )
        before = re.findall(r"```python\n(.*?)```", chapter[: named.start()], re.DOTALL)
        shown = max((len(answer & runs_of_four(block)) for block in before), default=0)
        assert shown < len(answer) / 3 or exercise.name in ALREADY_SHOWN, exercise.name


def runs_of_four(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+|[^\w\s]", text)
    return {tuple(words[place : place + 4]) for place in range(len(words) - 3)}


TO_REPAIR = [exercise for exercise in ALL if exercise.kind == FIND]


@pytest.mark.usefixtures("_strangers_share_worlds")
@pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(TO_REPAIR[TENTH % len(TO_REPAIR)], id=f"PLAYGROUND_TEST_TENTH={TENTH}"),
        *(pytest.param(each, id=each.name, marks=pytest.mark.stress) for each in TO_REPAIR),
    ],
)
def test_a_program_to_be_repaired_fails_in_another_way_with_another_seed(
    exercise: Exercise,
) -> None:
    """What its check shows is a report, without a name; and with the repair of one seed, the rank
    at fault is another's."""
    other = replace(exercise, seed=5)
    report = judge(exercise, other.stub)
    assert (report.status, report.mistake, report.seed) != (PASS, "", 5)
    assert len(tell_lines(report)) <= 12
    assert "written" not in report.words
    repaired = judge(exercise, CULPRIT.sub("RANK = None", other.solution))
    lines = tell_lines(repaired)
    assert lines[0].endswith("write the rank at fault into RANK = …, a number from 0 to 3")
    assert [line.strip() for line in lines[3:]] == [line.strip() for line in tell_lines(report)[1:]]
    [told] = judge(exercise, find_answer(other)).notes
    assert told.startswith(f"The fault: {other.repair.fault.name}. ")


def find_answer(exercise: Exercise) -> str:
    """The repaired program, with the rank at fault."""
    texts = (CULPRIT.sub(f"RANK = {rank}", exercise.solution) for rank in range(4))
    return next(text for text in texts if judge(exercise, text).status == PASS)


def test_a_number_that_is_zero_on_every_rank_is_called_that() -> None:
    wrong = CATALOGUE["whoami"].solution.replace('int(os.environ["LOCAL_WORLD_SIZE"])', "size")
    assert judge(CATALOGUE["whoami"], wrong).mistake == "probably: it is 0 on every rank"


@pytest.mark.stress
@pytest.mark.parametrize("exercise", TO_REPAIR, ids=lambda each: each.name)
def test_one_rank_is_at_fault(exercise: Exercise) -> None:
    for seed in (1, 2, 7):
        solution = replace(exercise, seed=seed).solution
        ends = [
            judge(exercise, CULPRIT.sub(f"RANK = {rank}", solution)).status for rank in range(4)
        ]
        assert sorted(ends) == [FAIL, FAIL, FAIL, PASS]


@pytest.mark.parametrize("exercise", TO_REPAIR, ids=lambda each: each.name)
def test_a_repair_of_another_program_is_none(exercise: Exercise) -> None:
    """Copied, and the seed changed: its names are others."""
    for seed in (2, 5, 11):
        changed = exercise.stub.replace("SEED = 0", f"SEED = {seed}")
        assert replace(exercise, seed=seed).stub != changed
        copied = exercise.solution.replace("SEED = 0", f"SEED = {seed}")
        assert (
            f"SEED is {seed}, and this file was drawn with another" in judge(exercise, copied).words
        )
        drawn = replace(exercise, seed=seed)
        assert not drawn.repair.find_changes(drawn.stub)


def test_a_program_to_be_repaired_stays_what_it_is(folder: Path, run_cli: Run) -> None:
    program = CATALOGUE["stuck"]
    assert "stuck.py fails, and its check says how" in run_cli("exercise", "stuck").out
    text = (folder / "stuck.py").read_text()
    seed = int(text.partition("SEED = ")[2].partition("\n")[0])
    assert text == replace(program, seed=seed).stub
    shown = run_cli("solution", "stuck", "--give-up").out
    assert shown == CULPRIT.sub("RANK = None", replace(program, seed=seed).solution)
    (folder / "stuck.py").write_text(text.replace(f"SEED = {seed}", f"SEED = {seed + 1}"))
    told = f"SEED is no longer {seed}: this is another program; write {seed} again, or begin again"
    assert told in " ".join(run_cli("check", "stuck").out.split())
    lines = "".join(f"extra = {number}\n" for number in range(7))
    for changed, words in (
        (
            text + lines,
            "7 lines are changed, and the fault takes 6 at most; begin again: python -m playground "
            "exercise stuck --reset",
        ),
        (text.replace("SEED = ", "seed = "), "there is no line SEED = … in it; begin again: "),
    ):
        verdict = judge(program, changed)
        assert (verdict.status, verdict.passed) == (ERROR, ())
        assert words in verdict.words


def test_a_prediction_stands_beside_what_was_counted(folder: Path, run_cli: Run) -> None:
    factor = CATALOGUE["ring-traffic"]
    (folder / factor.file).write_text(factor.mistakes[0].text)
    shown = run_cli("check", "-n", 2)
    assert shown.out.splitlines()[:5] == [
        "ring_traffic.py  2 ranks: fail (8 elements)",
        "  One phase only: each rank has one sum, and an all-gather has to follow",
        "  messages: predicted 1, counted 2",
        "  ranks = 2, elements = 8",
        "  8 elements         predicted           counted",
    ]
    assert "  messages                   1                 2" in shown.out
    (folder / factor.file).write_text(factor.solution.replace('"root_bytes"', '"root"'))
    assert "  root_bytes is missing" in run_cli("check", "-n", 2).out.splitlines()


@pytest.mark.parametrize(
    ("name", "changes", "rows"),
    [
        (
            "ring-traffic",
            {'"messages": 2': '"messages": 6', '"root_bytes": (': '"root_bytes": 3 * ('},
            ["messages, root_bytes: 3 times what is counted, on 3 ranks"],
        ),
        (
            "ring-traffic",
            {"2 * (ranks - 1) * elements": "(ranks - 1) * elements"},
            ["all_bytes: this is the answer to root_bytes"],
        ),
        (
            "ring-traffic",
            {
                "2 * (ranks - 1) * elements": "12 * (ranks - 1) * elements",
                '"root_bytes": (ranks - 1)': '"root_bytes": 2 * (ranks - 1)',
            },
            [
                "all_bytes: 6 times what is counted",
                "root_bytes: probably: what the root receives, too: a byte is counted where it is "
                "sent",
            ],
        ),
        (
            "rung-traffic",
            {"[len(sizes), 1, buckets]": "[1, len(sizes), buckets]"},
            ["calls: the right numbers, in another order"],
        ),
        (
            "rung-traffic",
            {"[sent] * 3": "[sent + 1, sent, sent]"},
            [],
        ),
    ],
)
def test_a_wrong_number_of_a_prediction_is_told_what_it_would_answer(
    name: str, changes: dict[str, str], rows: list[str]
) -> None:
    exercise, text = CATALOGUE[name], change_solution(name, changes)
    verdict = judge(exercise, text, exercise.worlds[0])
    assert list(verdict.rows) == rows, tell_lines(verdict)
    assert {f"  {row}" for row in rows} <= {*tell_lines(verdict)}


def test_a_choice_says_nothing_of_ranks(folder: Path, run_cli: Run) -> None:
    slow_link = CATALOGUE["slow-link"]
    (folder / slow_link.file).write_text(slow_link.mistakes[0].text)
    shown = run_cli("check").out.splitlines()
    assert shown[0] == "slow_link.py  fail (400 million parameters on 32 ranks)"
    assert "Again:       python -m playground check slow_link.py" in shown
    (folder / slow_link.file).write_text(slow_link.solution)
    assert run_cli("check", "-n", 1).out.splitlines()[0] == "slow_link.py  passed"
    assert Workbook(folder).has_passed(slow_link)


def test_after_a_repair_the_fault_is_told_and_the_chapter_named(folder: Path, run_cli: Run) -> None:
    program = CATALOGUE["stuck"]
    (folder / program.file).write_text(program.solution)
    assert run_cli("check").out.splitlines()[:4] == [
        "stuck.py  passed on 4 ranks",
        "  The fault: own number of steps. The rank with the fewest batches leaves the",
        "  loop, and the others wait for it in all_reduce.",
        "Chapter: python -m playground read failures",
    ]


def test_an_element_of_a_matrix_is_named_by_its_row_and_column() -> None:
    assert [name_element(*each) for each in ((3, (7,)), (12, (5, 6)), (23, (2, 3, 4)))] == [
        "element 3",
        "element [2, 0]",
        "element [1, 2, 3]",
    ]


def test_a_layout_costs_what_its_mesh_does() -> None:
    task = replace(scaling.TASK, sequences=1024)
    layout = Layout(dp=64, pp=2, tp=4, zero=2, microbatch=4, recompute=1)
    cost = cost_of(layout, task)
    assert cost == costs.cost_of((64, 2, 1, 4), 2, task, 4, recompute=True)
    table = [*compare(replace(cost, tensor=0), cost)]
    assert [line[:34].strip() for line in table[2:]] == [
        "s computing",
        "s waiting for tensor parallelism",
        "s waiting for replicas",
        "s waiting in the bubble",
        "s of a step",
    ]
    cost = replace(cost, tensor=0.004)
    assert not any("tensor" in line for line in compare(cost, cost))


@pytest.mark.parametrize(
    ("name", "row", "word"),
    [
        ("replicas alone", "held", "holds"),
        ("stages alone", "held", "holds"),
        ("tensor parallelism across hosts", "tensor", "all-reduces"),
        ("no pipeline", "tensor", "all-reduces"),
        ("a whole host for tensor parallelism", "tensor", "sums"),
    ],
)
def test_a_mistake_of_a_layout_explains_what_it_fails_by(name: str, row: str, word: str) -> None:
    """What does not fit, or the part of a step that differs most from the fastest one's."""
    exercise = CATALOGUE["fit-the-stages"]
    [mistake] = [each for each in exercise.mistakes if each.name == name]
    verdict = judge(exercise, mistake.text)
    assert verdict.where == ("memory" if row == "held" else "step"), tell_lines(verdict)
    rows = {line[:34].strip(): [*map(float, line[34:].split())] for line in verdict.notes[1:]}
    parts = {part: rows.get(words, [0, 0]) for part, words in PARTS.items() if part != "step"}
    assert row in ("held", max(parts, key=lambda part: parts[part][0] - parts[part][1]))
    assert word in verdict.says


def test_what_a_batch_costs_is_what_its_task_says() -> None:
    """Steps by the law of the paper, the model and the cluster; and a choice that is none."""
    exercise, task = CATALOGUE["choose-batch"], scaling.TASK
    least, noise = scaling.LEAST_STEPS, scaling.NOISE
    for sequences in scaling.SEQUENCES:
        trained = scaling.train(128, sequences)
        steps = trained["million sequences"] * 1e6 / sequences
        assert 1 / (steps / least - 1) == pytest.approx(sequences / noise)
        assert trained["GPU hours"] == pytest.approx(steps * trained["s of a step"] * 128 / 3600)
    for row in (
        f"| model | GPT of {task.layers} layers, width {task.width:,}: "
        f"{task.parameters / 1e9:.1f} billion parameters |",
        f"| training | {least:,} · (1 + {noise:,} / B) steps with B sequences of {task.length:,} "
        f"tokens in a batch, {scaling.SEQUENCES[0]} to {scaling.SEQUENCES[-1]:,} |",
        f"| cluster | up to {task.gpus} GPUs, {task.host} on each host; "
        f"{task.flops / 1e12:.0f} TFLOPS each |",
        f"| links | {1e-9 / task.machine.inner_beta:.0f} GB/s inside a host, "
        f"{1e-9 / task.machine.beta:.0f} GB/s between hosts; "
        f"{1e6 * task.machine.alpha:.0f} µs for a message |",
    ):
        assert f"\n{row}\n" in exercise.task
    for setting, words in (
        ('"gpus": 128, "sequences": 500', "sequences: 500 is no power of two"),
        ('"gpus": 100, "sequences": 1000', "gpus: 100 is no power of two"),
        ('"gpus": 4, "sequences": 512', "gpus: 4: the task has 8 to 512"),
        ('"gpus": 256, "sequences": 128', "gpus: 256 for 128 sequences"),
        (
            '"gpus": 64, "sequences": 512',
            "of 24 hours: cheaper, but not done within a day; use more GPUs, or fewer samples",
        ),
        (
            '"gpus": 128, "sequences": 1024',
            "  time: 24.2 of 24 hours: use more GPUs, or fewer samples",
        ),
        ('"gpus": 512, "sequences": 1024', " times the cheapest"),
    ):
        asked = exercise.solution.replace('"gpus": 128, "sequences": 512', setting)
        assert words in "\n".join(tell_lines(judge(exercise, asked)))


def test_a_batch_is_shown_beside_the_cheapest_one_once_it_has_passed() -> None:
    """Its million sequences, hours and GPU hours together are the answer."""
    exercise = CATALOGUE["choose-batch"]
    wrong, right = (
        [len(re.findall(r" [\d.]+(?= |$)", line)) for line in judge(exercise, text).notes[1:]]
        for text in (exercise.mistakes[0].text, exercise.solution)
    )
    assert wrong == [1, 1, 1, 1, 2]
    assert right == [2] * 5


def test_what_cannot_be_computed_is_told_of_what_is_to_be_chosen() -> None:
    exercise = CATALOGUE["fit-in-memory"]
    asked = exercise.solution.replace('"microbatch": 2', '"microbatch": 3')
    assert tell_lines(judge(exercise, asked))[1] == (
        "  microbatch: 128 sequences, no multiple of 64 replicas x 3 in a microbatch = 192"
    )


def test_no_number_of_steps_is_right_for_the_data_of_the_report_and_for_other_data() -> None:
    for seed in (*range(50), 9616):
        first, other = (max(map(int, re.findall(r"\d+", case.about))) for case in stuck(0, 4, seed))
        assert first != other


LAYOUTS = [
    each
    for each in ALL
    if each.kind == CHOOSE and "| cluster | " in each.task and each.name != "choose-batch"
]


@pytest.mark.parametrize("exercise", LAYOUTS, ids=lambda each: each.name)
def test_a_choice_s_task_has_the_numbers_that_are_costed(
    exercise: Exercise, monkeypatch: pytest.MonkeyPatch
) -> None:
    judges = importlib.import_module(exercise.module)
    monkeypatch.setattr(judges, "choose", lambda about, task, choices: (about, task))
    about, task = next(getattr(judges, exercise.function)(0, 1, 0))
    machine, billions = task.machine, f"{task.parameters / 1e9:.1f} billion parameters"
    assert f"{billions} on {task.gpus} GPUs of {task.memory / 1e9:.0f} GB" == about
    rows = (
        f"| model | GPT of {task.layers} layers, width {task.width:,}: {billions} |",
        f"| batch | {task.sequences} sequences of {task.length:,} tokens |",
        f"| cluster | {task.gpus} GPUs of {task.memory / 1e9:.0f} GB, {task.host} on each host; "
        f"{task.flops / 1e12:.0f} TFLOPS each |",
        f"| links | {1e-9 / machine.inner_beta:.0f} GB/s inside a host, "
        f"{1e-9 / machine.beta:.0f} GB/s between hosts; "
        f"{1e6 * machine.alpha:.0f} µs for a message |",
    )
    assert "\n".join(rows) in exercise.task


@pytest.mark.usefixtures("_strangers_share_worlds")
def test_the_page_of_the_exercises_shows_what_a_check_shows() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    program, traffic = CATALOGUE["stuck"], CATALOGUE["ring-traffic"]
    for verdict in (judge(program, program.stub), judge(traffic, traffic.mistakes[0].text)):
        assert "\n".join(tell_lines(verdict)) in page


def test_the_report_of_a_program_shows_all_named_values_of_a_rank_that_are_wrong() -> None:
    exercise = replace(CATALOGUE["counted-twice"], seed=1)
    ranks = judge(exercise, exercise.stub).ranks
    assert len(ranks) == 4
    assert all("accuracy: holds" in line for line in ranks)
    assert sum("samples tested: holds" in line for line in ranks) == 1


SWAP, COLUMN = CATALOGUE["swap"], CATALOGUE["column"]
HEAD = (
    "import os, threading, time\nimport torch\nimport torch.distributed as dist\n\n\ndef "
    "swap(rank, size, tensor):\n"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def swap(:\n", "line 1: invalid syntax"),
        (
            "def handover(rank, size, tensor): ...",
            "there is no function swap in it; begin again: python -m playground exercise swap "
            "--reset",
        ),
        (
            "from playground.algorithms import ALGORITHMS\n",
            "line 1 imports playground.algorithms: write it yourself",
        ),
        (
            f"{HEAD}    ...\n\n\nlaunch(swap, 2)\n",
            "line 10 starts ranks: put launch(…) under if __name__",
        ),
    ],
)
def test_what_cannot_be_run_gets_one_line(text: str, words: str) -> None:
    verdict = judge(SWAP, text)
    [line] = tell_lines(verdict)
    assert line.startswith(f"swap.py  {words}")
    assert (verdict.status, verdict.exit_code) == (ERROR, 1)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("while True: print('on and on')", LOOP, "line 7: runs without end: it prints more than "
                                                 "65,536 characters"),
        ("while True: dist.isend(tensor, rank ^ 1)", LOOP, "line 7: runs without end: it makes "
                                                           "more than 2,000 calls"),
        ("os._exit(3)", ERROR, "exited with code 3 without a result"),
        pytest.param(
            "threading.Thread(target=time.sleep, args=(99,)).start(); return tensor", FAIL,
            "A thread left running",
            marks=pytest.mark.stress,
        ),
        ("print('I am', rank)", FAIL, "  printed: I am 0"),
        (
            "breakpoint()", ERROR,
            "2 ranks: stopped (6 elements, int64)",
        ),
        ("import pdb; pdb.set_trace()", ERROR, "a breakpoint: check --debug opens it"),
        (
            "print(dist.isend(tensor, rank ^ 1))", FAIL,
            "printed: <Work of isend with rank 1, line 7>",
        ),
        (
            "return tensor if rank == 0 else 1", FAIL,
            "rank 0 returned the tensor that it was given, not a copy",
        ),
        (
            "print('before'); dist.recv(tensor, rank ^ 1)", DEADLOCK,
            "printed: rank 0: before            rank 1: before",
        ),
        pytest.param(
            "print('before')\n    while True: pass", LOOP, "of computing   printed: before",
            marks=pytest.mark.stress,
        ),
        pytest.param(
            "time.sleep(1000)", LOOP, "line 7: runs without end: it has slept for 20 s",
            marks=pytest.mark.stress,
        ),
        ("return 1 / 0", ERROR, "line 7: ZeroDivisionError: division by zero"),
        ("dist.destroy_process_group()", ERROR, "line 7: destroy_process_group(): the ranks have "
                                                "their world"),
        ("return None", FAIL, "rank 0 returned None; expected an int64 tensor of shape (6,)"),
        pytest.param(
            "return [tensor]", FAIL, "rank 0 returned a list; expected an int64 tensor",
            marks=pytest.mark.stress,
        ),
        ("dist.all_reduce(tensor, async_op=True); return tensor", FAIL, "nobody waits for this "
                                                                        "all_reduce"),
        (
            "other = tensor.clone(); r = dist.irecv(other, rank ^ 1); s = dist.isend(tensor, rank "
            "^ 1)\n"
            "    early = other.clone(); r.wait(); s.wait(); return early",
            FAIL,
            "Read before wait",
        ),
    ],
)  # fmt: skip
def test_what_happens_is_told(body: str, status: str, words: str) -> None:
    verdict = judge(SWAP, f"{HEAD}    {body}\n", 2)
    lines = tell_lines(verdict)
    assert verdict.status == status, lines
    assert words in " ".join(lines)
    assert len(lines) <= 12


@pytest.mark.parametrize(
    ("operation", "status"),
    [("isend", LOOP), ("irecv", LOOP), ("recv", DEADLOCK), ("wait() for isend", DEADLOCK)],
)
def test_ranks_in_silence_wait_for_each_other_only_in_calls_that_wait(
    operation: str, status: str
) -> None:
    made = Attempt(2)
    for rank in range(2):
        made.take(rank, {"at": Place(operation, 1 - rank, 7)})
    assert made.find_standstill().status == status


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {0: ("float64", 8), 1: ("float32", 8), 2: ("float64", 8)},
            " in all_reduce: its tensors differ in dtype: float64 on ranks 0, 2, float32 on rank 1",
        ),
        (
            {0: ("float64", 8), 1: ("float64", 6), 2: ("float64", 8)},
            " in all_reduce: its tensors differ in size: 8 on ranks 0, 2, 6 on rank 1",
        ),
        (
            dict.fromkeys(range(3), ("float64", 8)),
            " in all_reduce; do its tensors have the same size and dtype on all ranks?",
        ),
    ],
)
def test_a_rank_that_gloo_has_aborted_is_told_with_its_line_and_with_what_differs(
    given: dict[int, tuple[str, int]], told: str
) -> None:
    made = Attempt(3)
    for rank, each in given.items():
        made.take(rank, {"at": Place("all_reduce", None, 7), "given": each})
    failure = made.describe_killed(1, "was killed by SIGABRT")
    assert (failure.rank, failure.line) == (1, 7)
    assert failure.words == f"was killed by SIGABRT{told}"
    assert made.describe_killed(1, "exited with code 3").words == "exited with code 3"


def test_a_call_reports_what_it_is_given() -> None:
    def put(output: torch.Tensor, tensor: torch.Tensor) -> None: ...

    heard = list[Event]()
    record = Transcript("swap.py", 2, ())
    with hearing(heard.append):
        calls.call(record, put, torch.ones(4), tensor=torch.ones(2, dtype=torch.int64))
    assert heard[0]["given"] == ("int64", 2)


def test_an_error_that_torch_has_logged_is_shown_once_without_the_time() -> None:
    logged = "[rank0]:[F1130 19:19:30.335037606 ProcessGroupGloo.cpp:1583] Check failed: (2 vs. 3)."
    words = LOGGED.sub("", f"RuntimeError: {logged}")
    assert words == "RuntimeError: Check failed: (2 vs. 3)."
    assert leave_out(f"mine\n{logged} \n", words) == "mine"


def test_what_a_simulated_gpu_prints_is_shown_in_whole_sentences() -> None:
    said = (
        "simulated GPU: rank 0: a wait is missing: the host at\nmine.py:18 uses a float32 tensor. "
        "Nothing orders it\nafter aten::copy_ at mine.py:16. To fix it,\ncall "
        "torch.cuda.synchronize() before\nmine.py:18.\n"
    )
    record = Transcript("mine.py", 1, ())
    os.write(record.printed, f"before\n{said}after\n".encode())
    printed = record.read_written()
    assert printed == (
        "before\nsimulated GPU: rank 0: a wait is missing: the host at mine.py:18 uses a float32 "
        "tensor. Nothing orders it after aten::copy_ at mine.py:16.\nafter\n"
    )
    verdict = Verdict(exercise="swap", file="swap.py", status=FAIL, world=2, printed="one\ntwo")
    assert tell_lines(verdict)[1:] == ["  printed: one", "           two"]


def test_the_call_that_is_the_answer_is_a_short_cut_and_the_task_says_so() -> None:
    chain = CATALOGUE["chain"]
    verdict = judge(
        chain, f"{IMPORTS}\ndef chain(rank, size, tensor):\n    dist.all_reduce(tensor)\n", 2
    )
    assert (verdict.mistake, verdict.line) == ("short cut", 8)
    assert verdict.words == "dist.all_reduce is not to be used here, says the task"
    assert chain.task.endswith("\nUse: `dist.send`, `dist.recv`. Not here: `dist.all_reduce`.\n")


@pytest.mark.stress
def test_a_loop_is_ended_by_the_deadline() -> None:
    verdict = judge(
        SWAP, f"{HEAD}    while True:\n        try: rank += 1\n        except Exception: pass\n", 2
    )
    assert verdict.status == LOOP
    assert verdict.line in (7, 8, 9)


@pytest.mark.parametrize(
    ("held", "expected", "words"),
    [
        (101, 111, "rank 1's share is missing"),
        (121, 111, "rank 1's share is in it twice"),
        (1.0, 111.0, "what ranks 1-2 gave is missing"),
        (1, 10, "rank 0's share is in it, rank 1's share is missing"),
        (0.5, 1.0, ""),
        (float("nan"), 1.0, ""),
        (-1, 1, ""),
        (10_111, 111, ""),  # there is no rank 4
    ],
)
def test_digits_say_whose_share_it_is(held: float, expected: float, words: str) -> None:
    assert explain_digits(held, expected, 3) == words


def test_digits_are_explained_unless_a_named_mistake_does() -> None:
    exercise = CATALOGUE["reduce-scatter"]
    [named] = [each for each in exercise.mistakes if each.name == "sends its own chunk each time"]
    told, digits = judge(exercise, named.text, 3), "rank 1's share is missing"
    assert (told.mistake, told.words) == (named.name, "holds 101, should be 111")
    assert told.digits == digits
    guessed = replace(told, mistake=f"probably: {named.name}")
    assert tell_difference(guessed, WRITE) == f"holds 101, should be 111: {digits}"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_way_of_a_learner(folder: Path, run_cli: Run) -> None:
    assert "Next: python -m playground exercise" in run_cli("exercise").out
    begun = run_cli("exercise", "column").out
    assert "Column: send a part of a matrix" in begun
    assert str(folder) in "".join(begun.split())
    file = folder / "column.py"
    assert file.read_text() == COLUMN.stub
    assert run_cli("check", "column.py").out == (
        "column.py  not written yet\nTask: python -m playground exercise column\n"
    )
    assert "has not passed in this folder" in run_cli("solution", "column").err
    hints = [run_cli("hint", "column", *number).out for number in ((), (), (1,), (), (), ())]
    assert [hint[:11] for hint in hints] == [f"Hint {number} of 3" for number in (1, 2, 1, 2, 3, 3)]
    assert "Hint 2 of 3: python -m playground hint column" in hints[0]
    assert "Solution: python -m playground solution column --give-up" in hints[-1]
    file.write_text(COLUMN.mistakes[0].text)
    failed = run_cli("check")
    assert failed.code == 1, failed.err
    assert "Again:    python -m playground check column.py -n 2" in failed.out
    # as some editors do
    file.write_bytes(f"\ufeff{COLUMN.solution}".replace("\n", "\r\n").encode())
    assert run_cli("check").out == (
        f"column.py  passed on 2, 3 ranks\n1 of {len(ALL)} passed in this folder\n"
        "Next: python -m playground exercise swap\n"
    )
    assert Workbook(folder).state(COLUMN) == "passed"
    for words in ((), ("p2p",)):  # as check says: first what is of the core in its chapter
        assert run_cli("exercise", *words).out.endswith(
            "Next: python -m playground exercise swap\n"
        )
    solved = run_cli("hint", "column", 3).out.splitlines()[-1]
    assert solved == "Solution: python -m playground solution column"
    assert run_cli("solution", "column").out == COLUMN.solution
    assert "stays as it is" in run_cli("exercise", "column").out
    assert "is in column.1.py now" in " ".join(run_cli("exercise", "column", "--reset").out.split())
    assert (folder / "column.1.py").read_text(encoding="utf-8-sig") == COLUMN.solution
    assert Workbook(folder).state(COLUMN) == "changed"
    # what it has lost, a check finds out again
    progress_file().write_text(progress_file().read_text()[:-9])
    assert Workbook(folder).state(COLUMN) == "begun"


NOTE_ALL = """
import sys
from pathlib import Path
from playground.exercises.exercise import CATALOGUE
from playground.exercises.workbook import Workbook
work = Workbook(Path())
print("ready", flush=True)
sys.stdin.read()
for name in sys.argv[1:]:
    work.note(CATALOGUE[name], "a digest")
"""


def test_what_passes_in_several_processes_at_once_is_all_noted(folder: Path) -> None:
    names, pipe = [*CATALOGUE], subprocess.PIPE
    running = [
        subprocess.Popen(
            [sys.executable, "-c", NOTE_ALL, *names[first::8]],
            cwd=folder, stdin=pipe, stdout=pipe, text=True,
        )
        for first in range(8)
    ]  # fmt: skip
    for each in running:
        assert each.stdout
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin
        each.stdin.close()
    for each in running:
        with each:
            assert each.wait() == 0
    assert {*Workbook(folder).passed} == {*names}


def test_a_file_that_is_another_program_is_told(folder: Path, run_cli: Run) -> None:
    (folder / "swap.py").write_text("print('both send first')\n")
    told = " ".join(run_cli("exercise", "swap").out.split())
    assert "swap.py is here already and stays as it is. It has no function swap: if it is" in told
    (folder / "swap.py").write_text(SWAP.stub)
    assert "It has no function" not in run_cli("exercise", "swap").out


def test_the_list_fits_a_narrow_terminal(
    folder: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    work = Workbook(folder)
    for name in ("swap", "column"):
        (folder / CATALOGUE[name].file).write_text(CATALOGUE[name].solution)
        work.note(CATALOGUE[name], CATALOGUE[name].digest(CATALOGUE[name].solution))
    (folder / COLUMN.file).write_text(COLUMN.stub)
    (folder / "shift.py").write_text("")
    shown = run_cli("exercise").out
    table = shown.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 40
    rows = [re.fullmatch(r"  (.) ([\w-]+) +([●○]{3}) +(\d+)", line) for line in table]
    listed = {row[2]: (row[1], row[3], int(row[4])) for row in rows if row}
    marks = {"swap": "✓", "column": "~", "shift": "…"}
    assert listed == {
        each.name: (
            marks.get(each.name, "•" if each.name in CORE else " "),
            each.grade,
            each.minutes,
        )
        for each in ALL
    }
    counted = dict(re.findall(r"^  ([\w-]+)  (\d+ of \d+)$", "\n".join(table), re.MULTILINE))
    assert [*counted] == [*dict.fromkeys(each.lesson for each in ALL)]
    assert (counted["p2p"], counted["hello"]) == ("2 of 5", "0 of 3")
    assert f"2 of {len(ALL)} passed in" in shown
    assert [
        each in " ".join(shown.split())
        for each in ("… begun", "~ changed since it passed", "✓ passed", "• core")
    ] == [True] * 4
    assert "\n\n\n" not in run_cli("exercise", "fit-the-stages").out
    assert "the formulas of mesh, and" in " ".join(run_cli("exercise", "fit-in-memory").out.split())
    one = run_cli("exercise", "p2p", "--wide").out
    assert [name for name in CATALOGUE if f" {name} " in one] == [
        each.name for each in ALL if each.lesson == "p2p"
    ]
    assert "two ranks exchange tensors" in one


def test_a_check_of_several_files_says_which_it_is_at(
    folder: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[tuple[str, float, float | None]]()
    monkeypatch.setattr(terminal.Bar, "show", lambda bar, *at: shown.append(at))
    for each in (COLUMN, SWAP):
        (folder / each.file).write_text(each.stub)
    run_cli("check")
    assert shown == [("checking swap.py", 0, 2), ("checking column.py", 1, 2)]


def test_an_exercise_stands_on_what_has_passed(folder: Path) -> None:
    ring, reduce_scatter = CATALOGUE["ring"], CATALOGUE["reduce-scatter"]
    own = folder / reduce_scatter.file
    own.write_text(f"{reduce_scatter.solution}# mine\n")
    assert [each.file for each in Workbook(folder).solutions_before(ring)] == [
        "<reduce_scatter.py>"
    ]
    Workbook(folder).note(reduce_scatter, reduce_scatter.digest(own.read_text()))
    assert [each.text for each in Workbook(folder).solutions_before(ring)] == [own.read_text()]


@pytest.mark.parametrize(
    ("name", "content", "words", "code"),
    [
        (
            "juggle.py",
            b"",
            "there is no exercise 'juggle': did you mean judge?",
            2,
        ),
        ("swap.py", b"\xff\xfe", "swap.py is not UTF-8 text (byte 0): save it as such", 1),
        (
            "swap.py",
            None,
            "there is no such file; begin it: python -m playground exercise swap",
            2,
        ),
    ],
)
def test_what_is_no_solution_gets_one_line(
    name: str, content: bytes | None, words: str, code: int, folder: Path, run_cli: Run
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    shown = run_cli("check", name)
    told = shown.out.partition("\nHint")[0]
    assert (" ".join(told.split()), shown.code) == (f"{name} {words}", code)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exercise", "swp"), "there is no exercise 'swp': did you mean swap?"),
        (("exercise", "p2"), "there is no exercise 'p2': did you mean p2p?"),
        (("exercise", "nonsense"), "there is no exercise 'nonsense': list all of them"),
        (("hint", "xyzzy"), "no exercise 'xyzzy': list all of them: python -m playground exercise"),
        (("check",), "there is no solution in this folder"),
        (
            ("check", "swap.py", "-n", "9"),
            "-n 9: swap is checked on 1, 2, 3, 4, 5 ranks, choose one of them",
        ),
        (
            ("check", "slow_link.py", "-n", "2"),
            "-n 2: slow-link runs nothing on ranks: leave -n out",
        ),
        (("check", "gated-mlp", "-n", "2"), "-n 2: gated-mlp is checked on 1 rank: leave -n out"),
        (("exercise", "--reset"), "--reset begins one exercise again: name it"),
    ],
)
def test_bad_requests_get_one_line(
    words: tuple[str, ...], message: str, folder: Path, run_cli: Run
) -> None:
    shown = run_cli(*words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_an_exercise_is_named_by_its_file_too(folder: Path, run_cli: Run) -> None:
    for words in (("exercise", "token_ring.py"), ("hint", "my/token_ring.py"), ("exercise", "p2p")):
        assert run_cli(*words).code == 0
    assert (folder / "token_ring.py").is_file()
    assert "token_ring.py  not written yet" in run_cli("check", "token-ring.py").out
    assert "token_ring.py  not written yet" in run_cli("check", "token-ring").out


def test_a_file_that_reset_has_kept_is_checked_and_not_noted(folder: Path, run_cli: Run) -> None:
    handover = CATALOGUE["handover"]
    (folder / handover.file).write_text(handover.solution)
    assert run_cli("exercise", "handover", "--reset").code == 0
    for name in ("handover.1.py", "handover.1"):
        assert run_cli("check", name).out.splitlines()[:2] == [
            "handover.1.py  passed on 2, 3, 5 ranks",
            "  not noted: the file of handover is handover.py",
        ]
    assert Workbook(folder).passed == {}
    assert run_cli("check", "handover.2.py").out == "handover.2.py  there is no such file\n"
    lost = CATALOGUE["lost-token"]
    run_cli("exercise", "lost-token")
    run_cli("exercise", "lost-token", "--reset")
    assert "4 ranks: deadlock" in run_cli("check", f"{lost.function}.1.py").out


@pytest.mark.stress
def test_a_class_is_judged_each_in_processes_of_its_own(folder: Path, run_cli: Run) -> None:
    """One solution's patches and prints do not reach the others. The document has what the text
    has."""
    change = "import os, torch.distributed as dist\ndist.recv = print\nos.write(1, b'forged')\n"
    wrong = COLUMN.mistakes[1].text
    for student, text in {"ann": change + wrong, "ben": COLUMN.solution, "eve": wrong}.items():
        (folder / student).mkdir()
        (folder / student / "column.py").write_text(text)
    shown = run_cli(
        "check",
        *(f"{student}/column.py" for student in ("ann", "ben", "eve")),
        "--json",
        "--seed",
        7,
    )
    ann, *others = (Verdict(**each) for each in json.loads(shown.out)["verdicts"])
    assert shown.code == 1, shown.err
    assert tell_lines(ann)[0] == "ann/column.py  2 ranks: deadlock (16 elements, int64)"
    assert [tell_lines(each) for each in others] == [
        ["ben/column.py  passed on 2, 3 ranks"],
        [
            "eve/column.py  2 ranks: fail (16 elements, int64)",
            "  Received into a lost copy: the copy is never written back",
            "  rank 1, element [0, 2]: holds 10, should be 1",
        ],
    ]
    about = {
        "status": FAIL,
        "mistake": "received into a lost copy",
        "rank": 1,
        "index": 2,
        "held": 10,
        "expected": 1,
    }
    assert vars(others[1]).items() >= {**about, "world": 2, "seed": 7, "line": 0}.items()
    assert [file.name for file in folder.glob("???/*")] == ["column.py"] * 3


def test_a_deadlock_says_who_waits_for_whom(folder: Path, run_cli: Run) -> None:
    (folder / "handover.py").write_text(
        f"{IMPORTS}\ndef handover(rank, size, tensor):\n    dist.recv(tensor, 1 - rank)\n"
    )
    result = run_cli("check", "handover", "-n", 2)
    assert (result.code, result.out.splitlines()[:4]) == (1, [
        "handover.py  2 ranks: deadlock (6 elements, int64)",
        "  Probably: all receive first",
        "  rank 0: in recv from rank 1, line 8",
        "  rank 1: in recv from rank 0, line 8",
    ])  # fmt: skip


def test_a_function_is_checked_in_a_notebook(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ipython: Any = pytest.importorskip("IPython.core.interactiveshell")
    shell = ipython.InteractiveShell()
    assert shell.run_cell(f"from playground.exercises import check\n{COLUMN.solution}").success
    assert check(shell.user_ns["column"]).status == PASS
    assert capsys.readouterr().out.endswith("passed on 2, 3 ranks\n")


def test_what_a_solution_imports_is_imported_anew(folder: Path, run_cli: Run) -> None:
    """A world that is kept has imported it before."""
    (folder / "column.py").write_text(
        f"from mine import ROOT\n{COLUMN.solution}\nassert ROOT == 1\n"
    )
    for text, code in (
        ("ROOT = 1", 0),
        ("ROOT = 10 + 1  # of another length, so what was compiled is out of date", 1),
    ):
        (folder / "mine.py").write_text(text)
        assert run_cli("check", "column.py", "-n", 2).code == code


@pytest.mark.stress
def test_a_saved_file_is_checked_again(
    folder: Path, start_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    file = folder / "swap.py"
    file.write_text(SWAP.stub)
    watching = start_cli("check", "--watch", "-n", 2)
    assert watching.stdout
    assert watching.stdout.readline() == "swap.py  not written yet\n"
    assert watching.stdout.readline().startswith("Task: ")
    file.write_text(textwrap.dedent(SWAP.solution))
    assert watching.stdout.readline() == "swap.py  passed on 2 ranks\n"


def mark(rank: int, size: int) -> tuple[int, bool]:
    """Leave a trace in a module. Returns the process and whether a `column` has been imported."""
    vars(math)["marked"] = True
    print("marked")
    return os.getpid(), "column" in sys.modules


def test_a_solution_of_the_catalogue_shares_a_world_and_a_learner_s_has_its_own(
    world: Worlds, capfd: pytest.CaptureFixture[str]
) -> None:
    """The world is as it was, and prints where it printed before."""
    alone = f"{COLUMN.solution}\nimport math\nassert not hasattr(math, 'marked')\n"
    kept.end_worlds()
    kept.keep_worlds()
    before = world(2).run(mark)
    assert judge(COLUMN, alone, 2).status == PASS
    assert world(2).run(mark) == before
    assert judge(COLUMN, COLUMN.solution, 2).status == PASS
    assert world(2).run(mark) == [(pid, True) for pid, _ in before]
    assert capfd.readouterr().out == "marked\n" * 6


def test_without_a_verdict_nothing_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CATALOGUE["handover"]
    monkeypatch.setattr("playground.exercises.attempt.JUDGE", explode)
    verdict = judge(broken, broken.solution, 2)
    assert (verdict.status, verdict.exit_code) == (BLOCKED, 2)


def explode(rank: int, size: int, *args: object) -> None:
    raise RuntimeError("the judge itself is broken")
