"""Every reference passes, every mistake is called by its name, and whatever a learner writes gets a verdict."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.app import CHAPTERS
from playground.exercises import check
from playground.exercises.exercise import BLOCKED, CATALOGUE, DEADLOCK, ERROR, FAIL, LOOP, PASS, Exercise, Mistake
from playground.exercises.observation import explain_digits
from playground.exercises.verdict import Solution, Verdict, check_solution, tell_lines
from playground.exercises.work import Work, check_file, progress_file
from playground.runtime.launcher.server import preload

Run = Callable[..., Any]
ALL = list(CATALOGUE.values())
MISTAKES = [(exercise, mistake) for exercise in ALL for mistake in exercise.mistakes]
preload(*(module for exercise in ALL for module in exercise.preload))
QUICK = {"swap", "reduce-scatter", "average"}
"""The exercises that are looked at in every run of the suite, on fewer worlds; `make stress` looks at all."""


def judge(exercise: Exercise, text: str, world: int | None = None) -> Verdict:
    before = Work(Path("nowhere")).solutions_before(exercise)
    return check_solution(Solution(exercise, text, exercise.file), before, world)


def parameters(exercise: Exercise, *others: Any, quick: bool = True) -> Any:
    marks = () if exercise.name in QUICK and quick else pytest.mark.stress
    names = [exercise.name, *(each.name for each in others)]
    return pytest.param(exercise, *others, marks=marks, id="-".join(names))


@pytest.mark.parametrize("exercise", [parameters(exercise) for exercise in ALL])
def test_the_reference_passes_and_the_stub_is_not_written_yet(exercise: Exercise) -> None:
    verdict = judge(exercise, exercise.solution)
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
    for stub in (exercise.stub, f"{exercise.stub}\n# I do not know how\n"):
        assert judge(exercise, stub).words == "not written yet"


@pytest.mark.parametrize(
    ("exercise", "mistake"),
    [parameters(exercise, mistake, quick=mistake.status == FAIL) for exercise, mistake in MISTAKES],
)
def test_a_mistake_is_called_by_its_name(exercise: Exercise, mistake: Mistake) -> None:
    verdict = judge(exercise, mistake.text)
    assert (verdict.mistake, verdict.status) == (mistake.name, mistake.status), tell_lines(verdict)
    assert len(tell_lines(verdict)) <= 12


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_every_exercise_has_its_parts(exercise: Exercise) -> None:
    assert len(exercise.hints) == 3
    assert exercise.title.partition(": ")[2]
    assert max(map(len, exercise.solution.splitlines())) <= 80
    assert "NotImplementedError" in exercise.stub
    assert "NotImplementedError" not in exercise.solution
    for mistake in exercise.mistakes:
        assert mistake.text != exercise.solution


@pytest.mark.parametrize("lesson", sorted({exercise.lesson for exercise in ALL}))
def test_chapters_name_their_exercises(lesson: str) -> None:
    chapter = CHAPTERS[lesson].read_text(encoding="utf-8")
    for named in re.findall(r"\[checked\]\(../../exercises/README.md\): (.*?)\.\n", chapter, re.DOTALL):
        found = [CATALOGUE[name] for name in re.findall(r"`([\w-]+)`", named)]
        assert found
        assert {exercise.lesson for exercise in found} == {lesson}


SWAP = CATALOGUE["swap"]
LONG = "98765.4321"
"""Seconds for which a process that is left behind sleeps; found by this."""
IMPORTS = "import torch\nimport torch.distributed as dist\n\n\n"
HEAD = "import os, threading, time\nimport torch\nimport torch.distributed as dist\n\n\ndef swap(rank, size, tensor):\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty: exercise swap --reset writes the stub again"),
        ("def swap(:\n", "line 1: invalid syntax"),
        ("-" * 10**5 + "1", "it cannot be parsed: "),
        ("def handover(rank, size, tensor): ...", "there is no function swap in it, but handover, of another exercise"),
        ("from playground.algorithms import ALGORITHMS\n", "line 1 imports playground.algorithms: write it yourself"),
        (f"{HEAD}    ...\n\n\nlaunch(swap, 2)\n", "line 10 starts ranks: put launch(…) under if __name__"),
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
        ("return input()", ERROR, "line 7: input() needs a keyboard, and ranks have none: take it out"),
        ("breakpoint()", ERROR, "line 7: breakpoint() needs a keyboard"),
        ("while True: print('on and on')", LOOP, "line 7: runs without end: it prints more than 65,536 characters"),
        ("while True: dist.isend(tensor, rank ^ 1)", LOOP, "line 7: runs without end: it makes more than 2,000 calls"),
        ("os._exit(3)", ERROR, "exited with code 3 without a result"),
        ("threading.Thread(target=time.sleep, args=(99,)).start(); return tensor", FAIL, "A thread left running"),
        ("return 1 / 0", ERROR, "line 7: ZeroDivisionError: division by zero"),
        ("dist.destroy_process_group()", ERROR, "line 7: destroy_process_group() would end the world"),
        ("exit()", ERROR, "line 7: SystemExit"),
        ("return tensor.tolist()", FAIL, "int at returned[0]; should be int64 of shape (6,) at returned"),
        ("return None", FAIL, "nothing (None); should be int64 of shape (6,)"),
        ("dist.isend(tensor, rank ^ 1); return tensor", FAIL, "nobody waits for this isend"),
        (
            "other = tensor.clone(); r = dist.irecv(other, rank ^ 1); s = dist.isend(tensor, rank ^ 1)\n"
            "    early = other.clone(); r.wait(); s.wait(); return early",
            FAIL,
            "Read before wait",
        ),
        (
            "other = tensor.clone(); r = dist.irecv(other, rank ^ 1); s = dist.isend(tensor, rank ^ 1)\n"
            "    tensor.zero_(); r.wait(); s.wait(); return other",
            FAIL,
            "Written before wait",
        ),
    ],
)  # fmt: skip
def test_what_happens_is_told(body: str, status: str, words: str) -> None:
    verdict = judge(SWAP, f"{HEAD}    {body}\n", 2)
    lines = tell_lines(verdict)
    assert verdict.status == status, lines
    assert words in " ".join(lines)
    assert len(lines) <= 12


def test_the_call_that_is_the_answer_is_a_short_cut_and_the_task_says_so() -> None:
    chain = CATALOGUE["chain"]
    verdict = judge(chain, f"{IMPORTS}def chain(rank, size, tensor):\n    dist.all_reduce(tensor)\n", 2)
    assert (verdict.mistake, verdict.line) == ("short cut", 6)
    assert verdict.words == "dist.all_reduce is not to be used here, says the task"
    assert chain.task.endswith("\nNot here: dist.all_reduce.\n")


OTHER_SOLUTIONS = {
    "swap": """def swap(rank, size, tensor):
    partner, theirs = rank ^ 1, tensor.clone()
    if partner < size:
        messages = [dist.P2POp(dist.irecv, theirs, partner), dist.P2POp(dist.isend, tensor, partner)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return theirs
""",
    "broadcast": """def broadcast(rank, size, tensor, root):
    place = (rank - root) % size
    if place > 0:
        dist.recv(tensor, (rank - 1) % size)
    if place < size - 1:
        dist.send(tensor, (rank + 1) % size)
""",
    "ring": """def ring(rank, size, tensor):
    flat = torch.cat([tensor, tensor.new_zeros(-len(tensor) % size)])
    chunks, arrived = flat.view(size, -1), tensor.new_empty(len(flat) // size)
    for step in range(2 * size - 2):
        request = dist.isend(chunks[(rank - step) % size], (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        request.wait()
        mine = chunks[(rank - step - 1) % size]
        mine.copy_(arrived if step >= size - 1 else mine + arrived)
    tensor.copy_(flat[: len(tensor)])
""",
    "average": """def average(rank, size, model):
    params = list(model.parameters())
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    for param, grad, work in zip(params, grads, works):
        work.wait()
        param.grad = grad / size
""",
}


@pytest.mark.parametrize("name", OTHER_SOLUTIONS)
def test_another_right_solution_passes(name: str) -> None:
    verdict = judge(CATALOGUE[name], IMPORTS + OTHER_SOLUTIONS[name])
    assert verdict.status == PASS, tell_lines(verdict)


def test_a_sum_that_nobody_waits_for_is_not_there() -> None:
    text = OTHER_SOLUTIONS["average"].replace("work.wait()", "pass")
    verdict = judge(CATALOGUE["average"], IMPORTS + text, 2)
    assert (verdict.mistake, verdict.words) == ("no wait", "nobody waits for this all_reduce")


@pytest.mark.stress
def test_a_loop_is_ended_by_the_deadline() -> None:
    verdict = judge(SWAP, f"{HEAD}    while True:\n        try: rank += 1\n        except Exception: pass\n", 2)
    assert verdict.status == LOOP
    assert verdict.line in (7, 8, 9)


def test_what_a_solution_prints_is_shown_where_it_fails() -> None:
    lines = tell_lines(judge(SWAP, f"{HEAD}    print('I am', rank)\n", 2))
    assert lines[-1] == "  printed: I am 0"


def test_a_deadlock_says_who_waits_for_whom() -> None:
    verdict = judge(SWAP, f"{HEAD}    dist.send(tensor, rank ^ 1)\n", 2)
    assert (verdict.status, verdict.mistake) == (DEADLOCK, "")  # on 3 ranks it is another than "both send first"
    assert verdict.ranks == ("rank 0: in send to rank 1, line 7", "rank 1: in send to rank 0, line 7")


def test_other_line_ends_and_a_byte_order_mark_are_fine() -> None:
    text = f"\ufeff{SWAP.solution}".replace("\n", "\r\n")
    assert judge(SWAP, text, 2).status == PASS


@pytest.mark.parametrize(
    ("held", "expected", "words"),
    [
        (101, 111, "rank 1's share is missing"),
        (121, 111, "rank 1's share is in it twice"),
        (1.0, 111.0, "what ranks 1 and 2 gave is missing"),
        (1, 10, "rank 0's share is in it, rank 1's share is missing"),
        (0.5, 1.0, ""),
        (float("nan"), 1.0, ""),
        (-1, 1, ""),
        (10_111, 111, ""),  # there is no rank 4
    ],
)
def test_digits_say_whose_share_it_is(held: float, expected: float, words: str) -> None:
    assert explain_digits(held, expected, 3) == words


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_way_of_a_learner(folder: Path, run_cli: Run) -> None:
    assert "Next: python -m playground exercise" in run_cli("exercise").out
    shown = run_cli("exercise", "swap")
    assert "Swap: two ranks exchange tensors" in shown.out
    assert (folder / "swap.py").read_text() == SWAP.stub
    assert run_cli("check", "swap.py").out == "swap.py  not written yet\n"
    assert "has not passed here" in run_cli("solution", "swap").err
    assert "1 of 3: " in run_cli("hint", "swap").out
    (folder / "swap.py").write_text(SWAP.mistakes[2].text)
    failed = run_cli("check")
    assert failed.code == 1
    assert "Next: hint swap (2 of 3)   Again: check swap.py -n 2" in failed.out
    (folder / "swap.py").write_text(SWAP.solution)
    passed = run_cli("check", "-n", 2)
    assert (passed.code, passed.out) == (0, "swap.py  passed on 2 ranks\n")
    assert run_cli("check").out == "swap.py  passed on 2, 3, 1, 5, 4 ranks\n"
    assert run_cli("solution", "swap").out == SWAP.solution
    assert Work(folder).state(SWAP) == "passed"
    assert "stays as it is" in run_cli("exercise", "swap").out
    assert "is in swap.1.py now" in " ".join(run_cli("exercise", "swap", "--reset").out.split())
    assert (folder / "swap.1.py").read_text() == SWAP.solution
    assert Work(folder).state(SWAP) == "changed"


def test_what_progress_has_lost_is_found_out_again(folder: Path) -> None:
    (folder / "swap.py").write_text(SWAP.solution)
    progress_file().parent.mkdir(parents=True)
    progress_file().write_text('{"/": {"swap": {"digest": "one"')
    assert Work(folder).state(SWAP) == "begun"
    assert check_file(folder / "swap.py", None, 0).status == PASS
    assert Work(folder).state(SWAP) == "passed"


def test_an_exercise_stands_on_what_has_passed(folder: Path) -> None:
    ring, reduce_scatter = CATALOGUE["ring"], CATALOGUE["reduce-scatter"]
    own = folder / reduce_scatter.file
    own.write_text(reduce_scatter.mistakes[0].text)
    assert [source.file for source in Work(folder).solutions_before(ring)] == ["<reduce_scatter.py>"]
    own.write_text(f"{reduce_scatter.solution}# mine\n")
    assert check_file(own, None, 0).status == PASS
    assert [source.text for source in Work(folder).solutions_before(ring)] == [own.read_text()]


@pytest.mark.parametrize(
    ("name", "content", "words", "code"),
    [
        ("torch.py", b"", "it has a library's name, which Python would import in the place of torch: rename it", 2),
        ("juggle.py", b"", "no exercise is called juggle: `exercise` lists them", 2),
        ("swap.py", b"\xff\xfe", "swap.py is not UTF-8 text (byte 0): save it as such", 1),
        ("swap.py", None, "swap.py cannot be read: No such file or directory", 2),
    ],
)
def test_what_is_no_solution_gets_one_line(
    name: str, content: bytes | None, words: str, code: int, folder: Path, run_cli: Run
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    shown = run_cli("check", name)
    assert (" ".join(shown.out.split()), shown.code) == (f"{name} {words}", code)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exercise", "juggle"), "'juggle' is not one of 'whoami', 'share'"),
        (("check",), "there is no solution in this folder"),
        (("check", "swap.py", "-n", "9"), "-n 9: swap is checked on 1, 2, 3, 4, 5 ranks, choose one of them"),
        (("check", "--see", "mine.html"), "--see records a case of one solution"),
        (("exercise", "--reset"), "--reset begins one exercise again: name it"),
    ],
)
def test_bad_requests_get_one_line(words: tuple[str, ...], message: str, folder: Path, run_cli: Run) -> None:
    shown = run_cli(*words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_json_has_what_the_text_has(folder: Path, run_cli: Run) -> None:
    (folder / "reduce_scatter.py").write_text(CATALOGUE["reduce-scatter"].mistakes[0].text)
    shown = run_cli("check", "--json", "--seed", 7)
    [verdict] = json.loads(shown.out)["verdicts"]
    assert shown.code == 1
    about = {"status": FAIL, "mistake": "chunk off by one", "rank": 0, "index": 0, "held": 1, "expected": 11}
    assert verdict.items() >= {**about, "world": 2, "seed": 7, "line": 0}.items()


def test_the_case_that_fails_is_recorded_beside_the_reference_s_run(folder: Path, run_cli: Run) -> None:
    swap = CATALOGUE["swap"]
    both_send_first = next(mistake for mistake in swap.mistakes if mistake.status == DEADLOCK)
    (folder / swap.file).write_text(both_send_first.text)
    result = run_cli("check", "swap", "--see", folder / "mine.playground")
    assert result.code == 1
    assert "mine.playground shows" in result.err
    assert "cut off on ranks 0, 1" in result.err
    reference = run_cli("see", folder / "mine.playground.worlds" / "2.playground")
    assert reference.code == 0
    assert "cut off" not in reference.out


def test_a_class_is_judged_each_in_processes_of_its_own(folder: Path, run_cli: Run) -> None:
    """What one solution patches, prints to descriptor 1, or leaves running, is nothing to the others."""
    average = CATALOGUE["average"]
    patch = "import os, subprocess, torch.distributed as dist\ndist.all_reduce = print\nos.write(1, b'forged')\n"
    leave = f"subprocess.Popen(['sleep', '{LONG}'], start_new_session=True)\n"
    wrong = average.mistakes[0].text
    for student, text in {"ann": patch + leave + wrong, "ben": average.solution, "eve": wrong}.items():
        (folder / student).mkdir()
        (folder / student / "average.py").write_text(text)
    shown = run_cli("check", *(f"{student}/average.py" for student in ("ann", "ben", "eve")), "-n", 2)
    ann, *others = shown.out.splitlines()
    assert ann.startswith("ann/average.py  2 ranks: fail (all used)")
    assert others == [
        "ben/average.py  passed on 2 ranks",
        "eve/average.py  2 ranks: fail (all used): forgets to divide",
    ]
    assert shown.code == 1
    assert [file.name for file in folder.glob("*/*")] == ["average.py"] * 3
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if LONG.encode() in each.read_bytes()]


def test_a_function_is_checked_in_a_notebook(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ipython: Any = pytest.importorskip("IPython.core.interactiveshell")
    shell = ipython.InteractiveShell()
    assert shell.run_cell(f"from playground.exercises import check\n{SWAP.solution}").success
    assert check(shell.user_ns["swap"]).status == PASS
    assert capsys.readouterr().out.endswith("passed on 2, 3, 1, 5, 4 ranks\n")


def test_what_a_solution_imports_is_imported_anew(folder: Path) -> None:
    """A world that is kept has imported it before."""
    (folder / "swap.py").write_text(f"from mine import PARTNER\n{SWAP.solution}".replace("rank ^ 1", "rank ^ PARTNER"))
    (folder / "mine.py").write_text("PARTNER = 1")
    assert check_file(folder / "swap.py", 2, 0).status == PASS
    (folder / "mine.py").write_text("PARTNER = 10 + 1  # of another length, so that what was compiled is out of date")
    assert check_file(folder / "swap.py", 2, 0).status == FAIL


@pytest.mark.stress
def test_a_saved_file_is_checked_again(folder: Path, start_cli: Callable[..., subprocess.Popen[str]]) -> None:
    file = folder / "swap.py"
    file.write_text(SWAP.stub)
    watching = start_cli("check", "--watch", "-n", 2)
    assert watching.stdout
    assert watching.stdout.readline() == "swap.py  not written yet\n"
    file.write_text(textwrap.dedent(SWAP.solution))
    assert watching.stdout.readline() == "swap.py  passed on 2 ranks\n"


def test_without_a_verdict_nothing_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CATALOGUE["handover"]
    monkeypatch.setattr("playground.exercises.verdict.JUDGE", explode)
    verdict = judge(broken, broken.solution, 2)
    assert (verdict.status, verdict.exit_code) == (BLOCKED, 2)


def explode(rank: int, size: int, *args: object) -> None:
    raise RuntimeError("the judge itself is broken")
