"""What the doctor finds in a script for torchrun: each fault by the check that is for it, nothing
in a right one."""

from __future__ import annotations

import ast
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ddp_mistakes import MISTAKES
from processes import ENOUGH
from widths import too_wide

from playground.base.errors import UsageError
from playground.base.process_status import process_status
from playground.explain.hang.states import Doing, RankState
from playground.tools.doctor.checks import ERROR, WARNING, Fault, Undecided, run_checks
from playground.tools.doctor.data_parallel.edits import add_before, show_edits
from playground.tools.doctor.data_parallel.parts import Part, Plan, Status
from playground.tools.doctor.data_parallel.plan import plan
from playground.tools.doctor.imported import find_imported_training
from playground.tools.doctor.looked_at import LookedAt, say_looks
from playground.tools.doctor.page import tell_what_to_do
from playground.tools.doctor.script import (
    CHECKS,
    ScriptFacts,
    check_own_gpu,
    check_text,
    describe,
    examine,
    summarize,
)
from playground.tools.doctor.script_run import have_finished, tell_places
from playground.tools.doctor.set_order import sets_walked
from playground.world.backends import LEAVE_OUT

HEAD = """
import sys, threading, time
import torch
import torch.distributed as dist
dist.init_process_group()  # on cuda, where there is one
rank, size = dist.get_rank(), dist.get_world_size()
one = torch.ones(1)
"""
TRAINING = """
import argparse, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    dist.init_process_group()
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    device = gpu if torch.cuda.is_available() else torch.device("cpu")
    data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(parser.parse_args().epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x.to(device)) - y.to(device)).square().mean()
            loss.backward()
            optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        print(f"epoch {epoch}: {total.item()}")
    exchange(torch.ones(1, device=device), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()

def exchange(one, rank, size):
    to_next = dist.P2POp(dist.isend, one, (rank + 1) % size)
    from_last = dist.P2POp(dist.irecv, one.clone(), (rank - 1) % size)
    for work in dist.batch_isend_irecv([to_next, from_last]):
        work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    if rank == 0:
        dist.gather(one, [one.clone() for _ in range(size)])
        dist.send(one, 1)
    else:
        dist.gather(one)
    if rank == 1:
        dist.recv(one, 0)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is copied."""
    monkeypatch.chdir(tmp_path)


def find_in(folder: Path, source: str, seconds: float = ENOUGH) -> tuple[ScriptFacts, list[Fault]]:
    """What is known of a script with this source, and what the checks find in it."""
    path = folder / "train.py"
    path.write_text(source)
    script = examine(path, (), seconds, ENOUGH)
    return script, [*run_checks(CHECKS, script)]


