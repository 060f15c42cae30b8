"""Our synchronised batch norm over N ranks is batch norm over the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import difference, worked
from torch import nn

from playground.lessons.prove.batch_norm import AllReduceSum, SyncBatchNorm, convert_sync_batchnorm
from playground.runtime import device
from playground.runtime.errors import PlaygroundError
from playground.testing import World

Worlds = Callable[..., World]


def normalised(rank: int, size: int, shares: list[int], shape: list[int], like: dict[str, object]) -> dict[str, float]:
    """Two steps of a BatchNorm made with `like` over the whole batch, and of ours over this rank's share: by what the
    outputs, the gradients, the running statistics, and the outputs outside training differ."""
    torch.manual_seed(0)
    kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)]
    whole = kind(3, **like).to(device(), torch.float64)
    for param in whole.parameters():
        nn.init.uniform_(param, 0.5, 2)
    ours = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(whole)))[0]
    mine, differences = slice(sum(shares[:rank]), sum(shares[: rank + 1])), {}
    for step in ("first", "second"):
        inputs = (7 + 3 * torch.randn(sum(shares), 3, *shape, dtype=torch.float64)).to(device())
        factors = torch.rand_like(inputs)
        outputs, gradients = worked(whole, inputs, factors)
        our_outputs, our_gradients = worked(ours, inputs[mine], factors[mine])
        differences[f"{step} output"] = difference(our_outputs, outputs[mine])
        differences[f"{step} gradient of input"] = difference(our_gradients.pop(0), gradients.pop(0)[mine])
        for ours_of, theirs in zip(our_gradients, gradients, strict=True):
            dist.all_reduce(ours_of)
            differences[f"{step} gradient of {len(differences)}"] = difference(ours_of, theirs)
    for (name, buffer), theirs in zip(ours.named_buffers(), whole.buffers(), strict=True):
        differences[name] = difference(buffer.double(), theirs.double())
    if whole.track_running_stats:
        differences["outside training"] = difference(ours.eval()(inputs[mine]), whole.eval()(inputs)[mine])
    assert type(ours) is SyncBatchNorm
    return differences


@pytest.mark.parametrize("shares", [[8], [5, 0, 2]], ids=str)
@pytest.mark.parametrize(
    ("shape", "like"),
    [([4, 5], {}), ([], {"momentum": None}), ([2, 2], {"affine": False, "track_running_stats": False})],
    ids=["2d", "1d, cumulative", "bare"],
)
def test_our_batch_norm_over_n_ranks_is_batch_norm(
    shares: list[int], shape: list[int], like: dict[str, Any], world: Worlds
) -> None:
    for differences in world(len(shares)).run(normalised, shares, shape, like):
        assert len(differences) == (4 if like.get("affine") is False else 4 + 4 + 3 + 1)
        assert max(differences.values()) <= 1e-12, differences


def half_precision(rank: int, size: int) -> dict[str, object]:
    inputs = torch.full((300, 1), 400.0 + rank, dtype=torch.float16)  # their sum is beyond float16
    output = SyncBatchNorm(1)(inputs)
    return {"type": str(output.dtype), "values": output.unique().tolist()}


def gradients_of_gradients(rank: int, size: int) -> bool:
    torch.manual_seed(0)
    numbers = torch.randn(3, dtype=torch.float64, requires_grad=True)
    cubes = AllReduceSum.apply(numbers**3)
    [slope] = torch.autograd.grad((cubes**2).sum(), numbers, create_graph=True)
    [curve] = torch.autograd.grad(slope.sum(), numbers)
    # With x, y, … on the ranks: N losses (x³ + y³ + …)², so by x it is 6N x² (x³ + y³ + …); here all are equal.
    slopes_right = torch.allclose(slope, 6 * size**2 * numbers**5)
    return slopes_right and torch.allclose(curve, 30 * size**2 * numbers**4)


def one_value(rank: int, size: int) -> None:
    SyncBatchNorm(2)(torch.zeros(int(rank == 1), 2))


def far_from_zero(rank: int, size: int) -> float:
    """float32 numbers near 10,000 that vary by 1: how far what comes out of ours is from float64's right answer."""
    torch.manual_seed(0)
    inputs = 10_000 + torch.randn(size * 50, 2)
    right = nn.BatchNorm1d(2).double()(inputs.double())
    return difference(SyncBatchNorm(2)(inputs[rank * 50 : rank * 50 + 50]).double(), right[rank * 50 : rank * 50 + 50])


def test_our_batch_norm_s_arithmetic(world: Worlds) -> None:
    assert max(world(2).run(far_from_zero)) < 0.01
    assert world(2).run(half_precision) == [
        {"type": "torch.float16", "values": [-1.0]},
        {"type": "torch.float16", "values": [1.0]},
    ]
    assert world(2).run(gradients_of_gradients) == [True, True]
    with pytest.raises(PlaygroundError, match=r"1 value\(s\) per channel: a variance needs two"):
        world(2).run(one_value)
