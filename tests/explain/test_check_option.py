"""`--check` of `run` and of lessons: what is told of a script, and that the script stays as it
is."""

from __future__ import annotations

import errno
import re
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
from fixtures import Fork, Run
from processes import ENOUGH, by_hand, free_port
from test_readme import fenced_blocks

from playground.explain.right import early, run
from playground.explain.right.early import RECENT, EarlyTeller
from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import HINT, SURE, Finding
from playground.explain.right.gathering import receive_logs
from playground.explain.right.log import ENDED
from playground.explain.right.observer import checked
from playground.explain.right.reading import read_ranks
from playground.explain.right.report import HIDING, NOTHING_SEEN
from playground.explain.right.rules import find_mistakes
from playground.explain.right.run import NOT_CERTAIN
from playground.site.texts import CHAPTERS

SCRIPT = """
import os
import sys
import time
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
while "wait" in sys.argv and not os.path.exists("go on"):
    time.sleep(0.01)
if "abort" in sys.argv and dist.get_rank() == 1:
    os.abort()
dist.destroy_process_group()
"""
BACKWARD, STEP = 18, 21
"""Lines of the script."""


def test_a_wrong_script_is_told_on_stderr_and_runs_as_without(script: str, run_cli: Run) -> None:
    plain = run_cli("run", "-n", 2, "--check", "off", script, "wrong")
    told = run_cli("run", "-n", 2, script, "wrong")
    strict = run_cli("run", "-n", 2, "--check", "strict", script, "wrong")
    certain = run_cli("run", "-n", 2, "--check", "strict", script, "skip")
    assert (plain.code, told.code, strict.code, certain.code) == (0, 0, 0, 1), told.err
    assert sorted(plain.out.splitlines()) == sorted(told.out.splitlines())
    assert "wrong [" not in plain.err
    text = CHAPTERS["run"].read_text(encoding="utf-8")
    [shown] = [each for each in fenced_blocks(text, "text") if "D1-bypass" in each]
    assert f"(train.py:{BACKWARD})" in shown
    assert told.err.split() == shown.split()
    assert strict.err.split() == [*shown.split(), *NOT_CERTAIN.split()]
    assert NOT_CERTAIN not in certain.err


def test_a_right_script_is_told_nothing_but_what_was_looked_at(script: str, run_cli: Run) -> None:
    certain = run_cli("run", "-n", 2, script)
    hints = run_cli("run", "-n", 2, "--check", "hints", script)
    assert (certain.code, hints.code) == (0, 0), certain.err + hints.err
    assert certain.err == ""
    assert "no silent mistake was seen: 8 steps of optimizers were compared" in hints.err


METRIC = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group()
data = [*range(8)]
right = 0
for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)):
    right += (batch % 2 == 0).sum().item()
if dist.get_rank() == 0:
    print("accuracy", right / 4)
