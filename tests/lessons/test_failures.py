"""failures: each program goes wrong as the chapter says, and what is said of it is shown there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from boards import source_of
from fixtures import Run, Start
from test_readme import consoles

from playground.site.texts import CHAPTERS

CHAPTER = CHAPTERS["failures"].read_text(encoding="utf-8")
NAMES = {
    "bypass_ddp": "D1-bypass",
    "repeat_batches": "E1-batches",
    "skip_a_step": "D5-skip",
    "average_one_half": "D2-nosync-last",
    "swap_gradients": "K1-order",
}
"""The programs that train a wrong model, and the mistake that is named."""
NEEDS_BUCKETS = {"repeat_batches"}
"""Those of which torch older than 2.14 does not tell what is needed."""
STANDS = {
    "wait_in_a_circle": "rank 0 is in all_reduce of group 1 (ranks 0-1)",
    "send_first": "rank 0 is in send to rank 1",
    "evaluate_on_one_rank": "rank 0 is in all_reduce (lesson.py:1) where ranks 1-3 are in barrier",
}
"""The deadlocks, and what is said of each."""


def form(text: str) -> str:
    """Without times, lines, and where lines are broken."""
    return " ".join(re.sub(r"\d+\.\d s|:\d+\)?", "#", text).split())


def shown(command: str) -> list[str]:
    """The output that the chapter shows of this command."""
    [found] = [each for group in consoles(CHAPTER) for each in group if each.command == command]
    return [*found.output]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_only_the_right_program_equals_one_process(size: int, run_cli: Run) -> None:
    ran = run_cli("failures", "-n", size, "--check", "off")
    assert (ran.code, ran.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines()}
    assert [*rows] == ["right", *NAMES]
    between, apart = ({name: float(row[at]) for name, row in rows.items()} for at in (5, 9))
    assert between["right"] == 0
    assert apart["right"] < 1e-14
    if size > 1:
        assert min(apart[name] for name in NAMES) > 1e-2
        assert {name for name in NAMES if between[name] < 1e-2} == {"repeat_batches"}
    losses = [float(row[2]) for row in rows.values()]
    assert max(losses) < 7.55, "before the training"
    assert "Before the training, it is 7.55." in CHAPTER


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.torch(2, 14)] * (name in NEEDS_BUCKETS))
        for name in NAMES
    ],
)
def test_its_mistake_is_named_with_its_line(name: str, run_cli: Run) -> None:
    ran = run_cli("failures", "--program", name)
    assert ran.code == 0
    assert re.fullmatch(rf"{name} +loss .*\n", ran.out)
    assert re.match(rf"playground: (probably )?wrong \[{NAMES[name]}\]", ran.err)
    assert ran.err.count("wrong [") == 1
    [line] = re.findall(r"lesson\.py:(\d+)\)\.", ran.err)
    lines = source_of("failures").splitlines()
    called = lines[int(line) - 1].strip()
    assert called in {
        "mse_loss(model(inputs), targets).backward()",
        "optimizer.step()",
        "loss = mse_loss(model(inputs.chunk(2)[half]), targets.chunk(2)[half])",
        "dist.all_reduce(param.grad)",
    }
    if name == "skip_a_step":
        expected = shown(f"python -m playground failures --program {name}")
        assert [*ran.out.split(), *ran.err.split()] == " ".join(expected).split()


def test_the_right_program_is_accused_of_nothing(run_cli: Run) -> None:
    ran = run_cli("failures", "--program", "right", "--check", "hints")
    assert (ran.code, ran.out.split()[:2]) == (0, ["right", "loss"])
    assert "no silent mistake was seen: " in ran.err


@pytest.mark.parametrize("name", STANDS)
def test_a_program_that_stands_still_is_a_proved_deadlock(name: str, run_cli: Run) -> None:
    ran = run_cli("failures", "--program", name)
    assert (ran.code, ran.out) == (1, "")
    assert form(ran.err).startswith(f"playground: deadlock: {form(STANDS[name])}")
    if name == "wait_in_a_circle":
        assert form(ran.err) == form(
            " ".join(shown(f"python -m playground failures --program {name}"))
        )


def test_the_rank_that_stops_early_is_named(run_cli: Run) -> None:
    ran = run_cli("failures", "--program", "stop_early")
    assert ran.code == 1, ran.err
    told = shown("python -m playground failures --program stop_early")
    assert form(ran.err).startswith(form(" ".join(told[:-1])))
    last = r"rank [1-3] then lost its connection to rank 0 \(Connection (closed|reset) by peer\)"
    assert re.fullmatch(last, ran.err.splitlines()[-1])


def test_a_program_that_is_not_there_is_refused_in_a_line(run_cli: Run) -> None:
    ran = run_cli("failures", "--program", "stop_erly")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "there is no program stop_erly: did you mean stop_early?" in ran.err


CHANGES = {
    "fix": ("        if targets.abs().max() < 20:  # only the damaged target is larger\n"
            "            optimizer.step()\n",
            "        largest = targets.abs().max()\n"
            "        dist.all_reduce(largest, op=dist.ReduceOp.MAX)\n"
            "        if largest < 20:\n            optimizer.step()\n"),
    "half": ("half == 0", "half == 1"),
    "circle": ("in (pairs[rank], pairs[rank - 1]):  # pairs[-1] is the last",
               "in (pairs[rank], pairs[rank - 1])[:: -1 if rank == 0 else 1]:"),
}  # fmt: skip
"""What a reader changes under "Try this"."""


@pytest.fixture
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The program with such a change."""
    old, new = CHANGES[request.param]
    text = source_of("failures")
    assert text.count(old) == 1
    file = tmp_path / "lesson.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("changed", "row", "is_right"),
    [("fix", "skip_a_step", False), ("half", "average_one_half", True)],
    indirect=["changed"],
)
def test_a_training_that_is_fixed_agrees(
    changed: Path, row: str, is_right: bool, run_cli: Run
) -> None:
    ran = run_cli("run", "-n", 4, changed)
    [cells] = [line.split() for line in ran.out.splitlines() if line.startswith(row)]
    assert (ran.code, cells[5]) == (0, "0e+00")
    assert (float(cells[9]) < 1e-14) == is_right


