"""What tests of `prove` let ranks do."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms import ALL_REDUCES
from playground.lessons.prove import failure_modes, lesson
from playground.lessons.prove.differences import max_abs_diff, max_over_ranks, parameters
from playground.lessons.prove.results import BreakResult, MaxAbs, Proof
from playground.lessons.prove.settings import ProveSettings
from playground.runtime import device
from playground.runtime.remote import remote
from playground.training.batch_norm import AllReduceSum, SyncBatchNorm, convert_sync_batchnorm
from playground.training.grad_syncs import GRAD_SYNCS, GradSyncSpec
from playground.training.replicas import flat
from playground.training.runner import run_training


def with_a_lazy_sync(rank: int, size: int, settings: ProveSettings) -> Proof:
    """The proof, with two more gradient synchronisations in the table, which do nothing."""
    nothing = remote("playground.training.sync:GradSync")
    for name, rung in (("lazy", True), ("lazy-local", False)):
        GRAD_SYNCS[name] = GradSyncSpec(name=name, summary="averages nothing", code=nothing, needs=(), rung=rung)
    return lesson.run(rank, size, settings)


def each_all_reduce(rank: int, size: int, settings: ProveSettings) -> dict[str, dict[str, MaxAbs]]:
    """One step of the proof in float64 with every all-reduce."""
    return {
        name: lesson.compare(replace(settings, all_reduce=name, steps=1), torch.float64).steps[0].differences
        for name in ALL_REDUCES
    }


def breaks(rank: int, size: int, settings: ProveSettings) -> dict[str, BreakResult]:
    return failure_modes.run(rank, size, settings)


def one_process(rank: int, size: int, settings: ProveSettings) -> list[float]:
    run = lesson.OneProcess(lesson.new_net(settings.seed), settings)
    for images, labels in lesson.global_batches(settings):
        run.step(images, labels)
    return list(parameters(run.model).tolist())


def largest_of(rank: int, size: int) -> dict[str, list[float]]:
    nan, infinite = torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 0.0])
    return {
        "of two": max_over_ranks([float(rank), -1.0 - rank]),
        "nan": max_over_ranks([max_abs_diff(nan, 1.0) if rank == 0 else 0.0]),
        "infinite": [max_abs_diff(infinite, infinite)],
    }


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


def worked(layer: nn.Module, inputs: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Its output, and the gradients of (output x factors)^2 summed: of the input, then of the parameters."""
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    return output, list(torch.autograd.grad(((output * factors) ** 2).sum(), [inputs, *layer.parameters()]))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item() if one.numel() else 0.0


def far_from_zero(rank: int, size: int) -> float:
    """float32 numbers near 10,000 that vary by 1: how far what comes out of ours is from float64's right answer."""
    torch.manual_seed(0)
    inputs = 10_000 + torch.randn(size * 50, 2)
    right = nn.BatchNorm1d(2).double()(inputs.double())
    return difference(SyncBatchNorm(2)(inputs[rank * 50 : rank * 50 + 50]).double(), right[rank * 50 : rank * 50 + 50])


def half_precision(rank: int, size: int) -> dict[str, object]:
    inputs = torch.full((300, 1), 400.0 + rank, dtype=torch.float16)  # their sum is beyond float16
    output = SyncBatchNorm(1)(inputs)
    return {"type": str(output.dtype), "values": output.unique().tolist()}


def one_value(rank: int, size: int) -> None:
    SyncBatchNorm(2)(torch.zeros(int(rank == 1), 2))


def gradients_of_gradients(rank: int, size: int) -> bool:
    torch.manual_seed(0)
    numbers = torch.randn(3, dtype=torch.float64, requires_grad=True)
    cubes = AllReduceSum.apply(numbers**3)
    [slope] = torch.autograd.grad((cubes**2).sum(), numbers, create_graph=True)
    [curve] = torch.autograd.grad(slope.sum(), numbers)
    # With x, y, … on the ranks: N losses (x³ + y³ + …)², so by x it is 6N x² (x³ + y³ + …); here all are equal.
    slopes_right = torch.allclose(slope, 6 * size**2 * numbers**5)
    return slopes_right and torch.allclose(curve, 30 * size**2 * numbers**4)


def beside_torch_s_own(rank: int, size: int) -> dict[str, float]:
    """On GPUs: our SyncBatchNorm and torch's, on shares of 3 and 5 samples."""
    torch.manual_seed(rank)
    own = nn.BatchNorm2d(4).to(device(), torch.float64)
    theirs, ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(own)), convert_sync_batchnorm(own)
    inputs = torch.randn(3 + 2 * rank, 4, 6, 6, dtype=torch.float64, device=device())
    results = [worked(layer, inputs, inputs.cos()) for layer in (ours, theirs)]
    (output, gradients), (their_output, their_gradients) = results
    return {
        "output": difference(output, their_output),
        "gradients": difference(flat(gradients), flat(their_gradients)),
        "statistics": max(difference(*pair) for pair in zip(ours.buffers(), theirs.buffers(), strict=True)),
    }


def own_steps(rank: int, size: int, settings: ProveSettings) -> None:
    """Each rank is given another number of steps."""
    run_training(rank, size, remote("playground.lessons.prove.lesson:run"), replace(settings, steps=rank + 1))
