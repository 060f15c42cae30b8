"""DataParallel by its parts: one device with the whole batch is the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from playground.lessons.data_parallel import lesson
from playground.lessons.devices import device_of, find_devices, place, track_memory

program: Any = lesson
CPUS = [torch.device("cpu", number) for number in range(8)]


def model() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6, bias=False)
    norm, first = nn.BatchNorm1d(6), nn.Linear(5, 6)
    first.bias.requires_grad_(False)
    layers = first, nn.Tanh(), shared, nn.Sequential(), shared, norm, nn.Linear(6, 3)
    return nn.Sequential(*layers).double().eval()


def parallel(module: nn.Module, devices: Any) -> Callable[..., torch.Tensor]:
    return lambda *inputs: program.data_parallel(module, inputs, devices, devices[-1])


def gradients(
    run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, inputs: torch.Tensor
) -> torch.Tensor:
    """Gradients of the output's mean square: of every parameter that learns, and of the inputs."""
    module.zero_grad()
    inputs = inputs.clone().requires_grad_()
    (run(inputs) ** 2).mean().backward()
    params = (param.grad for param in module.parameters() if param.requires_grad)
    return torch.cat([grad.flatten() for grad in (inputs.grad, *params)])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch", [1, 5, 8, 33])
def test_gradients_are_those_of_one_device_with_the_whole_batch(count: int, batch: int) -> None:
    module, inputs = model(), torch.randn(batch, 5, dtype=torch.float64)
    run = parallel(module, CPUS[:count])
    expected = gradients(module, module, inputs)
    assert (gradients(run, module, inputs) - expected).abs().max() <= 1e-12
    with track_memory(CPUS[:count]):
        place(module, CPUS[0])
        assert (gradients(run, module, inputs) - expected).abs().max() <= 1e-12
    assert torch.allclose(run(inputs), module(inputs), rtol=0, atol=1e-12)


def test_gather_undoes_scatter_and_a_small_batch_has_fewer_chunks() -> None:
    whole = torch.randn(7, 5)
    with track_memory(CPUS):
        chunks = program.scatter(whole, CPUS[:3])
        assert [device_of(chunk) for chunk in chunks] == CPUS[:3]
        assert all(map(torch.equal, chunks, whole.chunk(3)))
        assert torch.equal(program.gather(chunks, CPUS[1]), whole)
        assert device_of(program.gather(chunks, CPUS[1])) == CPUS[1]
        assert [len(chunk) for chunk in program.scatter(whole, CPUS)] == [1] * 7
        assert program.gather([torch.tensor(1.0), torch.tensor(2.0)], CPUS[0]).tolist() == [1, 2]


def test_the_first_replica_has_the_module_s_parameters_and_the_module_gets_all_gradients() -> None:
    module = nn.Linear(2, 1)
    with track_memory(CPUS[:2]):
        place(module, CPUS[0])
        first, second = replicas = program.replicate(module, CPUS[:2])
        assert module not in replicas
        assert first.weight is module.weight
        assert second.weight.data_ptr() != module.weight.data_ptr()
        assert device_of(second.weight) == CPUS[1]
        chunks = program.scatter(torch.ones(2, 2), CPUS[:2])
        outputs = program.parallel_apply(replicas, [(chunk,) for chunk in chunks], CPUS[:2])
        program.gather(outputs, CPUS[0]).sum().backward()
    assert (module.weight.grad.tolist(), module.bias.grad.tolist()) == ([[2, 2]], [2])


def test_a_recurrent_model_uses_its_replicas_parameters() -> None:
    lstm = nn.LSTM(5, 4, batch_first=True).double()
    inputs = torch.randn(6, 3, 5, dtype=torch.float64)

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    outputs = Outputs()
    expected = gradients(outputs, lstm, inputs)
    together = gradients(parallel(outputs, CPUS[:3]), lstm, inputs)
    assert (expected - together).abs().max() <= 1e-12
    replica = program.replicate(lstm, CPUS[:2])[1]
    assert replica._flat_weights[0] is replica.weight_ih_l0
    assert replica.weight_ih_l0.data_ptr() != lstm.weight_ih_l0.data_ptr()


def test_gradients_of_gradients() -> None:
    module, inputs = model(), torch.randn(5, 5, dtype=torch.float64)
    penalties = []
    for run in (module, parallel(module, CPUS[:3])):
        module.zero_grad()
        x = inputs.clone().requires_grad_()
        [slope] = torch.autograd.grad((run(x) ** 2).sum(), x, create_graph=True)
        slope.norm().backward()
        penalties.append(module[0].weight.grad.clone())
    assert (penalties[0] - penalties[1]).abs().max() <= 1e-12


