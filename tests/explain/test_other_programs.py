"""Programs as others write them, whose communication is measured, delayed and recorded at once:
they print what they print without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures import Run

from playground.world.launcher import fork_client

FOLDER = Path(__file__).parents[1] / "tools" / "ecosystem"
ON_FOUR = ("hsdp", "mesh")
PROGRAMS = (
    "amp", "averaged_model", "checkpoint", "collectives", "compiled_collectives", "ddp",
    "ddp_options", "dtensor", "fsdp1", "fsdp2", "fsdp2_options", "functional", "groups", "hooks",
    "join", "local_sgd", "objects", "own_hook", "pipelining", "sequence_parallel",
    "tensor_parallel", "workers", "zero", *ON_FOUR,
)  # fmt: skip
"""Programs of torch alone, on two ranks or on four."""
OFTEN = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint",
)  # fmt: skip
"""What they import."""


@pytest.mark.stress
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_stays_as_it_is(
    name: str, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_client.preload(*OFTEN)
    script, size = FOLDER / f"{name}.py", 4 if name in ON_FOUR else 2
    more = ["--profile", "cost.json", "--link", 1, "--see", "see.playground"]
    found: list[list[str]] = []
    for options in ([], more):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        monkeypatch.chdir(folder)
        outcome = run_cli("run", "-n", size, *options, script)
        assert outcome.code == 0, outcome.err
        found.append(sorted(outcome.out.splitlines()))
    assert found[0] == found[1] != []
    assert Path("cost.json").stat().st_size > 0


COMPILED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
graphs = []
def keep(graph, inputs):
    graphs.append([node.name for node in graph.graph.nodes])
    return graph.forward
@torch.compile(backend=keep)
def find_loss(model, inputs):
    return model(inputs).square().mean()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(2):
    find_loss(model, torch.ones(2, 4)).backward()
find_loss(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.ones(3, 4)).backward()
from torch._dynamo.utils import counters
broken = sum(counters["graph_break"].values())
print(dist.get_rank(), counters["frames"]["ok"], broken, graphs)
"""


OPTIONS: list[tuple[Any, ...]] = [(), ("--profile",), ("--link", 1), ("--see", "run.json")]


def test_the_compiler_makes_what_it_makes_without(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would trace whatever function of Python is called while a compiled one runs, ours too."""
    fork_client.preload("torch._dynamo")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(COMPILED)
    found = [run_cli("run", "-n", 2, *options, "train.py") for options in OPTIONS]
    for each in found:
        assert each.code == 0, each.err
    without, *others = (sorted(each.out.splitlines()) for each in found)
    assert len(without) == 2
    assert others == [without] * 3
