"""The same lessons on GPUs with nccl: `pytest -m gpu`, or `make gpu` for a table of every lesson
beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Start, Worlds
from processes import by_hand, free_port, session_ends, wait_for_a_snapshot
from ranks import all_reduce_in_group, all_reduce_large, go_wrong, several_at_once
from torch import nn

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.checkpoint.folder import SnapshotSettings, find_snapshots
from playground.checkpoint.snapshots import deserialise, serialise
from playground.lessons.data_parallel.machine import parallel_apply
from playground.lessons.elastic.comparison import compare
from playground.lessons.parameter_server.experiment import paced
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.pipeline.experiment import now
from playground.lessons.pipeline.page import EXACT
from playground.lessons.sgd.lesson import Net, average_gradients
from playground.measurement.interleave import timed
from playground.runtime import RankFailed, RankTimeout, device
from playground.runtime.backends import BACKENDS
from playground.runtime.backends.nccl import SHARES_A_GPU, format_version, nccl_version
from playground.testing import World
from playground.trace.analyse import match_messages
from playground.trace.record import RECEIVE, SEND
from playground.trace.record.run import read_recording
from playground.training.history import History, now as time_of
from playground.training.loop import train_by_hand
from playground.training.settings import TrainingSettings

pytestmark = pytest.mark.gpu

ENOUGH = 120.0
"""Seconds: CUDA and NCCL start cold."""
NET = 87_360
"""Bytes of the parameters of `Net`."""
PAIR_MISSING = "needs two ranks: there is one GPU, and an NCCL before 2.30, which cannot share it"


@pytest.fixture(scope="module")
def size() -> int:
    """As many ranks as there are GPUs; two on one where NCCL can share it."""
    gpus = torch.cuda.device_count()
    return 2 if gpus == 1 and nccl_version() >= SHARES_A_GPU else gpus


@pytest.fixture
def pair(size: int) -> int:
    """Two ranks or more: with one alone nothing travels."""
    if size < 2:
        pytest.skip(PAIR_MISSING)
    return size


@pytest.fixture
def nccl(world: Worlds, size: int) -> World:
    return world(size, backend="nccl", timeout=ENOUGH)


def shown(run_cli: Run, *words: Any) -> Any:
    """The document that a command prints, on nccl, having left cleanly."""
    outcome = run_cli(*words, "--backend", "nccl", "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def steps_of(document: Any) -> dict[str, Any]:
    return {step["name"]: step["ranks"] for step in document["steps"]}


def test_hello_names_what_runs(run_cli: Run, size: int) -> None:
    document = shown(run_cli, "hello", "-n", size)
    gpus = torch.cuda.device_count()
    assert document["device"] == "cuda"
    [ranks] = [step["ranks"] for step in document["steps"] if step["name"] == "what_is_here"]
    for rank, told in enumerate(ranks):
        assert told["device"] == f"cuda:{rank % gpus}"
        assert told["implementation"].startswith("ProcessGroupNCCL")
        assert told["nccl"] == format_version(nccl_version())
        assert torch.cuda.get_device_name(rank % gpus) in told["hardware"]
        assert told["ranks_there"] == len(range(rank % gpus, size, gpus))
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", told["driver"])


@pytest.mark.parametrize("lesson", ["p2p", "collectives", "allreduce", "rpc"])
def test_a_lesson_leaves_what_it_leaves_on_gloo(lesson: str, run_cli: Run, pair: int) -> None:
    here = steps_of(shown(run_cli, lesson, "-n", pair))
    there = steps_of(json.loads(run_cli(lesson, "-n", pair, "--json").out))
    assert here.keys() == there.keys()
    compared = [
        name for name, ranks in here.items() if not any("refused" in str(rank) for rank in ranks)
    ]
    assert len(compared) >= len(here) - 3
    for name in compared:
        for ours, theirs in zip(here[name], there[name], strict=True):
            assert ours.get("after") == theirs.get("after"), name
    if lesson == "collectives":  # operations that gloo does not have
        total, reduced = pair * (pair + 1) / 2, here["reduce_operations"][0]["after"]
        assert "monitored" in here["monitored_barrier"][0]["refused"]
        assert (reduced["AVG"], reduced["PREMUL_SUM"]) == (total / pair, 2 * total)
        assert not any(str(outcome).startswith("wrong") for outcome in reduced.values())


def test_no_kernel_is_launched_first_beside_a_receive(
    run_cli: Run, pair: int, data_dir: Path
) -> None:
    """A kernel is loaded when the device is idle: a stage that waits for its neighbour never is,
    nor is that one."""
    data = (
        "--dataset",
        "digits",
        "--data-dir",
        data_dir,
        "--batch-size",
        16,
        "--microbatches",
        4,
        "--steps",
        1,
    )
    document = shown(run_cli, "pipeline", "-n", 2, *data, "--schedule", "1f1b", "--timeout", 30)
    assert document["schedules"]["1f1b"]["gradient_difference"] <= EXACT


def train_without_dropout(rank: int, size: int) -> list[torch.Tensor]:
    """Ten steps of the lesson's model and averages, with momentum, on shares of random images."""
    torch.manual_seed(0)
    model = Net().to(device())
    model.eval()  # there are no masks, and no statistics of batches
    images, labels = torch.randn(10, 12, 1, 28, 28), torch.randint(10, (10, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for batch, wanted in zip(images, labels, strict=True):
        optimizer.zero_grad()
        F.nll_loss(
            model(batch[rank::size].to(device())), wanted[rank::size].to(device())
        ).backward()
        average_gradients(model)
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


def test_training_ends_where_it_ends_on_gloo(pair: int, nccl: World, world: Worlds) -> None:
    """Within rounding: a convolution may add in another order."""
    for ours, theirs in zip(
        nccl.run(train_without_dropout), world(pair).run(train_without_dropout), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_our_all_reduce(pair: int, nccl: World) -> None:
    names = sorted(ALGORITHMS)
    for numel in (0, 5, 1_000_003):
        assert nccl.run(all_reduce_large, numel, names) == [dict.fromkeys(names, True)] * pair


def test_our_all_reduce_in_a_subgroup(pair: int, nccl: World) -> None:
    names = sorted(ALGORITHMS)
    members = list(range(pair - pair % 2))
    expected = float(sum(rank + 1 for rank in members))
    for rank, after in enumerate(nccl.run(all_reduce_in_group, members, names)):
        assert after == dict.fromkeys(names, expected if rank in members else rank + 1.0)


def test_asynchronous_all_reduces_take_turns(pair: int, nccl: World) -> None:
    total = sum(range(pair + 1))
    for result in nccl.run(several_at_once, "ring"):
        assert result == [
            *(float(total + pair * length) for length in (1, 5, 100_000, 3)),
            float(total),
        ]


def ours_and_then_torch_s(rank: int, size: int) -> set[float]:
    """Asynchronous sums of ours, and one of torch's behind them, which some ranks come to later
    than others."""
    all_reduce, tensors = load_all_reduce("ring"), list(torch.ones(20, 1000, device=device()))
    works: list[Any] = [all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
    time.sleep(0.3 * rank)
    dist.all_reduce(tensors[0])
    assert all(work.wait() for work in works)
    return {value for tensor in tensors for value in tensor.tolist()}


def test_asynchronous_all_reduces_are_issued_at_once(pair: int, nccl: World) -> None:
    """What a communicator is given, it does in that order, which must be the same on all ranks."""
    assert nccl.run(ours_and_then_torch_s) == [{float(pair)}] * pair


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("sgd", "--sync", "overlapped", "--all-reduce", "auto", "--bucket-cap-mb", "0.02"),
            marks=pytest.mark.stress,
        ),
        pytest.param(
            ("sgd", "--sync", "overlapped", "--batch-size", "20", "--accumulate", "5"),
            marks=pytest.mark.stress,
        ),
        ("ddp",),
    ],
)
def test_training(run_cli: Run, size: int, words: tuple[str, ...], data_dir: Path) -> None:
    data = ("--dataset", "digits", "--data-dir", data_dir, "--epochs", 8, "--lr", 0.05)
    document = shown(run_cli, *words, "-n", size, *data)
    assert document["replicas_max_difference"] == 0.0
    assert document["epochs"][-1]["loss"] < document["epochs"][0]["loss"] - 0.1


@pytest.mark.parametrize(
    ("words", "name", "count"),
    [
        pytest.param(("sgd",), "all_reduce", 8, marks=pytest.mark.stress),
        (("sgd", "--sync", "overlapped", "--bucket-cap-mb", "0.02"), "all_reduce", 2),
        pytest.param(("ddp",), "bucket 0", 1, marks=pytest.mark.stress),
    ],
)
def test_a_recording_has_what_ranks_issued(
    words: tuple[Any, ...],
    name: str,
    count: int,
    run_cli: Run,
    size: int,
    data_dir: Path,
    tmp_path: Path,
) -> None:
    """Every part of every step, and every sum of gradients in it."""
    file = tmp_path / "run.playground"
    shown(
        run_cli,
        *words,
        "-n",
        size,
        "--dataset",
        "digits",
        "--data-dir",
        data_dir,
        "--epochs",
        2,
        "--see",
        file,
    )
    for rank in read_recording(file).ranks:
        names = Counter(event.name for event in rank.events)
        assert names["training step"] == names["forward"] == names["backward"] == names["step"] > 1
        assert names[name] >= count * names["step"]
        assert all(event.end < float("inf") for event in rank.events)


@pytest.mark.parametrize(
    "words",
    [
        ("allreduce",),
        pytest.param(
            ("sgd", "--all-reduce", "ring", "--dataset", "digits", "--epochs", 1),
            marks=pytest.mark.stress,
        ),
    ],
)
def test_a_recording_counts_each_message_once(
    words: tuple[object, ...], run_cli: Run, pair: int, data_dir: Path, tmp_path: Path
) -> None:
    """Each send with its receive."""
    file = tmp_path / "run.playground"
    data = ("--data-dir", data_dir) if "sgd" in words else ()
    shown(run_cli, *words, *data, "-n", pair, "--see", file)
    matched, unmatched = match_messages(read_recording(file))
    assert matched
    assert unmatched == []


@pytest.mark.stress
@pytest.mark.parametrize("newest", ["1", "0"])
def test_every_message_of_a_recording_is_over(
    newest: str, start_cli: Start, pair: int, tmp_path: Path
) -> None:
    """Those of batches, too, for which the older ProcessGroupNCCL gives no works of their own."""
    file = tmp_path / "run.playground"
    words = ("p2p", "--backend", "nccl", "-n", pair, "--see", file)
    run = start_cli(*words, TORCH_DIST_USE_NCCL2=newest)
    _, err = run.communicate(timeout=ENOUGH)
    assert run.returncode == 0, err
    assert "Exception ignored" not in err
    events = [*read_recording(file).events(SEND, RECEIVE)]
    assert {event.name for event in events} >= {"send", "recv", "isend", "irecv"}
    assert [event for event in events if event.end == float("inf")] == []


@pytest.mark.stress
def test_a_run_leaves_cleanly_and_nothing_behind(start_cli: Start, size: int) -> None:
    run = start_cli("collectives", "--backend", "nccl", "-n", size, "--json")
    out, err = run.communicate(timeout=ENOUGH)
    assert (run.returncode, json.loads(out)["world_size"]) == (0, size), err
    assert session_ends(run.pid)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "failed: ValueError: this rank has had enough"),
        pytest.param("kill", "was killed by SIGKILL", marks=pytest.mark.stress),
    ],
)
def test_the_rank_that_failed_is_named(how: str, reason: str, pair: int, nccl: World) -> None:
    with pytest.raises(RankFailed) as caught:
        nccl.run(go_wrong, how, pair - 1)
    assert str(caught.value).startswith(f"rank {pair - 1} of {pair} {reason}")