def test_what_the_first_replica_does_to_buffers_stays() -> None:
    module, inputs = nn.BatchNorm1d(2).double(), torch.randn(8, 2, dtype=torch.float64)
    expected = nn.BatchNorm1d(2).double()
    expected(inputs[:3])
    with track_memory(CPUS[:3]):
        parallel(place(module, CPUS[0]), CPUS[:3])(inputs)
    pairs = zip(module.buffers(), expected.buffers(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_replicas_run_at_once_in_the_caller_s_grad_mode() -> None:
    all_here = threading.Barrier(3)

    class Meeting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            all_here.wait(60)
            return torch.tensor([torch.is_grad_enabled()])

    inputs = torch.zeros(3, 1)
    assert parallel(Meeting(), CPUS[:3])(inputs).tolist() == [True] * 3
    with torch.no_grad():
        assert parallel(Meeting(), CPUS[:3])(inputs).tolist() == [False] * 3


def test_of_several_errors_that_of_the_first_device_is_raised() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"not {int(x)}")

    with pytest.raises(ValueError, match="not 1"):
        parallel(Failing(), CPUS[:3])(torch.tensor([1, 2, 3]))


WAYS = ("gather_logits", "gather_elsewhere", "gather_losses", "average_losses", "keep_outputs")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In float64, and with a small vocabulary."""
    monkeypatch.setattr(program, "WORDS", 50)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("batch", [30, 32, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_way_to_the_loss_trains_as_one_device_does(
    count: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain mean of the losses only if all chunks have the same size."""
    monkeypatch.setattr(program, "BATCH", batch)
    devices = CPUS[:count]
    expected, _ = program.train(program.one_device, devices)
    sizes = {len(chunk) for chunk in torch.zeros(batch).chunk(count)}
    for way in WAYS:
        params, _ = program.train(getattr(program, way), devices)
        is_same = (params - expected).abs().max() <= 1e-12
        assert is_same == (way != "average_losses" or len(sizes) == 1), way


def test_the_copies_of_a_step_are_those_of_the_closed_form() -> None:
    devices = CPUS[:4]
    _, memory = program.train(program.gather_logits, devices)
    model = 4 * sum(param.numel() for param in program.make_model(CPUS[0]).parameters())
    tokens = [8 * len(chunk) * program.LENGTH for chunk in torch.zeros(30).chunk(4)]
    logits = [4 * count // 8 * program.WORDS for count in tokens]
    expected = {
        "scatter": tokens,
        "replicate": [0, model, model, model],
        "gather": [sum(logits[1:]), 0, 0, 0],
        "targets": [sum(tokens), 0, 0, 0],
        "backward of gather": [0, *logits[1:]],
        "backward of replicate": [3 * model, 0, 0, 0],
    }
    parts = {part for part, source, target in memory.copied}
    found = {part: [memory.copied_to(device, part) for device in devices] for part in parts}
    steps = program.STEPS
    assert found == {part: [steps * count for count in row] for part, row in expected.items()}


def test_the_loss_in_forward_gathers_numbers_and_evens_the_peaks_out() -> None:
    devices = CPUS[:4]
    memories = {way: program.train(getattr(program, way), devices)[1] for way in WAYS}
    peaks = {way: [memory.peak(each) for each in devices] for way, memory in memories.items()}
    gathered = {way: memory.copied_to(CPUS[0], "gather") for way, memory in memories.items()}
    assert peaks["gather_logits"][0] > 3 * max(peaks["gather_logits"][1:])
    assert peaks["gather_elsewhere"][3] > 2 * max(peaks["gather_elsewhere"][:3])
    for way in ("gather_losses", "keep_outputs"):
        assert max(peaks[way]) < 2 * min(peaks[way])
        assert gathered[way] == program.STEPS * 3 * 4 < gathered["gather_logits"] / 1000


def test_each_replica_gets_its_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    program.print_chunks(CPUS[:3])
    cut = [line.partition("cut into ")[2] for line in capsys.readouterr().out.splitlines()]
    assert cut == ["30", "15 15", "10 10 10", "1 1"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_its_functions_are_torch_s() -> None:
    devices = find_devices(2)
    module = model().float().to(devices[0])
    inputs = torch.randn(5, 5, device=devices[0])
    ours, theirs = program.scatter(inputs, devices), nn.parallel.scatter(inputs, devices)
    assert all(map(torch.equal, ours, theirs))
    replicas = program.replicate(module, devices)
    for one, other in zip(replicas, nn.parallel.replicate(module, devices), strict=True):
        assert torch.equal(one[0].weight, other[0].weight)
        assert one[0].weight.device == other[0].weight.device
    outputs = program.parallel_apply(replicas, [(chunk,) for chunk in ours], devices)
    assert all(map(torch.allclose, outputs, nn.parallel.parallel_apply(replicas, ours)))
    gathered = program.gather(outputs, devices[1])
    assert torch.equal(gathered, nn.parallel.gather(outputs, devices[1]))
    library = nn.DataParallel(module, devices)
    # simulated GPUs do not order what two threads of backward add up
    with torch.autograd.set_multithreading_enabled(False):
        found, expected = (
            gradients(run, module, inputs)
            for run in (parallel(module, devices), lambda x: library(x).to(devices[1]))
        )
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("_small")
def test_the_library_trains_as_one_gpu_does() -> None:
    devices = find_devices(2)
    expected, _ = program.train(program.one_device, devices)
    for way in ("library", "gather_logits"):
        params, memory = program.train(getattr(program, way), devices)
        assert (params - expected).abs().max() <= 1e-12
        assert memory.peak(devices[1]) > 0
