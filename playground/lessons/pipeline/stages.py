"""The ranks of a pipeline, with a link between neighbours, and the model that is cut over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """This rank's place in a pipeline, and its links."""

    row: Sequence[int]
    """The ranks, stage by stage."""
    stage: int
    links: dict[tuple[int, int], dist.ProcessGroup]
    """For each (source, target), neighbours in a row, a group of these two. NCCL carries out the messages of a group
    one after the other: in a group for all, a message that waits for its turn could be the one that others wait for."""

    @property
    def stages(self) -> int:
        return len(self.row)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def join_pipeline(rows: Sequence[Sequence[int]] = ()) -> Pipeline:
    """This rank's pipeline, of those that have these ranks; by default there is one of all ranks. Every rank makes all
    groups in the same order, as `new_group` demands."""
    rank, rows = dist.get_rank(), rows or [range(dist.get_world_size())]
    pairs = [pair for row in rows for left, right in pairwise(row) for pair in ((left, right), (right, left))]
    links = {pair: dist.new_group(sorted(pair)) for pair in pairs}
    [row] = (row for row in rows if rank in row)
    return Pipeline(row=row, stage=row.index(rank), links=links)


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
    Raises
    `ValueError` unless the number of blocks is a multiple of `stages`."""
    if (len(model) - 1) % stages:
        raise ValueError(f"{len(model) - 1} blocks cannot be cut into {stages} equal stages: choose a divisor")
    each = (len(model) - 1) // stages
    return model[stage * each : (stage + 1) * each + (stage == stages - 1)]