@pytest.mark.parametrize("changed", ["circle"], indirect=True)
def test_one_rank_is_enough_to_break_the_circle(changed: Path, run_cli: Run) -> None:
    ran = run_cli("run", "-n", 4, "--set", "PROGRAM=wait_in_a_circle", changed)
    assert (ran.code, ran.err) == (0, "")


def test_a_run_that_is_slow_is_asked_why(start_cli: Start, run_cli: Run) -> None:
    running = start_cli("failures", "--program", "save_for_long")
    said = ""
    for _ in range(150):
        told = run_cli("why", running.pid)
        said += told.err
        if "is in the program (lesson.py# while ranks 1-3 are in barrier" in form(told.out):
            break
        time.sleep(0.1)
    assert "has no ranks yet: if it starts some, ask again" in said
    chosen = run_cli("why")  # others may run on this machine, too
    assert form(chosen.out).count("ranks 1-3 are in barrier") == 1 or (
        f"{running.pid} failures --program save_for_long" in " ".join(chosen.err.split())
    )
    running.terminate()
    running.wait()
    varying = re.compile(r"--pid \d+|process \d+|started \d+ s")
    expected = varying.sub("#", form("\n".join(shown("python -m playground why"))))
    assert varying.sub("#", form(told.out)) == expected


SAID = {
    "stop_early": "received errors while waiting for send/recv from rank 0",
    "wait_in_a_circle": "Ranks 1 failed to pass monitoredBarrier",
    "evaluate_on_one_rank": "Detected mismatch between collectives on ranks",
}
"""Words of torch's errors with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


@pytest.mark.stress
@pytest.mark.parametrize("name", [*STANDS, "stop_early"])
def test_torch_says_what_the_table_says(name: str, tmp_path: Path) -> None:
    """With a timeout of two seconds in place of 30 minutes."""
    text = source_of("failures").replace('PROGRAM = "compare"', f"PROGRAM = {name!r}")
    limit = "timeout=__import__('datetime').timedelta(seconds=2)"
    text = text.replace('init_process_group("gloo")', f'init_process_group("gloo", {limit})')
    text = text.replace("(left + 1) % size])", f"(left + 1) % size], {limit})")
    file = tmp_path / "lesson.py"
    file.write_text(text, encoding="utf-8")
    said = []
    for level in ("OFF", "DETAIL"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
                *("--standalone", "--local-addr=127.0.0.1", str(file)),
            ],
            env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": level, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode
        said.append(" ".join(done.stderr.split()))
    plain, detail = said
    if name == "stop_early":
        assert "Connection closed by peer" in plain
    else:
        assert "Timed out waiting 2000ms for" in plain
    assert SAID.get(name, "Timed out waiting 2000ms for send operation to complete") in detail
