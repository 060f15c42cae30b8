"""Whatever happens between two steps, training is that of one process with the whole batch: by
every way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from sharded_functions import clip_grad_norm
from torch import nn
from torch.utils.checkpoint import checkpoint

from playground.testing import World
from playground.training.grad_syncs import GRAD_SYNCS, SPARSE
from playground.training.sparse_embeddings import SparseEmbeddings
from playground.training.sync import GradSync, new_grad_sync
from playground.training.zero_sync import SYNCS

BLOCKS, WORDS = 4, 9
EVERY_WAY = ["ddp", SPARSE, *(name for name in GRAD_SYNCS if name != "per-parameter")]
OF_SHARDS = [*SYNCS, "flat-step", "shared-step"]
COMPLETE = ("overlapped", "zero-2", SPARSE)
"""After an error in backward, also where it was raised on some ranks only."""


TELLING = range(618, 619)
"""The seed whose first nine steps have most of what can be drawn: each fate, each kind of
checkpointing, errors in backward on the same layers and on others, on all ranks and on some."""


class Failed(Exception):
    """In forward or backward."""


class Fails(torch.autograd.Function):
    """Nothing, but an error in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise Failed


class Chain(nn.Module):
    """Word ids [n] → a loss: blocks that may be left out, and may be checkpointed, one that is
    called twice, a weight in two layers, a frozen layer and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.words, self.scale = nn.Embedding(WORDS, 5), nn.Parameter(torch.ones(5))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(BLOCKS)
        )
        self.frozen, self.tied, self.out = (
            nn.Linear(5, 5).requires_grad_(False),
            nn.Linear(5, WORDS),
            nn.Linear(5, 3),
        )
        self.again = nn.Linear(5, WORDS)
        self.again.weight = self.tied.weight

    def forward(
        self, ids: torch.Tensor, how: str = "", skips: int | None = None, fails: Any = None
    ) -> torch.Tensor:
        hidden = self.words(ids) * self.scale
        # no backward of DDP's kind knows when it is complete
        twice = () if how == "reentrant" else (self.blocks[0],)
        for number, block in enumerate((*self.blocks, *twice)):
            if number == fails:
                hidden = Fails.apply(hidden)
            if number == skips:
                continue
            if how:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=how == "reentrant")
            else:
                hidden = hidden + block(hidden)
            if fails == f"forward {number}":
                raise Failed
        hidden = self.frozen(hidden).tanh()
        return (
            self.out(hidden).square().mean()
            + (self.tied(hidden) * self.again(hidden)).logsumexp(-1).mean()
        )


def new_sync(way: str, model: nn.Module) -> GradSync:
    if way == "ddp":
        return SYNCS["ddp"](model)
    if way == SPARSE:
        return SparseEmbeddings(model, bucket_cap=300)
    return new_grad_sync(way, model, bucket_cap=300)


class Pair:
    """A model that the ranks train by a way, and one that this process trains alone, on the batches
    of all ranks."""

    def __init__(self, rank: int, size: int, way: str, seed: int) -> None:
        self.rank, self.size, self.way, self.draw = rank, size, way, Random(seed)
        self.model, self.alone = Chain().double(), Chain().double()
        self.sync = new_sync(way, self.model)
        new_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.optimizer, self.by_itself = (
            self.sync.optimizer(new_sgd),
            new_sgd(self.alone.parameters()),
        )

    def train(self, steps: int) -> float:
        """The largest difference of a parameter after each of the steps that a test follows."""
        off = 0.0
        for number in range(steps):
            is_last = number == steps - 1 or self.draw.random() < 0.3
            takes = self.step(
                "step"
                if is_last
                else self.draw.choice(["step", "step", "skip", "forward", "backward"])
            )
            if takes:
                self.optimizer.step()
                self.by_itself.step()
                self.sync.after_step(is_last)
            if takes and is_last:
                off = max(off, self.difference())
                assert self.test() == self.test(self.alone)
        return off

    def step(self, fate: str) -> bool:
        """All of a step but the optimizer's part. Returns whether that may follow."""
        draw = self.draw
        batch = [torch.tensor(draw.choices(range(WORDS), k=3)) for _ in range(self.size)]
        how = draw.choice(["", "reentrant", "other"])
        none = draw.random() < 0.7
        early = draw.random() < 0.7
        skips = [
            None if fate in ("forward", "backward") else draw.choice([None, 1, 2, 3])
            for _ in range(self.size)
        ]
        places = [draw.randrange(BLOCKS) for _ in range(self.size)]
        if self.way == "zero-3":  # its ranks run the same layers
            skips, places = skips[:1] * self.size, places[:1] * self.size
        ends = draw.random() < 0.5 and self.way in COMPLETE and fate == "backward"
        tests = draw.choice(["", "no grad", "inference"])
        clips = draw.random() < 0.3 and self.way in OF_SHARDS
        lr, reloads = draw.choice([0.05, 0.1]), draw.random() < 0.2
        for optimizer in (self.optimizer, self.by_itself):
            optimizer.param_groups[0]["lr"] = lr
            if reloads:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if early:
            self.optimizer.zero_grad(set_to_none=none)
        self.by_itself.zero_grad()
        fails: Any = places[self.rank] if fate == "backward" else f"forward {places[self.rank]}"
        if fate not in ("forward", "backward") or (ends and self.rank == 0):
            fails = None
        try:
            loss = self.model(batch[self.rank], how, skips[self.rank], fails)
            if not early:
                self.optimizer.zero_grad(set_to_none=none)
            loss.backward()
        except Failed:
            return False
        for other in range(self.size):
            (self.alone(batch[other], how, skips[other]) / self.size).backward()
        self.sync.after_backward()
        for param in self.alone.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        if tests:
            self.test(self.model, tests)
        if clips and fate == "step":
            ours = clip_grad_norm(self.sync.flat_params, 0.05)  # type: ignore[attr-defined]
            theirs = nn.utils.clip_grad_norm_(self.alone.parameters(), 0.05)
            torch.testing.assert_close(ours, theirs)
        return fate == "step"

    def test(self, model: nn.Module | None = None, how: str = "no grad") -> float:
        """The loss on a batch that all ranks have, rounded."""
        model = model or self.model
        model.eval()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            loss = model(torch.arange(WORDS)).item()
        model.train()
        return round(loss, 11)

    def difference(self) -> float:
        pairs = zip(self.model.parameters(), self.alone.parameters(), strict=True)
        return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def train_by_chance(rank: int, size: int, seeds: range, steps: int) -> dict[tuple[str, int], float]:
    """How far training is off, by way and seed."""
    return {
        (way, seed): Pair(rank, size, way, seed).train(steps) for way in EVERY_WAY for seed in seeds
    }


@pytest.mark.parametrize(
    ("seeds", "steps"), [(TELLING, 9), pytest.param(range(50), 12, marks=pytest.mark.stress)]
)
def test_any_steps_are_those_of_one_process(
    seeds: range, steps: int, world: Callable[..., World]
) -> None:
    """Skipped steps, errors in forward and backward, branches, checkpointing, tests before the
    optimizer's step, clipping, states of the optimizer that are loaded."""
    for found in world(2, timeout=600).run(train_by_chance, seeds, steps):
        assert {each: off for each, off in found.items() if not off < 1e-12} == {}
