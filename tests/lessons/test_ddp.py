"""The DDP lab: what it reports of buckets, hooks, no_sync, Join and samplers, held against oracles
of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Worlds
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.lab import (
    DIFFER,
    HOOKS,
    ROUNDING,
    DDPRun,
    check,
    hooks,
    run_lab,
)
from playground.lessons.ddp.page import PARTS, LabSettings
from playground.lessons.mnist import Net
from playground.runtime import PlaygroundError
from playground.runtime.backends import BACKENDS
from playground.runtime.launcher.server import preload
from playground.training.averaging import buckets
from playground.training.settings import TrainingSettings

preload("playground.lessons.ddp.lab")

Lab = Callable[..., list[Any]]
SIZES = {name: param.nbytes for name, param in Net().named_parameters()}
"""Bytes of each parameter of Net, in the order of its layers."""


@pytest.fixture
def lab(world: Worlds, digits_folder: Path) -> Lab:
    """Run one part; its rows, which all ranks agree on."""

    def run(name: str, size: int, cap: float = 25.0, **training: Any) -> list[Any]:
        training = {"folder": digits_folder, "batch_size": 16, **training}
        settings = LabSettings(training=TrainingSettings(**training), parts=(name,), caps=(cap,))
        [rows], *others = world(size).run(run_lab, settings)
        assert all(theirs == [rows] for theirs in others)
        return rows

    return run


def cut(order: list[str], cap: float) -> list[list[str]]:
    """The oracle: gradients in the order in which they get ready, a bucket full once it holds its
    cap."""
    left = iter(order)
    tensors = [torch.empty(SIZES[name] // 4) for name in order]
    return [[next(left) for _ in bucket] for bucket in buckets(tensors, cap * 2**20)]


@pytest.mark.parametrize("size", [1, 3])
def test_buckets_are_what_ddp_is_known_to_build(size: int, lab: Lab) -> None:
    caps = [0.001, 0.02, 25.0]
    rows = [row for cap in caps for row in lab("buckets", size, cap)]
    order = [name for row in rows[1:6] for name in row.parameters]
    assert sorted(order) == sorted(SIZES)
    assert order.index("fc2.weight") < order.index("fc1.weight") < order.index("conv1.weight"), (
        "last layer first"
    )
    for cap in caps:
        first, *rebuilt = [row for row in rows if row.bucket_cap_mb == cap]
        assert first.backward == "1"
        assert (first.bytes, first.ready, sorted(first.parameters)) == (
            87_360,
            8,
            sorted(SIZES),
        )
        assert {row.backward for row in rebuilt} == {"2 …"}
        assert [row.parameters for row in rebuilt] == cut(order, cap)
        assert [row.bucket for row in rebuilt] == list(range(len(rebuilt)))
        assert all(row.bytes == sum(SIZES[name] for name in row.parameters) for row in rebuilt)
        ready = accumulate(len(row.parameters) for row in rebuilt)
        assert [row.ready for row in rebuilt] == list(ready), "each leaves at once"
    assert [row.bucket_cap_mb for row in rows] == [0.001] * 6 + [0.02] * 4 + [25.0] * 2


def test_hooks_send_less_and_err_more(lab: Lab) -> None:
    rows = {row.hook: row for row in lab("hooks", 3, 0.001)}
    assert list(rows) == ["none", "fp16", "bf16"]
    sent = {name: (row.sends, row.sent) for name, row in rows.items()}
    assert sent == {
        "none": ("float32", 87_360), "fp16": ("float16", 43_680), "bf16": ("bfloat16", 43_680),
    }  # fmt: skip
    assert [row.messages // rows["none"].messages for row in rows.values()] == [1, 1, 1]
    wrong = [row.gradient_rel for row in rows.values()]
    assert wrong == sorted(wrong)
    assert wrong[0] == 0
    assert 2**-14 < wrong[1] < 2**-9, "fp16 rounds to 11 bits"
    assert 2**-11 < wrong[2] < 2**-7, "bf16 rounds to 8 bits"
    apart = [row.parameters_rel for row in rows.values()]
    assert apart == sorted(apart)
    assert apart[0] == 0 < apart[1]
    assert all(2 < row.loss < 3 for row in rows.values()), "ten classes, hardly trained"


def keep(bucket: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def a_hook_that_averages_nothing(rank: int, size: int, folder: Path) -> None:
    """A new hook takes a function and an entry in the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HOOKS, "own", lambda state, bucket: keep(bucket))
        hooks(rank, size, LabSettings(training=TrainingSettings(folder=folder, batch_size=7)))


