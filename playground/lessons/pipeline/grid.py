"""A grid of ranks: each row is a pipeline, each column holds the replicas of one stage.

    replica 0:  stage 0 = rank 0   stage 1 = rank 1   stage 2 = rank 2
    replica 1:  stage 0 = rank 3   stage 1 = rank 4   stage 2 = rank 5

Along a row travel activations and their gradients; down a column, gradients of parameters are averaged. The stages of
a pipeline stand side by side, so that on several hosts a row stays within one, as far as it fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank's place in the grid, and the groups it talks in."""

    stages: int
    replicas: int
    stage: int
    replica: int
    links: dict[tuple[int, int], dist.ProcessGroup]
    """For each (source, target), neighbours in a row, a group of these two. NCCL carries out the messages of a group
    one after the other: in a group for all, a message that waits for its turn could be the one that others wait for."""
    column: dist.ProcessGroup | None
    """The replicas of this stage; None if there is one alone."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def make_grid(replicas: int = 1) -> Grid:
    """Arrange the world as `replicas` pipelines. Every rank makes all groups in the same order, as `new_group` demands.

    The size of the world must be a multiple of `replicas`.
    """
    stages = dist.get_world_size() // replicas
    replica, stage = divmod(dist.get_rank(), stages)
    rows = [[row * stages + column for column in range(stages)] for row in range(replicas)]
    pairs = [pair for row in rows for left, right in pairwise(row) for pair in ((left, right), (right, left))]
    links = {pair: dist.new_group(sorted(pair)) for pair in pairs}
    columns = [dist.new_group(list(column)) for column in zip(*rows, strict=True)] if replicas > 1 else [None] * stages
    return Grid(
        stages=stages, replicas=replicas, stage=stage, replica=replica, links=links, column=columns[stage]
    )  # fmt: skip
