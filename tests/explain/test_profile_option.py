"""`--profile` and `--link` of `run`: what they show of a script, and that the script stays as it
is."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run
from ranks import needs_native_calls

from playground.tap.native import HAS_HOOKS

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((2, 6), dist.get_rank() + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
work = dist.all_reduce(loss.detach(), async_op=True)
work.wait()
if dist.get_rank() == 0:
    print(sys.argv[1:], [param.sum().item() for param in model.parameters()])
dist.destroy_process_group()
"""
BACKWARD, CONSTRUCTOR = 15, 10
"""Lines of the script."""


def rows_of(file: str) -> dict[tuple[int, str], Any]:
    rows = json.loads(Path(file).read_text())["rows"]
    return {(row["line"], row["operation"]): row for row in rows}


def test_it_is_said_if_torch_does_not_tell_of_calls_in_cpp(script: str, run_cli: Run) -> None:
    ran = run_cli("run", "-n", 2, "--profile", script, "a", "b.json")
    assert ran.code == 0, ran.err
    assert ("does not tell of calls in C++" in ran.err) != HAS_HOOKS
    assert (f"train.py:{BACKWARD}" in ran.err) == HAS_HOOKS


@needs_native_calls
def test_what_a_script_prints_stays_and_the_profile_says_its_lines(
    script: str, run_cli: Run
) -> None:
    plain = run_cli("run", "-n", 2, script, "a", "b.json")
    table = run_cli("run", "-n", 2, "--profile", script, "a", "b.json")
    kept = run_cli("run", "-n", 2, "--profile", "cost.json", script, "a", "b.json")
    slow = run_cli(
        "run", "-n", 2, "--link", 0.01, "--profile=page.html", "--see", "see.txt", script,
        "a", "b.json",
    )  # fmt: skip
    assert plain.code == table.code == kept.code == slow.code == 0, slow.err
    assert plain.out == table.out == kept.out == slow.out
    assert plain.out.startswith("['a', 'b.json']")
    assert "train.py:15" in table.err
    assert table.err.splitlines()[-1].endswith(".")
    assert "of the run is spent waiting" in " ".join(table.err.splitlines()[-3:])
    rows = rows_of("cost.json")
    gradients = 28 * 4  # two ranks: an all-reduce sends what the tensor has
    of_backward = rows[BACKWARD, "all_reduce in C++"]
    assert [rank["sent"] for rank in of_backward["ranks"]] == [3 * gradients] * 2
    assert of_backward["function"] == "<module>"
    assert rows[CONSTRUCTOR, "broadcast in C++"]["ranks"][1]["sent"] == 0
    assert rows[17, "all_reduce"]["sent"] == 2 * 4
    assert rows[18, "all_reduce.wait"]["calls"] == 0
    page = Path("page.html").read_text()
    assert "loss.backward()" in page
    assert "http" not in page
    assert "2 ranks on gloo" in Path("see.txt").read_text()


DEADLOCK = """
import torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(2))
dist.recv(torch.ones(1), 1 - dist.get_rank())
"""


def test_a_run_that_failed_is_profiled(tmp_path: Path, run_cli: Run) -> None:
    """With the lines where its ranks stood still; a deadlock is proved as ever."""
    (tmp_path / "stuck.py").write_text(textwrap.dedent(DEADLOCK))
    cost = tmp_path / "cost.json"
    outcome = run_cli("run", "-n", 2, "--profile", cost, tmp_path / "stuck.py")
    assert outcome.code == 1, outcome.err
    assert "deadlock" in outcome.err
    row = rows_of(str(cost))[5, "recv"]
    assert [rank["calls"] for rank in row["ranks"]] == [1, 1]
    assert all(rank["waited"] > 0 for rank in row["ranks"])
    document = json.loads(cost.read_text())
    assert document["conclusion"].endswith("stuck.py:5.")


STUCK_IN_BACKWARD = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if dist.get_rank() == 0:
    loss.backward()
dist.barrier()
"""


def test_a_deadlock_in_backward_is_proved_as_ever(tmp_path: Path, run_cli: Run) -> None:
    """What the profile asks the backend to call later calls nothing: it is no way out."""
    (tmp_path / "stuck.py").write_text(textwrap.dedent(STUCK_IN_BACKWARD))
    outcome = run_cli("run", "-n", 2, "--profile", tmp_path / "stuck.py")
    assert outcome.code == 1, outcome.err
    assert "deadlock" in outcome.err
    assert "stuck.py:8" in outcome.err.split("Communication by line")[1]


ENDS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(2))
sys.stdout.flush()
os._exit(0)
"""


def test_a_program_that_ends_its_process_is_profiled(tmp_path: Path, run_cli: Run) -> None:
    (tmp_path / "ends.py").write_text(textwrap.dedent(ENDS))
    outcome = run_cli("run", "-n", 2, "--profile", tmp_path / "ends.py")
    assert outcome.code == 0, outcome.err
    assert "ends.py:5" in outcome.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "cost.json", "missing.py"], "missing.py: there is no such file"),
        (["--profile", "none/cost.json", "train.py"], "there is no such folder"),
        (["--profile=cost.txt", "train.py"], "cost.txt: there is no such file"),
        (["--link", "0", "train.py"], "--link"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], said: str, script: str, run_cli: Run
) -> None:
    outcome = run_cli("run", *words)
    assert outcome.code == 2, outcome.err
    assert said in outcome.err
    assert not Path("cost.json").exists()


def test_a_profile_of_ranks_that_others_started_is_refused(
    script: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    outcome = run_cli("run", "--profile", script)
    assert outcome.code == 2, outcome.err
    assert "ranks that were started elsewhere" in outcome.err
