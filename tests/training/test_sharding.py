"""ZeRO by hand for any training: one process's training by every method, as many bytes and
collectives as promised, and named failures."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from one_process import EXACT, EXACT_STEPS, backward_alone, train as train_gpt
from ranks import misbehave
from sharded_functions import clip_grad_norm
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from torch_syncs import TORCH_SYNCS
from zero_formulas import stage_bytes_sent, times_held

from playground.algorithms.bytes_sent import times_sent
from playground.algorithms.traffic import Traffic
from playground.figures.counted_step import CountedStep, CountSettings
from playground.figures.counting import Trainer, count, new_model
from playground.tap import observing
from playground.training.formulas import COLLECTIVES_OF_STAGE
from playground.training.replicas import flatten, max_abs_diff
from playground.training.sharding import METHODS, Zero2, Zero3, train
from playground.training.step import backward, training_step
from playground.training.sync import SECOND_BACKWARD, GradSync, new_grad_sync
from playground.training.tiny_gpt import batches
from playground.training.zero_sync import SYNCS
from playground.world import PlaygroundError

ALL_SYNCS: dict[str, Callable[[nn.Module], GradSync]] = {**SYNCS, **TORCH_SYNCS}


def small(width: int = 48) -> CountSettings:
    return CountSettings(methods=(), width=width)


def check_method(name: str, counts: CountedStep, difference: float, size: int) -> None:
    """What a method of ours holds and sends is its closed form, and it trains as one process
    does."""
    assert difference <= EXACT, name
    if name in COLLECTIVES_OF_STAGE:
        assert counts.held == pytest.approx(counts.model_bytes * times_held(name, size), rel=0.02)
        sent = stage_bytes_sent(name, counts.model_bytes, size)
        assert counts.sent == pytest.approx(sent, rel=0.02)


def compare(name: str, settings: CountSettings) -> float:
    """The largest difference of a loss or parameter from one process with the whole batch, after a
    few steps in float64."""
    trainer = Trainer(new_model(settings).double(), ALL_SYNCS[name])
    expected_losses, expected_params = train_alone(settings)
    for step, batch in enumerate(
        batches(2 * dist.get_world_size(), EXACT_STEPS, settings.seed), start=1
    ):
        trainer.step(batch, last=step == EXACT_STEPS)
    whole = (
        param.full_tensor() if isinstance(param, DTensor) else param
        for param in trainer.model.parameters()
    )
    losses = torch.stack(trainer.losses)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    return max(
        max_abs_diff(flatten(whole), expected_params),
        max_abs_diff(losses, losses.new_tensor(expected_losses)),
    )


@cache
def train_alone(settings: CountSettings) -> tuple[list[float], torch.Tensor]:
    """The losses of one process, by step, and its parameters at the end, flat."""
    model = new_model(settings).double()
    exact = batches(2 * dist.get_world_size(), EXACT_STEPS, settings.seed)
    return train_gpt(model, backward_alone(model), exact), flatten(model.parameters())


def collectives(name: str, settings: CountSettings) -> dict[str, int]:
    """Those of the second step, by name."""
    trainer = Trainer(new_model(settings), ALL_SYNCS[name])
    first, second = batches(2 * dist.get_world_size(), 2, 1)
    trainer.step(first)
    with CommDebugMode() as mode:
        trainer.step(second)
    return dict(
        Counter(
            {
                str(call).split(".")[-1].strip("_"): times
                for call, times in mode.get_comm_counts().items()
            }
        )
    )


def by_every_method(
    rank: int, size: int, names: tuple[str, ...]
) -> tuple[dict[str, dict[str, int]], dict[str, tuple[CountedStep, float]]]:
    """The collectives of two methods that must call the same; the bytes of each method, and its
    difference from one process."""
    settings = small()
    calls = {name: collectives(name, settings) for name in ("zero-3", "torch-fsdp")}
    return calls, {
        name: (count(name, ALL_SYNCS[name], settings), compare(name, settings)) for name in names
    }


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3, 4))]
)
def test_every_method_is_one_training_and_holds_and_sends_what_it_should(
    size: int, world: Worlds
) -> None:
    names = (
        (*COLLECTIVES_OF_STAGE, "torch-fsdp")
        if size == 2
        else (*COLLECTIVES_OF_STAGE, *TORCH_SYNCS)
    )
    for calls, found in world(size, timeout=300).run(by_every_method, names):
        for name, (counts, difference) in found.items():
            check_method(name, counts, difference, size)
        # which calls none on a single rank
        assert size == 1 or calls["zero-3"] == calls["torch-fsdp"]
        assert sum(calls["zero-3"].values()) == 8 + 4  # of four units
        assert found["zero-3"][0].peak <= 1.05 * found["torch-fsdp"][0].peak


def train_by_each_method(rank: int, size: int) -> dict[str, tuple[list[float], float]]:
    """By method: what a rank holds and sends, in bytes of the parameters, and how far it is from
    one process."""
    torch.manual_seed(0)
    start = nn.Sequential(
        nn.Linear(30, 31), nn.Tanh(), nn.Linear(31, 32), nn.Linear(32, 1)
    ).double()
    batches = torch.randn(4, 3 * size, 30, dtype=torch.float64)
    alone, found = copy.deepcopy(start), {}
    optimizer = torch.optim.Adam(alone.parameters())
    for batch in batches:
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        optimizer.step()
    whole = sum(param.nbytes for param in alone.parameters())
    for name, method in METHODS.items():
        model = copy.deepcopy(start)
        figures = train(method(model), batches.chunk(size, dim=1)[rank])
        pairs = zip(alone.parameters(), model.parameters(), strict=True)
        off = max((one - other).abs().max().item() for one, other in pairs)
        found[name] = ([figure / whole for figure in figures], off)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_method_is_one_training_and_holds_and_sends_what_it_should(
    size: int, world: Worlds
) -> None:
    for found in world(size).run(train_by_each_method):
        assert max(off for _, off in found.values()) <= EXACT, found
        for name, (figures, _) in found.items():
            *held, sent = figures
            assert sum(held) == pytest.approx(times_held(name, size), rel=0.01)
            assert sent == pytest.approx(times_sent(size, *COLLECTIVES_OF_STAGE[name]), rel=0.01)


class Uneven(nn.Module):
    """A unit of two dtypes, one that is not used, one that odd ranks do not use, and one without
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.unused, self.odd, self.tanh = (
            nn.Linear(5, 7),
            nn.Linear(7, 3),
            nn.Linear(7, 7),
            nn.Tanh(),
        )
        self.mixed = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
        self.double()
        self.mixed[2].register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        self.mixed[2].float()

    def forward(self, inputs: torch.Tensor, takes_odd: bool) -> torch.Tensor:
        hidden = self.tanh(self.first(inputs))
        return self.mixed(self.odd(hidden) if takes_odd else hidden).square().mean()


