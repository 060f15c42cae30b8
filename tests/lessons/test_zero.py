"""zero: five ways to one training, each of which holds what it should; and what is given to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures import Worlds
from one_process import EXACT
from torch import nn
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, make_batch, next_token_loss
from playground.training import prepare


def train_alone(batches: list[torch.Tensor]) -> torch.Tensor:
    """One process with the whole batches: the parameters at the end."""
    torch.manual_seed(1234)
    model = GPT()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


class Most:
    """The most bytes of gradients, and of parameters, that a model has in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.gradients = self.parameters = 0
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.look)

    def look(self, _: torch.Tensor) -> None:
        grads = [param.grad.nbytes for param in self.params if param.grad is not None]
        self.gradients = max(self.gradients, sum(grads))
        storages = [param.untyped_storage() for param in self.params]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}  # views share one
        self.parameters = max(self.parameters, sum(held.values()))


def train_by_every_method(
    rank: int, size: int
) -> dict[str, tuple[float, list[float], tuple[float, float]]]:
    """By method: the difference from one process, what it holds, and the most that the model has in
    backward, both in bytes of the parameters."""
    # in the rank: what fully_shard imports leaves a message at the end of a process forked after it
    from playground.lessons.zero import lesson as zero

    torch.set_default_dtype(torch.float64)
    try:
        assert zero.LR == 1e-3
        batches = [[make_batch(2, seed=size * step + r) for r in range(size)] for step in range(3)]
        expected = train_alone([torch.cat(parts) for parts in batches])
        found = {}
        for train in (zero.data_parallel, zero.zero1, zero.zero2, zero.zero3, zero.fsdp):
            torch.manual_seed(1234)
            model = GPT()
            most = Most(model)
            held = train(model, [parts[rank] for parts in batches])  # type: ignore[no-untyped-call]
            params = parameters_to_vector(model.parameters()).detach()
            off = (params - expected).abs().max().item()
            whole = expected.nbytes
            found[train.__name__] = (
                off,
                [count / whole for count in held],
                (most.gradients / whole, most.parameters / whole),
            )
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zero_is_one_training_and_each_stage_shards_one_more(size: int, world: Worlds) -> None:
    shards = {"data_parallel": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
    block = 111_840 / 235_440  # the largest layer, in parameters
    for found in world(size, timeout=300).run(train_by_every_method):
        assert {*found} == {*shards}
        for name, (off, held, (gradients, parameters)) in found.items():
            assert off <= EXACT, name
            form = [
                copies / (size if shards[name] >= first else 1)
                for copies, first in ((1, 3), (1, 2), (2, 1))
            ]
            assert held == pytest.approx(form, rel=1e-3), name
            if name in ("zero2", "zero3"):  # it reduces and frees in backward, not after it
                assert gradients == pytest.approx(block)
            if name == "zero3":  # only the layer that runs is there
                assert parameters == pytest.approx(block)


def test_mnist_as_it_is_given(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of the tutorial, and its accuracy: a fraction, without dropout."""
    from playground.lessons import mnist  # not in the server that forks ranks, as above

    monkeypatch.setenv(prepare.DATA_DIR, str(digits_folder.parents[1]))
    test_set = mnist.load_mnist(train=False)
    images, labels = test_set.tensors
    assert images.shape == (len(labels), 1, 28, 28)
    net = mnist.Net()
    assert sum(param.numel() for param in net.parameters()) == 21_840
    net.fc2.bias.data[labels[0]] += 1e6  # it says the same of every image
    fraction = (labels == labels[0]).float().mean().item()
    assert mnist.accuracy(net, test_set) == pytest.approx(fraction)
    assert net.training
