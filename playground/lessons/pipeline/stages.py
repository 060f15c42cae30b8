"""A grid of ranks: each row is a pipeline, each column holds the replicas of one stage.

    replica 0:  stage 0 = rank 0   stage 1 = rank 1   stage 2 = rank 2
    replica 1:  stage 0 = rank 3   stage 1 = rank 4   stage 2 = rank 5

Along a row travel activations and their gradients; down a column, gradients of parameters are averaged. The stages of
a pipeline stand side by side, so that on several hosts a row stays within one, as far as it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank's place in the grid, and the groups it talks in."""

    row: Sequence[int]
    """The ranks of this pipeline, stage by stage."""
    stage: int
    replicas: int = 1
    replica: int = 0
    links: dict[tuple[int, int], dist.ProcessGroup]
    """For each (source, target), neighbours in a row, a group of these two. NCCL carries out the messages of a group
    one after the other: in a group for all, a message that waits for its turn could be the one that others wait for."""
    column: dist.ProcessGroup | None = None
    """The replicas of this stage; None if there is one alone."""

    @property
    def stages(self) -> int:
        return len(self.row)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def make_grid(replicas: int = 1) -> Grid:
    """Arrange the world as `replicas` pipelines. Every rank makes all groups in the same order, as `new_group` demands.
    The size of the world must be a multiple of `replicas`."""
    stages = dist.get_world_size() // replicas
    replica, stage = divmod(dist.get_rank(), stages)
    rows = [[row * stages + column for column in range(stages)] for row in range(replicas)]
    links = link(rows)
    columns = [dist.new_group(list(column)) for column in zip(*rows, strict=True)] if replicas > 1 else [None] * stages
    return Grid(row=rows[replica], stage=stage, replicas=replicas, replica=replica, links=links, column=columns[stage])


def link(rows: Sequence[Sequence[int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The `links` of a grid, from the ranks of each of its rows."""
    pairs = [pair for row in rows for left, right in pairwise(row) for pair in ((left, right), (right, left))]
    return {pair: dist.new_group(sorted(pair)) for pair in pairs}


def new_block(width: int) -> nn.Sequential:
    """[samples, width] → [samples, width]. Weights are drawn as He et al. (2015) do for ReLU, so that what goes in and
    what comes out are of one size, however many blocks there are."""
    linear = nn.Linear(width, width)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    return nn.Sequential(linear, nn.ReLU())


def new_model(blocks: int, width: int, seed: int) -> nn.Sequential:
    """Equal blocks, and a last layer of 10 logits, which is small beside them. The same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(new_block(width) for _ in range(blocks)), nn.Linear(width, 10))


def cut(model: nn.Sequential, stage: int, stages: int) -> nn.Sequential:
    """The layers of one stage: an equal part of the blocks, the last stage with the logits. They are the model's own.
    The number of blocks must be a multiple of `stages`."""
    each = (len(model) - 1) // stages
    return model[stage * each : (stage + 1) * each + (stage == stages - 1)]
