"""DataParallel measured: what it shares out and moves, what fills a device and what helps; and
threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median

import torch
from torch import nn

from playground.lessons.data_parallel.losses import (
    LOSSES,
    TokenLoss,
    new_model_and_batch,
    new_optimizer,
)
from playground.lessons.data_parallel.machine import (
    HOST,
    DataParallel,
    copy_to,
    gather,
    parallel_apply,
    replicate,
    resolve_devices,
    scatter,
)
from playground.lessons.data_parallel.memory import Account, track_memory
from playground.lessons.data_parallel.page import (
    DataParallelSettings,
    DeviceLoad,
    DeviceStep,
    Move,
    ThreadTimes,
    WayResult,
)
from playground.measurement.interleave import interleave, timed
from playground.training.step import training_step
from playground.training.sync import GradSync


def split(rank: int, size: int, settings: DataParallelSettings) -> list[dict[str, str | int]]:
    """How many of 30 inputs each replica sees on 1, 2 and 3 devices, as it reports itself; and how
    many of only 2.

    | device | 30 on 1 | 30 on 2 | 30 on 3 | 2 on 3 |
    |--------|---------|---------|---------|--------|
    | cpu:0  | 30      | 15      | 10      | 1      |
    | cpu:1  | 0       | 15      | 10      | 1      |
    | cpu:2  | 0       | 0       | 10      | 0      |
    """
    devices = settings.devices[:3]
    seen: dict[int, int] = {}

    class Counting(nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            seen[int(numbers[0])] = len(numbers)
            return numbers

    shares: list[dict[str, str | int]] = [{"device": device} for device in devices]
    for batch, many in [*((30, many) for many in range(1, len(devices) + 1)), (2, len(devices))]:
        seen.clear()
        DataParallel(Counting(), devices[:many])(torch.arange(batch))
        sizes = [count for _, count in sorted(seen.items())]
        for number, mine in enumerate(shares):
            mine[f"{batch} on {many}"] = sizes[number] if number < len(sizes) else 0
    return shares


def one_step(rank: int, size: int, settings: DataParallelSettings) -> list[DeviceStep]:
    """One training step: what each part of it moves from where to where, and what every device
    holds after it."""
    devices = resolve_devices(settings.devices)
    output_device = devices[0]
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    optimizer = new_optimizer(model)

    def forward() -> torch.Tensor:
        chunks = scatter((tokens,), devices)
        after("scatter")
        used = devices[: len(chunks)]  # of fewer samples than devices some devices get none
        replicas = replicate(model, used)
        after("replicate")
        outputs = parallel_apply(replicas, chunks, None, used)
        after("parallel_apply")
        logits = gather(outputs, output_device)
        after("gather")
        loss = TokenLoss()(logits, copy_to(targets, output_device, "loss"))
        after("loss")
        return loss

    def after(part: str) -> None:
        for each, held in account.held.items():
            steps[each].held[part] = held

    def moment(name: str) -> None:
        if name == "synced":
            after("backward")

    steps = {each: DeviceStep(device=str(each), held={}, received=[]) for each in devices}
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        after("(before)")
        training_step(optimizer, [forward], GradSync(model), moment=moment)
        after("optimizer.step")
    for (part, source, target), count in account.moved.items():
        source_name = "host" if source == HOST else str(source)
        steps[target].received.append(Move({"part": part, "from": source_name, "bytes": count}))
    return list(steps.values())


def ways(rank: int, size: int, settings: DataParallelSettings) -> list[WayResult]:
    """The memory of a device and its work, and three cures: gathering logits on one device, or on
    another; computing the loss inside forward; leaving outputs where they are, with the criterion
    in parallel.

    One result for each of `settings.ways`, in order. All take their first step from the same
    parameters.
    """
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    start = {name: value.clone() for name, value in model.state_dict().items()}
    steps, results = [], []
    for way, output_device in settings.ways:
        loss = partial(LOSSES[way], model, (tokens, targets), devices, torch.device(output_device))
        optimizer = new_optimizer(model)
        model.load_state_dict(start)
        step = partial(training_step, optimizer, [loss], GradSync(model))
        first_loss = step().item()  # from here on the optimizer has its state
        account = track_step(model, optimizer, loss, devices)
        moved = sum(nbytes for (part, *_), nbytes in account.moved.items() if part == "gather")
        with track_memory(devices) as working:
            working.put_module(model, devices[0])
            started = time.perf_counter()
            for _ in range(settings.steps):
                step()
            seconds = time.perf_counter() - started
        loads = [
            DeviceLoad(
                device=str(at),
                peak=sum(held.values()),
                at_peak=held,
                share=working.busy[at] / seconds,
            )
            for at, held in account.at_peak.items()
        ]
        steps.append(step)
        results.append(
            partial(
                WayResult,
                gather=way,
                output_device=output_device,
                loss=first_loss,
                gathered=moved,
                devices=loads,
            )
        )
    calls = [timed(step, devices=devices) for step in steps]
    turns = interleave(calls, range(settings.steps), Random(settings.seed))
    return [result(seconds=median(turn)) for result, turn in zip(results, turns, strict=True)]


def track_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    devices: Sequence[torch.device],
    *inputs: torch.Tensor,
    default: torch.device = HOST,
) -> Account:
    """The account of a training step that is not the first: `optimizer` has its state already.
    `inputs` count on the first device; `default` is that of `track_memory`."""
    with track_memory(devices, default) as account:
        account.put_module(model, devices[0])
        account.put_state(optimizer, devices[0])
        account.put(*inputs, device=devices[0], label="inputs")
        training_step(optimizer, [loss], GradSync(model), moment=account.moment)
    return account


def threads(rank: int, size: int, settings: DataParallelSettings) -> ThreadTimes:
    """Many small operations on one device, then as many on each at once: threads take turns at the
    GIL."""
    torch.set_num_threads(1)
    devices = resolve_devices(settings.devices)
    model = nn.Sequential(*[nn.Linear(8, 8)] * 1000).requires_grad_(False).to(devices[0])
    inputs = torch.zeros(4, 8)
    replicas = replicate(model, devices)
    chunks = [(inputs.to(each),) for each in devices]
    calls = [
        partial(parallel_apply, replicas[:n], chunks[:n], None, devices[:n])
        for n in (1, len(devices))
    ]
    for call in calls:
        call()
    # five calls of each
    turns = interleave([timed(call, devices=devices) for call in calls], range(5), Random(0))
    alone, together = (median(seconds) for seconds in turns)
    return ThreadTimes(alone=alone, together=together)
