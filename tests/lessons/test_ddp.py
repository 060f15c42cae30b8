"""The DDP lab: what it reports of buckets, hooks, no_sync, Join and samplers, held against oracles of our own."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.lab import (
    DIFFER,
    ROUNDING,
    DDPRun,
    build_model,
    build_run,
    check,
    check_buckets,
    checkpoint,
    hooks,
    run_lab,
)
from playground.lessons.ddp.page import HOOKS, PARTS, LabSettings
from playground.runtime import PlaygroundError, UsageError
from playground.runtime.backends import BACKENDS
from playground.runtime.launcher.server import preload
from playground.runtime.remote import Remote, remote
from playground.testing import World
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import TrainingSettings
from playground.training.sync import buckets

RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")

preload(RUN_LAB.module, *(part.code.module for part in PARTS.values()))

Worlds = Callable[..., World]
Lab = Callable[..., list[Any]]
SIZES = {name: param.nbytes for name, param in Net().named_parameters()}
"""Bytes of each parameter of Net, in the order of its layers."""


@pytest.fixture
def lab(run_cli: Callable[..., Any], data_dir: Path) -> Lab:
    """Run one part; its rows, which all ranks agree on."""

    def run(name: str, *words: Any) -> list[Any]:
        data = ["--dataset", "digits", "--data-dir", data_dir, *(["--batch-size", 16] if name != "sampler" else [])]
        shown = run_cli("ddp", "--lab", name, *data, *words, "--json")
        assert shown.code == 0, shown.err
        [step] = json.loads(shown.out)["steps"]
        assert step["name"] == name
        rows: list[Any] = step["ranks"][0]
        assert all(theirs == rows for theirs in step["ranks"])
        return rows

    return run


def cut(order: list[str], cap: float) -> list[list[str]]:
    """The oracle: gradients in the order in which they get ready, a bucket full once it holds its cap."""
    left = iter(order)
    tensors = [torch.empty(SIZES[name] // 4) for name in order]
    return [[next(left) for _ in bucket] for bucket in buckets(tensors, cap * 2**20)]


@pytest.mark.parametrize("size", [1, 3])
def test_buckets_are_what_ddp_is_known_to_build(size: int, lab: Lab) -> None:
    caps = [0.001, 0.02, 25.0]
    rows = lab("buckets", "-n", size, "--bucket-cap-mb", "0.001,0.02,25")
    order = [name for row in rows[1:6] for name in row["parameters"]]
    assert sorted(order) == sorted(SIZES)
    assert order.index("fc2.weight") < order.index("fc1.weight") < order.index("conv1.weight"), "last layer first"
    for cap in caps:
        first, *rebuilt = [row for row in rows if row["bucket_cap_mb"] == cap]
        assert first["backward"] == "1"
        assert (first["bytes"], first["ready"], sorted(first["parameters"])) == (87_360, 8, sorted(SIZES))
        assert {row["backward"] for row in rebuilt} == {"2 …"}
        assert [row["parameters"] for row in rebuilt] == cut(order, cap)
        assert [row["bucket"] for row in rebuilt] == list(range(len(rebuilt)))
        assert all(row["bytes"] == sum(SIZES[name] for name in row["parameters"]) for row in rebuilt)
        ready = accumulate(len(row["parameters"]) for row in rebuilt)
        assert [row["ready"] for row in rebuilt] == list(ready), "each leaves at once"
    assert [row["bucket_cap_mb"] for row in rows] == [0.001] * 6 + [0.02] * 4 + [25.0] * 2


def thin() -> int:
    """The oracle: bytes of the two thin matrices of each matrix of Net, of rank one, and of its vectors."""
    shapes = [(len(param), param.numel() // len(param)) for param in Net().parameters()]
    return sum(4 * (rows + columns if columns > 1 else rows) for rows, columns in shapes)


@pytest.mark.parametrize(("size", "caps"), [(1, "25"), (3, "0.001")])
def test_hooks_send_less_and_err_more(size: int, caps: str, lab: Lab) -> None:
    rows = {row.pop("hook"): row for row in lab("hooks", "-n", size, "--bucket-cap-mb", caps)}
    assert list(rows) == ["none", "fp16", "bf16", "powersgd"]
    sent = {name: (row["sends"], row["sent"]) for name, row in rows.items()}
    assert sent == {
        "none": ("float32", 87_360), "fp16": ("float16", 43_680), "bf16": ("bfloat16", 43_680),
        "powersgd": ("float32", thin()),
    }  # fmt: skip
    assert [row["messages"] // rows["none"]["messages"] for row in rows.values()] == [1, 1, 1, 3]
    wrong = [row["gradient_rel"] for row in rows.values()]
    assert wrong == sorted(wrong)
    assert wrong[0] < 2**-20, "rounding of float32"
    assert 2**-14 < wrong[1] < 2**-9, "fp16 rounds to 11 bits"
    assert 2**-11 < wrong[2] < 2**-7, "bf16 rounds to 8 bits"
    assert 0.1 < wrong[3] < 2
    assert (rows["none"]["parameters_max"], rows["none"]["parameters_rel"]) == (0, 0)
    apart = [row["parameters_max"] for row in rows.values()]
    assert apart == sorted(apart)
    assert apart[1] > 0
    assert all(2 < row["loss"] < 3 for row in rows.values()), "ten classes, hardly trained"


def small_lab(folder: Path, **changes: Any) -> LabSettings:
    """A lab with batches that cannot be shared out evenly."""
    defaults = {"bucket_caps": (25.0,), "comm_hooks": ("none",)}
    return LabSettings(training=TrainingSettings(folder=folder, batch_size=7), **{**defaults, **changes})


def a_hook_that_is_refused(rank: int, size: int, folder: Path, required: bool) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HOOKS, "fp8", replace(HOOKS["none"], name="fp8", dtype="float8_e4m3fn"))
        return hooks(rank, size, small_lab(folder, comm_hooks=("fp8",) if required else ("all",)))


def test_what_the_backend_refuses_is_reported(world: Worlds, digits_folder: Path) -> None:
    for plain, *_, refused in world(2).run(a_hook_that_is_refused, digits_folder, False):
        assert plain["hook"] == "none"
        assert refused["hook"] == "fp8"
        assert refused["sends"].startswith("refused here: ")
    with pytest.raises(UsageError, match="--comm-hook fp8: refused here") as caught:
        world(2).run(a_hook_that_is_refused, digits_folder, True)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def register_hook_that_averages_nothing(model: DistributedDataParallel) -> None:
    def keep(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda state, bucket: keep(bucket))


def a_hook_that_averages_nothing(rank: int, size: int, folder: Path) -> None:
    """A new hook takes a function and an entry in the table."""
    code = Remote(__name__, register_hook_that_averages_nothing.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HOOKS, "own", replace(HOOKS["none"], name="own", code=code))
        hooks(rank, size, small_lab(folder, comm_hooks=("own",)))


def test_a_hook_that_averages_nothing_is_found_out(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(PlaygroundError, match=r"with this hook replicas differ by up to .*: they must not at all"):
        world(2).run(a_hook_that_averages_nothing, digits_folder)


def exact_mean(rank: int, size: int, folder: Path) -> tuple[float, float, float]:
    """The largest difference between a run's exact mean and the gradient of one process with the whole batch, and what
    DDP leaves; and the largest number of that gradient."""
    training = TrainingSettings(folder=folder, batch_size=7)
    run = DDPRun(build_model(training.seed).double().eval(), training, 25)
    mean = run.exact_mean(1)
    images, labels = run.images.__getitems__(range(7, 14))
    alone = build_model(training.seed).double().eval()
    F.nll_loss(alone(images.double()), labels).backward()
    whole = flat(param.grad for param in alone.parameters())
    run.backward(1)
    assert len(run.batch(1)[1]) == share(7, rank, size)
    to_alone, to_ddp, largest = ((mean - whole), (mean - run.gradients()), whole)
    return to_alone.abs().max().item(), to_ddp.abs().max().item(), largest.abs().max().item()


def test_the_exact_mean_is_the_gradient_of_the_whole_batch(world: Worlds, digits_folder: Path) -> None:
    for to_alone, to_ddp, largest in world(3).run(exact_mean, digits_folder):
        assert max(to_alone, to_ddp) < 1e-14
        assert largest > 1e-3


def test_verdicts() -> None:
    """What a notebook that runs an experiment is given too."""
    for difference in (1e-9, float("nan")):
        with pytest.raises(PlaygroundError, match=f"after Join replicas differ by up to {difference}: they must not"):
            check(difference, f"after Join {DIFFER}")
    check(1e-13, "{}", ROUNDING)
    with pytest.raises(PlaygroundError, match="the ranks' buckets differ"):
        check_buckets([[{"parameters": [name]}] for name in ("weight", "bias")])


@pytest.mark.parametrize(("size", "many", "cap", "messages"), [(1, 2, 25, 1), (3, 3, 0.001, 5)])
def test_no_sync_spares_messages_and_changes_nothing(size: int, many: int, cap: float, messages: int, lab: Lab) -> None:
    cap = 2 * cap if cap < 1 else cap  # in float64 each gradient has twice the bytes
    rows = lab("accumulation", "-n", size, "--accumulate", many, "--bucket-cap-mb", cap)
    assert [row["batches"] for row in rows] == [1, many, many]
    assert [row["messages"] for row in rows] == [messages, many * messages, messages]
    assert (rows[0]["max_error"], rows[0]["rel_error"]) == (0, 0)
    assert all(row["rel_error"] < 1e-14 for row in rows)


@pytest.mark.parametrize("size", [1, 3])
def test_join_lets_ranks_be_done_at_different_times(size: int, lab: Lab) -> None:
    ranks = lab("uneven_inputs", "-n", size)
    assert [rank["batches"] for rank in ranks] == list(range(3, 3 + size))
    assert [rank["steps"] for rank in ranks] == list(range(3, 3 + size))
    assert [rank["messages"] for rank in ranks] == [2 + size] * size, "one bucket a step, answered by all"
    assert [rank["difference"] for rank in ranks] == [0.0] * size
    assert [rank["early_end"] for rank in ranks] == [3] * size
    assert [rank["error"] != "none: no rank had to wait" for rank in ranks] == [size > 1] * size


@pytest.mark.parametrize(("size", "cap"), [(3, "0.02"), pytest.param(4, "25", marks=pytest.mark.stress)])
def test_training_goes_on_from_a_checkpoint(size: int, cap: str, lab: Lab) -> None:
    without_momentum, whole = lab("checkpoint", "-n", size, "--bucket-cap-mb", cap)
    assert without_momentum["read"] == whole["read"] > 2 * sum(SIZES.values())
    assert (whole["loaded"], whole["max_error"], whole["rel_error"]) == ("model, optimizer", 0, 0)
    assert without_momentum["loaded"] == "model"
    assert without_momentum["max_error"] > 1e-5


def checkpoint_in(rank: int, size: int, folder: Path, place: Path, seen: bool) -> list[str]:
    """What is left in `place`, where the checkpoint was. Rank 1 sees it there, or does not, as on another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        if rank == 1 and not seen:
            patch.setattr(Path, "exists", lambda path: False)
        assert checkpoint(rank, size, small_lab(folder))
    dist.barrier()
    return [path.name for path in place.glob("playground-*")]


