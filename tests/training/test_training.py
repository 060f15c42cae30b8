"""Training: N ranks equal one process, no sample is lost, replicas stay one. Real ranks on gloo."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from gpus import hold_the_gpu
from ranks import small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.mnist import Net
from playground.lessons.parameter_server.experiment import paced
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.pipeline.experiment import now as now_in_pipeline
from playground.lessons.sgd.lesson import average_gradients
from playground.measurement.interleave import timed
from playground.runtime import PlaygroundError, RankFailed, UsageError, device
from playground.runtime.backends import BACKENDS
from playground.runtime.remote import Remote, remote
from playground.testing import World
from playground.training import prepare
from playground.training.data import Images, partition_dataset, partition_test_set
from playground.training.grad_syncs import OF_GRADIENTS
from playground.training.history import History, now, summary
from playground.training.loop import identify, run_training, train
from playground.training.replicas import broadcast_parameters, find_largest_difference
from playground.training.results import Epoch, TrainingResult, replicas_verdict
from playground.training.settings import TrainingSettings
from playground.training.step import training_step
from playground.training.sync import GradSync, new_grad_sync

RUNGS = [name for name, *_ in OF_GRADIENTS]
SYNCS = [*RUNGS, "ddp"]
BY_HAND = Remote("general_loop", "train_by_hand")
WITH_DDP = remote("playground.training.loop:train_with_ddp")


def test_the_net_has_21840_parameters_and_gives_log_probabilities() -> None:
    net = Net().eval()
    assert sum(param.numel() for param in net.parameters()) == 21_840
    output = net(torch.zeros(3, 1, 28, 28))
    assert output.shape == (3, 10)
    torch.testing.assert_close(output.exp().sum(1), torch.ones(3))
    assert net(torch.zeros(0, 1, 28, 28)).shape == (0, 10)


def on_the_same_batches(folder: Path, batches: list[list[int]]) -> torch.Tensor:
    """The oracle: plain single-process SGD; the parameters after half of the batches and after
    all."""
    data, model = Images(folder, "train"), small_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history = []
    for step, batch in enumerate(batches, 1):
        images, labels = data[batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images.double()), labels).backward()
        optimizer.step()
        if step in (len(batches) // 2, len(batches)):
            history.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return torch.stack(history)


def which_samples(
    rank: int, size: int, folder: Path, samples: int, batch_size: int
) -> dict[str, Any]:
    """The positions, within the whole set, of what this rank trains on in each step of two epochs,
    and tests on."""
    train_set, _ = partition_dataset(Images(folder, "train", samples), batch_size)
    index, epochs = train_set.dataset.index.tolist(), range(2)
    steps = [[index[position] for position in step] for _ in epochs for step in train_set.sampler]
    tested = partition_test_set(Images(folder, "t10k"))
    return {
        "steps": steps,
        "lengths": [len(labels) for _, labels in train_set],
        "tested": tested.dataset.index.tolist(),
        "test_lengths": [len(labels) for _, labels in tested],
    }


def shared_steps(
    rank: int, size: int, folder: Path, samples: int, batch_size: int, sync: str
) -> list[list[float]]:
    """A few steps of SGD on this rank's shares; the parameters after each epoch, flat."""
    model = small_model(seed=rank)  # each rank its own: rank 0's must win
    if sync == "ddp":
        model = DistributedDataParallel(model)
    else:
        broadcast_parameters(model)
    averaging = new_grad_sync(sync, model, bucket_cap=1000) if sync in RUNGS else GradSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history = []
    train_set, _ = partition_dataset(Images(folder, "train", samples), batch_size)
    for _ in range(2):
        left = samples
        for images, labels in train_set:
            batch, left = min(batch_size, left), left - batch_size
            optimizer.zero_grad()
            output = model(images.double())
            loss = nn.functional.cross_entropy(output, labels, reduction="sum")
            (loss * size / batch).backward()
            averaging.after_backward()
            optimizer.step()
        history.append(
            torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()
        )
    return history


