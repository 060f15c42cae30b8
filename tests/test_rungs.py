"""The rungs of the ladder: whatever backward does, every parameter's gradient ends as the mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rung_ranks
import torch
from hypothesis import given, strategies as st

from playground.runtime import RankFailed, UsageError
from playground.testing import World
from playground.training.grad_syncs import RUNGS
from playground.training.gradients import buckets

Worlds = Callable[..., World]
NONE_SAFE = list(RUNGS)[1:]


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.float64]))), st.integers(1, 300))
def test_buckets_hold_every_tensor_once_and_are_full_no_earlier_than_they_must(
    shapes: list[tuple[int, torch.dtype]], cap: int
) -> None:
    tensors = [torch.empty(length, dtype=dtype) for length, dtype in shapes]
    cut = list(buckets(tensors, cap))
    assert sorted(id(tensor) for bucket in cut for tensor in bucket) == sorted(map(id, tensors))
    for dtype in (torch.float32, torch.float64):
        of_type = [bucket for bucket in cut if bucket[0].dtype == dtype]
        in_order = [tensor for tensor in tensors if tensor.dtype == dtype]
        assert [*map(id, in_order)] == [id(tensor) for bucket in of_type for tensor in bucket]
        for bucket in of_type:
            assert {tensor.dtype for tensor in bucket} == {dtype}
            assert sum(tensor.nbytes for tensor in bucket[:-1]) < cap
        assert all(sum(tensor.nbytes for tensor in bucket) >= cap for bucket in of_type[:-1])


@pytest.mark.parametrize("all_reduce", ["backend", "ring", "auto"])
@pytest.mark.parametrize("rung", NONE_SAFE)
def test_ranks_may_take_other_branches_in_another_order(rung: str, all_reduce: str, world: Worlds) -> None:
    """Gradients get ready in another order on every rank, some on no rank: no hang, and the mean all the same."""
    for steps in world(3, timeout=20).run(rung_ranks.branches, rung, all_reduce, ["abc", "cba", "b"]):
        assert all(step["off"] < 1e-15 for step in steps)
        assert all(step["zero"] == [] for step in steps)
    for steps in world(2, timeout=20).run(rung_ranks.branches, rung, all_reduce, ["a", "ab"]):
        assert all(step["off"] < 1e-15 for step in steps)
        assert all(step["zero"] == ["layers.c.weight", "layers.c.bias"] for step in steps)


def test_the_tutorials_loop_names_the_parameter_without_a_gradient(world: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 .*layers\.c\.weight has no gradient on rank 1"):
        world(3, timeout=20).run(rung_ranks.tutorial_without_a_gradient)


@pytest.mark.parametrize("cap", [1, 10_000, 25 * 2**20])
def test_overlapped_gradients_are_the_message_and_need_no_memory_beside_it(cap: int, world: Worlds) -> None:
    [result, _] = world(2).run(rung_ranks.memory_of_gradients, cap)
    assert result["same places"]
    assert result["bytes"] == result["gradients"] == sum(result["buckets"]) == 21_840 * 4
    assert len(result["buckets"]) == {1: 8, 10_000: 3, 25 * 2**20: 1}[cap]


def test_a_bucket_leaves_while_backward_goes_on(world: Worlds) -> None:
    [events, same] = world(2).run(rung_ranks.when_buckets_leave)
    assert events == same
    assert events[0].startswith("2.")
    assert events.index("leaves") < events.index("0.weight")
    assert events[-2:] == ["leaves", "backward is done"]


@pytest.mark.parametrize("rung", NONE_SAFE)
def test_gradients_add_up_under_no_sync(rung: str, world: Worlds) -> None:
    assert max(world(3).run(rung_ranks.two_backwards, rung, True)) < 1e-15


def test_a_second_backward_without_no_sync_is_an_error_with_a_remedy(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="put it under no_sync"):
        world(2).run(rung_ranks.two_backwards, "overlapped", False)


def run(world: Worlds, size: int, folder: Path, **settings: Any) -> dict[str, Any]:
    settings = {"limit": 96, "epochs": 2, "batch_size": 12, "lr": 0.1, **settings}
    results: list[dict[str, Any]] = world(size).run(rung_ranks.trained, folder, settings)
    assert all(result["parameters"] == results[0]["parameters"] for result in results)
    assert {result["difference"] for result in results} == {0.0}
    return results[0]


def max_abs_diff(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["parameters"], other["parameters"], strict=True))


@pytest.mark.parametrize("sync", [*RUNGS, "ddp"])
def test_accumulated_batches_are_one_larger_batch(sync: str, world: Worlds, digits_folder: Path) -> None:
    """Eight batches of 12, four at a time, take the two steps of two batches of 48."""
    accumulated = run(world, 3, digits_folder, sync=sync, accumulate=4)
    assert max_abs_diff(accumulated, run(world, 3, digits_folder, batch_size=48)) < 1e-12
    assert max_abs_diff(accumulated, run(world, 3, digits_folder)) > 1e-3


def test_accumulating_saves_messages(world: Worlds, digits_folder: Path) -> None:
    often = run(world, 2, digits_folder, sync="overlapped", all_reduce="recursive-doubling")
    seldom = run(world, 2, digits_folder, sync="overlapped", all_reduce="recursive-doubling", accumulate=4)
    assert (often["messages"], seldom["messages"]) == (16, 4)


def test_batches_that_would_be_left_over_are_refused(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(UsageError, match="accumulate 3 does not divide the 8 batches"):
        run(world, 2, digits_folder, accumulate=3)


@pytest.mark.parametrize("all_reduce", ["backend", "auto"])
def test_averaging_parameters_at_every_step_is_averaging_gradients(
    all_reduce: str, world: Worlds, digits_folder: Path
) -> None:
    """SGD's step is linear in the gradients, with momentum too. Every third step is another algorithm."""
    gradients = run(world, 3, digits_folder)
    assert max_abs_diff(run(world, 3, digits_folder, sync="parameters", all_reduce=all_reduce), gradients) < 1e-12
    seldom = run(world, 3, digits_folder, sync="parameters", all_reduce=all_reduce, sync_every=3)
    assert max_abs_diff(seldom, gradients) > 1e-3