@pytest.mark.stress
def test_a_hang_is_reported_with_every_rank_s_place(pair: int, world: Worlds) -> None:
    with pytest.raises(RankTimeout, match=r"time\.sleep\(1000\)"):
        world(pair, backend="nccl", timeout=30).run(go_wrong, "hang", 1)


def uses_cuda(rank: int, size: int) -> bool:
    """Whether a rank on gloo, having worked, has touched a GPU."""
    tensor = torch.ones(1000)
    for name in ALGORITHMS:
        load_all_reduce(name)(tensor)
    dist.all_reduce(tensor)
    return torch.cuda.is_initialized()


def test_gloo_leaves_the_gpus_alone(world: Worlds) -> None:
    assert world(2).run(uses_cuda) == [False, False]
    assert BACKENDS["gloo"].check(2) == ""


def hold_the_gpu(seconds: float = 0.2) -> float:
    """Give the GPU work for about so long, and do not wait for it. Returns how long it really
    takes."""
    cycles = int(seconds * 1e9)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    alone = time.perf_counter() - started
    torch.cuda._sleep(cycles)
    return alone


def take_times(rank: int, size: int, settings: ServerSettings) -> dict[str, float]:
    """How long an epoch, a stage's forward, a call and a slow worker's step take by their clocks,
    if each holds the GPU twice: multiples of holding it once."""
    found, unused = {}, cast(Any, ())
    history: Any = History(Net().to(device()), unused, unused)
    history.started = time_of(device())
    alone = hold_the_gpu()
    found["epoch"] = history.state()["seconds"] / alone
    started = now()
    alone = hold_the_gpu()
    found["forward"] = (now() - started) / alone
    called: list[float] = []
    seconds = timed(lambda: called.append(hold_the_gpu()))()
    found["call"] = seconds / called[0]
    dist.barrier()
    started = time.perf_counter()
    with paced(settings, dist.group.WORLD):
        alone = hold_the_gpu()
    return found | {"slow step": (time.perf_counter() - started) / alone}


