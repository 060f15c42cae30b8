"""ladder: every rung trains the model of one process, and sends its messages when it says so."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from fixtures import Run, Worlds
from one_process import EXACT
from processes import ENOUGH
from torch import nn
from torch.nn.utils import parameters_to_vector

from playground.lessons.ladder import lesson as ladder
from playground.tap import Call, Observer, observing
from playground.training.sync import new_grad_sync

OURS = (
    "per_parameter", "flat", "overlapped", "bucketed", "overlapped_buckets", "gradients_as_views",
)  # fmt: skip
ENGINES = {
    "per_parameter": "per-parameter", "flat": "flat", "bucketed": "bucketed",
    "gradients_as_views": "overlapped",
}  # fmt: skip
"""By rung, the name of the machine's own, which does the same for any model."""
LAYER = 8 * (4 * 4 + 4)
"""Bytes of a layer of the small model: weight and bias, in float64."""


@contextmanager
def full_with(bucket: int) -> Iterator[None]:
    """With buckets that are full with this number of bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "BUCKET_MB", bucket / 2**20)
        yield


def new_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers).double()


Calls = Sequence[Callable[[], None]]


def rung(name: str, model: nn.Module) -> tuple[nn.Module, Calls]:
    """The model to call, and what is called after backward."""
    found: tuple[nn.Module, Calls] = getattr(ladder, name)(model)
    return found


def engine(name: str, model: nn.Module) -> tuple[nn.Module, Calls]:
    values = {"bucket_cap": LAYER} if name in ("bucketed", "overlapped") else {}
    return model, [new_grad_sync(name, model, **values).after_backward]


def three_steps(model: nn.Module, after_backward: Calls, inputs: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in inputs:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().sum(1).mean().backward()
        for call in after_backward:
            call()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def all_rungs(rank: int, size: int) -> dict[str, float]:
    """By rung, and by the machine's own, the largest difference from one process."""
    with full_with(LAYER):
        torch.manual_seed(0)
        whole = torch.randn(3, 2 * size, 4).double()
        part = whole.chunk(size, dim=1)[rank]
        expected = three_steps(new_model(), [], whole)
        found = {name: three_steps(*rung(name, new_model()), part) for name in (*OURS, "ddp")}
        found |= {name: three_steps(*engine(name, new_model()), part) for name in ENGINES.values()}
        found["no_averaging"] = three_steps(*rung("no_averaging", new_model()), part)
        return {name: (params - expected).abs().max().item() for name, params in found.items()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rung_trains_the_model_of_one_process(size: int, world: Worlds) -> None:
    """And so does what the machine has for any model."""
    for differences in world(size, timeout=ENOUGH).run(all_rungs):
        apart = differences.pop("no_averaging")
        assert max(differences.values()) <= EXACT
        assert (apart > 1e-4) == (size > 1)


def gradients(rank: int, size: int) -> dict[str, float]:
    """By rung, how far the gradients of a second step are from what the machine's own leaves."""
    with full_with(LAYER):
        torch.manual_seed(rank)
        inputs = torch.randn(2, 5, 4).double()
        found = {}
        for name, its_engine in ENGINES.items():
            grads = []
            for make in (rung(name, new_model()), engine(its_engine, new_model())):
                model = make[0]
                three_steps(*make, inputs)
                grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
            found[name] = (grads[0] - grads[1]).abs().max().item()
        return found


def test_rungs_leave_the_gradients_that_the_machine_s_own_leave(world: Worlds) -> None:
    for differences in world(3, timeout=ENOUGH).run(gradients):
        assert differences.keys() == ENGINES.keys()
        assert max(differences.values()) <= EXACT


class Log(Observer):
    """Notes, one letter each, what happens in a step: `g`, a gradient is complete; `s`, an
    asynchronous all_reduce starts; `b`, one that blocks; `w`, a wait for one; `.`, backward
    ends."""

    def __init__(self, model: nn.Module) -> None:
        self.events, self.elements = "", list[int]()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: self.note("g"))

    def note(self, event: str) -> None:
        self.events += event

    def begun(self, call: Call) -> None:
        self.note("b" if call.blocks else "s")
        self.elements += [tensor.numel() for tensor in call.inputs]

    def waiting(self, calls: Sequence[Call]) -> None:
        self.note("w" * len(calls))