def train_uneven(rank: int, size: int) -> dict[str, float]:
    """The largest difference of each method from DistributedDataParallel."""
    start, found = Uneven(), {}
    for name, new_method in METHODS.items():
        ours = copy.deepcopy(start)
        theirs = nn.parallel.DistributedDataParallel(
            copy.deepcopy(start), find_unused_parameters=True
        )
        method = new_method(ours)
        optimizers = [
            torch.optim.SGD(params, lr=0.1, momentum=0.9)
            for params in (method.shards(), theirs.parameters())
        ]
        torch.manual_seed(rank)
        for step in range(4):
            batch = torch.randn(4, 5, dtype=torch.float64)
            takes = name == "zero-3" or rank % 2 == 0  # its ranks run the same units
            method.zero_grad()
            ours(batch, takes).backward()
            method.after_backward()
            optimizers[0].step()
            method.after_step(last=step == 3)
            optimizers[1].zero_grad()
            theirs(batch, takes).backward()
            optimizers[1].step()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        found[name] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_methods_train_units_of_several_dtypes_and_units_that_are_not_used(
    size: int, world: Worlds
) -> None:
    for found in world(size).run(train_uneven):
        assert max(found.values()) <= 1e-6, found  # some parameters are of float32


def shard_shared_parameters(rank: int, size: int) -> list[str]:
    own, tied = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own.scale = nn.Parameter(torch.ones(2))
    tied[1].weight = tied[0].weight
    told = []
    for model in (own, tied):
        for method in (Zero2, Zero3):
            with pytest.raises(ValueError, match="parameter") as caught:
                method(model)
            told.append(str(caught.value))
    return told


def test_methods_refuse_parameters_of_no_unit_and_of_two(world: Worlds) -> None:
    assert (
        world(2).run(shard_shared_parameters)
        == [["each parameter must belong to exactly one child of the model"] * 4] * 2
    )


