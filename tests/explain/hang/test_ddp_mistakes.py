"""Scripts whose ranks do not call the same where DistributedDataParallel averages, as `run` ends
them: both calls are named with their lines, however gloo ends: it stands still, aborts a process,
mixes both, or loses a connection. Right scripts of the same shapes are not accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ddp_mistakes import MISTAKES, RIGHT
from programs import ForkedProgram

from playground.explain.hang import Kind

CONDITION = "is it under a condition on the rank?"
BY_COUNTS = (
    "rank 0 has 6 batches, rank 1 has 5 (",
    "rank 1 has made 6 forward passes and 5 backward passes (",
)
"""How the cures begin where counts tell the cause."""
ENOUGH = 100
"""Seconds after which a run is ended by force."""
TIMEOUT = 20
"""Seconds after which a run in silence ends: one whose deadlock cannot be proved."""
TIMES = 3
"""How often each script runs in the stress tier."""
QUICK = (
    "early-stop", "early-stop-before-forward", "uneven-batches-then-the-end",
    "first-rank-evaluates-the-model", "models-in-another-order", "metrics-of-other-lengths",
    "metric-of-the-gradients-size",
)  # fmt: skip
"""One for each way in which gloo ends, and each cure."""
QUICK_RIGHT = "uneven-batches-in-join-with-buffers", "evaluates-without-gradients", "other-losses"
Fork = Callable[..., ForkedProgram]


def run(name: str, text: str, size: int, fork: Fork, folder: Path) -> tuple[int | None, str]:
    """The exit code and stderr of a script in this folder."""
    (folder / f"{name}.py").write_text(text)
    words = "-n", size, "--timeout", TIMEOUT, folder / f"{name}.py"
    program = fork("playground", "run", *words)
    _, err = program.communicate(timeout=ENOUGH)
    return program.returncode, err


def check_mistake(name: str, fork: Fork, folder: Path) -> None:
    script = MISTAKES[name]
    code, err = run(name, script.text, script.size, fork, folder)
    assert code == 1
    assert script.is_named_by(err), err
    told = " ".join(err.split())
    cures = (*(kind.cure for kind in Kind), "find_unused_parameters=True", CONDITION, *BY_COUNTS)
    assert any(cure in told for cure in cures), err


def check_right(name: str, fork: Fork, folder: Path) -> None:
    script = RIGHT[name]
    code, err = run(name, script.text, script.size, fork, folder)
    assert (code, "playground" in err) == (0, False), err


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_named_with_both_lines(name: str, fork_program: Fork, tmp_path: Path) -> None:
    check_mistake(name, fork_program, tmp_path)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("loader-of-another-length-then-a-metric",
         f"{BY_COUNTS[0]}train.py:14): give all ranks equal numbers, or `with model.join():`"),
        ("loader-of-another-length",
         f"{BY_COUNTS[0]}train.py:13): give all ranks equal numbers, or `with model.join():`"),
        ("leaves-out-a-backward-then-a-metric",
         f"{BY_COUNTS[1]}train.py:16): let all ranks decide alike which batches go without "
         "backward()"),
    ],
)  # fmt: skip
def test_where_counts_tell_the_cause_it_is_said_and_not_asked(
    name: str, cure: str, fork_program: Fork, tmp_path: Path
) -> None:
    script = MISTAKES[name]
    _, err = run("train", script.text, script.size, fork_program, tmp_path)
    told = " ".join(err.split())
    assert cure in told, err
    assert CONDITION not in told


@pytest.mark.stress
@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_always_named_with_both_lines(
    name: str, fork_program: Fork, tmp_path: Path
) -> None:
    for _ in range(TIMES):
        check_mistake(name, fork_program, tmp_path)


@pytest.mark.parametrize("name", QUICK_RIGHT)
def test_a_right_script_is_not_accused(name: str, fork_program: Fork, tmp_path: Path) -> None:
    check_right(name, fork_program, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("name", RIGHT)
def test_no_right_script_is_ever_accused(name: str, fork_program: Fork, tmp_path: Path) -> None:
    for _ in range(TIMES):
        check_right(name, fork_program, tmp_path)
