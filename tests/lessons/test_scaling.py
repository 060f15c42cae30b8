"""The lesson scaling: work and bytes counted against closed forms, training against torch's
optimizer and scheduler, the noise scale against the gradients of single samples, steps over links
against what the links carry."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from playground.algorithms.link import Link
from playground.lessons.scaling import further, lesson


@pytest.mark.parametrize(("step", "law"), [(lesson.strong, "amdahl"), (lesson.weak, "gustafson")])
def test_counted_speedups_are_those_of_the_closed_form(step: Any, law: str) -> None:
    for evaluated in (0, 128, 4096):
        values = step(0, 2, evaluated=evaluated)
        assert values["speedup"] == values[law]
        assert (values["serial"] == 0) == (evaluated == 0)


def test_speedups_end_where_the_laws_say() -> None:
    first, hidden = lesson.FEATURES * lesson.HIDDEN, lesson.HIDDEN * lesson.CLASSES
    evaluated = 128 * 2 * (first + hidden)
    serial = evaluated / (evaluated + 1024 * (4 * first + 6 * hidden))
    strong: Any = lesson.strong(0, 2)
    weak: Any = lesson.weak(0, 2)
    assert strong["serial"] == weak["serial"] == pytest.approx(serial, abs=5e-4)
    for n in lesson.WORLDS:
        assert strong["speedup"][n] == pytest.approx(1 / (serial + (1 - serial) / n), abs=5e-3)
        assert weak["speedup"][n] == pytest.approx(serial + (1 - serial) * n, abs=5e-3)
    assert max(strong["speedup"].values()) < 1 / serial


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_sends_less_than_two_gradients_whatever_it_computes(
    size: int, world: Worlds
) -> None:
    for values in world(size).run(lesson.messages):
        elements = 20 * 32 + 32 + 32 * 10 + 10
        assert values["by_formula"] == 2 * (size - 1) * 4 * elements // size
        # chunks differ by an element where the size does not divide their number
        assert values["sent"] == pytest.approx(values["by_formula"], abs=4 * 2 * (size - 1))
        work = values["flops_per_byte"]
        assert work["weak"] == pytest.approx(size * work["strong"], rel=0.01)


@pytest.fixture(scope="module")
def losses() -> Any:
    return lesson.batches(0, 2)


def test_a_rate_scaled_with_the_batch_trains_as_well_until_the_noise_scale(
    losses: dict[str, dict[int, float]],
) -> None:
    base = losses["linear"][64]
    assert losses["unscaled"][64] == base
    for batch in (128, 256):
        assert losses["linear"][batch] == pytest.approx(base, rel=0.1)
        assert losses["warm_up"][batch] == pytest.approx(base, rel=0.1)
        assert losses["unscaled"][batch] > 1.5 * base
    assert losses["linear"][512] > 1.3 * base
    assert losses["warm_up"][1024] < 0.75 * losses["linear"][1024]
    for way in losses.values():
        assert way[2048] > 3 * base


@pytest.mark.parametrize("way", ["unscaled", "linear", "warm_up"])
def test_losses_are_those_that_the_chapter_shows(
    way: str, losses: dict[str, dict[int, float]]
) -> None:
    """Up to a batch of 512: at larger rates roundings grow, which differ between processors."""
    chapter = Path(lesson.__file__).with_name("README.md").read_text(encoding="utf-8")
    [line] = re.findall(rf"^batches, {way}: (.*)$", chapter, re.MULTILINE)
    shown = {int(batch): float(loss) for batch, loss in map(str.split, line.split(", "))}
    assert shown.keys() == losses[way].keys()
    for batch in (64, 128, 256, 512):
        assert losses[way][batch] == pytest.approx(shown[batch], abs=0.02)


def test_training_is_that_of_torch_s_optimizer_and_scheduler() -> None:
    ours, theirs = lesson.new_model(), lesson.new_model()
    end, batch = 4096, 256
    loss = lesson.train(ours, batch, lambda seen: min(1, 2 * seen / end), 0, end)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, 2 * batch * (step + 1) / end)
    )
    inputs, labels = lesson.samples()
    for chosen, label in zip(inputs[:end].split(batch), labels[:end].split(batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(theirs(chosen), label).backward()
        optimizer.step()
        scheduler.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    others = F.cross_entropy(theirs(inputs[lesson.SAMPLES :]), labels[lesson.SAMPLES :])
    assert loss == pytest.approx(others.item(), rel=1e-4)


def exact_noise_scale(model: torch.nn.Module) -> float:
    """The variance of the gradients of all samples, one by one, over the square of their mean."""
    inputs, labels = (tensor[: lesson.SAMPLES] for tensor in lesson.samples())
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], one: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (one[None],)), of[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    total = squares = torch.zeros((), dtype=torch.float64)
    for some, of in zip(inputs.split(512), labels.split(512), strict=True):
        single = gradients(params, some, of).values()
        rows = torch.cat([each.flatten(1) for each in single], 1).double()
        total, squares = total + rows.sum(0), squares + rows.square().sum()
    mean = (total / len(inputs)).square().sum()
    return float((squares / len(inputs) - mean) / mean)


def noise_scale_after(rank: int, size: int, seen: int) -> float:
    model = lesson.new_model()
    lesson.train(model, 64, lambda _: lesson.RATE, 0, seen)
    return lesson.noise_scale(model, rank, size)


@pytest.mark.parametrize(
    ("size", "seen"),
    [(3, 0), (4, 8192), *(pytest.param(2, seen, marks=pytest.mark.stress) for seen in (0, 8192))],
)
def test_two_batch_sizes_give_the_noise_scale_of_single_samples(
    size: int, seen: int, world: Worlds
) -> None:
    estimates = world(size).run(noise_scale_after, seen)
    model = lesson.new_model()
    lesson.train(model, 64, lambda _: lesson.RATE, 0, seen)
    assert set(estimates) == {estimates[0]}, "all ranks know the same"
    assert estimates[0] == pytest.approx(exact_noise_scale(model), rel=0.15)


def test_the_noise_scale_grows_while_a_model_trains(world: Worlds) -> None:
    [found, _] = world(2).run(further.noise)
    scales = [*found["noise_scale"].values()]
    assert scales[0] < lesson.BATCHES[0] < min(scales[1:])
    assert 128 < scales[1] < 1024, "where a rate scaled with the batch ends"


@pytest.mark.parametrize("widths", [(3, 5), (3, 5, 7), (16, 8, 8, 2)])
def test_the_formula_counts_what_the_counter_counts(widths: tuple[int, ...]) -> None:
    model = lesson.network(*widths)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(6, widths[0])).sum().backward()
    assert further.flops_by_formula(6, *widths) == counter.get_total_flops()


def test_utilization_is_what_is_reached_of_the_peak(world: Worlds) -> None:
    for values in world(2).run(further.utilization):
        assert values["flops"]["counted"] == values["flops"]["by_formula"]
        assert values["mfu"] == pytest.approx(values["reached"] / values["peak"], rel=0.05)
        shares = [values[part] for part in ("compute", "averaging", "optimizer")]
        assert sum(shares) == pytest.approx(1, abs=2e-3)


GRADIENTS = 4 * 3 * (256 * 256 + 256)
"""Bytes."""


@pytest.mark.parametrize(
    ("size", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_worlds_double_up_to_all_ranks(size: int, sizes: list[int]) -> None:
    assert further.worlds(size) == sizes


def time_once(rank: int, size: int) -> dict[tuple[str, int, str], float]:
    return further.time_steps(rounds=1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_takes_at_least_as_long_as_its_link_carries(size: int, world: Worlds) -> None:
    [seconds, *others] = world(size).run(time_once)
    assert all(each == seconds for each in others), "of the slowest rank"
    sizes = [1, 2, 3][:size]
    assert seconds.keys() == {("alone", n, "no link") for n in sizes} | {
        (scaling, n, link) for scaling in ("strong", "weak") for n in sizes[1:]
        for link in further.LINKS
    }  # fmt: skip
    for (_, n, link), taken in seconds.items():
        carried = 2 * (n - 1) / n * GRADIENTS * 8 / (1e9 * further.LINKS[link])
        assert taken > carried == pytest.approx(further.seconds_on_link(n, link))


class CountingLink(Link):
    carried = 0.0

    def carry(self, nbytes: float) -> float:
        self.carried += nbytes
        return super().carry(nbytes)


def mean_gradients(rank: int, size: int, scaling: str) -> list[tuple[float, float]]:
    """For 2 ranks and for all: the bytes that a step puts on the link, and how far its gradient is
    from that of one process with all samples."""
    found = []
    for ranks in (2, size):
        group, link = dist.new_group(range(ranks)), CountingLink(1000)
        if rank >= ranks:
            continue
        sums: list[torch.Tensor] = []

        def all_reduce(tensor: torch.Tensor, keep: Any = sums.append, **options: Any) -> Any:
            work = dist.all_reduce(tensor, **options)
            work.wait()
            keep(tensor / size)
            return work

        over_link = partial(link.all_reduce(all_reduce), group=group)
        further.new_step(scaling, ranks, over_link)()
        model = lesson.network(*further.WIDTHS)
        inputs = []
        for seed in range(ranks if scaling == "weak" else 1):
            torch.manual_seed(seed)
            inputs.append(torch.randn(further.BATCH, further.WIDTHS[0]))
        model(torch.cat(inputs)).square().mean().backward()
        expected = torch.cat([param.grad.flatten() for param in model.parameters()])
        [found_mean] = sums
        off = (found_mean - expected).norm() / expected.norm()
        found.append((link.carried, off.item()))
    return found


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_ranks_average_over_the_link_what_one_process_would_compute(
    scaling: str, world: Worlds
) -> None:
    """Of three ranks, the two of a group share the batch; the third has no part in that."""
    of_two, of_three = GRADIENTS, 4 / 3 * GRADIENTS
    by_rank = world(3).run(mean_gradients, scaling)
    assert [len(found) for found in by_rank] == [2, 2, 1]
    for found in by_rank:
        carried, off = zip(*found, strict=True)
        assert [*carried] == pytest.approx([of_two, of_three][-len(found) :])
        assert max(off) < 1e-5


def count_members(rank: int, size: int) -> dict[tuple[str, int], set[float]]:
    """By how many ranks the steps of this rank are taken."""
    members: dict[tuple[str, int], set[float]] = defaultdict(set)

    def new_step(scaling: str, ranks: int, all_reduce: Any) -> Callable[[], None]:
        def step() -> None:
            ones = torch.ones(1)
            all_reduce(ones)
            members[scaling, ranks].add(ones.item())

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(further, "new_step", new_step)
        further.time_steps(rounds=2)
    return dict(members)


def test_the_first_ranks_take_a_step_and_the_others_wait(world: Worlds) -> None:
    for rank, members in enumerate(world(4).run(count_members)):
        alone = {("alone", n): {1} for n in (1, 2, 4)} if rank == 0 else {}
        assert members == alone | {
            (scaling, n): {n} for scaling in ("strong", "weak") for n in (2, 4) if rank < n
        }


def test_steps_as_long_as_the_formula_says_are_not_off(monkeypatch: pytest.MonkeyPatch) -> None:
    one, slow = 0.05, 8 * 1.5 * GRADIENTS / 1e8
    seconds = {("alone", n, "no link"): one / n for n in (1, 2, 4)}
    for n in (2, 4):
        for link in further.LINKS:
            carried = further.seconds_on_link(n, link)
            seconds["strong", n, link] = one / n + carried
            seconds["weak", n, link] = one + carried
    monkeypatch.setattr(further, "time_steps", lambda rounds: seconds)
    found: Any = further.over_links(0, 4)
    rows = [*found["strong"].values(), *found["weak"].values()]
    assert len(rows) == 12
    assert all(row["speedup"] == row["by_formula"] and row["off"] == 0 for row in rows)
    for scaling, work, computing in (("strong", one, one / 4), ("weak", 4 * one, one)):
        assert found[scaling]["4 ranks, no link"]["speedup"] == 4
        over_slow = work / (computing + slow)
        assert found[scaling]["4 ranks, 0.1 Gbit/s"]["speedup"] == round(over_slow, 2)
    seconds["weak", 4, "no link"] *= 2  # as on half as many cores
    found = further.over_links(0, 4)
    assert found["weak"]["4 ranks, no link"] == {"speedup": 2, "by_formula": 4, "off": 0.5}