@pytest.mark.stress
def test_times_are_taken_when_the_gpu_is_done(pair: int, nccl: World, digits_folder: Path) -> None:
    """The slow worker, the last, takes three times as long. Ranks that share a GPU take turns on
    it."""
    found = nccl.run(take_times, ServerSettings(folder=digits_folder, slow_worker=3.0))
    for name in ("epoch", "forward", "call"):
        assert min(times[name] for times in found) > 1.5, name
    assert found[-1]["slow step"] > 4


def use_what_is_under_way(rank: int, size: int) -> dict[str, list[float]]:
    """What a snapshot's copy, and a replica in its thread, have of a tensor that the GPU has still
    to compute."""
    tensor = torch.empty(2, device=device())

    def copy() -> list[float]:
        values: list[float] = deserialise(serialise(tensor)).tolist()
        return values

    def compute() -> list[float]:
        [output] = parallel_apply([nn.ReLU()], [(tensor,)], None, [device()])
        values: list[float] = output.tolist()
        return values

    found = {}
    for use in (copy, compute):
        tensor.zero_()
        tensor += 1
        use()  # the kernels are loaded, the memory is there
        hold_the_gpu()
        tensor += 1
        found[use.__name__] = use()
    return found


def test_what_is_under_way_is_waited_for(size: int, nccl: World) -> None:
    assert nccl.run(use_what_is_under_way) == [{"copy": [2.0, 2.0], "compute": [2.0, 2.0]}] * size