def what_happens(rank: int, size: int) -> dict[str, tuple[str, list[int]]]:
    """By rung, the events of a second step, and the elements of its messages."""
    found = {}
    with full_with(2 * LAYER):
        for name in OURS:
            model = new_model()
            log = Log(model)
            model, after_backward = rung(name, model)
            for _ in range(2):
                log.events, log.elements = "", []
                model.zero_grad(set_to_none=False)
                with observing(log):
                    model(torch.ones(2, 4).double()).sum().backward()
                    log.note(".")
                    for call in after_backward:
                        call()
            found[name] = log.events, log.elements
    return found


def test_messages_are_few_or_early_or_both(world: Worlds) -> None:
    """Three layers of 16 + 4 elements, two of which fill a bucket. A rung that waits in its hooks,
    that begins with the first layer, or that has one bucket only, has other events."""
    [found, same] = world(2, timeout=ENOUGH).run(what_happens)
    assert found == same
    _, in_backward = found["overlapped"]
    assert Counter(in_backward) == {16: 3, 4: 3}
    assert found == {
        "per_parameter": ("gggggg." + "bbbbbb", [16, 4] * 3),
        "flat": ("gggggg." + "b", [60]),
        "overlapped": ("gsgsgsgsgsgs." + "wwwwww", in_backward),
        "bucketed": ("gggggg." + "swsw", [40, 20]),
        "overlapped_buckets": ("ggggsggs." + "ww", [40, 20]),
        "gradients_as_views": ("ggggsggs." + "ww", [40, 20]),
    }


def places(rank: int, size: int) -> list[list[tuple[int, int]]]:
    """By step of `gradients_as_views`, where the storage of each gradient is, and its bytes."""
    found = []
    with full_with(2 * LAYER):
        model, after_backward = rung("gradients_as_views", new_model())
        for _ in range(2):
            three_steps(model, after_backward, torch.ones(1, 2, 4).double())
            storages = [param.grad.untyped_storage() for param in model.parameters()]
            found.append([(storage.data_ptr(), storage.nbytes()) for storage in storages])
    return found


def test_gradients_stay_in_the_message_of_their_bucket(world: Worlds) -> None:
    """Six gradients of three layers, in a bucket of two layers and one of one: nothing is copied,
    and there is no other memory."""
    for first, second in world(2, timeout=ENOUGH).run(places):
        assert first == second
        assert sorted(nbytes for _, nbytes in {*first}) == [LAYER, 2 * LAYER]


PARAMETERS = 16 * (128 * 128 + 3 * 128)
"""Of each layer: a matrix, its bias, and the weight and bias of its norm."""


@pytest.mark.torch(2, 14)  # older ones do not tell what DistributedDataParallel sends
@pytest.mark.parametrize("size", [2, 3])
def test_the_profile_has_the_calls_and_bytes_of_the_closed_form(
    size: int, run_cli: Run, tmp_path: Path
) -> None:
    """Every rung sends the same bytes, 2 (N - 1) / N of the gradients from each rank."""
    steps, file = 2, tmp_path / "profile.json"
    ran = run_cli("ladder", "-n", size, "--steps", steps, "--profile", file)
    assert ran.code == 0, ran.err
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    sent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in sorted(rows, key=itemgetter("line")):
        if row["sent"] > steps * PARAMETERS:
            sent[row["function"], row["operation"]] += [row["calls"], row["sent"]]
    of_all = 2 * (size - 1) * steps * 8 * PARAMETERS
    each, by_bytes = steps * size, pytest.approx(of_all)
    assert sent.pop(("train", "all_reduce in C++"))[1] == by_bytes
    del sent["ddp", "broadcast in C++"]  # when it wraps the model
    assert sent == {
        ("average", "all_reduce"): [64 * each, by_bytes, each, by_bytes],
        ("start", "all_reduce"): [
            64 * each,
            by_bytes,
            2 * 4 * each,
            pytest.approx(2 * of_all),
            4 * each,
            by_bytes,
        ],
    }


def test_over_a_link_a_rung_that_hides_nothing_pays_for_every_byte(run_cli: Run) -> None:
    """17 ms for 2.1 MB over 1 Gbit/s."""
    ran = run_cli("ladder", "--steps", 3, "--link", 1)
    assert ran.code == 0, ran.err
    milliseconds = {line.split()[0]: float(line.split()[1]) for line in ran.out.splitlines()[1:]}
    assert [*milliseconds] == [*OURS, "ddp", "no_averaging"]
    assert min(milliseconds[name] for name in (*OURS, "ddp")) > 17
