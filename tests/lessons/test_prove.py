"""prove: N ranks are one process, to the last digits; each way to break it breaks it; the proof can
fail."""

from __future__ import annotations

import copy
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Worlds
from ranks import difference, worked
from torch import nn

from playground.lessons import LESSONS
from playground.lessons.mnist import Net
from playground.lessons.prove import experiment, lesson as board
from playground.lessons.prove.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from playground.lessons.prove.lesson import Training, max_abs_diff, new_net, parameters
from playground.lessons.prove.page import Break, Proof, ProveSettings, check, failure
from playground.lessons.sgd.lesson import average_gradients
from playground.measurement.interleave import slowest as max_over_ranks
from playground.runtime import device
from playground.runtime.errors import PlaygroundError
from playground.runtime.remote import ROOT, remote
from playground.training.data import Images
from playground.training.grad_syncs import GRAD_SYNCS, GradSyncSpec
from playground.training.loop import run_training

OF_PARAMETERS = ["parameters", "flat-step", "shared-step", "zero-1", "zero-2", "zero-3"]
SYNCS = ["per-parameter", "none-safe", "flat", "bucketed", "overlapped", *OF_PARAMETERS, "ddp"]
BREAKS = ["summed", "unweighted_shares", "own_weights", "batch_norm"]


def settings_for(folder: Path, **changes: Any) -> ProveSettings:
    return ProveSettings(folder=folder, **{"batch_size": 24, "bucket_cap": 10_000, **changes})


@pytest.mark.parametrize(
    ("size", "steps", "batch_size"),
    [
        (3, 2, 32), pytest.param(1, 2, 24, marks=pytest.mark.stress),
        pytest.param(4, 8, 24, marks=pytest.mark.stress), pytest.param(8, 2, 30,
        marks=pytest.mark.stress),
    ],
)  # fmt: skip
def test_n_ranks_are_one_process(
    size: int, steps: int, batch_size: int, world: Worlds, digits_folder: Path
) -> None:
    settings = settings_for(digits_folder, batch_size=batch_size, steps=steps)
    proofs = world(size).run(
        run_training, remote("playground.lessons.prove.experiment:run"), settings
    )
    assert all(proof == proofs[0] for proof in proofs)
    assert list(proofs[0]) == ["float64", "float32"]
    assert [*GRAD_SYNCS, "ddp"] == SYNCS
    for comparison, bound in zip(proofs[0].values(), (1e-12, 1e-4), strict=True):
        assert [step.step for step in comparison.steps] == list(range(1, steps + 1))
        for step in comparison.steps:
            assert list(step.differences) == SYNCS
            largest = max(step.differences.values())
            assert largest <= bound
            assert (largest == 0) == (size == 1), "bit-identical on one rank, rounding on more"
            assert step.largest > 0.1
    check(proofs[0], {})


def by_board(rank: int, size: int) -> dict[str, list[float]]:
    """How far the board's trainings are from one process, after each of two steps."""
    batches = board.random_batches(steps=2)
    ranks = {"average_gradients": Training(new_net(), board.part_of_loss, average_gradients)}
    if size > 1:
        ranks |= {name: getattr(board, name)() for name in BREAKS[:-1]}
    found = [*board.compare(batches, Training(new_net()), *ranks.values())]
    alone = Training(board.new_batch_norm_net())
    normalised = [*board.compare(batches, alone, board.batch_norm())]
    columns = zip(*(differences for _, *differences in found), strict=True)
    return {
        **dict(zip(ranks, map(list, columns), strict=True)),
        "batch_norm": [last for _, last in normalised],
    }


@pytest.mark.parametrize(
    "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
)
def test_the_board_s_ranks_are_one_process_until_they_are_broken(size: int, world: Worlds) -> None:
    results = world(size).run(by_board)
    assert all(result == results[0] for result in results)
    for name, differences in results[0].items():
        if name == "average_gradients" or size == 1:
            assert max(differences) <= 1e-14, name
        else:
            assert min(differences) > 1e-6, name


@pytest.mark.parametrize(("samples", "size"), [(64, 4), (7, 3), (2, 2), (5, 5)])
def test_shares_are_of_the_whole_batch(samples: int, size: int) -> None:
    equal, unequal = board.equal_shares(samples, size), board.one_for_the_last(samples, size)
    assert (sum(equal), max(equal) - min(equal) <= 1) == (samples, True)
    assert (sum(unequal), len(unequal), unequal[-1]) == (samples, size, 1)