@pytest.fixture
def training(data_dir: Path) -> tuple[Any, ...]:
    """Options of a training of ten steps an epoch."""
    return (
        "--dataset",
        "digits",
        "--data-dir",
        data_dir,
        "--limit",
        600,
        "--batch-size",
        64,
        "--snapshot-every",
        3,
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("sgd",), id="sgd"),
        pytest.param(("sgd", "--sync", "overlapped"), id="overlapped", marks=pytest.mark.stress),
        pytest.param(("ddp",), id="ddp", marks=pytest.mark.stress),
    ],
)
def test_training_ends_with_the_same_bits(
    words: tuple[Any, ...], training: Any, run_cli: Run, size: int, tmp_path: Path, world: Worlds
) -> None:
    """Once whole, and once in two parts, with all processes new in between: the last snapshots,
    byte by byte."""
    for name, epochs in (("whole", 2), ("parts", 1), ("parts", 2)):
        shown(
            run_cli,
            *words,
            "-n",
            size,
            *training,
            "--epochs",
            epochs,
            "--snapshots",
            tmp_path / name,
        )
    [found] = world(1, backend="nccl", timeout=ENOUGH).run(
        compare, tmp_path / "whole", tmp_path / "parts"
    )
    assert found["nbytes"] > NET
    assert found["differing"] == 0


