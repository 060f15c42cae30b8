"""ddp: the script to copy trains the model of one process; and what its chapter says of buckets,
hooks, no_sync, Join, samplers and checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Worlds
from one_process import EXACT
from processes import ENOUGH
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp import lesson as ddp
from playground.lessons.mnist import Net
from playground.training import prepare
from playground.training.averaging import buckets
from playground.training.replicas import find_largest_difference

SIZES = {name: param.nbytes for name, param in Net().named_parameters()}
"""Bytes of each parameter of Net, in the order of its layers."""
CAPS = (0.001, 0.02, 25.0)
"""MiB with which `Net` has several buckets, few, and one."""


def flat(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def digits(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(count, 1, 28, 28), torch.randint(10, (count,))


def new_net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().eval()  # without dropout


def take_steps(rank: int, size: int) -> tuple[float, float]:
    """The largest difference of three steps of the script from one process with the whole batch;
    and the gradient's norm after clipping, of a loss whose gradient is long."""
    model, expected = DistributedDataParallel(new_net().double()), new_net().double()
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, expected)
    ]
    images, labels = digits(12 * size)
    images = 10 * images.double()
    for _ in range(3):
        part = slice(12 * rank, 12 * (rank + 1))
        ddp.train_step(model, optimizers[0], images[part], labels[part])
        optimizers[1].zero_grad()
        F.nll_loss(expected(images), labels).backward()
        before = clip_grad_norm_(expected.parameters(), ddp.MAX_NORM)
        optimizers[1].step()
    assert before > ddp.MAX_NORM
    difference = flat(model.parameters()) - flat(expected.parameters())
    norm = flat(param.grad for param in model.parameters()).norm()
    return difference.abs().max().item(), norm.item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_is_that_of_one_process_with_the_whole_batch(size: int, world: Worlds) -> None:
    """In microbatches, clipped, by DDP."""
    for difference, norm in world(size, timeout=ENOUGH).run(take_steps):
        assert difference <= EXACT
        assert norm == pytest.approx(ddp.MAX_NORM)


