"""Training: N ranks equal one process, no sample is lost, replicas stay one. Real ranks on gloo."""

from __future__ import annotations

from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Worlds
from gpus import hold_the_gpu
from ranks import small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.mnist import Net
from playground.lessons.sgd.lesson import average_gradients
from playground.measurement.interleave import timed
from playground.testing import World
from playground.tools.bench.steps import replicas_verdict
from playground.training.data import Images, partition_dataset
from playground.training.grad_syncs import OF_GRADIENTS
from playground.training.replicas import broadcast_parameters, find_largest_difference
from playground.training.step import training_step
from playground.training.step_settings import StepSettings
from playground.training.sync import GradSync, new_grad_sync
from playground.world import PlaygroundError, UsageError, device

AVERAGING = [each.name for each in OF_GRADIENTS]
SYNCS = [*AVERAGING, "ddp"]


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
    """The positions, within the whole set, of what this rank trains on in each step of two
    epochs."""
    train_set, _ = partition_dataset(Images(folder, "train", samples), batch_size)
    index, epochs = train_set.dataset.index.tolist(), range(2)
    steps = [[index[position] for position in step] for _ in epochs for step in train_set.sampler]
    return {
        "steps": steps,
        "lengths": [len(labels) for _, labels in train_set],
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
    averaging = (
        new_grad_sync(sync, model, bucket_cap=1000) if sync in AVERAGING else GradSync(model)
    )
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


def tutorial_s_loader(rank: int, size: int, folder: Path) -> tuple[int, list[int], int]:
    """The batch size, the length of each batch, and the tutorial's own count of them."""
    train_set, bsz = partition_dataset(Images(folder, "train"))
    num_batches = ceil(len(train_set.dataset) / float(bsz))
    return bsz, [len(target) for data, target in train_set], num_batches


@pytest.mark.parametrize(("size", "sizes"), [(2, [64, 64]), (3, [43, 43, 42])])
def test_the_tutorial_s_partition_dataset(
    size: int, sizes: list[int], world: Worlds, digits_folder: Path
) -> None:
    """Parts of the digits, in batches of shares of 128."""
    by_rank = world(size).run(tutorial_s_loader, digits_folder)
    assert [bsz for bsz, _, _ in by_rank] == sizes
    for bsz, batches, num_batches in by_rank:
        assert batches[:-1] == [bsz] * 4
        assert len(batches) == num_batches
    assert sum(sum(batches) for _, batches, _ in by_rank) == len(Images(digits_folder, "train"))


def test_a_step_returns_its_loss() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = training_step(optimizer, lambda: model(torch.full((1, 1), 4.0)).sum(), GradSync(model))
    assert (loss.item(), loss.requires_grad, model.weight.item()) == (4.0, False, 1 - 0.5 * 4)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "telepathy"}, "model 'telepathy' is unknown"),
        ({"lr": float("nan")}, "lr nan: it must be a finite number"),
    ],
)
def test_settings_that_cannot_be_are_refused_wherever_they_are_made(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        StepSettings(folder=Path(), **change)


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


def take_time(rank: int, size: int) -> float:
    """How long a call takes by its clock, as a multiple of the time for which it holds the GPU."""
    called: list[float] = []
    return timed(lambda: called.append(hold_the_gpu()))() / called[0]


@pytest.mark.gpu
@pytest.mark.stress
def test_times_are_taken_when_the_gpu_is_done(pair: int, nccl: World) -> None:
    """Ranks that share a GPU take turns on it."""
    assert min(nccl.run(take_time)) > 1.5
