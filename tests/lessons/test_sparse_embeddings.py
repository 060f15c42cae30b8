"""Only the rows in use of an embedding's gradient travel; all else is as if the whole gradient were
averaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.testing import World
from playground.training.grad_syncs import SPARSE
from playground.training.replicas import flatten
from playground.training.sparse_embeddings import (
    PADDING,
    SparseEmbeddings,
    TokenBert,
    TokenSizes,
    ZipfSequences,
    use_sparse_gradients,
)
from playground.training.step import training_step
from playground.training.step_settings import BERT, candidates
from playground.training.step_times import TimedReplica, build_sync, count_messages
from playground.training.sync import GradSync

STEPS: list[list[list[int]]] = [
    [[1, 4, 4], [9, 1, 0], [4, 1, 2]],
    [[3], [], [3, 3, 0, 5, 7]],
    [[], [], []],
]


class Reader(nn.Module):
    """Ids [n] → a loss. `again` has the weight of `words`, `tied` that of the output; `lengths` is
    not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.again = nn.Embedding(11, 3, padding_idx=0), nn.Embedding(11, 3)
        self.lengths, self.tied, self.output = (
            nn.Embedding(8, 3),
            nn.Embedding(4, 3),
            nn.Linear(3, 4),
        )
        self.again.weight = self.words.weight
        self.output.weight = self.tied.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = (
            self.words(ids)
            + self.again(ids.flip(0))
            + self.lengths.weight[: len(ids)]
            + self.tied(ids % 4)
        )
        return self.output(words.tanh()).logsumexp(-1).sum()


def compare(rank: int, size: int) -> tuple[float, list[float]]:
    """How far the gradients and parameters of steps of Adam are from those with DDP; all of
    them."""
    seen: list[list[torch.Tensor]] = [[], []]
    in_ddp = DistributedDataParallel(Reader().double(), find_unused_parameters=True)
    for found, sync in zip(
        seen, (SparseEmbeddings(Reader().double()), GradSync(in_ddp)), strict=True
    ):
        optimizer = torch.optim.Adam(sync.model.parameters(), lr=0.01)
        for ids in (
            torch.tensor(by_rank[rank], dtype=torch.int64) for by_rank in (*STEPS, STEPS[0])
        ):
            training_step(optimizer, partial(sync.model, ids), sync)
            found += [
                *(param.grad.clone() for param in sync.model.parameters()),
                flatten(sync.model.parameters()),
            ]
    ours, theirs = map(flatten, seen)
    return (ours - theirs).abs().max().item(), ours.tolist()


def test_it_is_the_mean_of_the_dense_gradients(world: Callable[..., World]) -> None:
    results = world(3).run(compare)
    assert all(difference < 1e-13 and values == results[0][1] for difference, values in results)


def written_into(rank: int, size: int) -> list[list[int]]:
    """Rows with a gradient after steps that use words 1, 2 and 3, when somebody adds to the first
    step's gradient."""
    words, found = nn.Embedding(11, 3), []
    sync = SparseEmbeddings(words)
    for word in (1, 2, 3):
        words.zero_grad()
        words(torch.tensor([word])).sum().backward()
        sync.after_backward()
        found.append(words.weight.grad.any(1).nonzero().flatten().tolist())
        if word == 1:
            words.weight.grad += 1
    return found


def test_what_somebody_else_writes_into_a_gradient_does_not_stay(
    world: Callable[..., World],
) -> None:
    assert world(2).run(written_into) == [[[1], [2], [3]]] * 2


def test_which_weights_are_sparse() -> None:
    """Not those of frozen embeddings, of those scaled by frequency, and of those that another
    module has too."""
    model = nn.ModuleDict(
        {name: nn.Embedding(4, 2) for name in ("words", "same", "frozen", "tied")}
    )
    model["scaled"], model["output"] = nn.Embedding(4, 2, scale_grad_by_freq=True), nn.Linear(2, 4)
    model["same"].weight = model["words"].weight
    model["output"].weight = model["tied"].weight
    model["frozen"].weight.requires_grad_(False)
    assert [param is model["words"].weight for param in use_sparse_gradients(model)] == [True]
    assert [name for name, module in model.items() if getattr(module, "sparse", False)] == [
        "words",
        "same",
    ]


SMALL = TokenSizes(vocabulary=50, width=8, layers=1, heads=2, intermediate=16, max_length=12)


def test_sequences_are_as_frequent_as_in_a_text_the_same_each_time_and_padded_behind() -> None:
    data, first = ZipfSequences(config=SMALL), ZipfSequences(limit=20, config=SMALL)
    assert (len(data), len(first)) == (4096, 20)
    assert torch.equal(data.ids[:20], first.ids)
    in_use = first.ids != PADDING
    assert torch.equal(in_use, in_use.sort(dim=1, descending=True).values)
    assert {*in_use.sum(1).tolist()} <= {*range(6, 13)}
    counts = data.ids.flatten().bincount(minlength=50)[1:]
    assert (counts[:5] * torch.arange(1, 6) / counts[0] - 1).abs().max() < 0.1, (
        "the k-th 1/k times as frequent"
    )
    assert data.labels.bincount().min() > 500


def test_padding_makes_no_difference() -> None:
    model, ids = TokenBert(SMALL).eval(), torch.tensor([[3, 4, 5, PADDING, PADDING]])
    output = model(ids)
    assert torch.allclose(output.exp().sum(1), torch.ones(1))
    assert torch.allclose(output, model(ids[:, :3]), atol=1e-6)


def messages(rank: int, size: int) -> tuple[list[int], list[int]]:
    """The bytes counted for a step, and those that a step and then averaging alone send."""
    model = TokenBert(
        TokenSizes(vocabulary=900, width=8, layers=1, heads=1, intermediate=8, max_length=4)
    )
    sent = []

    def recording(tensor: torch.Tensor, **options: object) -> object:
        sent.append(tensor.nbytes)
        return dist.all_reduce(tensor, **options)

    ids = torch.tensor([[1, 2, 2, 0], [3, 1 + rank, 0, 0]])
    new_sync = partial(build_sync, SPARSE, bucket_cap=2**20)
    replica = TimedReplica(SPARSE, model, new_sync, recording, partial(torch.optim.SGD, lr=0.01))
    replica.step((ids,), torch.zeros(2, dtype=torch.int64), 2)
    replica.average_alone()
    return [nbytes for nbytes, _ in count_messages(new_sync, model, (ids,))], sent


def test_only_rows_in_use_travel(world: Callable[..., World]) -> None:
    """Buckets, then a byte per row, then the rows that any rank has used, once each: of words 1 to
    3, of all else."""
    for counted, sent in world(2).run(messages):
        assert sent == 2 * counted
        assert counted[-2:] == [900 + 4, 4 * 8 * (3 + 4)]
    assert [name for name in candidates(BERT) if name not in candidates("net")] == [SPARSE]
