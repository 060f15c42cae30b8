"""Who gets which sample: pure functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from playground.lessons.sgd import lesson as sgd
from playground.training.partition import DataPartitioner, Partition, share, shares


@settings(max_examples=25)
@given(st.integers(0, 2_000), st.integers(1, 64), st.integers(0, 10))
def test_equal_fractions_share_out_every_sample_once(samples: int, size: int, seed: int) -> None:
    data = range(samples)
    partitions = [DataPartitioner(data, [1 / size] * size, seed).use(rank) for rank in range(size)]
    assert sorted(i for partition in partitions for i in partition.index.tolist()) == list(data)
    lengths = [len(partition) for partition in partitions]
    assert max(lengths) - min(lengths) <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.integers(0, 3_000))
def test_any_fractions_are_met_and_disjoint(weights: list[float], samples: int) -> None:
    whole = sum(weights) or 1.0
    sizes = [weight / whole for weight in weights]
    partitions = DataPartitioner(range(samples), sizes).partitions
    taken = [i for partition in partitions for i in partition]
    assert len(taken) == len(set(taken))
    assert all(
        abs(len(part) - size * samples) <= 1 for part, size in zip(partitions, sizes, strict=True)
    )
    if sum(weights):
        assert len(taken) == samples


def test_the_tutorial_s_fractions_seven_ranks_and_three() -> None:
    assert [len(part) for part in DataPartitioner(range(1000)).partitions] == [700, 200, 100]
    sevenths = DataPartitioner(range(60_000), [1 / 7] * 7).partitions
    assert sum(map(len, sevenths)) == 60_000, "to round each part down would lose three"
    assert ([share(128, rank, 3) for rank in range(3)], shares(60_000, 128, 3)) == (
        [43, 43, 42],
        [20156, 20156, 19688],
    )


def test_a_partition_is_a_dataset() -> None:
    partition = Partition("abcdef", [5, 0, 3])
    assert (len(partition), partition[0], [partition[i] for i in range(3)]) == (
        3,
        "f",
        ["f", "a", "d"],
    )
    batched = Partition(torch.arange(6) * 10, [5, 0, 3])
    assert batched[[2, 1]].tolist() == [30, 0]


def test_the_seed_decides_and_shuffles() -> None:
    first, again, other = (
        DataPartitioner(range(100), [0.5, 0.5], seed).partitions for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first[0] != sorted(first[0])


@pytest.mark.parametrize("sizes", [[0.7, 0.4], [-0.1, 0.5], [float("nan")], [2.0]])
def test_fractions_that_are_none_are_refused(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match="must be fractions"):
        DataPartitioner(range(10), sizes)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(0, 500))
def test_every_global_batch_is_what_was_asked(samples: int, size: int, more: int) -> None:
    batch_size = size + more
    parts = shares(samples, batch_size, size)
    steps = -(-samples // batch_size)
    assert sum(parts) == samples
    for step in range(steps):
        batch = min(batch_size, samples - step * batch_size)
        held = [
            min(share(batch_size, r, size), parts[r] - step * share(batch_size, r, size))
            for r in range(size)
        ]
        assert sum(held) == batch
        assert min(held) >= 0


@pytest.mark.parametrize(
    "fractions", [[0.7, 0.2, 0.1], *([1 / size] * size for size in (1, 2, 4, 8))]
)
def test_the_lesson_and_the_machine_make_the_same_cut(fractions: list[float]) -> None:
    data = torch.arange(1000) * 10
    theirs, ours = sgd.DataPartitioner(data, fractions), DataPartitioner(data, fractions)
    assert theirs.partitions == ours.partitions
    for part in range(len(fractions)):
        batch = torch.tensor([3, 0])
        assert torch.equal(theirs.use(part)[batch], ours.use(part)[batch])
        assert len(theirs.use(part)) == len(ours.use(part))
    taken = [index for part in theirs.partitions for index in part]
    assert sorted(taken) == list(range(1000))


def test_the_lesson_gives_every_rank_as_many_samples() -> None:
    """Or one would wait for the others, which have no further batch."""
    for size in range(1, 65):
        partitioner = sgd.DataPartitioner(range(60_000), [1 / size] * size)
        assert len({len(part) for part in partitioner.partitions}) == 1