@pytest.mark.parametrize("size", [1, 3])
def test_both_loaders_give_the_same_batches(size: int, world: Worlds, digits_folder: Path) -> None:
    """17 samples in batches of 8 leave one, so that of 3 ranks two have an empty batch."""
    whole = world(size).run(rung_ranks.fetched, digits_folder, "batch")
    single = world(size).run(rung_ranks.fetched, digits_folder, "per-sample")
    assert [len(rank[2][1]) for rank in whole] == [1, 0, 0][:size]
    for mine, theirs in zip(whole, single, strict=True):
        for (images, labels, dtype), (same_images, same_labels, same_dtype) in zip(mine, theirs, strict=True):
            assert (labels, dtype) == (same_labels, same_dtype)
            torch.testing.assert_close(torch.tensor(images), torch.tensor(same_images))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("width", r"0.weight is torch.float32 \[3, 4\] on rank 0 and torch.float32 \[5, 4\] on rank 2"),
        ("layer", r"1.weight is not there on rank 0 and torch.float32 \[3, 3\] on rank 2"),
    ],
)
def test_a_rank_with_another_model_is_named_before_anything_is_sent(how: str, message: str, world: Worlds) -> None:
    with pytest.raises(UsageError, match=message):
        world(3, timeout=20).run(rung_ranks.other_shapes, how)


@pytest.mark.parametrize("name", ["ring", "auto", "binary-tree"])
def test_asynchronous_all_reduces_take_turns(name: str, world: Worlds) -> None:
    for result in world(3, timeout=20).run(rung_ranks.several_at_once, name):
        assert result == [*(6.0 + 3 * length for length in (1, 5, 100_000, 3)), 6.0]


def test_an_asynchronous_all_reduce_fails_where_it_is_waited_for(world: Worlds) -> None:
    assert world(2).run(rung_ranks.failure_at_wait) == ["no more"] * 2