def one_process(rank: int, size: int, settings: ProveSettings) -> list[float]:
    training = experiment.new_one_process(new_net(settings.seed), settings)
    for images, labels in experiment.global_batches(settings):
        training.step(images, labels)
    return list(parameters(training.model).tolist())


def test_the_process_they_are_compared_with_is_plain_sgd(
    world: Worlds, digits_folder: Path
) -> None:
    """Written once more here, for batches that go beyond the last sample and on from the first."""
    torch.manual_seed(3)
    model, data = Net().double().eval(), Images(digits_folder, "train", 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for positions in (range(0, 24), [*range(24, 40), *range(0, 8)]):
        images, labels = data[list(positions)]
        optimizer.zero_grad()
        F.nll_loss(model(images.double()), labels).backward()
        optimizer.step()
    settings = settings_for(digits_folder, limit=40, lr=0.1, seed=3, steps=2)
    for there in world(2).run(one_process, settings):
        here = torch.cat([param.detach().flatten() for param in model.parameters()])
        assert (torch.tensor(there, dtype=torch.float64) - here).abs().max() <= 1e-14


def with_a_lazy_sync(rank: int, size: int, settings: ProveSettings) -> Proof:
    """The proof of three gradient synchronisations, of which the last does nothing."""
    nothing = remote("playground.training.sync:GradSync")
    lazy = GradSyncSpec(name="lazy", summary="averages nothing", code=nothing, needs=())
    few = {name: GRAD_SYNCS[name] for name in ("flat", "bucketed")} | {"lazy": lazy}
    with patch.dict(GRAD_SYNCS, few, clear=True):
        return experiment.run(rank, size, settings)


def test_what_is_added_to_the_table_is_tested_and_the_proof_can_fail(
    world: Worlds, digits_folder: Path
) -> None:
    settings = settings_for(digits_folder, batch_size=16, steps=2)
    [proof, *_] = world(2).run(with_a_lazy_sync, settings)
    first = proof["float64"].steps[0].differences
    assert list(first) == ["flat", "bucketed", "lazy", "ddp"]
    assert first["lazy"] > 1e-5
    with pytest.raises(
        PlaygroundError,
        match=r"lazy: in float64 the parameters .* after step 1, more than rounding",
    ):
        check(proof, {})
    for comparison in proof.values():
        for step in comparison.steps:
            del step.differences["lazy"]
    check(proof, {})
    proof["float32"].steps[1].differences["ddp"] = 1e-3
    check(proof, {})
    proof["float32"].steps[0].differences["ddp"] = 1e-3
    with pytest.raises(PlaygroundError, match=r"ddp: in float32 the parameters .* after step 1,"):
        check(proof, {})
    proof["float64"].steps[1].differences["flat"] = 2e-12
    with pytest.raises(
        PlaygroundError, match=r"flat: in float64 the parameters .* after step 2, more"
    ):
        check(proof, {})
    assert failure(proof).startswith("flat: ")


def breaks(rank: int, size: int, settings: ProveSettings) -> dict[str, Break]:
    return experiment.break_it(rank, size, settings)


def test_each_break_breaks_and_is_what_it_is_said_to_be(world: Worlds, digits_folder: Path) -> None:
    results = world(3).run(breaks, settings_for(digits_folder, batch_size=16, steps=5))
    assert all(result == results[0] for result in results)
    assert list(results[0]) == BREAKS
    for name, result in results[0].items():
        assert min(result.breaks.values()) > 1e-4, name
        assert max(result.holds.values()) <= 1e-13, name
        assert result.is_broken
    own = results[0]["own_weights"]
    initial, final = (
        own.breaks[f"{when} parameters, compared with rank 0"] for when in ("initial", "final")
    )
    assert initial == pytest.approx(final, abs=1e-12)
    assert own.holds["averaged gradients, compared with rank 0"] == 0
    check({}, results[0])


@pytest.mark.parametrize(
    ("broken", "left"), [(0.01, 1e-7), (0.01, 1e-3), (0.01, float("nan")), (float("inf"),) * 2]
)
def test_an_explanation_that_does_not_hold_is_a_failure(broken: float, left: float) -> None:
    wrong = Break({"one process": broken}, holds={"parameters": left})
    with pytest.raises(
        PlaygroundError, match=r"summed: parameters: .* this break is not what it is said to be"
    ):
        check({}, {"summed": wrong})
    check({}, {"summed": Break({"one process": 0.01}, holds={"parameters": 1e-9})})
    assert wrong.is_broken
    assert not Break({"one process": 1e-13}, holds={}).is_broken


def largest_of(rank: int, size: int) -> dict[str, list[float]]:
    nan, infinite = torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 0.0])
    return {
        "of two": max_over_ranks([float(rank), -1.0 - rank]),
        "nan": max_over_ranks([max_abs_diff(nan, 1.0) if rank == 0 else 0.0]),
        "infinite": [max_abs_diff(infinite, infinite)],
    }


