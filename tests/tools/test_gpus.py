"""`--gpus N`: scripts, lessons and `play` on GPUs that are not there. How such a run ends and what
it tells is as without. The GPUs of the tests' own process are not used."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import Run, Save, Start
from gpus import NONE
from processes import ENOUGH, session_ends
from programs import Outcome

from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
LIMIT = 3 * ENOUGH
SAID = "playground: {} simulated GPUs: computed by the CPU, no measure of speed"
HEAD = """
import os, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
total = torch.full((2,), rank + 1.0, device="cuda")
dist.all_reduce(total)
"""
TELLS = (
    HEAD
    + """
line = sys.stdin.readline() if rank == 0 else ""
properties = torch.cuda.get_device_properties(rank)
print(total.tolist(), total.device, torch.cuda.device_count(), properties.total_memory >> 30, line)
dist.destroy_process_group()
"""
)
LIBRARIES = (
    HEAD
    + """
torch.cuda.mem_get_info()
lines = open("/proc/self/maps").read().split()
opened = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
          if os.path.islink(f"/proc/self/fd/{name}")]
print(*sorted({each for each in lines if "libcuda.so" in each or "libnvidia-ml" in each}))
print(*[each for each in opened if each.startswith("/dev/nvidia")])
"""
)
FAILS_ONCE = (
    HEAD
    + """
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("not this time")
print("restarts:", os.environ["TORCHELASTIC_RESTART_COUNT"], total.tolist())
dist.destroy_process_group()
"""
)
WAITS = (
    HEAD
    + """
work = dist.all_reduce(total, async_op=True)
if "wait" in sys.argv:
    work.wait()
print(total.tolist())
work.wait()
torch.cuda.synchronize()
dist.destroy_process_group()
"""
)
STANDS = (
    HEAD
    + """
print("ready", flush=True)
time.sleep(1000)
"""
)


@pytest.fixture
def run_on(start_cli: Start) -> Callable[..., Outcome]:
    """`run_on(words…)`: how a command ends that begins without a GPU."""

    def run(*words: object, **environ: str) -> Outcome:
        process = start_cli(*words, **NONE | environ)
        out, err = process.communicate(timeout=LIMIT)
        assert session_ends(process.pid)
        return Outcome(process.returncode, out, err)

    return run


def test_a_script_sees_them_and_their_memory(run_on: Run, save: Save) -> None:
    ran = run_on("run", "-n", 2, "--gpus", 3, "--gpu-memory", "80G", save(TELLS))
    assert ran.code == 0, ran.err
    assert ran.err.startswith(f"{SAID.format(3)}\n")
    lines = [f"[3.0, 3.0] cuda:{rank} 3 80" for rank in (0, 1)]
    assert sorted(line.rstrip() for line in ran.out.splitlines() if line.strip()) == lines


def test_no_library_and_no_device_of_a_real_gpu_is_opened(
    run_on: Run, save: Save, tmp_path: Path
) -> None:
    """Not even one that is found first by name."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / name).write_text("a real driver's")
    script = save(LIBRARIES)
    words = ("run", "-n", 1, "--gpus", 1, "--output", "first", script)
    ran = run_on(*words, LD_LIBRARY_PATH=str(tmp_path))
    assert ran.code == 0, ran.err
    libraries, devices = ran.out.split("\n")[:2]
    assert len(libraries.split()) == 1
    assert re.search(r"/simulated-gpu/torch-[^/]+/libcuda\.so\.1$", libraries)
    assert devices == ""


def test_a_failure_a_restart_and_a_recording_are_as_without(
    run_on: Run, save: Save, tmp_path: Path
) -> None:
    words = ("--gpus", 2, "--profile", "--see", "run.txt", save(FAILS_ONCE))
    ran = run_on("run", "-n", 2, "--restarts", 1, *words)
    assert ran.code == 0, ran.err
    assert ran.out.count("restarts: 1 [3.0, 3.0]") == 2
    assert "not this time" in ran.err
    assert "all_reduce" in ran.err + ran.out
    assert "2 events" in (tmp_path / "run.txt").read_text()
    assert "2 ranks on nccl, cuda" in (tmp_path / "run.txt").read_text()
    ran = run_on("run", "-n", 2, *words[:2], words[-1])
    assert ran.code == 1
    assert "rank 1 of 2 failed: ValueError: not this time" in ran.err


WRONG = {
    "one GPU for all": (
        HEAD.replace("torch.cuda.set_device(rank)", "").replace('"cuda", rank', '"cuda", 0'),
        "Duplicate GPU detected",
    ),
    "a CPU tensor": (
        HEAD + "dist.all_reduce(torch.ones(2))",
        "No backend type associated with device type cpu: nccl takes tensors on GPUs: move it",
    ),
    "two devices": (
        HEAD + "total + torch.ones(2)",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:",
    ),
    "another rank's GPU": (
        HEAD + "total + torch.ones(2, device='cuda:0')",
        "this rank owns cuda:1; the text names cuda:0 at ",
    ),
    "other shapes": (
        HEAD + "dist.all_reduce(torch.ones(2 + rank, device='cuda')); torch.cuda.synchronize()",
        "pass tensors of the same shape on all ranks of the group",
    ),
}