def count_correct(rank: int, size: int) -> tuple[float, float]:
    model, (images, labels) = new_net(), digits(11)
    found = ddp.accuracy(model, TensorDataset(images, labels), rank, size)
    model.eval()
    return found, (model(images).argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_test_accuracy_counts_each_of_11_images_once(size: int, world: Worlds) -> None:
    for found, expected in world(size, timeout=ENOUGH).run(count_correct):
        assert found == pytest.approx(expected)


@pytest.fixture
def few_digits_here(few_digits: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """MNIST is out of reach, and the working folder is empty."""
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rank_0_leaves_a_checkpoint_with_which_training_can_go_on(
    few_digits_here: Path, run_cli: Run
) -> None:
    ran = run_cli("ddp", "--epochs", 2)
    assert ran.code == 0, ran.err
    assert [file.name for file in few_digits_here.iterdir()] == ["checkpoint.pt"]
    state = torch.load(few_digits_here / "checkpoint.pt", weights_only=True)
    assert state.keys() == {"model", "optimizer", "epoch"}
    assert state["epoch"] == 2
    Net().load_state_dict(state["model"])
    momentum = [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
    assert [buffer.nbytes for buffer in momentum] == [*SIZES.values()]


def test_ranks_that_cannot_divide_the_batch_are_refused_in_one_line(
    few_digits_here: Path, run_cli: Run
) -> None:
    ran = run_cli("ddp", "-n", 3)
    assert (ran.code, ran.out) == (1, "")
    *_, last = ran.err.splitlines()
    assert "3 ranks cannot divide a batch of 128 equally (lesson.py:" in last


@pytest.mark.stress
def test_on_mnist_it_learns(
    real_mnist: Path, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepare.DATA_DIR, str(tmp_path))
    monkeypatch.setenv(prepare.MIRROR, str(real_mnist))
    monkeypatch.chdir(tmp_path)
    ran = run_cli("ddp", "--epochs", 2)
    assert ran.code == 0, ran.err
    found = re.findall(r"^epoch \d: loss \S+, test accuracy (\S+)%$", ran.out, re.MULTILINE)
    assert 85 < float(found[0]) < float(found[1]) > 90


def cut(order: list[str], cap: float) -> list[list[str]]:
    """The oracle: gradients in the order in which they get ready, a bucket full once it holds its
    cap."""
    left = iter(order)
    tensors = [torch.empty(SIZES[name] // 4) for name in order]
    return [[next(left) for _ in bucket] for bucket in buckets(tensors, cap * 2**20)]


Sent = tuple[list[str], int, int]
"""A bucket as it leaves: its parameters, its bytes, and how many gradients are ready."""


def observe(model: DistributedDataParallel) -> list[Sent]:
    """A list that grows in every backward, by the buckets as they leave."""
    names = {param: name for name, param in model.module.named_parameters()}
    ready: list[str] = []
    sent: list[Sent] = []

    def send(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        params = [names[param] for param in bucket.parameters()]
        assert torch.equal(flat(iter(bucket.gradients())), bucket.buffer()), "gradients travel"
        sent.append((params, bucket.buffer().nbytes, len(ready)))
        if bucket.is_last():
            ready.clear()
        return allreduce_hook(None, bucket)

    for param in names:
        param.register_post_accumulate_grad_hook(lambda param: ready.append(names[param]))
    # without types: torch would compare their names
    model.register_comm_hook(None, lambda state, bucket: send(state, bucket))
    return sent


def buckets_of_three_backwards(rank: int, size: int, cap: float) -> list[list[Sent]]:
    model = DistributedDataParallel(new_net(), bucket_cap_mb=cap)
    sent, passes = observe(model), []
    images, labels = digits(4, seed=rank)
    for _ in range(3):
        sent.clear()
        F.nll_loss(model(images), labels).backward()
        passes.append([*sent])
    return passes


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("size", [1, 3])
def test_buckets_are_those_that_ddp_is_known_to_build(size: int, cap: float, world: Worlds) -> None:
    """One in the first backward; then those that the cap asks for, the last layer's first, each as
    soon as it is complete, the same on all ranks."""
    first, *others = world(size, timeout=ENOUGH).run(buckets_of_three_backwards, cap)
    assert all(other == first for other in others)
    [(names, nbytes, ready)], rebuilt, again = first
    assert (sorted(names), nbytes, ready) == (sorted(SIZES), 87_360, 8)
    assert rebuilt == again
    order = [name for params, *_ in rebuilt for name in params]
    assert order.index("fc2.weight") < order.index("fc1.weight") < order.index("conv1.weight")
    assert [params for params, *_ in rebuilt] == cut(order, cap)
    assert [nbytes for _, nbytes, _ in rebuilt] == [
        sum(SIZES[name] for name in params) for params, *_ in rebuilt
    ]
    assert [ready for *_, ready in rebuilt] == [*accumulate(len(params) for params, *_ in rebuilt)]
    assert len(rebuilt) == {0.001: 5, 0.02: 3, 25.0: 1}[cap]


HOOKS: dict[str, Callable[..., Any]] = {
    "none": allreduce_hook, "fp16": fp16_compress_hook,
    "bf16": lambda state, bucket: bf16_compress_hook(state, bucket),  # torch wants CUDA for it
}  # fmt: skip


def errors_of_hooks(rank: int, size: int) -> dict[str, tuple[float, float]]:
    """By hook, the relative error of a gradient, and the largest difference between replicas."""
    found, expected = {}, torch.empty(0)
    for name, hook in HOOKS.items():
        model = DistributedDataParallel(new_net())
        model.register_comm_hook(None, hook)
        images, labels = digits(16, seed=rank)
        F.nll_loss(model(images), labels).backward()
        gradient = flat(param.grad for param in model.parameters()).double()
        expected = gradient if name == "none" else expected
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        error = (gradient - expected).norm() / expected.norm()
        found[name] = error.item(), find_largest_difference(model.module)[0]
    return found


def test_hooks_send_less_and_err_more(world: Worlds) -> None:
    for found in world(3, timeout=ENOUGH).run(errors_of_hooks):
        assert {differ for _, differ in found.values()} == {0.0}
        none, fp16, bf16 = (error for error, _ in found.values())
        assert none == 0
        assert 2**-14 < fp16 < 2**-9, "fp16 rounds to 11 bits"
        assert max(fp16, 2**-11) < bf16 < 2**-7, "bf16 rounds to 8 bits"


def add_up(rank: int, size: int) -> dict[str, tuple[int, float]]:
    """By way, the messages of four microbatches, and the difference from one large batch."""
    model = DistributedDataParallel(new_net().double(), bucket_cap_mb=0.002)
    sent = observe(model)
    images, labels = digits(16, seed=rank)
    images = images.double()
    for _ in range(2):  # it rebuilds its buckets after the first
        F.nll_loss(model(images), labels).backward()
    found, expected = {}, torch.empty(0)
    for way in ("one large batch", "all send", "no_sync"):
        sent.clear()
        model.zero_grad()
        count = 1 if way == "one large batch" else 4
        *first, last = zip(images.chunk(count), labels.chunk(count), strict=True)
        for part in first:
            if way == "no_sync":
                with model.no_sync():
                    ddp.add_gradients(model, part, 16)
            else:
                ddp.add_gradients(model, part, 16)
        ddp.add_gradients(model, last, 16)
        gradient = flat(param.grad for param in model.parameters())
        expected = gradient if count == 1 else expected
        found[way] = len(sent), (gradient - expected).abs().max().item()
    return found


def test_no_sync_spares_messages_and_changes_nothing(world: Worlds) -> None:
    for found in world(3, timeout=ENOUGH).run(add_up):
        assert [messages for messages, _ in found.values()] == [5, 20, 5]
        assert max(difference for _, difference in found.values()) <= EXACT


def uneven(rank: int, size: int, divide_by_initial: bool) -> tuple[float, float]:
    """Rank r has 3 + r batches: the replicas' largest difference, and the step that the last rank's
    last batch makes, in lengths of the step that it asks for."""
    model = DistributedDataParallel(new_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = after = asked = torch.empty(0)
    with Join([model], divide_by_initial_world_size=divide_by_initial):
        for _ in range(3 + rank):
            images, labels = digits(4, seed=rank)
            alone = new_net()
            alone.load_state_dict(model.module.state_dict())
            F.nll_loss(alone(images), labels).backward()
            asked = -0.1 * flat(param.grad for param in alone.parameters())
            before = parameters_to_vector(model.parameters()).detach().clone()
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
            after = parameters_to_vector(model.parameters()).detach()
    step = ((after - before).norm() / asked.norm()).item()
    return find_largest_difference(model.module)[0], step


@pytest.mark.parametrize(("divide_by_initial", "share"), [(True, 1 / 3), (False, 1.0)])
def test_join_lets_ranks_be_done_at_different_times(
    divide_by_initial: bool, share: float, world: Worlds
) -> None:
    """And the mean is over all ranks, unless it is told to be over those that have batches."""
    found = world(3, timeout=ENOUGH).run(uneven, divide_by_initial)
    assert {difference for difference, _ in found} == {0.0}
    assert found[2][1] == pytest.approx(share, rel=1e-4)


def samplers(rank: int, size: int, samples: int) -> dict[str, list[int]]:
    padding, dropping = (
        DistributedSampler(range(samples), seed=5, drop_last=drop_last)
        for drop_last in (False, True)
    )
    found = {f"no set_epoch, epoch {epoch}": [*padding] for epoch in range(2)}
    for epoch in range(2):
        padding.set_epoch(epoch)
        found[f"set_epoch({epoch})"] = [*padding]
    return found | {"drop_last": [*dropping]}


def test_who_gets_which_sample(world: Worlds) -> None:
    """Ten samples on three ranks: two count twice, or one is dropped; without set_epoch every epoch
    has the same order."""
    ranks = world(3, timeout=ENOUGH).run(samplers, 10)
    counts = {way: Counter(place for rank in ranks for place in rank[way]) for way in ranks[0]}
    assert {len(rank[way]) for rank in ranks for way in rank if way != "drop_last"} == {4}
    for way, count in counts.items():
        twice, never = (sum(count[place] == n for place in range(10)) for n in (2, 0))
        assert (twice, never) == ((0, 1) if way == "drop_last" else (2, 0)), way
    for rank in ranks:
        assert rank["no set_epoch, epoch 0"] == rank["no set_epoch, epoch 1"]
        assert rank["set_epoch(0)"] != rank["set_epoch(1)"]


def go_on(rank: int, size: int, file: str) -> dict[str, float]:
    """By what is loaded from a checkpoint after five steps, the difference of the parameters after
    five more from ten steps on end."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
        for step in steps:
            images, labels = digits(4, seed=step * size + rank)
            optimizer.zero_grad()
            F.nll_loss(model(images.double()), labels).backward()
            optimizer.step()
        return parameters_to_vector(model.parameters()).detach().clone()

    def new() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        model = DistributedDataParallel(new_net().double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    model, optimizer = new()
    train(model, optimizer, range(5))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()
    expected, found = train(model, optimizer, range(5, 10)), {}
    state = torch.load(file, weights_only=True)
    for loaded in ("model", "model, optimizer"):
        model, optimizer = new()
        model.module.load_state_dict(state["model"])
        if loaded != "model":
            optimizer.load_state_dict(state["optimizer"])
        params = train(model, optimizer, range(5, 10))
        found[loaded] = (params - expected).abs().max().item()
    return found


def test_training_goes_on_from_a_checkpoint_with_the_optimizer(
    world: Worlds, tmp_path: Path
) -> None:
    for found in world(3, timeout=ENOUGH).run(go_on, str(tmp_path / "checkpoint.pt")):
        assert found["model, optimizer"] <= EXACT
        assert found["model"] > 1e-5