@pytest.mark.parametrize("sync", SYNCS)
def test_n_ranks_equal_one_process_on_the_whole_batch(
    sync: str, world: Worlds, digits_folder: Path
) -> None:
    """92 samples in batches of 20, two epochs: the last batch, 12, is smaller; 3 ranks share
    unequally."""
    shares = world(3).run(which_samples, digits_folder, 92, 20)
    batches = [[*chain(*parts)] for parts in zip(*(rank["steps"] for rank in shares), strict=True)]
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 12] * 2
    alone = on_the_same_batches(digits_folder, batches)
    together = world(3).run(shared_steps, digits_folder, 92, 20, sync)
    assert all(history == together[0] for history in together), "replicas differ"
    assert (alone - torch.tensor(together[0], dtype=torch.float64)).abs().max() < 1e-12


def test_no_sample_is_dropped_or_doubled(world: Worlds, digits_folder: Path) -> None:
    """98 samples in batches of 8 leave 2: of 3 ranks, one has nothing to do in the last step but
    must take it."""
    results = world(3).run(which_samples, digits_folder, 98, 8)
    for step in range(13):
        assert sum(result["lengths"][step] for result in results) == (8 if step < 12 else 2)
    for epoch in (slice(0, 13), slice(13, 26)):
        trained = [
            sample for result in results for step in result["steps"][epoch] for sample in step
        ]
        assert sorted(trained) == list(range(98))
    assert results[0]["steps"][:13] != results[0]["steps"][13:], (
        "every epoch has an order of its own"
    )
    tested = [sample for result in results for sample in result["tested"]]
    assert sorted(tested) == list(range(200))
    assert sum(sum(result["test_lengths"]) for result in results) == 200


def averaged_types(rank: int, size: int, sync: str) -> list[Any]:
    """Average gradients of several types and memory layouts."""
    shapes = {"a": (2, 3, 2, 2), "b": (), "c": (5,), "d": (0,)}
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    )
    model["c"] = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    for param in model.parameters():
        param.grad = torch.arange(param.numel(), dtype=param.dtype).view(param.shape) * (rank + 1)
    assert model["a"].grad is not None
    model["a"].grad = model["a"].grad.contiguous(memory_format=torch.channels_last)
    new_grad_sync(sync, model, bucket_cap=16).after_backward()
    return [
        (str(param.grad.dtype), param.grad.tolist())
        for param in model.parameters()
        if param.grad is not None
    ]


def test_ways_of_averaging_agree_on_any_type_and_layout(world: Worlds) -> None:
    one_by_one = world(3).run(averaged_types, "per-parameter")
    flat = world(3).run(averaged_types, "flat")
    assert one_by_one == flat
    assert flat[0] == flat[2]
    assert flat[0][1] == ("torch.float32", 0.0)
    assert flat[0][2] == ("torch.float64", [0.0, 2.0, 4.0, 6.0, 8.0])


def named_difference(rank: int, size: int, name: str, values: list[float]) -> tuple[float, str]:
    """What is found where the last rank has another value in one place of this parameter or
    buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1).double())
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("nothing", torch.empty(0))
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    tensor.detach().view(-1)[0] = values[rank == size - 1]
    return find_largest_difference(model)


@pytest.mark.parametrize(
    ("name", "values", "difference"),
    [
        ("1.running_mean", [0, 0.5], 0.5), ("1.num_batches_tracked", [2**60, 2**60 + 1], 1),
        ("mask", [1, 0], 1),
        ("0.bias", [0.0, -0.0], 5e-324), ("1.running_var", [1, 1], 0),
        ("2.weight", [1, torch.nan], torch.nan), ("0.bias", [torch.nan, torch.nan], 0),
    ],
)  # fmt: skip
def test_what_differs_is_named_buffers_too(
    name: str, values: list[float], difference: float, world: Worlds
) -> None:
    """Statistics of BatchNorm that each rank has of its own samples are no equal replicas."""
    found = world(3).run(named_difference, name, values)
    assert repr(found) == repr([(float(difference), name if difference else "")] * 3), (
        "NaN is not equal to itself"
    )


@pytest.mark.parametrize(("difference", "words"), [(0.5, r"0\.5"), (float("nan"), "nan")])
def test_a_run_whose_replicas_differ_says_where(difference: float, words: str) -> None:
    with pytest.raises(
        PlaygroundError,
        match=rf"^the replicas differ by up to {words}, in 1\.bias: they must not at all",
    ):
        replicas_verdict(difference, None, "1.bias")


def test_replicas_that_differ_are_an_error_unless_it_is_rounding() -> None:
    assert "bit-identical" in replicas_verdict(0.0, "ring")
    assert "differ by up to 1.0e-08" in replicas_verdict(1e-8, "tutorial-ring")
    for difference, all_reduce in (
        (1e-8, "ring"),
        (1e-8, None),
        (0.1, "tutorial-ring"),
        (float("nan"), "backend"),
    ):
        with pytest.raises(PlaygroundError, match="must not"):
            replicas_verdict(difference, all_reduce)


def broadcast_result(rank: int, size: int) -> list[list[float]]:
    """A model in channels_last, with buffers, that each rank has made otherwise."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    model[1].running_mean += rank
    broadcast_parameters(model)
    return [tensor.flatten().tolist() for tensor in model.state_dict().values()]


