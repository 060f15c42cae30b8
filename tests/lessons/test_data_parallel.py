"""DataParallel by its parts: one device with the whole batch is the oracle; the accounts are what
was really kept."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fixtures import Run
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from playground.lessons.data_parallel import experiment, lesson
from playground.lessons.data_parallel.lesson import ParallelLossModel, chunk_sizes, weighted_mean
from playground.lessons.data_parallel.losses import DataParallelCriterion, DataParallelModel
from playground.lessons.data_parallel.machine import (
    DataParallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from playground.lessons.data_parallel.memory import track_memory
from playground.lessons.data_parallel.page import (
    LABELS,
    PARTS,
    DataParallelSettings,
    ways_to_compare,
)
from playground.runtime import launch

DEVICES = [torch.device("cpu", number) for number in range(8)]
Pair = namedtuple("Pair", "left right")


def model() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6, bias=False)
    layers = [
        nn.Linear(5, 6),
        nn.Tanh(),
        shared,
        nn.Sequential(),
        shared,
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ]
    layers[0].bias.requires_grad_(False)
    return nn.Sequential(*layers).double().eval()


def gradients(
    run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, inputs: torch.Tensor
) -> torch.Tensor:
    """Gradients of the output's mean square: of every parameter that learns, and of the inputs."""
    module.zero_grad()
    inputs = inputs.clone().requires_grad_()
    (run(inputs) ** 2).mean().backward()
    grads = [
        inputs.grad,
        *(parameter.grad for parameter in module.parameters() if parameter.requires_grad),
    ]
    return torch.cat([grad.flatten() for grad in grads])


@given(st.integers(1, 8), st.integers(1, 33))
@settings(max_examples=20, deadline=None)
def test_gradients_are_those_of_one_device_with_the_whole_batch(devices: int, batch: int) -> None:
    module, inputs = model(), torch.randn(batch, 5, dtype=torch.float64)
    parallel = DataParallel(module, DEVICES[:devices], DEVICES[devices - 1])
    assert (
        gradients(module, module, inputs) - gradients(parallel, module, inputs)
    ).abs().max() <= 1e-12


