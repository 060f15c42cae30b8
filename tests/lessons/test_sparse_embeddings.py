"""Only the rows in use of an embedding's gradient travel; all else is as if the whole gradient were averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.ladder.sparse_embeddings import SparseEmbeddings, use_sparse_gradients
from playground.testing import World
from playground.training.replicas import flat
from playground.training.step import training_step
from playground.training.sync import GradSync

Worlds = Callable[..., World]
WORDS, WIDTH = 11, 3
RANKS = 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
ids = st.lists(st.integers(0, WORDS - 1), max_size=6)
runs = st.tuples(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.booleans(),  # whether each batch comes as two, accumulated
    st.booleans(),  # whether zero_grad sets gradients to None
    st.lists(st.lists(ids, min_size=RANKS, max_size=RANKS), min_size=2, max_size=3),  # [step][rank]
)


class Reader(nn.Module):
    """Ids [n] → a loss. `words` has a padding row; `again` is the same weight; `lengths` is used without its module."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.again = nn.Embedding(WORDS, WIDTH)
        self.again.weight = self.words.weight
        self.kinds, self.unused = nn.Embedding(2, WIDTH), nn.Embedding(7, 2)
        self.lengths = nn.Embedding(8, WIDTH)
        self.output = nn.Linear(WIDTH, 4)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) + self.again(ids.flip(0)) * self.kinds(ids % 2) + self.lengths.weight[: len(ids)]
        return self.output(words.tanh()).logsumexp(-1).sum()


class Zeroing(torch.optim.Optimizer):
    """What an optimizer is to a training step, but `zero_grad` leaves the gradients where they are, and zero."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def train(sync: GradSync, optimizer: torch.optim.Optimizer, batches: list[list[list[int]]]) -> torch.Tensor:
    """Steps on batches, each given in parts to be accumulated: gradients and parameters of all steps, flat."""
    seen = []
    for parts in batches:
        losses = [lambda part=part: sync.model(torch.tensor(part, dtype=torch.int64)) for part in parts]
        training_step(optimizer, losses, sync)
        params = [param for name, param in sync.model.named_parameters() if "unused" not in name]
        seen.append(flat([*(param.grad for param in params), *params]))
    return torch.cat(seen)


def differences(rank: int, size: int, drawn: list[Any]) -> list[dict[str, float]]:
    return [compare(rank, size, *case) for case in drawn]


def compare(
    rank: int, size: int, name: str, accumulate: bool, to_none: bool, steps: list[list[list[int]]]
) -> dict[str, float]:
    """How far sparse gradients are from those of DDP and from rank 0's."""
    mine = [[ids[:1], ids[1:]] if accumulate else [ids] for ids in (by_rank[rank] for by_rank in steps)]

    def trained(sync: GradSync) -> torch.Tensor:
        optimizer = OPTIMIZERS[name](sync.model.parameters())
        return train(sync, optimizer if to_none else Zeroing(optimizer), mine)

    ours = trained(SparseEmbeddings(Reader()))
    ddp = trained(GradSync(DistributedDataParallel(Reader(), find_unused_parameters=True)))
    bits = ours.clone()
    dist.broadcast(bits, 0)
    return {"rank 0": float(not torch.equal(bits, ours)), "ddp": (ours - ddp).abs().max().item()}


@pytest.mark.parametrize(
    ("size", "cases"),
    [(1, 2), (3, 6), *(pytest.param(size, 60, marks=pytest.mark.stress) for size in (2, 4))],
)
def test_it_is_the_mean_of_the_dense_gradients(size: int, cases: int, world: Worlds) -> None:
    """For any ids: repeated, disjoint, none at all on a rank or on any, padding; with SGD and Adam, accumulated."""

    # Of two examples, the first is always the simplest: no ids anywhere.
    @settings(
        max_examples=2, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(st.lists(runs, min_size=cases, max_size=cases))
    def check(drawn: list[Any]) -> None:
        for by_case in world(size).run(differences, drawn):
            for case, found in zip(drawn, by_case, strict=True):
                assert max(found.values()) < 1e-13, (case, found)

    check()


def messages_of(rank: int, size: int, all_reduce: str, ids: list[list[int]], dtype: str) -> dict[str, Any]:
    """A step: what travels, in elements; which rows then have a gradient; where the gradient of the words lies."""
    sent: list[int] = []
    original = load_all_reduce(all_reduce)

    def recording(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.numel())
        return original(tensor, **options)

    model = Reader(getattr(torch, dtype))
    sync = SparseEmbeddings(model, recording)
    places = []
    for mine in (ids[rank], [1], ids[rank]):
        model.zero_grad()
        sent.clear()
        model(torch.tensor(mine)).backward()
        sync.after_backward()
        places.append(model.words.weight.grad.data_ptr())
    rows = model.words.weight.grad.any(1).nonzero().flatten().tolist()
    unused = model.unused.weight.grad
    return {"sent": list(sent), "rows": rows, "unused": unused.any().item(), "places": len(set(places))}


@pytest.mark.parametrize(("all_reduce", "dtype"), [("backend", "float32"), ("ring", "bfloat16")])
def test_only_rows_in_use_travel(all_reduce: str, dtype: str, world: Worlds) -> None:
    """The first message is the output layer; then a byte per row; then the rows that any rank has used, once each."""
    for result in world(3).run(messages_of, all_reduce, [[1, 4, 4], [9, 1, 0], [4, 1, 2]], dtype):
        words, kinds, lengths = 4, 2, 8  # words 1, 2, 4 and 9, and padding, which the shared weight does not exempt
        rows = (WIDTH * (words + 1 + kinds + lengths)) if all_reduce else 0
        assert result == {
            "sent": [4 * WIDTH + 4, WORDS + 2 + 7 + 8, rows], "rows": [0, 1, 2, 4, 9], "unused": False, "places": 1,
        }  # fmt: skip


def test_which_weights_are_sparse() -> None:
    """Not those of frozen embeddings, of those scaled by frequency, and of those that another module has too."""
    model = nn.ModuleDict({name: nn.Embedding(4, 2) for name in ("words", "same", "frozen", "tied")})
    model["scaled"], model["output"] = nn.Embedding(4, 2, scale_grad_by_freq=True), nn.Linear(2, 4)
    model["same"].weight, model["output"].weight = model["words"].weight, model["tied"].weight
    model["frozen"].weight.requires_grad_(False)
    assert [param is model["words"].weight for param in use_sparse_gradients(model)] == [True]
    assert [name for name, module in model.items() if getattr(module, "sparse", False)] == ["words", "same"]
