"""The lesson's run: on each mesh a training, beside one process's, with its messages counted by
axis."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from playground.algorithms.traffic import Traffic
from playground.lessons.mesh import costs
from playground.lessons.mesh.lesson import GPTStage, Mesh
from playground.lessons.mesh.page import GroupTraffic, MeshSettings, MeshTraining
from playground.lessons.pipeline.experiment import warm_up
from playground.lessons.pipeline.lesson import split
from playground.lessons.tensor.experiment import shard_like
from playground.lessons.tensor.lesson import GPTConfig, new_gpt
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.runtime.tap import Call, Observer, observing, ranks_of
from playground.training.gpt_config import WIDTH
from playground.training.gpt_run import Batch, backward_alone, batches, parameter_difference, train
from playground.training.replicas import broadcast_parameters, max_abs_diff


def run(rank: int, size: int, settings: MeshSettings) -> list[MeshTraining]:
    """This rank's training on each mesh."""
    require_same_on_all_ranks(vars(settings))
    oracle = new_model(settings)
    losses = [0.0] * settings.steps
    if rank == 0:
        alone = train("one process", oracle, backward_alone(oracle), batches_of(settings))
        losses = alone.losses
    expected = torch.tensor(losses, dtype=torch.float64, device=device())
    dist.broadcast(expected, 0)
    broadcast_parameters(oracle)
    return [train_on(shape, oracle, expected, settings) for shape in settings.shapes]


def new_model(settings: MeshSettings) -> nn.Sequential:
    return new_gpt(GPTConfig(), settings.seed).to(device(), torch.float64)


def batches_of(settings: MeshSettings) -> list[Batch]:
    return batches(costs.BATCH, settings.steps, settings.seed)


def train_on(
    shape: costs.Shape, oracle: nn.Sequential, expected: Tensor, settings: MeshSettings
) -> MeshTraining:
    """Train on a mesh. The differences from one process are the largest of any rank."""
    mesh, whole = Mesh(shape), batches_of(settings)
    stage, traffic = GPTStage(new_model(settings), mesh), AxisTraffic(mesh)
    tokens, targets = (mesh.shard_batch(each).chunk(costs.MICROBATCHES) for each in whole[0])
    hidden = [expected.new_ones(*each.shape, WIDTH).requires_grad_() for each in tokens]
    warm_up(stage, tokens if stage.is_first else hidden, targets)
    backward = partial(stage.step, microbatches=costs.MICROBATCHES)
    with observing(traffic):
        found = train(costs.name_of(shape), stage.model, backward, whole)
    by_loss = max_abs_diff(expected, expected.new_tensor(found.losses)) if stage.is_last else 0.0
    by_parameter = parameter_difference(
        split(oracle, stage.index, len(stage.ranks)),
        stage.model,
        partial(shard_like, group=mesh.groups["tp"]),
    )
    largest = expected.new_tensor([by_loss, by_parameter])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return MeshTraining(
        **vars(found),
        loss_difference=largest[0].item(),
        parameter_difference=largest[1].item(),
        place=mesh.coordinates,
        groups=traffic.by_axis(settings.steps, costs.bytes_sent(shape, stage.index)),
    )


class AxisTraffic(Observer):
    """Counts this rank's calls, and the bytes that it sends in them, by axis of the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.axes = {group: axis for axis, group in mesh.groups.items()}
        self.ranks = {axis: [*ranks_of(group)] for axis, group in mesh.groups.items()} | {
            "pp": [*mesh.pp_ranks]
        }
        self.traffic = {axis: Traffic() for axis in self.ranks}

    def begun(self, call: Call) -> None:
        if call.name != "irecv":
            self.traffic[self.axes.get(call.group, "pp")].begun(call)

    def by_axis(self, steps: int, forms: dict[str, float]) -> dict[str, GroupTraffic]:
        """The traffic in this rank's group on each axis of several ranks."""
        return {
            axis: GroupTraffic(
                ranks=ranks,
                calls={name: count // steps for name, count in self.traffic[axis].calls.items()},
                sent=self.traffic[axis].sent / steps,
                form=forms[axis],
            )
            for axis, ranks in self.ranks.items()
            if len(ranks) > 1
        }