def test_a_checkpoint_must_be_seen_by_all_and_is_removed(world: Worlds, digits_folder: Path, tmp_path: Path) -> None:
    assert world(2).run(checkpoint_in, digits_folder, tmp_path, True) == [[], []]
    with pytest.raises(UsageError, match=rf"^checkpoint: not all ranks see {tmp_path}/.*: set TMPDIR to a folder that"):
        world(2).run(checkpoint_in, digits_folder, tmp_path, False)


def watched_run(rank: int, size: int, folder: Path) -> int:
    """How often a run of the lab asks its device for deterministic kernels."""
    asked: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKENDS["gloo"], "use_deterministic_kernels", lambda: asked.append(None))
        build_run(small_lab(folder))
    return len(asked)


def test_runs_that_are_compared_bit_by_bit_use_deterministic_kernels(world: Worlds, digits_folder: Path) -> None:
    assert world(2).run(watched_run, digits_folder) == [1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_who_gets_which_sample(size: int, lab: Lab) -> None:
    rows = lab("sampler", "-n", size, "--seed", 5)
    ways = {row["sampler"]: [row[f"rank {rank}"] for rank in range(size)] for row in rows}
    samples = 10 if 10 % size else 11
    for rank in range(size):
        theirs = DistributedSampler(range(samples), size, rank, seed=5)
        assert ways["no set_epoch, epoch 0"][rank] == ways["no set_epoch, epoch 1"][rank] == list(theirs)
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
    shown = run_cli("ddp", "--lab", "--dataset", "digits", "--data-dir", data_dir, "--limit", 64, "--batch-size", 8)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0].startswith("ddp: gloo on cpu, 2 ranks x ")
    assert lines[2] == "lab: on the model net"
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in PARTS] == list(PARTS)
    assert "Shown: the buckets that DDP built, " in shown.out
    assert "  no_sync but for the last        4         1 " in shown.out


