"""`--gpu-memory`: what was alive on a simulated GPU when it held most, by line of the script."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from fixtures import Run, Save, Start
from gpus import COLD, NONE
from programs import Outcome

from playground.explain.memory.peaks import Peak, Row
from playground.explain.memory.report import memory_texts
from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
layers = (nn.Linear(512, 512, bias=False) for _ in range(8))
model = nn.Sequential(*layers).cuda()
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
for step in range(3):
    x = torch.ones(1024 * (rank + 1), 512, device="cuda")
    loss = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
print("peak", torch.cuda.max_memory_allocated() >> 20)
dist.destroy_process_group()
"""
LINES = {line.partition("#")[0]: number for number, line in enumerate(SCRIPT.splitlines(), 1)}
WEIGHTS = 8.0
"""MiB of all parameters."""


def line_of(start: str) -> str:
    return next(f"train.py:{number}" for line, number in LINES.items() if start in line)


@pytest.fixture
def run_on(start_cli: Start) -> Callable[..., Outcome]:
    """`run_on(words…)`: how a command ends that begins without a GPU."""

    def run(*words: object) -> Outcome:
        process = start_cli(*words, **NONE)
        out, err = process.communicate(timeout=COLD)
        return Outcome(process.returncode, out, err)

    return run


def read_rows(text: str) -> dict[tuple[str, str], float]:
    """MiB by line and kind."""
    found = re.findall(r"^ +(\S+:\d+|no line) +(\w+) +\d+ +([\d.,]+)$", text, re.MULTILINE)
    return {(where, kind): float(mib.replace(",", "")) for where, kind, mib in found}


def test_the_lines_and_kinds_of_what_was_alive(run_on: Run, save: Save) -> None:
    ran = run_on("run", "-n", 2, "--gpus", 2, "--gpu-memory", "1G", save(SCRIPT, "train.py"))
    assert ran.code == 0, ran.err
    rows = read_rows(ran.err)
    assert rows[line_of("model ="), "parameters"] == WEIGHTS
    assert rows[line_of("optimizer.step"), "optimizer"] == 2 * WEIGHTS
    gradients = sum(mib for (_, kind), mib in rows.items() if kind == "gradients")
    assert gradients >= WEIGHTS
    inputs = 1024 * 2 * 512 * 4 / 2**20
    assert rows[line_of("x ="), "other"] == inputs
    assert rows[line_of("loss = "), "activations"] >= 7 * inputs
    most = max(int(each) for each in re.findall(r"peak (\d+)", ran.out))
    assert sum(rows.values()) == pytest.approx(most, abs=1)
    assert re.search(r"\ncuda:1 of rank 1 held most in train\.py:\d+: tensors of ", ran.err)
    assert "\ncuda:0 of rank 0 held " in ran.err


def test_what_did_not_fit_is_said_with_its_line(run_on: Run, save: Save) -> None:
    script = "import torch\nkept = torch.ones(2**20, device='cuda')\n"
    script += "more = torch.ones(2**28, device='cuda')\n"
    ran = run_on("run", "-n", 1, "--gpus", 1, "--gpu-memory", "64M", save(script, "train.py"))
    assert ran.code == 1
    said = "cuda:0 of rank 0 had no room for 1 GiB more in train.py:3. Tensors of 4 MiB were alive:"
    assert said in " ".join(ran.err.split())
    assert read_rows(ran.err) == {("train.py:2", "other"): 4.0}
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB" in ran.err


def test_nothing_is_said_unless_memory_is_asked_for(run_on: Run, save: Save) -> None:
    ran = run_on("run", "-n", 1, "--gpus", 1, save("import torch\ntorch.ones(9, device='cuda')\n"))
    assert (ran.code, ran.err.count("\n")) == (0, 1)


def test_where_something_did_not_fit_comes_first() -> None:
    def peak(rank: int, nbytes: int, lacking: int) -> Peak:
        rows = tuple(Row(f"train.py:{line}", "other", 1, 1 << 20) for line in range(20))
        return Peak(rank, rank, 1 << 30, nbytes, 1 << 20, "train.py:1", lacking, rows)

    texts = memory_texts([peak(0, 2 << 20, 0), peak(1, 1 << 20, 4 << 20), peak(2, 3 << 20, 0)])
    words = [text for text in texts if isinstance(text, str)]
    assert words[1].startswith("cuda:1 of rank 1 had no room for 4 MiB more in train.py:1. ")
    assert words[2] == "and 8 rows more: 8 MiB"
    assert words[-1] == "The 2 other GPUs held 2 MiB to 3 MiB at most."