def test_parameters_and_buffers_come_from_rank_0(world: Worlds) -> None:
    results = world(3).run(broadcast_result)
    assert results[0] == results[1] == results[2]


def tutorial_s_loader(rank: int, size: int, cache: Path) -> tuple[int, list[int], int]:
    """The batch size, the length of each batch, and the tutorial's own count of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(prepare, "MIRRORS", ("file:///nowhere/",))
        train_set, bsz = partition_dataset()
    num_batches = ceil(len(train_set.dataset) / float(bsz))
    return bsz, [len(target) for data, target in train_set], num_batches


@pytest.mark.parametrize(("size", "sizes"), [(2, [64, 64]), (3, [43, 43, 42])])
def test_the_tutorial_s_partition_dataset(
    size: int, sizes: list[int], world: Worlds, data_dir: Path, digits_folder: Path, tmp_path: Path
) -> None:
    """`train_set, bsz = partition_dataset()`, where MNIST cannot be had: its default are the
    digits, then."""
    (tmp_path / "playground").symlink_to(data_dir)
    by_rank = world(size).run(tutorial_s_loader, tmp_path)
    assert [bsz for bsz, _, _ in by_rank] == sizes
    for bsz, batches, num_batches in by_rank:
        assert batches[:-1] == [bsz] * 4
        assert len(batches) == num_batches
    assert sum(sum(batches) for _, batches, _ in by_rank) == len(Images(digits_folder, "train"))


def dropout_masks(rank: int, size: int, folder: Path) -> list[float]:
    """What the first random numbers of training are on this rank."""
    torch.manual_seed(0)
    train_set, _ = partition_dataset(Images(folder, "train", 64), 16)
    test_set = partition_test_set(Images(folder, "t10k", 8))
    drawn: list[float] = []
    net = Net()
    net.conv2_drop.register_forward_hook(
        lambda module, args, output: drawn.append((output == 0).sum().item())
    )
    train(
        GradSync(net), train_set, test_set, TrainingSettings(folder=folder, epochs=1, batch_size=16)
    )
    return drawn


def test_dropout_masks_differ_between_ranks_and_not_between_runs(
    world: Worlds, digits_folder: Path
) -> None:
    first, second = world(2).run(dropout_masks, digits_folder)
    assert first != second
    assert [first, second] == world(2).run(dropout_masks, digits_folder)


def modes(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether dropout is on, in each forward of two epochs of two steps, and of a test in one
    batch."""
    train_set, _ = partition_dataset(Images(folder, "train", 32), 16)
    test_set, net, found = partition_test_set(Images(folder, "t10k", 8)), Net(), list[bool]()
    net.register_forward_hook(lambda module, args, output: found.append(module.training))
    train(
        GradSync(net), train_set, test_set, TrainingSettings(folder=folder, epochs=2, batch_size=16)
    )
    return found


def test_dropout_is_on_in_training_and_off_in_tests(world: Worlds, digits_folder: Path) -> None:
    assert world(2).run(modes, digits_folder) == [[True, True, False] * 2] * 2


