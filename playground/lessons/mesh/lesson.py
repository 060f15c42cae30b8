"""Data, pipeline, context and tensor parallelism at once: ranks on a device mesh, and one training
over it.

    torchrun --nproc-per-node 8 lesson.py
    python -m playground mesh
    python -m playground mesh -n 4 --grid 2 1 1 2

A rank has a coordinate on each axis of the mesh. Ranks that differ on one axis alone share a group;
in it they exchange what that axis shards:

    dp  data      own samples    gradients, added up once in a step
    pp  pipeline  own layers     activations and their gradients
    cp  context   own positions  keys and values, in a ring in each layer
    tp  tensor    own matrices   sums of activations, four in each layer

The last coordinate changes fastest: tensor's ranks, which exchange most and wait for it, are
neighbours, the devices of one host. Ranks of dp and cp have the same parameters and see different
tokens, so gradients are added up over both axes at once, and the loss is divided by the number of
all targets, wherever they are.
Source: Narayanan et al., Megatron-LM on GPU clusters, 2021, arXiv 2104.04473
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from playground.lessons.context.lesson import position_ids, shard_sequence
from playground.lessons.pipeline.lesson import Stage, new_groups, one_forward_one_backward, split
from playground.lessons.tensor.lesson import (
    IGNORED,
    GPTConfig,
    copying,
    copying_loss,
    new_gpt,
    shard_gpt,
    vocab_parallel_cross_entropy,
)

AXES = ("dp", "pp", "cp", "tp")
Shape = tuple[int, int, int, int]  # ranks along each axis


def groups_along(axes: tuple[str, ...], shape: Shape) -> list[list[int]]:
    """All groups of ranks that differ in their coordinates on these axes alone."""
    ranks = torch.arange(prod(shape)).view(shape)
    dims = [AXES.index(axis) for axis in axes]
    last = range(-len(dims), 0)
    return ranks.movedim(dims, [*last]).flatten(-len(dims)).flatten(0, -2).tolist()


class Mesh:
    """The device mesh of this world: this rank's coordinates and groups. `shape` multiplies to the
    number of ranks. Raises `ValueError` for another product.

    Ranks of "dp x cp" have the same parameters and see different tokens. `pp_ranks` are the ranks
    of this rank's pipeline, which `pp_groups` connect.
    """

    def __init__(self, shape: Shape) -> None:
        if prod(shape) != (size := dist.get_world_size()):
            raise ValueError(f"a mesh of {prod(shape)} for {size} ranks: the two must be the same")
        self.shape = shape
        ranks = torch.arange(size).view(shape)
        [coordinates] = (ranks == dist.get_rank()).nonzero().tolist()
        self.coordinates = dict(zip(AXES, coordinates, strict=True))
        self.groups = {
            "tp": self.new_group("tp"),
            "cp": self.new_group("cp"),
            "dp x cp": self.new_group("dp", "cp"),
        }
        for pp_ranks in groups_along(("pp",), shape):
            pp_groups = new_groups(pp_ranks)
            if dist.get_rank() in pp_ranks:
                self.pp_ranks = pp_ranks
                self.pp_groups = pp_groups

    def new_group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group along these axes. All ranks create all groups, in the same order."""
        for ranks in groups_along(axes, self.shape):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = group
        return own

    def shard_batch(self, batch: Tensor) -> Tensor:
        """This rank's samples and positions of tokens or targets [batch, length]."""
        dp, _, cp, _ = self.shape
        positions = position_ids(batch.shape[1], cp, self.coordinates["cp"], zigzag=True)
        return batch.tensor_split(dp)[self.coordinates["dp"]][:, positions.to(batch.device)]


class GPTStage(Stage):
    """This rank's stage of a GPT, of which it is given the whole: its layers, with its shards of
    their matrices, on its positions."""

    def __init__(self, model: nn.Sequential, mesh: Mesh) -> None:
        self.mesh = mesh
        self.width = model[0].positions.weight.shape[1]
        shard_gpt(model, mesh.groups["tp"])
        shard_sequence(model, mesh.groups["cp"], zigzag=True)
        layers = split(model, mesh.coordinates["pp"], len(mesh.pp_ranks))
        super().__init__(layers, mesh.pp_ranks, mesh.pp_groups)

    def step(self, tokens: Tensor, targets: Tensor, microbatches: int) -> float:
        """Compute the gradients of a batch [batch, length], the same on all ranks. Returns its
        loss, which the ranks of the last stage know. Targets `IGNORED` do not count."""
        self.load(self.mesh.shard_batch(tokens), self.mesh.shard_batch(targets), microbatches)
        self.targets = int((targets != IGNORED).sum())  # those of all ranks
        one_forward_one_backward(self, microbatches)
        self.finish()
        for param in self.model.parameters():
            dist.all_reduce(param.grad, group=self.mesh.groups["dp x cp"])
        loss = next(self.model.parameters()).new_tensor(self.loss)
        dist.all_reduce(loss, group=self.mesh.groups["dp x cp"])
        return loss.item()

    def new_buffer(self, m: int) -> Tensor:
        """Memory for the hidden states of microbatch `m`, or their gradients."""
        return next(self.model.parameters()).new_empty(*self.images[m].shape, self.width)

    def compute(self, m: int, inputs: Tensor) -> Tensor:
        """The activations of microbatch `m`; in the last stage its part of the mean loss."""
        output = self.model(inputs)
        if self.is_last:
            group = self.mesh.groups["tp"]
            output = vocab_parallel_cross_entropy(output, self.labels[m], group, self.targets)
        return output


def train(shape: Shape, steps: int = 5) -> None:
    """Train a GPT on a mesh. The last rank compares the losses with those of one process."""
    mesh, rank = Mesh(shape), dist.get_rank()
    alone, model = (new_gpt(GPTConfig(), seed=1234).double() for _ in range(2))
    stage = GPTStage(model, mesh)
    optimizer = torch.optim.AdamW([*alone.parameters(), *stage.model.parameters()], lr=2e-3)
    generator = torch.Generator().manual_seed(1234)  # the same batches on every rank
    losses, differences = [], []
    for _ in range(steps):
        tokens, targets = copying(24, generator)
        optimizer.zero_grad()
        losses.append(stage.step(tokens, targets, microbatches=2))
        if rank == dist.get_world_size() - 1:
            expected = copying_loss(alone(tokens), targets)
            expected.backward()
            differences.append(abs(losses[-1] - expected.item()))
        optimizer.step()
    if differences:
        groups = {axis: dist.get_process_group_ranks(each) for axis, each in mesh.groups.items()}
        groups["pp"] = mesh.pp_ranks
        print("dp x pp x cp x tp = " + " x ".join(map(str, shape)))
        print(
            f"    groups of rank {rank}: " + ", ".join(f"{a} {each}" for a, each in groups.items())
        )
        print(f"    loss {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {steps}")
        print(f"    at most {max(differences):.12f} from one process's loss")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for dp, pp, cp, tp in product((1, 2), repeat=4):
        if dp * pp * cp * tp == dist.get_world_size():
            train((dp, pp, cp, tp))
    dist.destroy_process_group()
