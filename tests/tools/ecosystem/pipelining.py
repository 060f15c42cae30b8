import torch
from common import dist, rank, say, size
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)


def loss_fn(out, target):
    return (out - target).square().mean()


def step(schedule, inputs, stage):
    losses = []
    arguments = {"target": torch.ones(6, 8), "losses": losses} if rank == size - 1 else {}
    schedule.step(*[inputs] * (rank == 0), **arguments)
    norm = sum(each.grad.norm() for each in stage.parameters())
    say(norm, *[sum(losses).detach()] if losses else [])


layers, inputs = [nn.Linear(8, 8) for _ in range(size)], torch.randn(6, 8)
for kind in (ScheduleGPipe, Schedule1F1B):
    layer = layers[rank]
    layer.zero_grad()
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    step(kind(stage, 3, loss_fn=loss_fn), inputs, layer)
ends = {str(number): SplitPoint.BEGINNING for number in range(1, size)}
traced = pipeline(nn.Sequential(*layers), (inputs[:2],), split_spec=ends)
stage = traced.build_stage(rank, torch.device("cpu"))
stage.submod.zero_grad()
step(ScheduleGPipe(stage, 3, loss_fn=loss_fn), inputs, stage.submod)
dist.destroy_process_group()
