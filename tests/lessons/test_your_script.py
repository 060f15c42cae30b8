"""The page "your own train.py": its two scripts are those that it shows, and print what it says."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import Fork, Run
from processes import ENOUGH, free_port, session_ends

from playground.base.remote import ROOT
from playground.tools.doctor.data_parallel.parts import Status
from playground.tools.doctor.data_parallel.plan import plan, plan_of_half

FOLDER = ROOT / "playground" / "lessons"
ONE, MANY = FOLDER / "train_on_one.py", FOLDER / "train_on_many.py"
PAGE = (FOLDER / "your_script.md").read_text(encoding="utf-8")


def block(language: str, words: str = "") -> str:
    """The block of this language that has these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    [wanted] = [each for each in found if words in each]
    return str(wanted)


def test_the_diff_is_that_of_the_two_scripts() -> None:
    before, after = (file.read_text(encoding="utf-8").splitlines() for file in (ONE, MANY))
    lines = difflib.unified_diff(before, after, ONE.name, MANY.name, n=1, lineterm="")
    assert block("diff") == "\n".join(lines) + "\n"


def statements(source: str) -> tuple[set[str], list[str]]:
    """The names that a script imports, and its other statements, without its docstring."""
    _, *body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {
        f"{getattr(node, 'module', '')} {each.name} {each.asname}"
        for node in imports
        for each in node.names
    }
    return names, [ast.unparse(node) for node in body if node not in imports]


def test_the_second_is_the_first_with_the_lines_of_doctor() -> None:
    found = plan(ONE.read_text(encoding="utf-8"), ONE.name)
    assert statements(found.after) == statements(MANY.read_text(encoding="utf-8"))
    assert plan_of_half(MANY) is None
    assert [part.name for part in found.parts if part.status is Status.UNKNOWN] == []
    table = re.findall(r"^\| (?!part|---)(.*?) \|", PAGE, re.MULTILINE)
    assert len(table) == len(found.parts)


def test_doctor_says_what_the_page_shows(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ONE.name).write_bytes(ONE.read_bytes())
    said = run_cli("doctor", ONE.name)
    shown = block("console", "doctor").partition("\n")[2]
    assert said.code == 1
    for piece in re.split(r"^…$", shown, flags=re.MULTILINE):
        assert piece.strip() in said.out


def test_it_prints_the_same_on_any_number_of_ranks(
    fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = []
    for size in ("1", "2", "4"):
        words = "run", "-n", size, str(MANY), "--checkpoint", f"{size}.pt"
        program = fork_program("playground", *words, OMP_NUM_THREADS="1")
        out, err = program.communicate(timeout=ENOUGH)
        assert (program.returncode, err) == (0, "")
        assert session_ends(program.pid)
        outputs.append(out)
    assert outputs == outputs[:1] * 3
    shown = block("console", "run -n 2").partition("\n")[2]
    digits = re.compile(r"\d")
    assert digits.sub("0", outputs[0]) == digits.sub("0", shown)


def test_the_script_of_one_process_runs_and_goes_on(
    fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, *parts = (
        ("run", "-n", "1", str(ONE), "--checkpoint", name, "--epochs", epochs)
        for name, epochs in (("whole.pt", "2"), ("parts.pt", "1"), ("parts.pt", "2"))
    )
    printed = []
    for words in (whole, *parts):
        program = fork_program("playground", *words)
        out, err = program.communicate(timeout=ENOUGH)
        assert (program.returncode, err) == (0, "")
        printed.append(out.splitlines())
    assert [len(lines) for lines in printed] == [2, 1, 1]
    assert printed[1] == printed[0][:1]
    assert printed[2][0].startswith("epoch 1: loss ")


def test_the_batch_script_starts_its_ranks(tmp_path: Path) -> None:
    script = block("bash").replace("29500", str(free_port())).replace("--nproc-per-node 8", "-n 2")
    script = script.replace("-n 2", "--nproc-per-node 2").replace(MANY.name, f"{MANY} --epochs 1")
    stand_ins = 'srun() { "$@"; }\nscontrol() { echo 127.0.0.1; }\n'
    torchrun = f'torchrun() {{ "{sys.executable}" -m torch.distributed.run "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euc", stand_ins + torchrun + script],
        env=os.environ | {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"},
        cwd=tmp_path, capture_output=True, text=True, timeout=ENOUGH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0: loss ")
    assert len(done.stdout.splitlines()) == 1
    assert re.findall(r"^#SBATCH --(\S+)=", block("bash"), re.MULTILINE) == [
        "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time",
    ]  # fmt: skip