dist.destroy_process_group()
"""


def test_a_sum_of_one_rank_s_samples_that_it_prints_is_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("metric.py").write_text(METRIC, encoding="utf-8")
    told = run_cli("run", "-n", 2, "--check", "hints", "metric.py")
    silent = run_cli("run", "-n", 2, "metric.py")
    assert (told.code, silent.code, silent.err) == (0, 0, ""), told.err
    said = " ".join(told.err.split())
    assert (
        "perhaps wrong [S11-printed]: metric.py:11 prints what one rank has added up of its own "
        "samples: right (ranks 0-1)." in said
    )
    assert "nothing adds up over the ranks (metric.py:8)." in said


@pytest.mark.parametrize(
    ("script", "end"), [("print(1)", "seen"), ("raise ValueError", "seen before rank")]
)
def test_of_a_run_that_calls_nothing_it_is_said_that_nothing_was_checked(
    script: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Run
) -> None:
    """The other rank may be ended before it has failed, too."""
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text(f"import time\n{script}\n", encoding="utf-8")
    said = " ".join(run_cli("run", "-n", 2, "--check", "hints", "empty.py").err.split())
    assert f"nothing was checked: {NOTHING_SEEN} {end}" in said
    assert "no silent mistake" not in said
    assert "looked at" not in said


def test_of_a_run_that_fails_nothing_is_seen_until_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import torch, torch.distributed as dist\ndist.init_process_group()\n"
    text += "dist.all_reduce(torch.ones(1))\nraise ValueError\n"
    Path("fails.py").write_text(text, encoding="utf-8")
    told = run_cli("run", "-n", 2, "--check", "hints", "fails.py")
    assert told.code == 1
    assert "until the failure, no silent mistake was seen: no optimizer made a step" in " ".join(
        told.err.split()
    )


def test_a_rank_that_was_killed_leaves_what_it_has_seen(script: str, run_cli: Run) -> None:
    ran = run_cli("run", "-n", 2, script, "skip", "abort")
    assert ran.code == 1, ran.err
    assert "playground: wrong [D5-skip]" in ran.err
    assert "rank 0 made 0 steps" in " ".join(ran.err.split())
    assert f"(train.py:{STEP})" in ran.err


def test_what_is_certain_is_told_while_the_script_runs(script: str, fork_program: Fork) -> None:
    program = fork_program("playground", "run", "-n", 2, script, "skip", "wait")
    assert "wrong [D5-skip]" in program.stderr.readline()
    assert program.poll() is None
    Path("go on").touch()
    out, err = program.communicate(timeout=ENOUGH)
    assert program.returncode == 0
    assert len(out.splitlines()) == 2
    assert "wrong [" not in err  # it was told a moment ago


def test_hints_and_what_a_later_step_may_answer_are_not_told_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (("D5-skip", SURE), ("D4-later", SURE), ("D2-nosync-all", HINT))
    found = [Finding(name, level, name, (0,), 0, "", "x", "x") for name, level in names]
    monkeypatch.setattr(early, "find_mistakes", lambda facts: found)
    teller = EarlyTeller(tmp_path, 1)
    monkeypatch.setattr(teller, "written", [1])
    for _ in range(2):
        teller.look()
        teller.written = [1]
    shown = capsys.readouterr().err
    assert re.findall(r"\[(.*)\]", shown) == ["D5-skip"]
    assert HIDING in " ".join(shown.split()), "as where it is told at the end"


def test_only_what_was_told_long_ago_is_told_again() -> None:
    teller = EarlyTeller(Path(), 2)
    now, long_ago, never = (Finding(name, SURE, "", (0,), 0, "", "", "") for name in "abc")
    teller.told["a", (0,)] = time.monotonic()
    teller.told["b", (0,)] = time.monotonic() - RECENT
    assert [*map(teller.is_recent, (now, long_ago, never))] == [True, False, False]


@pytest.mark.parametrize("mode", ["certain", "strict", "hints"])
def test_what_was_told_long_ago_is_told_again_in_a_sentence(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (
        Finding(rule, SURE, f"the {rule} drift", (0, 1), 3, "train.py:8", "why", "cure")
        for rule in ("D-old", "new")
    )
    monkeypatch.setattr(run, "find_mistakes", lambda facts: [old, new])
    teller = EarlyTeller(Path(), 2)
    teller.told["D-old", (0, 1)] = time.monotonic() - RECENT
    assert run.show([RankFacts(rank, ENDED) for rank in (0, 1)], mode, teller)
    first, second, *_ = capsys.readouterr().err.split("\n\n")
    assert " ".join(first.split()) == (
        "playground: wrong [D-old]: the D-old drift (ranks 0-1, since step 3). See above."
    )
    assert second.splitlines()[1:] == ["Why: why (train.py:8).", "To fix it: cure."]
    assert HIDING not in second


@pytest.mark.parametrize("mode", ["certain", "strict"])
def test_under_torchrun_rank_0_tells_of_all_ranks(
    mode: str, script: str, fork_program: Fork
) -> None:
    program = fork_program(*torchrun("--check", mode, script, "skip"))
    _, err = program.communicate(timeout=ENOUGH)
    assert (program.returncode == 0) == (mode == "certain"), err
    [said] = re.findall(r"playground: wrong .*?\(train.py:\d+\)", err, re.DOTALL)
    assert "[D5-skip]" in said
    assert "rank 0 made 0 steps" in " ".join(said.split())


def torchrun(*words: str) -> tuple[object, ...]:
    start = ("torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    return *start, "-m", "playground", "run", *words


def test_under_torchrun_what_is_certain_is_told_while_the_script_runs(
    script: str, fork_program: Fork, tmp_path: Path
) -> None:
    program = fork_program(*torchrun(script, "skip", "wait"), TMPDIR=str(tmp_path))
    said = ""
    while "wrong [D5-skip]" not in said:
        line = program.stderr.readline()
        assert line, said
        said += line
    assert program.poll() is None
    [folder] = tmp_path.glob("playground-check-*")
    assert sorted(each.name for each in (folder / "0").iterdir()) == [
        "rank-0.right", "rank-1.right",
    ]  # fmt: skip
    Path("go on").touch()
    _, err = program.communicate(timeout=ENOUGH)
    assert program.returncode == 0
    assert "wrong [" not in err  # it was told a moment ago
    assert [*tmp_path.glob("playground-check-*")] == []


def test_under_torchrun_a_rank_that_was_killed_leaves_what_it_has_seen(
    script: str, fork_program: Fork, tmp_path: Path
) -> None:
    program = fork_program(*torchrun(script, "skip", "abort"), TMPDIR=str(tmp_path))
    _, err = program.communicate(timeout=ENOUGH)
    assert program.returncode != 0
    assert err.count("playground: wrong [D5-skip]") == 1
    assert [*tmp_path.glob("playground-check-*")] == []


def test_ranks_started_by_hand_are_checked_too(script: str, fork_program: Fork) -> None:
    port = free_port()
    second, first = (
        fork_program("playground", "run", script, "wrong", **by_hand(rank, 2, port))
        for rank in (1, 0)
    )
    for rank, program in enumerate((first, second)):
        _, err = program.communicate(timeout=ENOUGH)
        assert program.returncode == 0, err
        assert ("wrong [D1-bypass]" in err) == (rank == 0)


def test_without_room_for_logs_a_script_runs_unchecked(
    script: str, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(purpose: str) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "temporary_folder", refuse)
    ran = run_cli("run", "-n", 2, script, "wrong")
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) == 2


def test_without_room_for_its_log_a_rank_runs_unchecked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with checked(tmp_path / "file" / "0", 0):
        dist.is_initialized()
    assert (tmp_path / "file").read_bytes() == b""


def test_of_a_rank_that_sends_nothing_nothing_is_said(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("1", b"no log")
    receive_logs(store, tmp_path, range(1, 3), 0.1)
    facts = read_ranks(tmp_path, 3)
    assert [each.unknown != "" for each in facts] == [True] * 3
    assert find_mistakes(facts) == []


def test_a_lesson_is_checked_too(run_cli: Run) -> None:
    ran = run_cli("p2p", "--check", "hints")
    assert ran.code == 0, ran.err
    assert "no silent mistake was seen: no optimizer made a step" in ran.err