def test_a_hook_that_averages_nothing_is_found_out(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(
        PlaygroundError, match=r"with this hook replicas differ by up to .*: they must not at all"
    ):
        world(2).run(a_hook_that_averages_nothing, digits_folder)


def test_verdicts() -> None:
    """What a notebook that runs an experiment is given too."""
    for difference in (1e-9, float("nan")):
        with pytest.raises(
            PlaygroundError,
            match=f"after Join replicas differ by up to {difference}: they must not",
        ):
            check(difference, f"after Join {DIFFER}")
    check(1e-13, "{}", ROUNDING)


def test_no_sync_spares_messages_and_changes_nothing(lab: Lab) -> None:
    rows = lab("accumulation", 3, 0.002)
    assert [row.batches for row in rows] == [1, 4, 4]
    assert [row.messages for row in rows] == [5, 20, 5]
    assert rows[0].rel_error == 0
    assert all(row.rel_error < 1e-14 for row in rows)


def test_join_lets_ranks_be_done_at_different_times(lab: Lab) -> None:
    size = 3
    ranks = lab("uneven_inputs", size)
    assert [rank.batches for rank in ranks] == list(range(3, 3 + size))
    assert [rank.messages for rank in ranks] == [2 + size] * size, (
        "one bucket a step, answered by all"
    )
    assert [rank.difference for rank in ranks] == [0.0] * size


@pytest.mark.parametrize(
    ("size", "cap"), [(3, 0.02), pytest.param(4, 25.0, marks=pytest.mark.stress)]
)
def test_training_goes_on_from_a_checkpoint(size: int, cap: float, lab: Lab) -> None:
    without_momentum, whole = lab("checkpoint", size, cap)
    assert without_momentum.read == whole.read > 2 * sum(SIZES.values())
    assert (whole.loaded, whole.rel_error) == ("model, optimizer", 0)
    assert without_momentum.loaded == "model"
    assert without_momentum.rel_error > 1e-5


def watched_run(rank: int, size: int, folder: Path) -> list[str]:
    """What a run of the lab asks its device for."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            BACKENDS["gloo"],
            "use_deterministic_kernels",
            lambda: asked.append("deterministic kernels"),
        )
        DDPRun(LabSettings(training=TrainingSettings(folder=folder, batch_size=7)))
    return asked


def test_runs_that_are_compared_bit_by_bit_use_deterministic_kernels(
    world: Worlds, digits_folder: Path
) -> None:
    assert world(2).run(watched_run, digits_folder) == [["deterministic kernels"]] * 2


def test_who_gets_which_sample(lab: Lab) -> None:
    size = 3
    rows = lab("sampler", size, seed=5)
    ways = {row["sampler"]: [row[f"rank {rank}"] for rank in range(size)] for row in rows}
    samples = 10 if 10 % size else 11
    for rank in range(size):
        theirs = DistributedSampler(range(samples), size, rank, seed=5)
        assert (
            ways["no set_epoch, epoch 0"][rank]
            == ways["no set_epoch, epoch 1"][rank]
            == list(theirs)
        )
        theirs.set_epoch(1)
        assert ways["set_epoch(1)"][rank] == list(theirs)
        dropping = DistributedSampler(range(samples), size, rank, seed=5, drop_last=True)
        assert ways["drop_last"][rank] == list(dropping)
    assert ways["set_epoch(0)"] != ways["set_epoch(1)"]
    for row in rows:
        counts = Counter(place for mine in ways[row["sampler"]] for place in mine)
        assert row["doubled"] == sorted(place for place, count in counts.items() if count == 2)
        assert row["left_out"] == sorted(set(range(samples)) - set(counts))
    padding, rest = -samples % size, samples % size
    assert [len(row["doubled"]) for row in rows] == [padding] * 4 + [0, 0]
    assert [len(row["left_out"]) for row in rows] == [0] * 4 + [rest, 0]


def test_the_lab_shows_its_parts_in_order(run_cli: Callable[..., Any], data_dir: Path) -> None:
    parts = ["buckets", "accumulation", "sampler"]
    data = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 64, "--batch-size", 8)
    shown = run_cli("ddp", "--lab", "sampler,accumulation,buckets", *data)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0].startswith("ddp: gloo on cpu, 2 ranks x ")
    assert lines[2] == "lab: on the model net"
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in PARTS] == parts
    assert "Shown: the buckets that DDP built, " in shown.out
    assert "  no_sync but for the last        4         1 " in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lab", "everything"], "'everything' is not one of 'buckets', 'hooks', "),
        (["--lab", "--epochs", "2"], "--epochs is for training"),
        (["--lab", "--batch-size", "601"], "there are 600 samples to train on"),
    ],
)
def test_bad_input(
    words: list[str], message: str, run_cli: Callable[..., Any], data_dir: Path
) -> None:
    shown = run_cli("ddp", *words, "--dataset", "digits", "--data-dir", data_dir)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1
