"""The same lessons on GPUs with nccl: `pytest -m gpu`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from playground.algorithms import ALGORITHMS
from playground.runtime.devices import SHARES_A_GPU, nccl_version
from playground.testing import World
from playground.training.rungs import RUNGS

pytestmark = pytest.mark.gpu

Run = Callable[..., Any]
Worlds = Callable[..., World]


@pytest.fixture(scope="module")
def size() -> int:
    """As many ranks as there are GPUs; two on one where NCCL can share it."""
    gpus = torch.cuda.device_count()
    return 2 if gpus == 1 and nccl_version() >= SHARES_A_GPU else gpus


def nccl(run_cli: Run, *words: Any) -> Any:
    shown = run_cli(*words, "--backend", "nccl", "--json")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_hello(run_cli: Run, size: int) -> None:
    document = nccl(run_cli, "hello", "-n", size)
    assert document["device"] == "cuda"
    assert [rank["device"] for rank in document["steps"][0]["ranks"]] == [
        f"cuda:{rank % torch.cuda.device_count()}" for rank in range(size)
    ]


def test_p2p(run_cli: Run, size: int) -> None:
    if size < 2:
        pytest.skip("one GPU, and an NCCL that cannot share it between two ranks")
    steps = {step["name"]: step["ranks"] for step in nccl(run_cli, "p2p", "-n", size)["steps"]}
    for step in ("blocking", "immediate"):
        assert [rank["after"] for rank in steps[step]] == [1.0, 1.0] + [0.0] * (size - 2)
    assert all("recv" in rank["refused"] for rank in steps["any_source"])
    assert steps["ring"][0]["after"] == size


def test_collectives(run_cli: Run, size: int) -> None:
    steps = {step["name"]: step["ranks"] for step in nccl(run_cli, "collectives", "-n", size)["steps"]}
    everyone = [rank + 1.0 for rank in range(size)]
    assert [rank["after"] for rank in steps["all_reduce"]] == [sum(everyone)] * size
    assert [rank["after"] for rank in steps["all_gather"]] == [everyone] * size
    assert [rank["after"] for rank in steps["reduce_scatter"]] == [sum(everyone) * (rank + 1) for rank in range(size)]
    assert "refused" in steps["monitored_barrier"][0]
    reduced = steps["reduce_operations"][0]["after"]
    assert reduced["AVG"] == sum(everyone) / size
    assert reduced["PREMUL_SUM"] == 2 * sum(everyone)
    assert not any(str(outcome).startswith("wrong") for outcome in reduced.values())


def test_our_all_reduce(size: int, world: Worlds) -> None:
    if size < 2:
        pytest.skip("one GPU, and an NCCL that cannot share it between two ranks")
    names = sorted(ALGORITHMS)
    for numel in (0, 1, 5, 1_000_003):
        right = world(size, backend="nccl").run(ranks.all_reduce_large, numel, names)
        assert right == [dict.fromkeys(names, True)] * size


@pytest.mark.parametrize(
    "words",
    [
        *[("sgd", "--sync", sync) for sync in (*RUNGS, "parameters")],
        ("sgd", "--all-reduce", "ring"),
        ("sgd", "--sync", "overlapped", "--all-reduce", "auto", "--bucket-cap-mb", "0.02"),
        ("sgd", "--sync", "overlapped", "--batch-size", "20", "--accumulate", "5"),
        ("ddp",),
    ],
)
def test_training(run_cli: Run, size: int, words: tuple[str, ...], data_dir: Path) -> None:
    data = ("--dataset", "digits", "--data-dir", data_dir, "--epochs", 8, "--lr", 0.05)
    document = nccl(run_cli, *words, "-n", size, *data)
    assert document["replicas_max_difference"] == 0.0
    assert document["epochs"][-1]["loss"] < document["epochs"][0]["loss"] - 0.1


def test_more_ranks_than_an_old_nccl_allows(run_cli: Run) -> None:
    if nccl_version() >= SHARES_A_GPU:
        pytest.skip("this NCCL shares a GPU")
    shown = run_cli("hello", "--backend", "nccl", "-n", torch.cuda.device_count() + 1)
    assert (shown.code, shown.out) == (2, "")
    assert "wants a GPU for each rank" in shown.err
