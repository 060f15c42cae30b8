import torch
from common import dist, rank, say, size
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)


def loss_fn(out, target):
    return (out - target).square().mean()


looped, v_shaped = (rank, rank + size), (rank, 2 * size - 1 - rank)
for kind, indices in (
    (ScheduleInterleaved1F1B, looped),
    (ScheduleLoopedBFS, looped),
    (ScheduleInterleavedZeroBubble, looped),
    (ScheduleZBVZeroBubble, v_shaped),
):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(2 * size)]
    stages = [PipelineStage(layers[i], i, 2 * size, torch.device("cpu")) for i in indices]
    schedule, losses = kind(stages, 4, loss_fn=loss_fn), []
    has_last = 2 * size - 1 in indices
    arguments = {"target": torch.ones(8, 8), "losses": losses} if has_last else {}
    schedule.step(*[torch.randn(8, 8)] * (rank == 0), **arguments)
    norms = sum(layers[i].weight.grad.norm() for i in indices)
    say(norms, *[sum(losses).detach()] if losses else [])
dist.destroy_process_group()
