"""All cuts at once: ranks in a grid of data, pipeline, context and tensor parallelism, and one training over it.

    python -m playground mesh
    python -m playground mesh -n 16
    python -m playground mesh -n 4 --grid 2 1 1 2

A rank has a coordinate on each axis of the grid. Ranks that differ on one axis alone share a group; in it they exchange
what that axis cuts:

    dp  data      own samples    gradients, added up once in a step
    pp  pipeline  own layers     activations and their gradients
    cp  context   own positions  keys and values, in a ring in each layer
    tp  tensor    own matrices   sums of activations, four in each layer

The last coordinate changes fastest: tensor's ranks, which exchange most and wait for it, are neighbours, the devices of
one host. Ranks of dp and cp have the same parameters and see different tokens, so gradients are added up over both axes
at once, and the loss is divided by the number of all targets, wherever they are.
Source: Narayanan et al., Megatron-LM on GPU clusters, 2021, arXiv 2104.04473
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.context.lesson import position_ids, shard_sequence
from playground.lessons.pipeline.lesson import Stage, new_groups, one_forward_one_backward, split
from playground.lessons.tensor.lesson import IGNORED, shard_gpt, vocab_parallel_cross_entropy

AXES = ("dp", "pp", "cp", "tp")
Shape = tuple[int, int, int, int]
"""Ranks along each axis."""


def coordinates(rank: int, shape: Shape) -> dict[str, int]:
    """The place of a rank on each axis, the last of which changes fastest."""
    place = dict.fromkeys(AXES, 0)
    for axis, size in zip(reversed(AXES), reversed(shape), strict=True):
        rank, place[axis] = divmod(rank, size)
    return place


def groups_along(axes: tuple[str, ...], shape: Shape) -> list[list[int]]:
    """All groups of ranks that differ in their coordinates on these axes alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(shape)):
        fixed = tuple(at for axis, at in coordinates(rank, shape).items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


class Mesh:
    """This rank's place in a grid of ranks, whose `shape` multiplies to the size of the world, and its groups. Ranks of
    "dp x cp" have the same parameters and see different tokens; `pp_ranks` are the ranks of this rank's pipeline, which
    `pp_groups` connect. Raises `ValueError` for another product."""

    def __init__(self, shape: Shape) -> None:
        if prod(shape) != dist.get_world_size():
            raise ValueError(f"a grid of {prod(shape)} for {dist.get_world_size()} ranks: the two must be the same")
        self.shape, self.place = shape, coordinates(dist.get_rank(), shape)
        self.groups = {" x ".join(axes): self.new_group(axes) for axes in (("tp",), ("cp",), ("dp", "cp"))}
        pipelines = [(ranks, new_groups(ranks)) for ranks in groups_along(("pp",), shape)]
        [(self.pp_ranks, self.pp_groups)] = (each for each in pipelines if dist.get_rank() in each[0])

    def new_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """This rank's group along the axes. Every rank creates every group, in the same order."""
        ranks = groups_along(axes, self.shape)
        groups = [dist.new_group(each) for each in ranks]
        [mine] = (group for each, group in zip(ranks, groups, strict=True) if dist.get_rank() in each)
        return mine

    def part_of(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's samples and positions of tokens or targets [batch, length]."""
        replicas, _, parts, _ = self.shape
        own = position_ids(batch.shape[1], parts, self.place["cp"], zigzag=True).to(batch.device)
        return batch.tensor_split(replicas)[self.place["dp"]][:, own]


class GPTStage(Stage):
    """This rank's part of a GPT, of which it is given the whole: its layers, its part of their matrices."""

    def __init__(self, model: nn.Sequential, mesh: Mesh) -> None:
        self.mesh, self.width = mesh, model[0].positions.weight.shape[1]
        self.targets_in_all = 1
        shard_gpt(model, mesh.groups["tp"])
        shard_sequence(model, mesh.groups["cp"], zigzag=True)
        super().__init__(split(model, mesh.place["pp"], len(mesh.pp_ranks)), mesh.pp_ranks, mesh.pp_groups)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, microbatches: int) -> float:
        """The gradients of a whole batch [batch, length], on this rank's parameters; and its loss, known to the ranks
        of the last stage. Targets `IGNORED` do not count."""
        self.targets_in_all = int((targets != IGNORED).sum())
        tokens, targets = (self.mesh.part_of(each) for each in (tokens, targets))
        self.load(tokens, targets, microbatches)
        one_forward_one_backward(self, microbatches)
        self.finish()
        for param in self.model.parameters():
            dist.all_reduce(param.grad, group=self.mesh.groups["dp x cp"])
        loss = next(self.model.parameters()).new_tensor(self.loss)
        dist.all_reduce(loss, group=self.mesh.groups["dp x cp"])
        return loss.item()

    def new_buffer(self, m: int) -> torch.Tensor:
        """Memory for the hidden states of microbatch `m`, or their gradients."""
        return next(self.model.parameters()).new_empty(*self.images[m].shape, self.width)

    def compute(self, m: int, inputs: torch.Tensor) -> torch.Tensor:
        """The activations of microbatch `m`; in the last stage its part of the mean loss over all ranks' targets."""
        output = self.model(inputs)
        if self.is_last:
            output = vocab_parallel_cross_entropy(output, self.labels[m], self.mesh.groups["tp"], self.targets_in_all)
        return output


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