def test_differences_are_the_largest_of_any_rank_and_never_hide_a_nan(world: Worlds) -> None:
    for result in world(3).run(largest_of):
        assert result == {"of two": [2.0, -1.0], "nan": [math.inf], "infinite": [math.inf]}


def normalised(rank: int, size: int, shares: list[int]) -> dict[str, float]:
    """Two steps of BatchNorm over the whole batch, and of ours over this rank's share: by what the
    outputs, the gradients, the running statistics, and the outputs outside training differ."""
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(3).to(device(), torch.float64)
    for param in whole.parameters():
        nn.init.uniform_(param, 0.5, 2)
    ours = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(whole)))[0]
    mine, differences = slice(sum(shares[:rank]), sum(shares[: rank + 1])), {}
    for step in ("first", "second"):
        inputs = (7 + 3 * torch.randn(sum(shares), 3, 4, 5, dtype=torch.float64)).to(device())
        factors = torch.rand_like(inputs)
        outputs, gradients = worked(whole, inputs, factors)
        our_outputs, our_gradients = worked(ours, inputs[mine], factors[mine])
        differences[f"{step} output"] = difference(our_outputs, outputs[mine])
        differences[f"{step} gradient of input"] = difference(
            our_gradients.pop(0), gradients.pop(0)[mine]
        )
        for ours_of, theirs in zip(our_gradients, gradients, strict=True):
            dist.all_reduce(ours_of)
            differences[f"{step} gradient of {len(differences)}"] = difference(ours_of, theirs)
    for (name, buffer), theirs in zip(ours.named_buffers(), whole.buffers(), strict=True):
        differences[name] = difference(buffer.double(), theirs.double())
    return {
        **differences,
        "outside training": difference(ours.eval()(inputs[mine]), whole.eval()(inputs)[mine]),
    }


def test_our_batch_norm_over_n_ranks_is_batch_norm(world: Worlds) -> None:
    for differences in world(3).run(normalised, [5, 0, 2]):
        assert len(differences) == 4 + 4 + 3 + 1
        assert max(differences.values()) <= 1e-12, differences


def far_from_zero(rank: int, size: int) -> float:
    """float32 numbers near 10,000 that vary by 1: how far what comes out of ours is from float64's
    right answer."""
    torch.manual_seed(0)
    inputs = 10_000 + torch.randn(size * 50, 2, 1, 1)
    right, mine = nn.BatchNorm2d(2).double()(inputs.double()), slice(rank * 50, rank * 50 + 50)
    return difference(SyncBatchNorm(2)(inputs[mine]).double(), right[mine])


def test_our_batch_norm_is_right_where_the_mean_is_large(world: Worlds) -> None:
    assert max(world(2).run(far_from_zero)) < 0.01


@pytest.fixture
def prove(run_cli: Run, few_digits: None) -> Run:
    return partial(run_cli, "prove", "--dataset", "digits")