class Awkward(nn.Module):
    """What no N divides, a layer that odd ranks do not use and one that none does, a weight in two
    layers, a frozen layer, a buffer, a parameter of the model's own and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.norm, self.odd, self.unused = (
            nn.Linear(5, 7),
            nn.BatchNorm1d(7),
            nn.Linear(7, 7),
            nn.Linear(3, 1),
        )
        self.frozen, self.blocks = (
            nn.Linear(7, 7).requires_grad_(False),
            nn.ModuleList([nn.Linear(7, 7), nn.Tanh()]),
        )
        self.tied, self.scale = nn.Linear(7, 7), nn.Parameter(torch.ones(3, 7))
        self.tied.weight = self.blocks[0].weight
        self.out = nn.Linear(7, 1).float()

    def forward(self, inputs: torch.Tensor, takes_odd: bool) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        hidden = self.odd(hidden) if takes_odd else hidden
        for block in (*self.blocks, self.frozen):
            hidden = block(hidden)
        return self.out((self.tied(hidden) * self.scale.sum(0)).float()).square().mean()


def train_awkward(rank: int, size: int, clips: bool) -> dict[str, float]:
    """The largest difference from gradients averaged one by one, after four steps."""
    start, found = Awkward().double(), {}
    start.out.float()
    for name in SYNCS:
        models = {"ours": copy.deepcopy(start), "theirs": copy.deepcopy(start)}
        syncs: dict[str, Any] = {
            "ours": SYNCS[name](models["ours"]),
            "theirs": new_grad_sync("none-safe", models["theirs"]),
        }
        new_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizers = {each: sync.optimizer(new_sgd) for each, sync in syncs.items()}
        torch.manual_seed(rank)
        for step in range(4):
            inputs = torch.randn(4, 5, dtype=torch.float64)
            takes = name == "zero-3" or rank % 2 == 0  # its ranks run the same layers
            for each, model in models.items():
                backward(optimizers[each], partial(model, inputs, takes), syncs[each])
                most = 0.05 if step else 1000.0  # which nothing is above
                if clips and each == "ours":
                    clip_grad_norm(syncs[each].flat_params, most)
                elif clips:
                    params = [
                        param
                        for group in optimizers[each].param_groups
                        for param in group["params"]
                    ]
                    nn.utils.clip_grad_norm_(params, most)
                optimizers[each].step()
                syncs[each].after_step(last=step == 3)
        pairs = zip(models["ours"].parameters(), models["theirs"].parameters(), strict=True)
        found[name] = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        models["ours"].eval()
        assert models["ours"](inputs, takes).isfinite()
    return found


@pytest.mark.parametrize("clips", [pytest.param(False, marks=pytest.mark.stress), True])
def test_awkward_models_are_trained_right(clips: bool, world: Worlds) -> None:
    for found in world(3).run(train_awkward, clips):
        assert max(found.values()) <= 1e-6, found  # a parameter is of float32


def read_and_write_between_steps(rank: int, size: int) -> dict[str, float]:
    """The largest difference from gradients averaged one by one, where parameters are read, copied
    and loaded."""
    start, found = Awkward().double(), {}
    start.out.float()
    for name in SYNCS:
        ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
        pairs = [(ours, SYNCS[name](ours)), (theirs, new_grad_sync("none-safe", theirs))]
        new_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizers = [sync.optimizer(new_sgd) for _, sync in pairs]
        torch.manual_seed(rank)

        def step(pairs: list[Any] = pairs, optimizers: list[Any] = optimizers) -> None:
            batch = torch.randn(4, 5, dtype=torch.float64)
            for (model, sync), optimizer in zip(pairs, optimizers, strict=True):
                training_step(optimizer, partial(model, batch, True), sync)

        def off(model: nn.Module, theirs: nn.Module = theirs) -> float:
            own = model.state_dict()
            return max(
                (value - own[key]).abs().max().item() for key, value in theirs.state_dict().items()
            )

        step()
        state = ours.state_dict()
        before = copy.deepcopy(theirs.state_dict())
        model = copy.deepcopy(ours)
        differences = [
            off(model),
            off(ours),
            (ours.tied.bias - theirs.tied.bias).abs().max().item(),
        ]
        kept = copy.deepcopy(state)
        step()
        assert all(value.isfinite().all() for value in state.values()), (
            "it is there though its unit was freed"
        )
        differences.append(off(ours))
        for each, values in ((ours, kept), (theirs, before)):
            each.load_state_dict(values)
        differences.append(off(ours))
        for _ in range(2):
            step()
            differences.append(off(ours))
        ours.blocks[0].load_state_dict(start.blocks[0].state_dict())  # a part of the model alone
        theirs.blocks[0].load_state_dict(start.blocks[0].state_dict())
        step()
        found[name] = max(*differences, off(ours))
    return found


def test_parameters_can_be_read_copied_and_loaded_between_steps(world: Worlds) -> None:
    """With zero-3 they are not there: reading gathers them, and what is loaded reaches their
    owners."""
    for found in world(3).run(read_and_write_between_steps):
        assert max(found.values()) <= 1e-6, found


def backward_twice(rank: int, size: int) -> dict[str, str]:
    told = {}
    for name in ("zero-1", "zero-2", "zero-3"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        sync = SYNCS[name](model)
        model(torch.ones(2, 3)).sum().backward()
        if name == "zero-1":
            sync.after_backward()
            model(torch.ones(2, 3)).sum().backward()
        again = sync.after_backward if name == "zero-1" else model(torch.ones(2, 3)).sum().backward
        with pytest.raises(RuntimeError) as caught:
            again()
        told[name] = str(caught.value)
    return told


def test_a_second_backward_is_refused_in_one_line(world: Worlds) -> None:
    for told in world(2).run(backward_twice):
        assert {*told.values()} == {SECOND_BACKWARD}


def average_twice(rank: int, size: int) -> dict[str, float]:
    """The largest difference from `none-safe`, by way, where two backwards are averaged before a
    step."""
    found = {}
    for name in ("ddp", "zero-2", "zero-3"):
        torch.manual_seed(3)
        start, ends = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double(), []
        for new_sync in (SYNCS[name], partial(new_grad_sync, "none-safe")):
            model = copy.deepcopy(start)
            sync = new_sync(model)
            optimizer = sync.optimizer(partial(torch.optim.SGD, lr=0.1))
            for number in range(2):
                model(
                    torch.full((2, 3), rank + 2.0 * number, dtype=torch.float64)
                ).square().sum().backward()
                sync.after_backward()
            optimizer.step()
            sync.after_step(last=True)
            ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        found[name] = (ends[0] - ends[1]).abs().max().item()
    return found


def test_gradients_that_are_averaged_twice_before_a_step_add_up(world: Worlds) -> None:
    for found in world(2).run(average_twice):
        assert max(found.values()) <= EXACT, found


class Checkpointed(nn.Module):
    """Layers whose forward is repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.sum()


