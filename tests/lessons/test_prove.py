"""prove: N ranks train the model of one process until one line is wrong; where the linear rule
ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Run, Worlds
from one_process import EXACT
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from playground.lessons.prove import lesson as prove

RIGHT = {"mean_gradient", "DDP", "sum_over_batch"}
WRONG = {"summed_gradient", "unequal_parts", "own_parameters", "batch_norm"}


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.stress), 4])
def test_the_test_tells_right_trainings_from_wrong_ones(size: int, run_cli: Run) -> None:
    ran = run_cli("prove", "-n", size, "--samples", 192, "--check", "off")
    assert (ran.code, ran.err) == (0, "")
    rows = re.findall(r"^(\w+) +differs from one process by (\S+)$", ran.out, re.MULTILINE)
    differences = {name: float(difference) for name, difference in rows}
    assert differences.keys() == RIGHT | WRONG
    assert max(differences[name] for name in RIGHT) <= EXACT
    assert min(differences[name] for name in WRONG) > 1e-3


def explain(rank: int, size: int) -> dict[str, float]:
    """How far each mistake is from what the chapter says it trains."""
    batches = prove.make_batches(prove.make_samples(5 * prove.BATCH_SIZE), prove.BATCH_SIZE)
    equal = [[tensor.tensor_split(size)[rank] for tensor in batch] for batch in batches]
    summed = prove.summed_gradient(prove.new_model(0), equal)
    faster = prove.one_process(prove.new_model(0), batches, size * prove.LR)

    model = prove.new_model(rank)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    steps = prove.mean_gradient(model, equal) - start
    others = [torch.empty_like(steps) for _ in range(size)]
    torch.distributed.all_gather(others, steps)
    return {
        "summed": (summed - faster).abs().max().item(),
        "own parameters": max((other - steps).abs().max().item() for other in others),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_mistakes_train_what_the_chapter_says(size: int, world: Worlds) -> None:
    """The sum trains with N times the learning rate; ranks with other parameters take the same
    steps."""
    for found in world(size).run(explain):
        assert found["summed"] <= EXACT
        assert found["own parameters"] <= EXACT


def unequal_gradient(rank: int, size: int) -> tuple[float, float]:
    """The gradients of a mean of means, and of a sum over the batch, for samples 1, 2, 3, …, of
    which all ranks but the last have one."""
    samples = torch.arange(1.0, prove.BATCH_SIZE + 1).double()[:, None]
    part = samples.tensor_split([*range(1, size)])[rank]
    labels = torch.zeros(len(part), dtype=torch.long)
    found = []
    trainings: list[Any] = [prove.mean_gradient, prove.sum_over_batch]
    for training in trainings:
        model = nn.Linear(1, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        found.append(training(model, [(part, labels)])[0].item() / prove.LR)
    return found[0], found[1]


def test_a_mean_of_means_counts_a_lonely_sample_more(world: Worlds) -> None:
    """With both logits 0, the loss of a sample x has the gradient -x / 2."""
    mean_of_means = (1 + 2 + 3 + sum(range(4, 49)) / 45) / 4
    for mean, total in world(4).run(unequal_gradient):
        assert mean == pytest.approx(mean_of_means / 2, rel=1e-12)
        assert total == pytest.approx(sum(range(1, 49)) / 48 / 2, rel=1e-12)


def test_the_linear_rule_holds_until_the_noise_scale(run_cli: Run) -> None:
    printed = run_cli("prove", "-n", 2).out
    rows = re.findall(r"^ +(\d+) +(\d+) +\S+ +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    table = {int(batch): [*map(float, rest)] for batch, *rest in rows}
    factors = (1, 2, 4, 8, 16, 32)
    assert [*table] == [48 * factor for factor in factors]
    steps, same_loss, lr, scaled_loss = zip(*table.values(), strict=True)
    assert steps == tuple(512 / factor for factor in factors)
    assert lr == pytest.approx([0.2 * factor for factor in factors])
    same, scaled = (dict(zip(table, loss, strict=True)) for loss in (same_loss, scaled_loss))
    assert same[48] == scaled[48]
    for batch in (96, 192, 384):
        assert scaled[batch] == pytest.approx(scaled[48], rel=0.15)
        assert same[batch] > same[batch // 2]
    assert same[384] > 2 * scaled[384]
    assert scaled[768] > 1.3 * scaled[48]
    assert scaled[1536] > 3 * scaled[48]
    scales = re.search(
        r"^noise scale (\d+) samples before training, (\d+) after it$", printed, re.M
    )
    assert scales
    before, after = map(float, scales.groups())
    assert before < 48 < 256 < after < 1024


def exact_noise_scale(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The variance of the gradients of all samples, one by one, over the square of their mean."""
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], one: Tensor, of: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (one[None],)), of[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    total = squares = torch.zeros((), dtype=torch.float64)
    for some, of in zip(inputs.split(512), labels.split(512), strict=True):
        rows = torch.cat([each.flatten(1) for each in gradients(params, some, of).values()], 1)
        total, squares = total + rows.sum(0), squares + rows.square().sum()
    mean = (total / len(inputs)).square().sum()
    return float((squares / len(inputs) - mean) / mean)


def noise_scales(rank: int, size: int) -> list[float]:
    """Before a short training, and after it."""
    batches = prove.make_batches(prove.make_samples(prove.SAMPLES), prove.BATCH_SIZE)
    model = prove.new_model(0)
    before = prove.noise_scale(model, rank, size, batches)
    prove.one_process(model, batches[:64], prove.LR)
    return [before, prove.noise_scale(model, rank, size, batches)]


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.stress), 4])
def test_two_batch_sizes_give_the_noise_scale_of_single_samples(size: int, world: Worlds) -> None:
    estimates = world(size).run(noise_scales)
    assert all(each == estimates[0] for each in estimates)
    inputs, labels = prove.make_samples(prove.SAMPLES)
    batches = prove.make_batches((inputs, labels), prove.BATCH_SIZE)
    model = prove.new_model(0)
    exact = [exact_noise_scale(model, inputs, labels)]
    prove.one_process(model, batches[:64], prove.LR)
    exact.append(exact_noise_scale(model, inputs, labels))
    assert estimates[0] == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize(
    ("size", "batch_size", "said"),
    [
        (1, 48, "choose at least 2 ranks, with at least 2 samples each"),
        (5, 48, "5 ranks cannot divide a batch of 48 equally"),
        (4, 4, "choose at least 2 ranks, with at least 2 samples each"),
    ],
)
def test_numbers_of_ranks_that_it_cannot_use_are_refused_in_one_line(
    size: int, batch_size: int, said: str, run_cli: Run
) -> None:
    ran = run_cli("prove", "-n", size, "--batch-size", batch_size)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert said in ran.err