def test_as_text(prove: Run) -> None:
    shown = prove("-n", 2, "--batch-size", 7, "--steps", 3, "--all-reduce", "tutorial-ring")
    lines = shown.out.splitlines()
    assert (shown.code, shown.err) == (0, "")
    assert lines[2] == "training: 3 steps, batches of 7 = 1 x 4 + 1 x 3, without dropout"
    assert [line.split() for line in lines if line.startswith("  after step")] == [
        ["after", "step", "1", "2", "3"]
    ] * 2
    rows = [line.split()[0] for line in lines if re.match(r"  [a-z0-3-]+ .*\de-\d+$", line)]
    assert rows == SYNCS * 2
    assert sum(line.startswith("Why not 0: ") for line in lines) == 1
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in BREAKS] == BREAKS
    text = " ".join(shown.out.split())
    assert (
        "Shown: 2 ranks equal one process with the whole batch (largest difference of parameters"
        in text
    )
    assert text.endswith("; broken in 4 of 4 ways.")


def test_one_rank_is_bit_identical_and_cannot_be_broken(prove: Run) -> None:
    shown = prove("-n", 1, "--batch-size", 8, "--steps", 2)
    assert (shown.code, shown.err) == (0, "")
    text = " ".join(shown.out.split())
    assert (
        "after the last step: 0 in float64, 0 in float32); with one rank nothing can break it."
        in text
    )
    assert not any(words in shown.out for words in (*BREAKS, "Why not 0"))


@pytest.mark.stress
def test_as_json(prove: Run) -> None:
    document = json.loads(prove("-n", 2, "--batch-size", 7, "--steps", 3, "--json").out)
    assert document["steps"] == [{"name": "equal", "ranks": [{"samples": 4}, {"samples": 3}]}]
    assert (
        document["recipe"].items() >= {"batch_size": 7, "all_reduce": "backend", "lr": 0.01}.items()
    )
    assert [len(document["proof"][name]["steps"]) for name in ("float64", "float32")] == [3, 3]
    assert list(document["breaks"]) == BREAKS


def test_a_run_that_diverges_fails_and_says_what_helps(prove: Run) -> None:
    shown = prove("-n", 2, "--batch-size", 8, "--steps", 3, "--lr", 1e20)
    assert shown.code == 1
    assert "Why not 0" not in shown.out
    assert "faster with a larger --lr: try a smaller one" in shown.err
    assert "Shown" not in shown.out


def chapter_rows(first: str) -> list[list[str]]:
    """The cells of each row of the chapter's table whose head begins with `first`."""
    text = (ROOT / LESSONS["prove"].path / "README.md").read_text(encoding="utf-8")
    table = text.partition(f"| {first} |")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


PROVE_AS_SHOWN = ("prove", "-n", 3, "--steps", 5, "--dataset", "digits")


@pytest.mark.stress
def test_the_chapter_has_the_distances_of_a_run(run_cli: Run, data_dir: Path) -> None:
    shown = run_cli(*PROVE_AS_SHOWN, "--json")
    breaks = json.loads(shown.out)["breaks"]
    rows = chapter_rows("mistake")
    assert [name.strip("`") for name, *_ in rows] == BREAKS
    for name, distance, rounding, _ in rows:
        found = breaks[name.strip("`")]
        assert f"{next(iter(found['breaks'].values())):.1e}" == distance
        assert max(found["holds"].values()) < 10 * float(rounding) < 1e-14
    few = run_cli(*PROVE_AS_SHOWN, "--batch-size", 6, "--json")
    [distance] = json.loads(few.out)["breaks"]["batch_norm"]["breaks"].values()
    chapter = " ".join((ROOT / LESSONS["prove"].path / "README.md").read_text().split())
    assert f"two samples per rank, it is {distance:.1e}." in chapter


@pytest.mark.stress
@pytest.mark.parametrize("row", chapter_rows("`--batch-size`"), ids=lambda row: " ".join(row[:2]))
def test_the_chapter_s_losses_by_batch_and_learning_rate(
    row: list[str], run_cli: Run, data_dir: Path
) -> None:
    batch_size, lr, steps, loss, accuracy = row
    options = ("--epochs", 2, "--limit", 6000, "--batch-size", batch_size, "--lr", lr)
    shown = run_cli("ddp", *options, "--dataset", "digits", "--json")
    last = json.loads(shown.out)["epochs"][-1]
    assert 2 * math.ceil(6000 / int(batch_size)) == int(steps)
    assert last["loss"] == pytest.approx(float(loss), abs=1e-3)
    assert 100 * last["test_accuracy"] == pytest.approx(float(accuracy.removesuffix(" %")), abs=0.1)
