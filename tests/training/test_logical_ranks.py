"""Logical ranks: no bit of training depends on how many processes carry it, nor on when their number changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings as options, strategies as st
from mortals import by_hand
from ranks import small_model
from torch import nn

from playground import launch
from playground.lessons.elastic.page import Kill
from playground.runtime import RankFailed, UsageError
from playground.survival.comparison import last_snapshot
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import load_all
from playground.testing import World
from playground.training.data import Images, training_images
from playground.training.loop import (
    carried_shards,
    partition_among_shards,
    partition_test_set_among_shards,
    prepare_and_train,
    sum_of_shards,
    sync_by_hand,
    train,
)
from playground.training.replicas import flat
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync

Worlds = Callable[..., World]
few = options(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture
def settings(digits_folder: Path) -> TrainingSettings:
    """Two epochs of five steps; the last batch is smaller than the others, and no batch is a multiple of 6."""
    return TrainingSettings(folder=digits_folder, epochs=2, batch_size=32, limit=150, lr=0.1)


def values_of(seed: int, number: int) -> list[torch.Tensor]:
    """One tensor per shard, of numbers so different in size that their sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(50, generator=generator) * 10 ** torch.randn(50, generator=generator) for _ in range(number)]


def sum_in_halves(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The oracle: the same tree, in one process."""
    middle = len(values) // 2
    return sum_in_halves(values[:middle]) + sum_in_halves(values[middle:]) if middle else values[0]


def sums_of_shards(rank: int, size: int, cases: list[tuple[int, int]]) -> list[list[float] | None]:
    """For each (seed, shards per rank) the sum of all shards."""
    sums = []
    for seed, shards in cases:
        values = values_of(seed, size * shards)
        own = {shard: values[shard] for shard in carried_shards(shards)}
        total = sum_of_shards(own, 0, size * shards, shards)
        sums.append(None if total is None else total.tolist())
    return sums


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_shards_are_added_along_one_tree_whoever_carries_them(size: int, world: Worlds) -> None:
    drawn = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 16 // size)), min_size=20, max_size=20)

    @few
    @given(drawn)
    def compare(cases: list[tuple[int, int]]) -> None:
        first, *others = world(size).run(sums_of_shards, cases)
        assert first == [sum_in_halves(values_of(seed, size * shards)).tolist() for seed, shards in cases]
        assert others == [[None] * len(cases)] * (size - 1)

    compare()


def test_the_order_of_addition_matters() -> None:
    """Else the test above would show nothing."""
    values = values_of(1, 16)
    assert not torch.equal(sum_in_halves(values), reduce(add, values))


def train_and_read_parameters(rank: int, size: int, settings: TrainingSettings) -> tuple[bytes, list[Any], float]:
    """The bits of all parameters after training, every epoch's figures without its times, and how replicas differ."""
    models: list[nn.Module] = []

    def keep_model(model: nn.Module, settings: TrainingSettings) -> GradSync:
        models.append(model)
        return sync_by_hand(model, settings)

    result = prepare_and_train(settings, keep_model)
    bits = flat(models[0].parameters()).numpy().tobytes()
    return bits, figures(result), result.replicas_max_difference


def figures(result: TrainingResult) -> list[Any]:
    """All of each epoch but its times."""
    return [replace(epoch, seconds=0.0, samples_per_second=0.0) for epoch in result.epochs]


@pytest.mark.parametrize(("logical_ranks", "sizes"), [(4, (4, 2, 1)), (6, (3, 2, 1))])
def test_no_bit_depends_on_the_number_of_ranks(
    logical_ranks: int, sizes: tuple[int, ...], settings: TrainingSettings, world: Worlds
) -> None:
    asked = replace(settings, logical_ranks=logical_ranks)
    first, *others = [world(size).run(train_and_read_parameters, asked)[0] for size in sizes]
    assert others == [first] * len(others)
    epochs, difference = first[1:]
    assert difference == 0.0
    assert epochs[0].loss != epochs[1].loss
    assert [len(epoch.loss_per_rank) for epoch in epochs] == [logical_ranks] * 2


def train_without_dropout(rank: int, size: int, settings: TrainingSettings) -> list[float]:
    """The parameters of a model without dropout, after training."""
    model = nn.Sequential(small_model(seed=0).float(), nn.LogSoftmax(dim=1))
    sync, shards = sync_by_hand(model, settings), settings.shards_per_rank(size)
    train_set = partition_among_shards(training_images(settings), settings.batch_size, settings.seed, 0, shards)
    train(sync, train_set, partition_test_set_among_shards(Images(settings.folder, "t10k"), shards), settings)
    return flat(model.parameters()).tolist()


def test_logical_ranks_train_the_model_that_as_many_ranks_train(settings: TrainingSettings, world: Worlds) -> None:
    """They add in another order than gloo does, and draw other dropout masks: without these, rounding is left."""
    logical = world(2).run(train_without_dropout, replace(settings, logical_ranks=4))[0]
    ordinary = world(4).run(train_without_dropout, settings)[0]
    torch.testing.assert_close(torch.tensor(logical), torch.tensor(ordinary), rtol=1e-6, atol=1e-6)


def random_numbers_of_shards(rank: int, size: int, settings: TrainingSettings) -> int:
    """How many different dropout masks a step of all this rank's shards draws, of the same samples."""
    masks = set()

    class Witness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if self.training:
                masks.add(tuple(torch.rand(5).tolist()))
            return (self.weight * images.mean()).log_softmax(0).expand(len(images), 10)

    sync, shards = sync_by_hand(Witness(), settings), settings.shards_per_rank(size)
    train_set = partition_among_shards(training_images(settings), settings.batch_size, settings.seed, 0, shards)
    train(sync, train_set, partition_test_set_among_shards(Images(settings.folder, "t10k"), shards), settings)
    return len(masks)


def test_every_shard_draws_its_own_random_numbers_in_every_step(settings: TrainingSettings, world: Worlds) -> None:
    assert world(1).run(random_numbers_of_shards, replace(settings, logical_ranks=4)) == [2 * 5 * 4]


def end_of(folder: Path) -> Any:
    """Model and optimizer in the last snapshot."""
    return load_all(last_snapshot(folder))[0].shared


def train_on(sizes: Sequence[int], settings: TrainingSettings, folder: Path) -> list[Any]:
    """Train with each number of ranks in turn, all but the last until a rank is killed, three steps on."""
    snapshots = SnapshotSettings(folder=folder, every=2)
    asked = replace(settings, logical_ranks=4, snapshots=snapshots)
    for number, size in enumerate(sizes[:-1], 1):
        with pytest.raises(RankFailed, match="killed"):
            launch(by_hand, size, args=(asked, [Kill(size - 1, 3 * number)]))
    return figures(launch(by_hand, sizes[-1], args=(asked, []))[0])


@pytest.mark.parametrize("sizes", [(4, 2), pytest.param((4, 2, 1, 4), marks=pytest.mark.stress)], ids=str)
def test_a_run_goes_on_with_other_numbers_of_ranks(
    sizes: tuple[int, ...], settings: TrainingSettings, tmp_path: Path
) -> None:
    undisturbed = train_on([1], settings, tmp_path / "undisturbed")
    assert train_on(sizes, settings, tmp_path / "killed") == undisturbed
    torch.testing.assert_close(end_of(tmp_path / "killed"), end_of(tmp_path / "undisturbed"), rtol=0, atol=0)


def test_another_number_of_logical_ranks_is_another_run(settings: TrainingSettings, tmp_path: Path) -> None:
    snapshots = SnapshotSettings(folder=tmp_path, every=2)
    launch(by_hand, 1, args=(replace(settings, epochs=1, logical_ranks=2, snapshots=snapshots), []))
    with pytest.raises(UsageError, match="logical_ranks is 2 in the snapshot and 3 here"):
        launch(by_hand, 1, args=(replace(settings, epochs=1, logical_ranks=3, snapshots=snapshots), []))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sgd", "-n", 4, "--logical-ranks", 6], "the number of ranks must be one of 1, 2, 3, 6"),
        (["sgd", "-n", 4, "--logical-ranks", 2], "the number of ranks must be one of 1, 2"),
        (["sgd", "--logical-ranks", 4, "--sync", "flat"], "--sync flat does not go with --logical-ranks"),
        (["sgd", "--logical-ranks", 4, "--all-reduce", "ring"], "--all-reduce ring does not go with --logical-ranks"),
        (["sgd", "--logical-ranks", 4, "--accumulate", 2], "--accumulate 2 does not go with --logical-ranks"),
        (["sgd", "--logical-ranks", 8, "--batch-size", 6], "--batch-size 6 for 8 ranks"),
        (["ddp", "--logical-ranks", 4], "--logical-ranks 4 does not go with DistributedDataParallel"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[Any], message: str, run_cli: Callable[..., Any]) -> None:
    refused = run_cli(*words, "--dataset", "digits")
    assert refused.code == 2
    assert message in refused.err
    assert refused.err.count("\n") == 1
    assert refused.out == ""


def test_the_command_shows_each_logical_rank(run_cli: Callable[..., Any], data_dir: Path) -> None:
    shown = run_cli(
        "sgd", "-n", 2, "--logical-ranks", 4, "--epochs", 1, "--limit", 64, "--dataset", "digits",
        "--data-dir", data_dir, "--wide",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    assert "logical ranks: 4, 2 on each rank, which computes on one thread" in shown.out
    assert [f"Rank {rank}, epoch 1: " in shown.out for rank in range(5)] == [True] * 4 + [False]