def repeat_forward(rank: int, size: int) -> tuple[dict[str, int], list[bool]]:
    """The collectives of a second backward; and whether no parameters are here after it, after the
    step, and after one that a test follows."""
    model = Checkpointed()
    sync: Any = SYNCS["zero-3"](model)
    optimizer = sync.optimizer(partial(torch.optim.SGD, lr=0.1))
    inputs = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        traffic = Traffic()
        with observing(traffic):
            backward(optimizer, lambda: model(inputs), sync)
        is_free = [all(flat.is_free for flat in sync.flat_params)]
        optimizer.step()
        for last in (False, True):
            sync.after_step(last)
            is_free.append(all(flat.is_free for flat in sync.flat_params))
        sync.after_step(last=False)
    return dict(traffic.calls), is_free


def test_a_forward_that_is_repeated_fetches_its_own_layer_alone(world: Worlds) -> None:
    for calls, is_free in world(2).run(repeat_forward):
        assert is_free == [True, True, False]
        # reduce-scatters, and all-gathers for forward and backward
        assert sorted(calls.values()) == [3, 6]


def pass_in_turn(rank: int, size: int) -> list[int]:
    """The collectives of three passes over a model that is being tested."""
    model, counts = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), []
    SYNCS["zero-3"](model)
    model.eval()
    for _ in range(3):
        traffic = Traffic()
        with observing(traffic), torch.no_grad():
            model(torch.ones(2, 3))
        counts.append(traffic.calls.total())
    return counts


def test_a_test_gathers_parameters_once(world: Worlds) -> None:
    assert world(2).run(pass_in_turn) == [[2, 0, 0]] * 2


def go_wrong_in_a_step(rank: int, size: int, how: str) -> None:
    settings = small(width=60) if how == "mismatch" and rank == 1 else small()
    trainer = Trainer(new_model(settings), SYNCS["zero-3"])

    def misbehave_in_forward(*_: object) -> None:
        if rank == 1:
            misbehave(how)

    if how != "mismatch":
        trainer.model[1].register_forward_hook(misbehave_in_forward)
    trainer.step(batches(size, 1, 0)[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"^rank 1 of 2 was killed by SIGKILL"),
        pytest.param("hang", "rank 1", marks=pytest.mark.stress),
        ("mismatch", "all_gather"),
    ],
)
def test_a_rank_that_fails_in_a_step_is_named(how: str, message: str, world: Worlds) -> None:
    with pytest.raises(PlaygroundError, match=message) as caught:
        world(2, timeout=3).run(go_wrong_in_a_step, how)
    print(caught.value)