def test_what_was_looked_at_is_said_and_what_was_not(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    ran = run_cli("doctor", "--seconds", ENOUGH, tmp_path / "train.py", "--epochs", "1")
    said = " ".join(ran.out.split())
    assert "1 model in DistributedDataParallel, 5 iterations over a DistributedSampler" in said
    assert "not looked at: other backends and devices than those used" in said
    assert "fit" not in said
    (tmp_path / "train.py").write_text(HEAD + "dist.all_reduce(one)\ntime.sleep(60)")
    said = " ".join(run_cli("doctor", "--seconds", 2, tmp_path / "train.py").out.split())
    assert (
        "not looked at: what comes after the first 2 s; training, as no optimizer of torch.optim "
        "made a step; other backends"
    ) in said


def test_what_was_not_looked_at_in_one_of_two_runs_is_said_of_that_run() -> None:
    two = LookedAt(size=2, calls=9, steps=20, models=1, passes=0, files=0, unknown=["workers"])
    three = replace(two, size=3, steps=0, unknown=["workers", "training"])
    said = [*say_looks([two, three])]
    assert said[0].startswith("  looked at, on 2 ranks and on 3 ranks: 18 calls, 20 steps")
    assert said[1].startswith("  not looked at: training (on 3 ranks); workers; other")


def test_an_option_behind_the_script_is_told_to_stand_before_it(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import sys\n")
    (tmp_path / "own.py").write_text("import sys\nseconds = sys.argv[2]\n")
    note = "playground: --seconds stands after train.py, so the script gets it"
    assert note in run_cli("doctor", "train.py", "--seconds", 60).err
    assert "stands after" not in run_cli("doctor", "own.py", "--seconds", 60).err


def test_a_right_training_has_no_faults(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    shown = run_cli("doctor", "--json", "--seconds", ENOUGH, tmp_path / "train.py", "--epochs", "2")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert document["faults"] == []
    assert [(run["size"], run["has_returned"]) for run in document["script"]["runs"]] == [
        (2, True),
        (3, True),
    ]
    for run in document["script"]["runs"]:
        seen, size = run["looked_at"], run["size"]
        steps = 2 * -(-20 // size // 5) * size  # of two epochs, on all ranks
        assert (seen["steps"], seen["models"], seen["passes"]) == (steps, 1, 2 * size)
        assert seen["calls"] > steps
        assert seen["unknown"] == []


NOT_PORTABLE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size, one = dist.get_rank(), dist.get_world_size(), torch.ones(1)
if rank == 0:
    dist.recv(one)
elif rank == 1:
    dist.send(one, 0)
"""


def test_what_breaks_on_nccl_is_found(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NOT_PORTABLE)
    shown = run_cli("doctor", "--seconds", ENOUGH, tmp_path / "train.py")
    assert (shown.code, shown.err) == (0, "")
    assert "1 warning, no error." in shown.out
    assert "None of the faults" not in shown.out
    assert too_wide(shown.out) == []
    faults = re.split("^  (?=error|warning|note)", shown.out, flags=re.MULTILINE)[1:]
    found = [
        " ".join(re.split("    rule:|  looked at", each)[0].split()).replace(" in <module>", "")
        for each in faults
    ]
    assert found == [
        "warning, any-source: a receive from anyone (train.py:7)",
        'note, device: for GPUs: leave out "gloo" (train.py:4), and make tensors on '
        'torch.device("cuda", int(os.environ["LOCAL_RANK"])) (:7, among others)',
    ]


MEMBERS = """
torch.manual_seed(rank)
for member in range(2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    dist.all_reduce(one)
"""
TIME_IS_UP = """
import os, time
from playground.tools.doctor.script_run import TIME_LIMIT
from playground.world.rank.reports import report
report(**{TIME_LIMIT: 0} if os.environ["RANK"] == "0" else {})
time.sleep(1000)
"""
"""Says itself that its time is up, before what comes next."""
HALF = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group()
data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""
ALONE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for x, y in DataLoader(data, batch_size=2):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""


def test_ranks_that_train_apart_are_not_data_parallel(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.tools.doctor.script.SIZES", (2,))
    (tmp_path / "train.py").write_text(HEAD + MEMBERS)
    shown = run_cli("doctor", "--seconds", ENOUGH, "train.py")
    assert shown.code == 1
    assert too_wide(shown.err) == []
    why = "train.py is not data parallel: nothing averages gradients or parameters"
    assert f"playground: 1 warning, {why}" in " ".join(shown.err.split())


def test_a_script_that_has_not_come_to_its_process_group_is_undecided(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.tools.doctor.script.SIZES", (2,))
    (tmp_path / "train.py").write_text(TIME_IS_UP + HALF)
    shown = run_cli("doctor", "--seconds", ENOUGH, "--write", "new.py", "train.py")
    assert shown.code == Undecided.exit_code
    assert too_wide(shown.err) == []
    said = " ".join(shown.err.split())
    assert "the ranks had not come to init_process_group (train.py:11); give it longer" in said
    assert "5. model, missing: nothing averages the gradients" in shown.out
    assert "DistributedDataParallel(model)" in (tmp_path / "new.py").read_text()


def test_a_script_that_forms_no_process_group_with_its_arguments_is_refused(tmp_path: Path) -> None:
    source = f"import sys\n{HEAD.replace('dist.init', 'if sys.argv[1:]: dist.init')}"
    (tmp_path / "train.py").write_text(source.partition("rank, size")[0])
    with pytest.raises(UsageError, match=r"ended without init_process_group \(train.py:6\)"):
        examine(tmp_path / "train.py", (), ENOUGH, ENOUGH)


def test_the_file_that_has_the_training_is_named(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "loops.py").write_text(ALONE)
    (tmp_path / "start.py").write_text("from parts import loops\nloops.main()\n")
    (tmp_path / "train.py").write_text("from start import loops\n")
    shown = run_cli("doctor", "train.py")
    assert shown.code == UsageError.exit_code
    assert (
        "parts/loops.py, which train.py imports, has the training: python -m playground doctor "
        "parts/loops.py"
    ) in shown.err
    forms = "import torch.distributed as dist\nfrom start import loops\ndist.init_process_group()\n"
    (tmp_path / "forms.py").write_text(forms)
    assert find_imported_training(Path("forms.py")) is None
    assert find_imported_training(Path("parts/loops.py")) is None


def test_the_changed_script_is_written_to_a_new_file(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    shown = run_cli("doctor", "--write", "new.py", "train.py")
    assert shown.code == 1
    assert "new.py was written" in shown.out
    assert (tmp_path / "new.py").read_text() == plan(ALONE, "train.py").after
    assert "  python -m playground run -n 2 new.py\n" in shown.err
    for words, why in (
        (("--write", "train.py", "train.py"), "--write train.py: there is such a file"),
        (("--write", "other.py"), "--write other.py: name the script"),
    ):
        refused = run_cli("doctor", *words)
        assert refused.code == UsageError.exit_code
        assert why in refused.err
    assert (tmp_path / "train.py").read_text() == ALONE


def test_nothing_is_written_where_no_line_changes(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.tools.doctor.script.SIZES", (2,))
    (tmp_path / "train.py").write_text(HEAD + "dist.barrier()\n")
    shown = run_cli("doctor", "--seconds", ENOUGH, "--write", "new.py", "train.py")
    assert shown.code == 0
    assert "--write new.py: there is nothing to write" in shown.out
    assert not (tmp_path / "new.py").exists()


def test_parts_without_lines_are_left_to_write() -> None:
    edits = (add_before(1, "", "import os"),)
    parts = (
        Part("start", Status.MISSING, "", edits),
        Part("device", Status.NOT_NEEDED, ""),
        Part("sampler", Status.UNKNOWN, ""),
        Part("model", Status.UNKNOWN, ""),
    )
    found = tell_what_to_do(Path("train.py"), Plan("import torch\n", parts), None)
    assert "With these lines and parts 3, 4, yours to write, try\n" in found
    found = tell_what_to_do(Path("train.py"), Plan("import torch\n", parts[1:3]), None)
    assert "With part 2, yours to write, try\n" in found
    assert "--write" not in found


def test_lines_are_shown_behind_one_that_is_not_empty() -> None:
    source = "import torch\n\n\ntorch.ones(1)\n"
    assert [*show_edits(source, [add_before(4, "", "import os")])] == [
        "1   import torch",
        "  + import os",
    ]
    assert [*show_edits("\nimport torch\n", [add_before(2, "", "import os")])] == ["  + import os"]


UNEQUAL = "for batch in range(rank, 8, size):\n    dist.all_reduce(one)\n"
BYPASS = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    model.module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
FAULTY: list[tuple[str, str, str, str]] = [
    ("averaging", WARNING, MEMBERS, "on 2 ranks: 12 steps of optimizers, 0 models in Distributed"),
    ("training", WARNING, BYPASS, "on 2 ranks: the replicas of a model drift apart: weight of"),
    ("agreement", ERROR, UNEQUAL,
    "on 3 ranks: rank 2 has finished (last call: all_reduce, train.py:9) while"),
    ("agreement", ERROR, "one = one.int() if rank else one\ndist.all_reduce(one)",
    "on 2 ranks: rank 0 has called all_reduce of"),
    ("set-order", WARNING, "for name in {'b', 'w'}:\n    dist.all_reduce(one)",
    "in its own order (train.py:8)"),
    ("failure", ERROR, "dist.barrier()\n[2, 3][rank]", "it works on 2 ranks; rank 2 of 3 failed: "
                                                       "IndexError"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "severity", "source", "saw"), FAULTY)
def test_a_fault_is_found_by_one_check(
    check: str, severity: str, source: str, saw: str, tmp_path: Path
) -> None:
    script, faults = find_in(tmp_path, HEAD + source)
    assert len(faults) == 1, faults
    [fault] = faults
    assert (fault.check, fault.severity) == (check, severity)
    assert saw in fault.saw
    assert [run.size for run in script.runs] == ([2] if "has called" in saw else [2, 3])


HANGS = """
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if rank == 0:
    dist.barrier()
"""


@pytest.mark.stress
def test_a_script_that_hangs_is_stopped_when_its_time_is_up(tmp_path: Path) -> None:
    _, [fault] = find_in(tmp_path, HEAD + HANGS, seconds=10)
    assert (fault.check, fault.severity) == ("agreement", ERROR)
    assert fault.saw.startswith(
        "on 2 ranks: probably a deadlock: rank 1 has finished where rank 0 is in"
    )


RUNS_ON = """
import subprocess
from playground.tools.doctor.script_run import TIME_LIMIT
from playground.world.rank.reports import report
child = subprocess.Popen(["sleep", "1000"])
open(f"{sys.argv[1]}/{rank}", "w").write(str(child.pid))
dist.barrier()
report(**{TIME_LIMIT: 0} if rank == 0 else {})
while True: dist.all_reduce(one)
"""
"""Says itself that its time is up, so that this does not depend on how fast the machine is."""


def test_a_script_that_runs_on_is_stopped_with_what_it_has_started(
    tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.tools.doctor.script.SIZES", (2,))
    (tmp_path / "train.py").write_text(HEAD + RUNS_ON)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    shown = run_cli("doctor", "--seconds", ENOUGH, "train.py", outside)
    assert shown.code == Undecided.exit_code
    assert "undecided: stopped after" in shown.err
    assert "0 steps of optimizers seen; give it longer" in " ".join(shown.err.split())
    said = " ".join(shown.out.split())
    assert "nothing found (2 ranks stopped when their time was up, " in said
    assert re.search(r"2 ranks when they were stopped: rank 0 in .* rank 1 in ", said)
    deadline = time.monotonic() + ENOUGH
    while any(is_running(int((outside / str(rank)).read_text())) for rank in range(2)):
        assert time.monotonic() < deadline


def test_ranks_that_had_finished_were_not_stopped(tmp_path: Path) -> None:
    script, _ = find_in(tmp_path, HEAD + "dist.barrier()")
    [run, _] = script.runs
    assert not run.had_finished
    ended, left = RankState(rank=0, doing=Doing.FINISHED), RankState(rank=1, doing=Doing.IN_PROGRAM)
    for last, words in (([ended, ended], "ended as"), ([ended, left], "stopped when")):
        late = replace(
            run, has_returned=False, stands=tell_places(last), had_finished=have_finished(last)
        )
        facts = replace(script, runs=[late])
        assert summarize(facts).startswith(f"2 ranks {words} their time was up, in copies of")
        [*_, where] = describe(facts)
        when = "as their time was up" if last[1] is ended else "when they were stopped"
        assert where == f"  2 ranks {when}: {tell_places(last)}"
        assert facts.is_undecided == (last[1] is left)


WRITES = """
import os, pathlib, helper
dist.barrier()
assert "/playground-doctor-" in helper.__file__ and not pathlib.Path("pipe").exists()
for name in ("checkpoint.pt", os.path.join(os.path.dirname(__file__), "best.pt")):
    assert pathlib.Path(name).read_text() == "kept"
    dist.barrier()
    pathlib.Path(name).write_text("overwritten")
    dist.barrier()
"""


def test_a_script_overwrites_no_file_of_the_user_s(
    tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    scripts = tmp_path / "lib"
    scripts.mkdir()
    files = [tmp_path / "checkpoint.pt", scripts / "best.pt"]
    for file in files:
        file.write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (scripts / "helper.py").touch()
    (scripts / "train.py").write_text(HEAD + WRITES)
    shown = run_cli("doctor", "--json", "--seconds", ENOUGH, scripts / "train.py")
    document = json.loads(shown.out)
    assert [fault for fault in document["faults"] if fault["severity"] == ERROR] == []
    assert [run["has_returned"] for run in document["script"]["runs"]] == [True, True]
    assert not Path(document["script"]["folder"]).exists()
    assert [file.read_text() for file in files] == ["kept"] * 2


def test_a_folder_too_large_to_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.tools.doctor.script_run.COPIED", 2)
    with pytest.raises(UsageError, match="which has more than 2 B: name data by"):
        find_in(tmp_path, TRAINING)


def is_running(pid: int) -> bool:
    """Whether this process does something: one that nobody has waited for does not."""
    return process_status(pid)[:1] not in ([], [b"Z"])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "called no operation of torch.distributed within 60 s: name a script for torchrun"),
        ("if", "line 1: invalid syntax"),
        (None, "cannot be read as a script in Python"),
    ],
)
def test_what_is_no_script_for_torchrun_is_refused(
    source: str | None, why: str, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "train.py").write_text(source)
    with pytest.raises(UsageError, match=why):
        examine(tmp_path / "train.py", (), ENOUGH, ENOUGH)


def test_without_flight_recorderes_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYGROUND_FLIGHT_RECORDER", "0")
    with pytest.raises(UsageError, match="it needs them, so not PLAYGROUND_FLIGHT_RECORDER=0"):
        find_in(tmp_path, TRAINING)


def test_every_check_finds_a_fault() -> None:
    named = {check for check, *_ in FAULTY} | {"any-source", "device", "own-gpu"}
    assert len(named) == len(CHECKS)


@pytest.mark.parametrize("words", [("--hosts", "a,b", "train.py"), ("no-such.py",)])
def test_what_does_not_go_with_a_script_is_refused(
    words: tuple[str, ...], run_cli: Callable[..., Any]
) -> None:
    shown = run_cli("doctor", *words)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert words[-1] in shown.err


SETS = """
names = {"weight", "bias"} | extra
for name in names: pass
list({"a", x})
[f(name) for name in set(model)]
"-".join(frozenset(words))
{name: 1 for name in names}
sorted(names), len(names), "a" in names, max(len(name) for name in names), {name for name in names}
for number in {1, 2}: pass
for number in set(range(3)): pass
for name in sorted({"a", "b"}): pass
names.add("c"), sorted([name for name in names])
"""


def test_sets_are_found_where_their_order_counts() -> None:
    assert sets_walked(ast.parse(SETS)) == [3, 4, 5, 6, 7]


def test_an_aborted_operation_is_one_fault_with_its_cause_and_cure(tmp_path: Path) -> None:
    script = MISTAKES["uneven-batches-then-a-metric"]
    text = script.text.replace('"gloo"', "").replace("import torch\n", "import torch  # cuda\n", 1)
    _, [fault, hint] = find_in(tmp_path, text)
    assert (hint.check, hint.severity) == ("training", WARNING)
    assert "train on the same batches" in hint.saw
    assert (fault.check, fault.severity) == ("agreement", ERROR)
    assert fault.saw == (
        "on 2 ranks: rank 0 has called DDP's backward (train.py:15) where rank 1 has called "
        "all_reduce (:17)"
    )
    assert fault.fix.startswith("rank 1 calls all_reduce (train.py:17), rank 0 does not: is it")
    assert fault.fix.endswith("unequal numbers of batches, or does one leave the loop early?")


OF_GPUS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8).{move}
{use}
"""


@pytest.mark.parametrize(
    "use",
    [
        "if local_rank == 0: print(local_rank)",
        "print(f'rank {rank}: {local_rank}')",
        "torch.manual_seed(3 + local_rank)",
        "model = DistributedDataParallel(model, device_ids=[local_rank])",
        "is_main = not local_rank",
        "name = str(local_rank)\nprint(name)",
    ],
)
def test_a_local_rank_that_chooses_no_gpu_is_told(use: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OF_GPUS.format(move="cuda()", use=use))
    [fault] = check_text(path, [check_own_gpu])
    assert fault.saw == (
        'all ranks would use the first GPU: "cuda" has to be the rank\'s own; LOCAL_RANK '
        "(train.py:6) chooses none"
    )
    assert "torch.cuda.set_device(" in fault.fix


@pytest.mark.parametrize(
    ("move", "use"),
    [
        ("cuda()", "torch.cuda.set_device(local_rank)"),
        ("cuda(local_rank)", ""),
        ("to(f'cuda:{local_rank}')", ""),
        ("cuda()", "device = 'cuda:{}'.format(local_rank)\ntrain(device)"),
        ("cuda()", "train(local_rank)"),
        ("cuda()", "with torch.cuda.device(local_rank): train()"),
        ("cuda()", "os.environ['CUDA_VISIBLE_DEVICES'] = str(local_rank)"),
        ("to(['cuda:0', 'cuda:1'][local_rank])", ""),
        ("cuda()", "gpu = rank % torch.cuda.device_count()"),
        ("to(model_device)", "is_cuda = model_device.type == 'cuda'"),
    ],
)
def test_a_rank_that_chooses_its_gpu_is_right(move: str, use: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OF_GPUS.format(move=move, use=use))
    assert check_text(path, [check_own_gpu]) == []


def test_what_it_proposes_for_a_failure_shows_more(tmp_path: Path) -> None:
    _, [fault] = find_in(tmp_path, HEAD + "dist.barrier()\n[][rank]\n")
    path = tmp_path / "train.py"
    assert fault.fix == f"python -m playground run -n 2 {path} shows the traceback"


def test_without_a_gpu_a_script_for_nccl_is_to_leave_the_backend_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = "import torch.distributed as dist\ndist.init_process_group('nccl')  # cuda\n"
    _, [fault] = find_in(tmp_path, source)
    assert fault.saw.endswith(
        " of 2 failed: the program asks for nccl, and this machine shows no GPU (train.py:2 in "
        "<module>)"
    )
    run = f"python -m playground run -n 2 --gpus 2 {tmp_path / 'train.py'}"
    assert fault.fix == f"{LEAVE_OUT}: {run}"


def test_without_a_gpu_a_script_that_chooses_one_is_to_have_it_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = "RuntimeError('Found no NVIDIA driver on your system.')"
    source = f"import torch.distributed as dist\ndist.init_process_group()\nraise {words}\n"
    _, [fault] = find_in(tmp_path, source)
    assert " of 2 failed: RuntimeError: Found no NVIDIA driver on your system." in fault.saw
    path = tmp_path / "train.py"
    assert fault.fix == f"python -m playground run -n 2 --gpus 2 {path} simulates GPUs"


def test_what_is_wrong_in_a_training_is_in_the_document(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HEAD + BYPASS)
    document = json.loads(
        run_cli("doctor", "--json", "--seconds", ENOUGH, tmp_path / "train.py").out
    )
    assert [each["check"] for each in document["faults"]] == ["training"]
    mistakes = document["script"]["runs"][0]["mistakes"]
    assert [each["level"] for each in mistakes] == ["probably wrong"]


SAME_ORDER = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from helper import tell
dist.init_process_group()
torch.manual_seed(0)
data = torch.randn(48, 4)
samplers = {"train": DistributedSampler(data)}
loader = DataLoader(data, batch_size=4, sampler=samplers["train"])
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    total = 0.0
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if dist.get_rank() == 0:
        print(epoch, total)
"""


def test_what_a_run_has_measured_overrules_what_was_read(
    tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    (tmp_path / "helper.py").write_text("tell = print")
    (tmp_path / "train.py").write_text(SAME_ORDER)
    shown = run_cli("doctor", "--seconds", ENOUGH, "train.py")
    said = " ".join(shown.out.split())
    assert "set_epoch, missing: in its run, the samples come in the same order" in said
    assert said.endswith(
        "1 warning, missing: sampler, set_epoch, metrics over ranks; no error. "
        "What was not called was not looked at."
    )