@pytest.mark.stress
@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_on_gpus_is_told(run_on: Run, save: Save, fault: str) -> None:
    script, said = WRONG[fault]
    ran = run_on("run", "-n", 2, "--gpus", 2, "--timeout", 15, save(script))
    assert (ran.code, ran.out) == (1, "")
    assert said in ran.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [(("--check", "strict"), 1, 1), ((), 0, 1), (("--check", "strict", "wait"), 0, 0)],
    ids=["strict", "certain", "strict and right"],
)
def test_a_missing_wait_fails_a_strict_run_alone(
    words: tuple[str, ...], code: int, told: int, run_on: Run, save: Save
) -> None:
    options = [word for word in words if word != "wait"]
    script = [save(WAITS), *words[len(options) :]]
    ran = run_on("run", "-n", 2, "--gpus", 2, *options, *script)
    assert (ran.code, ran.err.count("To fix it")) == (code, told), ran.err  # of both ranks
    assert ran.out.count("[6.0, 6.0]" if not told else "[3.0, 3.0]") == 2


@pytest.mark.stress
@pytest.mark.parametrize(("mode", "fails"), [("strict", True), ("certain", False)])
def test_under_torchrun_rank_0_fails_for_a_missing_wait(mode: str, fails: bool, save: Save) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "playground", "run", "--gpus", "2", "--check", mode, save(WAITS)]
    ran = subprocess.run(
        [*torchrun, *words], env=os.environ | NONE, capture_output=True, text=True,
        timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (ran.returncode != 0) == fails, ran.stderr
    assert ran.stderr.count("a wait is missing") == 2


@pytest.mark.stress
def test_ctrl_c_ends_it(start_cli: Start, save: Save) -> None:
    process = start_cli("run", "-n", 2, "--gpus", 2, save(STANDS), **NONE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert err.split("\n")[0] == SAID.format(2)
    assert err.endswith("\nplayground: interrupted\n")
    assert session_ends(process.pid)


def test_a_lesson_takes_the_backend_of_gpus(run_on: Run) -> None:
    ran = run_on("collectives", "-n", 2, "--gpus", 2)
    assert ran.code == 0, ran.err
    assert ran.err.startswith(SAID.format(2))
    refused = run_on("collectives", "-n", 2, "--gpus", 2, "--backend", "gloo")
    assert refused.code == 2
    assert refused.err == (
        "playground: --gpus has no effect with --backend gloo: it is for --backend nccl\n"
    )


@pytest.mark.stress
def test_cells_run_on_them(start_cli: Start) -> None:
    words = [sys.executable, "-m", "playground", "play", "-n", "2", "--gpus", "2"]
    cell = "x = torch.tensor([10.0 ** rank], device='cuda'); dist.all_reduce(x); x\n"
    ran = subprocess.run(
        words, input=cell, env=os.environ | NONE, capture_output=True, text=True, timeout=LIMIT
    )
    assert ran.returncode == 0, ran.stderr
    assert "tensor([11.], device='cuda:1')" in ran.stdout


@pytest.mark.stress
def test_under_torchrun_each_process_starts_again(save: Save) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "playground", "run", "--gpus", "2", save(TELLS)]
    ran = subprocess.run(
        [*torchrun, *words], env=os.environ | NONE, capture_output=True, text=True,
        timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("[3.0, 3.0] cuda:") == 2
    assert ran.stderr.count(SAID.format(2)) == 1


def test_ranks_of_several_hosts_have_none(run_on: Run, save: Save) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "first.host", "MASTER_PORT": "1234"}
    ran = run_on("run", "--gpus", 2, save(TELLS), **place, LOCAL_WORLD_SIZE="1")
    assert ran.code == 2
    assert ran.err.startswith("playground: --gpus 2 with ranks on several hosts: ")


def test_without_a_compiler_it_is_one_line(run_on: Run, save: Save, tmp_path: Path) -> None:
    python = Path(sys.executable).parent
    assert not shutil.which("g++", path=str(python))
    ran = run_on(
        "run", "--gpus", 2, save(TELLS), PATH=str(python), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("playground: simulated GPUs are compiled with g++: sudo apt-get")
    assert ran.err.count("\n") == 1


SCRIPT = """
import os, sys
from playground.ui.gpus import start_again
from playground.base.errors import UsageError
try:
    start_again(dict(os.environ))
except UsageError as error:
    print(error)
"""


def test_a_python_that_does_not_load_them_is_started_again_once(save: Save) -> None:
    command = [sys.executable, save(SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("--gpus: this Python does not load what LD_PRELOAD names")
    assert ran.stdout.count("\n") == 1


def test_a_process_that_has_pytorch_cannot_begin_with_them(
    run_cli: Run, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "torch" in sys.modules
    monkeypatch.setenv(GPUS, "")
    ran = run_cli("run", "--gpus", 2, save(TELLS))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("playground: --gpus: this process has imported PyTorch")