def train_and_tell_seed(rank: int, size: int, settings: TrainingSettings) -> int:
    train_by_hand(rank, size, settings)
    return torch.cuda.initial_seed()


def test_new_ranks_draw_masks_of_their_own(
    pair: int, nccl: World, world: Worlds, digits_folder: Path, tmp_path: Path
) -> None:
    """Training begun by one rank goes on with more: none of them has the random numbers of a run's
    start."""
    settings = TrainingSettings(
        folder=digits_folder,
        epochs=1,
        batch_size=32,
        limit=150,
        snapshots=SnapshotSettings(folder=tmp_path, every=2),
    )
    first = settings.seed + 1
    assert world(1, backend="nccl", timeout=ENOUGH).run(train_and_tell_seed, settings) == [first]
    seeds = nccl.run(train_and_tell_seed, replace(settings, epochs=2))
    assert seeds[0] == first
    assert len({*seeds[1:]} - {*range(first, first + pair)}) == pair - 1


@pytest.fixture
def endless(data_dir: Path) -> tuple[Any, ...]:
    """A training that somebody has to end."""
    words = (
        "sgd",
        "--backend",
        "nccl",
        "--dataset",
        "digits",
        "--data-dir",
        data_dir,
        "--limit",
        600,
    )
    return (*words, "--epochs", 100_000, "--snapshot-every", 20)


@pytest.mark.stress
def test_training_that_is_asked_to_end_can_be_resumed(
    endless: Any, start_cli: Start, size: int, tmp_path: Path
) -> None:
    run = start_cli(*endless, "-n", size, "--snapshots", tmp_path)
    wait_for_a_snapshot(tmp_path, ENOUGH)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=ENOUGH)
    assert run.returncode == os.EX_TEMPFAIL, err
    assert f"preempted by SIGTERM after step {find_snapshots(tmp_path)[0][0]}" in err
    assert session_ends(run.pid)


@pytest.mark.stress
def test_a_rank_that_is_lost_is_named_by_the_others(
    endless: Any, start_cli: Start, pair: int, tmp_path: Path
) -> None:
    """They wait in the driver, for their GPU, and no connection that ends gets them out of
    there."""
    port = free_port()
    runs = [
        start_cli(
            *endless, "--snapshots", tmp_path, **by_hand(rank, pair, port), LOCAL_RANK=str(rank)
        )
        for rank in range(pair)
    ]
    wait_for_a_snapshot(tmp_path, ENOUGH)
    runs[-1].kill()
    for run in runs[:-1]:
        _, err = run.communicate(timeout=ENOUGH)
        assert run.returncode == 1, err
        assert f"of {pair} lost rank {pair - 1} (" in err
