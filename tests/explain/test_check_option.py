"""`--check` of `run` and of lessons: what is told of a script, and that the script stays as it
is."""

from __future__ import annotations

import pytest
from fixtures import Run
from test_readme import fenced_blocks

from playground.site.chapters import CHAPTERS

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
forward = model.module if "wrong" in sys.argv else model
for step in range(4):
    optimizer.zero_grad()
    forward(torch.randn(2, 6)).square().sum().backward()
    if "skip" in sys.argv and step == 1 and dist.get_rank() == 0:
        continue
    optimizer.step()
print(model.module.weight.sum().item())
if "abort" in sys.argv and dist.get_rank() == 1:
    os.abort()
dist.destroy_process_group()
"""
BACKWARD, STEP = 17, 20
"""Lines of the script."""


def test_a_wrong_script_is_told_on_stderr_and_runs_as_without(script: str, run_cli: Run) -> None:
    plain = run_cli("run", "-n", 2, script, "wrong")
    told = run_cli("run", "-n", 2, "--check", "certain", script, "wrong")
    strict = run_cli("run", "-n", 2, "--check", "strict", script, "wrong")
    assert (plain.code, told.code, strict.code) == (0, 0, 1), told.err
    assert sorted(plain.out.splitlines()) == sorted(told.out.splitlines())
    assert "wrong [" not in plain.err
    text = CHAPTERS["run"].read_text(encoding="utf-8")
    [shown] = [each for each in fenced_blocks(text, "text") if "D1-bypass" in each]
    assert f"(train.py:{BACKWARD})" in shown
    for ran in (told, strict):
        assert ran.err.split() == shown.split()


def test_a_right_script_is_told_nothing_but_what_was_looked_at(script: str, run_cli: Run) -> None:
    certain = run_cli("run", "-n", 2, "--check", "certain", script)
    hints = run_cli("run", "-n", 2, "--check", "hints", script)
    assert (certain.code, hints.code) == (0, 0)
    assert certain.err == ""
    assert "nothing wrong was seen: 8 steps of optimizers were compared" in hints.err


def test_a_rank_that_was_killed_leaves_what_it_has_seen(script: str, run_cli: Run) -> None:
    ran = run_cli("run", "-n", 2, "--check", "certain", script, "skip", "abort")
    assert ran.code == 1
    assert "playground: wrong [D5-skip]" in ran.err
    assert "rank 0 made 0 steps" in " ".join(ran.err.split())
    assert f"(train.py:{STEP})" in ran.err


def test_ranks_of_another_launcher_are_not_checked(
    script: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ran = run_cli("run", "--check", "certain", script)
    assert ran.code == 2
    assert "--check certain of ranks that were started elsewhere" in ran.err


def test_a_lesson_is_checked_too(run_cli: Run) -> None:
    ran = run_cli("p2p", "--check", "hints")
    assert ran.code == 0
    assert "nothing wrong was seen: no optimizer made a step" in ran.err