def lab_settings(folder: Path, **changes: Any) -> LabSettings:
    return LabSettings(training=TrainingSettings(folder=folder, limit=32, batch_size=8, seed=1), **changes)


def own_caps(rank: int, size: int, settings: LabSettings) -> None:
    """Every rank was asked for a bucket cap of its own."""
    run_lab(rank, size, replace(settings, bucket_caps=(1.0 + rank,)))


def test_ranks_that_were_asked_for_different_things_are_stopped(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"caps is .*1.0.* on rank 0 and .*2.0.* on rank 1"):
        world(2).run(own_caps, lab_settings(digits_folder, lab=("sampler",)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bucket-cap-mb", "1,-5"], "-5.0 is not in the range"),
        (["--comm-hook", "fp8"], "'fp8' is none of none, fp16, bf16, powersgd, all"),
        (["--lab", "everything"], "'everything' is none of buckets, hooks, "),
        (["--lab", "--epochs", "2"], "--epochs is for training"),
        (["--lab", "hooks", "--accumulate", "2"], "--accumulate changes nothing in hooks"),
        (["--lab", "--batch-size", "601"], "there are 600 samples to train on"),
        (["--lab", "accumulation", "--accumulate", "257"], "the lab adds up 256 at most"),
    ],
)
def test_bad_input(words: list[str], message: str, run_cli: Callable[..., Any], data_dir: Path) -> None:
    shown = run_cli("ddp", *words, "--dataset", "digits", "--data-dir", data_dir)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1
