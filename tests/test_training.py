"""Training: N ranks equal one process, no sample is lost, replicas stay one. Real ranks on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from playground.lessons import LESSONS
from playground.runtime import RankFailed, UsageError
from playground.runtime.remote import Remote, remote
from playground.testing import World
from playground.training.data import Images
from playground.training.grad_syncs import RUNGS
from playground.training.net import Net
from playground.training.results import Epoch, TrainingResult
from playground.training.runner import run_training
from playground.training.settings import TrainingSettings

Worlds = Callable[..., World]
SYNCS = [*RUNGS, "ddp"]
BY_HAND = remote("playground.training.loop:train_by_hand")
WITH_DDP = remote("playground.training.loop:train_with_ddp")


def test_the_net_has_21840_parameters_and_gives_log_probabilities() -> None:
    net = Net().eval()
    assert sum(param.numel() for param in net.parameters()) == 21_840
    output = net(torch.zeros(3, 1, 28, 28))
    assert output.shape == (3, 10)
    torch.testing.assert_close(output.exp().sum(1), torch.ones(3))
    assert net(torch.zeros(0, 1, 28, 28)).shape == (0, 10)


def on_the_same_batches(folder: Path, batches: list[list[int]]) -> torch.Tensor:
    """The oracle: plain single-process SGD; the parameters after half of the batches and after all."""
    data, model = Images(folder, "train"), ranks.small_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history = []
    for step, batch in enumerate(batches, 1):
        images, labels = data.__getitems__(batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images.double()), labels).backward()
        optimizer.step()
        if step in (len(batches) // 2, len(batches)):
            history.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return torch.stack(history)


@pytest.mark.parametrize(("size", "sync"), [(2, "flat"), (4, "overlapped"), *((3, sync) for sync in SYNCS)])
def test_n_ranks_equal_one_process_on_the_whole_batch(size: int, sync: str, world: Worlds, digits_folder: Path) -> None:
    """92 samples in batches of 20, two epochs: the last batch, 12, is smaller; 3 ranks share unequally."""
    shares = world(size).run(ranks.which_samples, digits_folder, 92, 20)
    batches = [[*chain(*parts)] for parts in zip(*(rank["steps"] for rank in shares), strict=True)]
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 12] * 2
    alone = on_the_same_batches(digits_folder, batches)
    together = world(size).run(ranks.shared_steps, digits_folder, 92, 20, sync)
    assert all(history == together[0] for history in together), "replicas differ"
    assert (alone - torch.tensor(together[0], dtype=torch.float64)).abs().max() < 1e-12


def one_batch(world: Worlds, size: int, folder: Path, samples: int, sync: str) -> torch.Tensor:
    histories = world(size).run(ranks.shared_steps, folder, samples, samples, sync)
    assert all(history == histories[0] for history in histories), "replicas differ"
    return torch.tensor(histories[0], dtype=torch.float64)


@pytest.mark.parametrize("sync", ["overlapped", "ddp"])
@pytest.mark.parametrize(("size", "samples"), [(2, 64), (3, 64), (4, 50), (8, 9)])
def test_one_batch_on_n_ranks_is_one_batch(
    size: int, samples: int, sync: str, world: Worlds, digits_folder: Path
) -> None:
    """Where one batch is the whole data, order does not matter, and N ranks must equal one to the last digits."""
    alone = one_batch(world, 1, digits_folder, samples, "per-parameter")
    together = one_batch(world, size, digits_folder, samples, sync)
    assert (alone - together).abs().max() < 1e-12
    assert (alone[0] - alone[1]).abs().max() > 1e-3, "nothing was learnt"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_no_sample_is_dropped_or_doubled(size: int, world: Worlds, digits_folder: Path) -> None:
    """101 samples in batches of 8 leave 5: with 8 ranks, three have nothing to do in the last step but must take it."""
    results = world(size).run(ranks.which_samples, digits_folder, 101, 8)
    for step in range(13):
        assert sum(result["lengths"][step] for result in results) == (8 if step < 12 else 5)
    for epoch in (slice(0, 13), slice(13, 26)):
        trained = [sample for result in results for step in result["steps"][epoch] for sample in step]
        assert sorted(trained) == list(range(101))
    assert results[0]["steps"][:13] != results[0]["steps"][13:], "every epoch has an order of its own"
    tested = [sample for result in results for sample in result["tested"]]
    assert sorted(tested) == list(range(200))
    assert sum(sum(result["test_lengths"]) for result in results) == 200


@pytest.mark.parametrize("sync", list(RUNGS)[1:])
def test_a_missing_gradient_counts_as_zero(sync: str, world: Worlds) -> None:
    for result in world(3).run(ranks.uneven_gradients, sync):
        assert result == {"all": [1.0, 1.0], "some": [4.0, 4.0], "nobody": [0.0, 0.0], "frozen": None}


def test_ways_of_averaging_agree_on_any_type_and_layout(world: Worlds) -> None:
    one_by_one = world(3).run(ranks.averaged_types, "per-parameter")
    flat = world(3).run(ranks.averaged_types, "flat")
    assert one_by_one == flat
    assert flat[0] == flat[2]
    assert flat[0][1] == ("torch.float32", 0.0)
    assert flat[0][2] == ("torch.float64", [0.0, 2.0, 4.0, 6.0, 8.0])


def test_parameters_and_buffers_come_from_rank_0(world: Worlds) -> None:
    results = world(3).run(ranks.broadcast_result)
    assert results[0] == results[1] == results[2]


def test_the_proof_of_equal_replicas_can_fail(world: Worlds) -> None:
    assert world(3).run(ranks.difference_after, "nothing") == [0.0] * 3
    assert world(3).run(ranks.difference_after, "drift") == pytest.approx([0.25] * 3)
    assert all(difference != difference for difference in world(3).run(ranks.difference_after, "nan"))


def test_dropout_masks_differ_between_ranks_and_not_between_runs(world: Worlds, digits_folder: Path) -> None:
    first, second = world(2).run(ranks.dropout_masks, digits_folder)
    assert first != second
    assert [first, second] == world(2).run(ranks.dropout_masks, digits_folder)


def train(world: World, run: Remote, folder: Path, **changes: Any) -> list[TrainingResult]:
    """What a function that trains returns on every rank."""
    settings = TrainingSettings(folder=folder, **{"limit": 500, "epochs": 2, "lr": 0.05, **changes})
    return world.run(run_training, run, settings)


def test_sgd_learns_and_every_way_of_averaging_learns_the_same(world: Worlds, digits_folder: Path) -> None:
    runs = {
        "sgd": train(world(2), LESSONS["sgd"].remote("run"), digits_folder, epochs=8),
        "flat": train(world(2), BY_HAND, digits_folder, epochs=8, sync="flat"),
        "per-parameter": train(world(2), BY_HAND, digits_folder, epochs=8, sync="per-parameter"),
        "ddp": train(world(2), LESSONS["ddp"].remote("run"), digits_folder, epochs=8),
        "ddp, general": train(world(2), WITH_DDP, digits_folder, epochs=8),
    }
    for first, second in runs.values():
        assert list(map(without_times, first.epochs)) == list(map(without_times, second.epochs))
        assert first.replicas_max_difference == 0.0
        assert first.epochs[-1].loss < first.epochs[0].loss - 0.05
        assert [epoch.tested for epoch in first.epochs] == [200] * 8
    losses = {sync: [epoch.loss for epoch in run[0].epochs] for sync, run in runs.items()}
    for sync in runs:
        assert losses[sync] == pytest.approx(losses["sgd"], rel=1e-4), sync


def without_times(epoch: Epoch) -> Epoch:
    return replace(epoch, seconds=0, samples_per_second=0)


@pytest.mark.parametrize("lesson", ["sgd", "ddp"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_training_in_any_world_is_reproducible(lesson: str, size: int, world: Worlds, digits_folder: Path) -> None:
    first, again = (
        train(world(size), LESSONS[lesson].remote("run"), digits_folder, limit=130, epochs=1) for _ in range(2)
    )
    assert first[0].replicas_max_difference == 0.0
    assert len(first[0].epochs[0].loss_per_rank) == size
    assert without_times(first[0].epochs[0]) == without_times(again[0].epochs[0])


def test_the_global_loss_is_the_mean_over_all_samples(world: Worlds, digits_folder: Path) -> None:
    """67 samples on 3 ranks fall as 23 + 22 + 22: the mean of the ranks' means would be another number."""
    run = LESSONS["sgd"].remote("run")
    [result, *_] = train(world(3), run, digits_folder, limit=67, epochs=1, batch_size=67)
    epoch = result.epochs[0]
    weighted = sum(n * (loss or 0) for n, loss in zip([23, 22, 22], epoch.loss_per_rank, strict=True)) / 67
    assert epoch.loss == pytest.approx(weighted, rel=1e-12)


def test_ranks_that_were_told_different_things_are_stopped(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"lr is 0.01 on rank 0 and 0.1 on rank 2"):
        world(3).run(ranks.own_settings, digits_folder)


def test_data_that_disappears_is_a_failure_with_a_name(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="FileNotFoundError"):
        train(world(2), LESSONS["sgd"].remote("run"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync": "telepathy"}, "sync 'telepathy' is unknown"),
        ({"all_reduce": "mail"}, "all_reduce 'mail' is unknown"),
        ({"loader": "slow"}, "loader 'slow' is unknown"),
        ({"epochs": 0}, "epochs 0: it must be at least 1"),
        ({"accumulate": -1}, "accumulate -1"),
        ({"lr": float("nan")}, "lr nan: it must be a finite number"),
        ({"sync_every": 2}, "--sync-every 2 is for parameters"),
    ],
)
def test_settings_that_cannot_be_are_refused_wherever_they_are_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingSettings(folder=Path(), **change)
