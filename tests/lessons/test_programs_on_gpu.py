"""Every lesson's program on nccl: it ends, and the difference that it prints is one of rounding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures import Run
from test_programs import CHECKS, PROGRAMS, SMALLER, differences, largest

from playground.lessons.lesson_row import Lesson
from playground.training import prepare

ROUNDING = 1e-12
"""What float64 leaves of a difference, whatever the order of additions."""
NARROW = {"bert": 1e-10, "elastic": 1e-6}
"""By lesson, where more additions meet; and where two trainings in float32 are compared, as a GPU
adds the gradients of a convolution in another order each time."""
ONE_RANK = {"data-parallel"}
COUNTED = re.compile(r"^(?:parameters|operations) +[\d,]+ +([\d,]+) +([\d,]+) ", re.MULTILINE)
"""What gpt counts on all ranks, and by formula. The formula of the numbers that are kept is of the
CPU's attention: a GPU's keeps more."""
QUICK = {"zero", "tensor", "checkpoint"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.stress] * (each.name not in QUICK))
        for each in PROGRAMS
    ],
)
def test_a_program_on_gpus_ends_with_its_difference_within_rounding(
    lesson: Lesson,
    run_cli: Run,
    few_digits: None,
    nccl_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))  # MNIST is out of reach
    monkeypatch.chdir(tmp_path)
    size = 1 if lesson.name in ONE_RANK else min(nccl_size, 2)
    words = ("-n", size, "--backend", "nccl", *SMALLER.get(lesson.name, ()))
    ran = run_cli(lesson.name, *words)
    assert ran.code == 0, ran.err
    if lesson.name == "gpt":
        counted = COUNTED.findall(ran.out)
        assert len(counted) == 2
        assert [number for number, formula in counted if number != formula] == []
        return
    assert largest(differences(CHECKS[lesson.name], ran.out)) <= NARROW.get(lesson.name, ROUNDING)