def test_figures_are_those_of_all_ranks_samples() -> None:
    """Three ranks: of one, two and no samples to train on, and of four, two and one to test on."""
    trained = torch.tensor([[6.0, 1.0, 1.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    tested = torch.tensor([[1.0, 4.0], [2.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    assert summary(7, trained, tested, 0.5) == Epoch(
        epoch=7, loss=3.0, loss_per_rank=[6.0, 1.5, None], train_accuracy=2 / 3,
        test_accuracy=4 / 7, tested=7,
        seconds=0.5, samples_per_second=6.0,
    )  # fmt: skip


def test_a_step_returns_the_sum_of_its_losses() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [
        lambda value=value: model(torch.full((1, 1), value)).sum() for value in (1.0, 2.0, 4.0)
    ]
    total = training_step(optimizer, losses, GradSync(model))
    assert (total.item(), total.requires_grad, model.weight.item()) == (7.0, False, 1 - 0.5 * 7)


def start_from(rank: int, size: int, src: int) -> bool:
    """Whether this rank's model, after the broadcast, is that of `src`: each has its own, of any
    layout."""
    models = []
    for seed in (rank, src):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(3)
        )
        model.get_buffer("1.running_mean").fill_(seed)
        models.append(model)
    broadcast_parameters(models[0], src)
    pairs = zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("src", [0, 1])
def test_parameters_and_buffers_of_any_layout_are_broadcast(src: int, world: Worlds) -> None:
    assert world(2).run(start_from, src) == [True, True]


def train_in(world: World, run: Remote, folder: Path, **changes: Any) -> list[TrainingResult]:
    """What a function that trains returns on every rank."""
    settings = TrainingSettings(folder=folder, **{"limit": 500, "epochs": 2, "lr": 0.05, **changes})
    return world.run(run_training, run, settings)


def test_a_model_learns_and_every_way_of_averaging_learns_the_same(
    world: Worlds, digits_folder: Path
) -> None:
    train = partial(train_in, world(2), folder=digits_folder, limit=160, batch_size=32, lr=0.1)
    runs = {
        "per-parameter": train(BY_HAND),
        "flat": train(BY_HAND, sync="flat"),
        "ddp": train(WITH_DDP),
    }
    for first, second in runs.values():
        assert list(map(without_times, first.epochs)) == list(map(without_times, second.epochs))
        assert first.replicas_max_difference == 0.0
        assert first.epochs[-1].loss < first.epochs[0].loss - 0.02
        assert [epoch.tested for epoch in first.epochs] == [200] * 2
    losses = {sync: [epoch.loss for epoch in run[0].epochs] for sync, run in runs.items()}
    for sync in runs:
        assert losses[sync] == pytest.approx(losses["per-parameter"], rel=1e-4), sync


def test_by_hand_and_by_ddp_the_loss_is_the_same_where_shares_differ(
    world: Worlds, digits_folder: Path
) -> None:
    """On 3 ranks, whose shares of a batch are not equal, and of the last one, 10 samples, even less
    so."""
    by_hand, by_ddp = (
        train_in(world(3), run, digits_folder, limit=100, batch_size=30)
        for run in (BY_HAND, WITH_DDP)
    )
    for one, other in zip(by_hand, by_ddp, strict=True):
        assert one.replicas_max_difference == other.replicas_max_difference == 0.0
        for first, second in zip(one.epochs, other.epochs, strict=True):
            assert second.loss == pytest.approx(first.loss, rel=1e-5)
            assert second.loss_per_rank == pytest.approx(first.loss_per_rank, rel=1e-5)


def test_time_passes_until_the_device_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        BACKENDS["gloo"], "synchronize", lambda device: order.append("synchronized")
    )
    monkeypatch.setattr("time.perf_counter", lambda: order.append("read"))
    now(torch.device("cpu"))
    assert order == ["synchronized", "read"]


def without_times(epoch: Epoch) -> Epoch:
    return replace(epoch, seconds=0, samples_per_second=0)


def test_the_global_loss_is_the_mean_over_all_samples(world: Worlds, digits_folder: Path) -> None:
    """67 samples on 3 ranks fall as 23 + 22 + 22: the mean of the ranks' means would be another
    number."""
    [result, *_] = train_in(world(3), WITH_DDP, digits_folder, limit=67, epochs=1, batch_size=67)
    epoch = result.epochs[0]
    weighted = (
        sum(n * (loss or 0) for n, loss in zip([23, 22, 22], epoch.loss_per_rank, strict=True)) / 67
    )
    assert epoch.loss == pytest.approx(weighted, rel=1e-12)


def own_settings(rank: int, size: int, folder: Path) -> None:
    """Rank 2 was started with another learning rate."""
    settings = TrainingSettings(folder=folder / str(rank), lr=0.1 if rank == 2 else 0.01)
    run_training(rank, size, BY_HAND, settings)


def test_ranks_that_were_told_different_things_are_stopped(
    world: Worlds, digits_folder: Path
) -> None:
    with pytest.raises(UsageError, match=r"lr is 0.01 on rank 0 and 0.1 on rank 2"):
        world(3).run(own_settings, digits_folder)


def test_data_that_disappears_is_a_failure_with_a_name(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"failed: FileNotFoundError: .*train-images"):
        train_in(world(2), WITH_DDP, tmp_path)


def test_what_changes_a_number_is_part_of_what_a_run_is(digits_folder: Path) -> None:
    """It resumes from no other's snapshot."""
    settings, sync = TrainingSettings(folder=digits_folder), GradSync(Net())
    same: list[dict[str, Any]] = [{"epochs": 3}]
    other: list[dict[str, Any]] = [
        {"lr": 0.2}, {"momentum": 0.9}, {"seed": 1}, {"batch_size": 64}, {"limit": 100},
        {"accumulate": 2},
        {"sync": "flat"}, {"all_reduce": "ring"}, {"sync": "parameters", "sync_every": 2},
        {"dataset": "mnist"},
        {"sync": "bucketed", "bucket_cap": 2**20},
    ]  # fmt: skip
    own = identify(settings, sync)
    assert [change for change in same if identify(replace(settings, **change), sync) != own] == []
    assert [change for change in other if identify(replace(settings, **change), sync) == own] == []
    assert identify(settings, GradSync(small_model(0))) != own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync": "telepathy"}, "sync 'telepathy' is unknown"),
        ({"lr": float("nan")}, "lr nan: it must be a finite number"),
    ],
)
def test_settings_that_cannot_be_are_refused_wherever_they_are_made(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingSettings(folder=Path(), **change)


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


@pytest.mark.gpu
def test_training_ends_where_it_ends_on_gloo(pair: int, nccl: World, world: Worlds) -> None:
    """Within rounding: a convolution may add in another order."""
    for ours, theirs in zip(
        nccl.run(train_without_dropout), world(pair).run(train_without_dropout), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def take_times(rank: int, size: int, settings: ServerSettings) -> dict[str, float]:
    """How long an epoch, a stage's forward, a call and a slow worker's step take by their clocks,
    if each holds the GPU twice: multiples of holding it once."""
    found, unused = {}, cast(Any, ())
    history: Any = History(Net().to(device()), unused, unused)
    history.started = now(device())
    alone = hold_the_gpu()
    found["epoch"] = history.state()["seconds"] / alone
    started = now_in_pipeline()
    alone = hold_the_gpu()
    found["forward"] = (now_in_pipeline() - started) / alone
    called: list[float] = []
    seconds = timed(lambda: called.append(hold_the_gpu()))()
    found["call"] = seconds / called[0]
    dist.barrier()
    started = time.perf_counter()
    with paced(settings, dist.group.WORLD):
        alone = hold_the_gpu()
    return found | {"slow step": (time.perf_counter() - started) / alone}


@pytest.mark.gpu
@pytest.mark.stress
def test_times_are_taken_when_the_gpu_is_done(pair: int, nccl: World, digits_folder: Path) -> None:
    """The slow worker, the last, takes three times as long. Ranks that share a GPU take turns on
    it."""
    found = nccl.run(take_times, ServerSettings(folder=digits_folder, slow_worker=3.0))
    for name in ("epoch", "forward", "call"):
        assert min(times[name] for times in found) > 1.5, name
    assert found[-1]["slow step"] > 4