CPUS = ["cpu"] * 8


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_the_board_s_gradients_are_those_of_one_device(devices: int, batch: int) -> None:
    module, inputs = model(), torch.randn(batch, 5, dtype=torch.float64)
    parallel = lesson.DataParallel(module, CPUS[:devices])
    assert (
        gradients(module, module, inputs) - gradients(parallel, module, inputs)
    ).abs().max() <= 1e-12
    assert torch.allclose(parallel(inputs), module(inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_board_s_gather_undoes_its_scatter(dim: int) -> None:
    whole = torch.randn(5, 7)
    chunks = lesson.scatter(whole, CPUS[:3], dim)
    assert all(map(torch.equal, chunks, whole.chunk(3, dim)))
    assert torch.equal(lesson.gather(chunks, "cpu", dim), whole)
    assert [len(chunk) for chunk in lesson.scatter(whole, CPUS)] == [1] * 5, (
        "fewer samples than devices"
    )
    assert lesson.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1, 2]


def test_each_replica_of_the_board_has_copies_and_the_module_gets_all_gradients() -> None:
    def to(tensor: torch.Tensor, device: str) -> torch.Tensor:
        return tensor if device == "first" else tensor.clone()

    module = nn.Linear(2, 1)
    first, second = replicas = lesson.replicate(module, ["first", "second"], to)
    assert module not in replicas
    assert first.weight is module.weight
    assert second.weight is not module.weight
    sum(replica(torch.ones(1, 2)) for replica in replicas).backward()
    assert (module.weight.grad.tolist(), module.bias.grad.tolist()) == ([[2, 2]], [2])


def test_the_board_s_replicas_run_at_once_in_the_caller_s_grad_mode() -> None:
    all_here = threading.Barrier(3)

    class Meeting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            all_here.wait(60)
            return torch.tensor([torch.is_grad_enabled()])

    assert (
        torch.cat(lesson.parallel_apply([Meeting()] * 3, [torch.zeros(1)] * 3)).tolist()
        == [True] * 3
    )
    with torch.no_grad():
        assert (
            torch.cat(lesson.parallel_apply([Meeting()] * 3, [torch.zeros(1)] * 3)).tolist()
            == [False] * 3
        )


def test_the_board_raises_the_first_error_when_all_are_done() -> None:
    done = []

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x == 3:
                done.append(x)
                return x
            raise ValueError(f"not {int(x)}")

    with pytest.raises(ValueError, match="not 1"):
        lesson.parallel_apply([Failing()] * 3, [torch.tensor(1), torch.tensor(2), torch.tensor(3)])
    assert len(done) == 1


def test_chunk_sizes_are_what_its_docstring_says() -> None:
    tested = doctest.testmod(lesson)
    assert (tested.failed, tested.attempted) == (0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_board_s_functions_are_torch_s() -> None:
    module = model().float().to("cuda:0")
    inputs = torch.randn(5, 5, device="cuda:0")
    devices = [0, 1]
    ours, theirs = lesson.scatter(inputs, devices), nn.parallel.scatter(inputs, devices)
    assert all(map(torch.equal, ours, theirs))
    replicas = lesson.replicate(module, devices)
    for one, other in zip(replicas, nn.parallel.replicate(module, devices), strict=True):
        assert torch.equal(one[0].weight, other[0].weight)
        assert one[0].weight.device == other[0].weight.device
    outputs = lesson.parallel_apply(replicas, ours)
    assert all(map(torch.allclose, outputs, nn.parallel.parallel_apply(replicas, ours)))
    assert torch.equal(lesson.gather(outputs, 1), nn.parallel.gather(outputs, 1))
    parallel, torch_s = lesson.DataParallel(module, devices), nn.DataParallel(module, devices)
    # simulated GPUs do not order what two threads of backward add up
    with torch.autograd.set_multithreading_enabled(False):
        assert torch.allclose(
            gradients(parallel, module, inputs), gradients(torch_s, module, inputs), atol=1e-5
        )


def test_a_recurrent_model_uses_its_replicas_parameters() -> None:
    lstm = nn.LSTM(5, 4, batch_first=True).double()
    inputs = torch.randn(6, 3, 5, dtype=torch.float64)
    parallel = DataParallel(lstm, DEVICES[:3])
    alone = gradients(lambda x: lstm(x)[0], lstm, inputs)
    together = gradients(lambda x: parallel(x)[0], lstm, inputs)
    assert (alone - together).abs().max() <= 1e-12
    replica = replicate(lstm, DEVICES[:2])[1]
    assert replica._flat_weights[0] is replica.weight_ih_l0
    assert replica.weight_ih_l0.data_ptr() != lstm.weight_ih_l0.data_ptr()


def test_one_in_the_other() -> None:
    module, inputs = model(), torch.randn(9, 5, dtype=torch.float64)
    nested = DataParallel(DataParallel(module, DEVICES[:2]), DEVICES[:2])
    assert (
        gradients(module, module, inputs) - gradients(nested, module, inputs)
    ).abs().max() <= 1e-12


def test_gradients_of_gradients() -> None:
    module, inputs = model(), torch.randn(5, 5, dtype=torch.float64)
    penalties = []
    for run in (module, DataParallel(module, DEVICES[:3])):
        module.zero_grad()
        x = inputs.clone().requires_grad_()
        [slope] = torch.autograd.grad((run(x) ** 2).sum(), x, create_graph=True)
        slope.norm().backward()
        penalties.append(module[0].weight.grad.clone())
    assert (penalties[0] - penalties[1]).abs().max() <= 1e-12


NESTED = st.recursive(
    st.just("tensor") | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Of one structure, with equal leaves."""
    leaves, spec = tree_flatten(one)
    others, other_spec = tree_flatten(other)
    return spec == other_spec and all(
        map(torch.equal, map(torch.as_tensor, leaves), map(torch.as_tensor, others))
    )


@given(NESTED, st.integers(1, 9), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_scatter_cuts_every_tensor_and_keeps_everything_else(
    shape: Any, batch: int, devices: int
) -> None:
    """torch.chunk at every tensor, all else as it is; gather puts the tensors together again."""
    value = tree_map(lambda leaf: torch.randn(batch, 2) if leaf == "tensor" else leaf or 0, shape)
    parts = scatter(value, DEVICES[:devices])
    assert len(parts) in (1, len(torch.zeros(batch).chunk(devices)))
    for number, part in enumerate(parts):
        whole = len(parts) == 1
        cut = tree_map(
            lambda leaf, n=number, w=whole: (
                leaf if w or type(leaf) is int else leaf.chunk(devices)[n]
            ),
            value,
        )
        assert same(part, cut)
    tensors = tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else torch.ones(batch), value
    )
    assert same(gather(scatter([tensors], DEVICES[:devices]), DEVICES[0]), [tensors])


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors of 3 and of 4 samples"):
        scatter((torch.zeros(4), {"more": torch.zeros(3)}), DEVICES[:2])


def test_keyword_arguments_and_a_batch_smaller_than_the_devices() -> None:
    calls = []

    class Adding(nn.Module):
        def forward(
            self, x: torch.Tensor, *, more: dict[str, torch.Tensor], times: int
        ) -> dict[str, torch.Tensor]:
            calls.append(len(x))
            return {"sum": times * x + more["y"]}

    x, y = torch.randn(3, 2), torch.randn(3, 2)
    result = DataParallel(Adding(), DEVICES)(x, more={"y": y}, times=2)
    assert torch.equal(result["sum"], 2 * x + y)
    assert calls == [1, 1, 1]
    assert DataParallel(Adding(), DEVICES[:2])(x[:0], more={"y": y[:0]}, times=2)["sum"].shape == (
        0,
        2,
    )


def test_torch_s_arguments_and_defaults() -> None:
    for ours, theirs in ((DataParallel, nn.DataParallel), (DataParallelModel, nn.DataParallel)):
        taken = [(each.name, each.default) for each in inspect.signature(ours).parameters.values()]
        assert taken == [
            (each.name, each.default) for each in inspect.signature(theirs).parameters.values()
        ]
    torch_s = inspect.signature(nn.parallel.parallel_apply)
    assert list(inspect.signature(parallel_apply).parameters) == list(torch_s.parameters)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the devices would be GPUs")
def test_without_a_gpu_numbers_are_virtual_devices_and_the_default_is_the_module_alone() -> None:
    module, inputs, criterion = model(), torch.randn(7, 5, dtype=torch.float64), nn.MSELoss()
    parallel = DataParallel(module, device_ids=[0, 1], output_device=0)
    assert parallel.devices == DEVICES[:2]
    assert torch.allclose(parallel(inputs), module(inputs), rtol=0, atol=1e-12)
    assert torch.equal(DataParallel(module)(inputs), module(inputs))
    outputs = parallel_apply(replicate(module, [0, 1]), scatter(inputs, [0, 1]))
    assert torch.equal(gather(outputs, 0), parallel(inputs))
    [output] = DataParallelModel(module)(inputs)
    assert torch.equal(output, module(inputs))
    assert torch.equal(
        DataParallelCriterion(criterion)([output], inputs[:, :3]), criterion(output, inputs[:, :3])
    )


def test_what_the_first_replica_does_to_buffers_stays() -> None:
    module, inputs = nn.BatchNorm1d(2).double(), torch.randn(8, 2, dtype=torch.float64)
    DataParallel(module, DEVICES[:3])(inputs)
    alone = nn.BatchNorm1d(2).double()
    alone(inputs[:3])
    assert all(
        torch.equal(one, other)
        for one, other in zip(module.buffers(), alone.buffers(), strict=True)
    )


@pytest.fixture
def four_threads() -> Iterator[int]:
    """The number of threads that this process computes in."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_a_failure_is_told_with_its_device(four_threads: int) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0] == 2:
                raise ValueError("no twos")
            return x

    with pytest.raises(RuntimeError, match="replica 2 on cpu:2: no twos") as caught:
        DataParallel(Failing(), DEVICES[:4])(torch.arange(4))
    assert isinstance(caught.value.__cause__, ValueError)
    assert torch.get_num_threads() == four_threads


def test_replicas_run_in_the_caller_s_modes_on_their_share_of_the_threads(
    four_threads: int,
) -> None:
    class Modes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes = [
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
            ]
            return torch.tensor([[*modes, torch.get_num_threads()]])

    share = four_threads // 2
    callers = (
        (torch.enable_grad(), [1, 0, 0]),
        (torch.inference_mode(), [0, 1, 0]),
        (torch.autocast("cpu"), [1, 0, 1]),
    )
    for mode, expected in callers:
        with mode:
            assert (
                DataParallel(Modes(), DEVICES[:2])(torch.zeros(2)).tolist()
                == [[*expected, share]] * 2
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [8, 10, 2])
def test_the_loss_in_parallel_is_the_loss(reduction: str, batch: int) -> None:
    module, criterion = model(), nn.CrossEntropyLoss(reduction=reduction)
    inputs, targets = torch.randn(batch, 5, dtype=torch.float64), torch.randint(3, (batch,))
    alone = criterion(module(inputs), targets)
    outputs = DataParallelModel(module, DEVICES[:4])(inputs)
    assert [len(output) for output in outputs] == chunk_sizes(batch, 4)
    assert (
        DataParallelCriterion(criterion, DEVICES[:4])(outputs, targets) - alone
    ).abs().max() <= 1e-12
    if reduction == "mean":
        losses = DataParallel(ParallelLossModel(module, criterion), DEVICES[:4])(inputs, targets)
        assert (weighted_mean(losses, chunk_sizes(batch, 4)) - alone).abs() <= 1e-12
        assert ((losses.mean() - alone).abs() <= 1e-12) == (len(set(chunk_sizes(batch, 4))) == 1)


def test_an_account_is_what_is_kept_alive() -> None:
    first, second = DEVICES[:2]
    weight = torch.ones(1000, requires_grad=True)  # 4,000 bytes
    with track_memory([first, second]) as account:
        account.put(weight, device=first)
        kept = weight * 2  # kept, and no copy of weight is needed for backward
        assert account.held == {first: 8000, second: 0}
        squares = kept.exp().sum()  # saves its result
        assert account.held[first] == 12004
        squares.backward()
        del squares, kept
        assert account.held == {first: 8000, second: 0}, "the parameter and its gradient"
        assert account.peak[first] >= 16000
        [part, other] = scatter(weight.detach(), [first, second])
        assert account.held == {first: 8000, second: 2000}, "the first half is where it was"
        assert account.moved == {("scatter", first, second): 2000}
        with pytest.raises(RuntimeError, match="operands on cpu:0 and cpu:1"):
            part + other


def on(*devices: str, **more: Any) -> DataParallelSettings:
    return DataParallelSettings(devices=devices, **more)


def test_the_loss_inside_forward_gathers_a_thousandth_and_evens_the_peaks_out() -> None:
    devices = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    compared = ways_to_compare(devices, None)
    assert compared == (
        ("logits", "cpu:0"),
        ("loss", "cpu:0"),
        ("outputs", "cpu:0"),
        ("logits", "cpu:1"),
    )
    [results] = launch(
        experiment.ways, 1, args=(on(*devices, ways=compared, batch_size=16, steps=1, seed=0),)
    )
    logits, inside, outputs, elsewhere = results
    assert all(way.seconds > 0 for way in results)
    assert max(inside.gathered, outputs.gathered) <= logits.gathered / 1000
    assert logits.gathered == elsewhere.gathered == 12 * 8 * 30_000 * 4
    peaks = [[device.peak for device in way.devices] for way in results]
    assert peaks[0][0] > 3 * max(peaks[0][1:])
    assert max(peaks[1]) < 2 * min(peaks[1])
    assert peaks[3].index(max(peaks[3])) == 1
    assert [way.loss for way in results] == pytest.approx([logits.loss] * 4, rel=1e-6)
    for device in (device for way in results for device in way.devices):
        assert sum(device.at_peak.values()) == device.peak
        assert 0 < device.share < 1


COPY = 4 * (2 * 30_000 * 32 + 30_000 + 32 * 32 + 32)
"""Bytes of the lesson's model."""


def test_the_lesson_s_step_adds_up() -> None:
    devices = experiment.one_step(0, 1, on("cpu:0", "cpu:1", batch_size=4))
    moved = [
        {(move["part"], move["from"]): move["bytes"] for move in device.received}
        for device in devices
    ]
    copy = COPY
    assert moved[1] == {
        ("scatter", "host"): 2 * 8 * 8,
        ("replicate", "cpu:0"): copy,
        ("gradients of outputs", "cpu:0"): 2 * 8 * 30_000 * 4,
    }
    assert moved[0][("reduce", "cpu:1")] == copy
    assert devices[1].held["optimizer.step"] == 0
    assert devices[0].held["optimizer.step"] == 2 * copy
    assert devices[0].held["backward"] == 2 * copy + 4, "parameters, gradients, and the loss"
    assert list(devices[0].held) == ["(before)", *PARTS]


def test_the_split_is_what_its_table_says() -> None:
    lines = [
        line.strip().strip("|").split("|")
        for line in str(experiment.split.__doc__).splitlines()
        if "|" in line
    ]
    names, *rows = [[cell.strip() for cell in line] for line in lines if "---" not in line[0]]
    table = [
        {
            name: cell if name == "device" else ast.literal_eval(cell)
            for name, cell in zip(names, row, strict=True)
        }
        for row in rows
    ]
    assert experiment.split(0, 1, on("cpu:0", "cpu:1", "cpu:2")) == table


def test_one_way_as_json(run_cli: Run) -> None:
    words = "--devices cpu:2,cpu:0 --gather logits --steps 1 --batch-size 4 --json"
    document = json.loads(run_cli("data-parallel", *words.split()).out)
    assert (
        document.items()
        >= {"lesson": "data-parallel", "world_size": 1, "devices": ["cpu:2", "cpu:0"]}.items()
    )
    assert document["ways"][0]["devices"][0]["at_peak"].keys() <= {*LABELS}
    steps = {step["name"]: step["ranks"] for step in document["steps"]}
    assert list(steps) == ["split", "one_step", "gather logits on cpu:2"]
    assert [row["device"] for row in steps["gather logits on cpu:2"]] == ["cpu:2", "cpu:0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0"], "no devices"),
        (["--devices", ","], "a name is missing"),
        (["--devices", "65"], "at most 64"),
        (["--devices", "cuda:99"], "cuda:99 is absent"),
        (["--devices", "cpu:0,cpu:0"], "named twice"),
    ],
)
def test_bad_input(words: list[str], message: str, run_cli: Run) -> None:
    shown = run_cli("data-parallel", *words)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert message in shown.err


def test_it_does_not_join_a_world(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    shown = run_cli("data-parallel")
    assert (shown.code, shown.out) == (2, "")
    assert "run it without torchrun" in shown.err


@pytest.mark.gpu
def test_on_gpus_it_is_torch_s_own() -> None:
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    module, inputs = model().to(gpus[0]), torch.randn(13, 5, dtype=torch.float64, device=gpus[0])
    theirs = gradients(nn.DataParallel(module, gpus), module, inputs)
    for parallel in (
        DataParallel(module, gpus),
        DataParallel(module),
        DataParallel(module, range(len(gpus)), 0),
    ):
        assert parallel.devices == gpus
        assert (theirs - gradients(parallel, module, inputs)).abs().max() <= 1e-12
