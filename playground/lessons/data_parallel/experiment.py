"""DataParallel measured: what it shares out and moves, what fills a device and what helps; two claims; and threads.

"Two models sit on the first GPU": the replica there is made of the model's own memory. "The replicas differ, so
training does not go well": every forward makes new ones from the one model, which gets the sum of their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from random import Random
from statistics import median

import torch
from torch import nn

from playground.lessons.data_parallel.lesson import DataParallel, gather, parallel_apply, replicate, scatter
from playground.lessons.data_parallel.losses import LOSSES, TokenLoss, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.machine import HOST, copy_to, resolve_devices
from playground.lessons.data_parallel.memory import Account, track_memory, track_utilisation
from playground.lessons.data_parallel.page import DataParallelSettings
from playground.measurement import Fields
from playground.measurement.interleave import interleave, timed
from playground.training.replicas import flat
from playground.training.step import training_step
from playground.training.sync import GradSync


def split(rank: int, size: int, settings: DataParallelSettings) -> list[Fields]:
    """How many of 30 inputs each replica sees on 1, 2 and 3 devices, as it reports itself; and how many of only 2.

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

    shares: list[Fields] = [{"device": device} for device in devices]
    for batch, many in [*((30, many) for many in range(1, len(devices) + 1)), (2, len(devices))]:
        seen.clear()
        DataParallel(Counting(), devices[:many])(torch.arange(batch))
        sizes = [count for _, count in sorted(seen.items())]
        for number, mine in enumerate(shares):
            mine[f"{batch} on {many}"] = sizes[number] if number < len(sizes) else 0
    return shares


def one_step(rank: int, size: int, settings: DataParallelSettings) -> list[Fields]:
    """One training step: what each part of it moves from where to where, and what every device holds after it."""
    devices = resolve_devices(settings.devices)
    output_device = torch.device(settings.output_device or devices[0])
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
            steps[each]["held"][part] = held

    def moment(name: str) -> None:
        if name == "synced":
            after("backward")

    steps: dict[torch.device, Fields] = {each: {"device": str(each), "held": {}, "received": []} for each in devices}
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        after("(before)")
        training_step(optimizer, [forward], GradSync(model), moment=moment)
        after("optimizer.step")
    for (part, source, target), count in account.moved.items():
        move = {"part": part, "from": "host" if source == HOST else str(source), "bytes": count}
        steps[target]["received"].append(move)
    return list(steps.values())


def ways(rank: int, size: int, settings: DataParallelSettings) -> list[Fields]:
    """The memory of a device and its work, and three cures: gathering logits on one device, or on
    another; computing the loss inside forward; leaving outputs where they are, with the criterion in parallel.

    For each of `settings.ways`, in order: the loss before a step, the bytes that gather copies from other devices, of
    each device the most bytes that it holds at any moment, these by label, and the share of the step in which it
    computes, 0 to 1; and the median of a step's seconds. All take their first step from the same parameters.
    """
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    start = {name: value.clone() for name, value in model.state_dict().items()}
    steps, results = [], []
    for way, output_device in settings.ways:
        loss = partial(LOSSES[way], model, (tokens, targets), devices, torch.device(output_device))
        optimizer = new_optimizer(model)
        model.load_state_dict(start)
        steps.append(partial(training_step, optimizer, [loss], GradSync(model)))
        first_loss = steps[-1]().item()  # from here on the optimizer has its state
        account = track_step(model, optimizer, loss, devices)
        moved = sum(nbytes for (part, *_), nbytes in account.moved.items() if part == "gather")
        with track_utilisation(devices) as share:
            for _ in range(settings.steps):
                steps[-1]()
        held = zip(devices, account.peak.values(), account.at_peak.values(), share.values(), strict=True)
        loads = [dict(zip(("device", "peak", "at_peak", "share"), (str(at), *rest), strict=True)) for at, *rest in held]
        about = {"gather": way, "output_device": output_device, "loss": first_loss, "gathered": moved}
        results.append({**about, "devices": loads})
    turns = interleave([timed(step, devices=devices) for step in steps], range(settings.steps), Random(settings.seed))
    return [{**result, "seconds": median(seconds)} for result, seconds in zip(results, turns, strict=True)]


def track_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    devices: Sequence[torch.device],
    *inputs: torch.Tensor,
    default: torch.device = HOST,
) -> Account:
    """The account of a training step that is not the first: `optimizer` has its state already. `inputs` count on the
    first device; `default` is that of `track_memory`."""
    with track_memory(devices, default) as account:
        account.put_module(model, devices[0])
        account.put_state(optimizer, devices[0])
        account.put(*inputs, device=devices[0], label="inputs")
        training_step(optimizer, [loss], GradSync(model), moment=account.moment)
    return account


def claims(rank: int, size: int, settings: DataParallelSettings) -> tuple[list[Fields], list[Fields]]:
    """Two sentences put to the test: "two models sit on the first device" and "the replicas differ, so training does
    not go well".

    Of the first, for each device: the bytes of parameters that it holds once there are replicas, how many parameters of
    its replica are the model's own memory, of how many, and their largest difference from the model's. Of the second:
    steps of DataParallel with two samples per device, and as many on one device with all of them, in float64: the loss,
    and the largest difference of the two models after each step.
    """
    devices = resolve_devices(settings.devices)
    model, *batch = new_model_and_batch(2 * len(devices), settings.seed, devices[0])
    names, parameters = zip(*model.named_parameters(), strict=True)
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        replicas = replicate(model, devices)
        held = account.held_by_label
    copies = []
    for device, replica in zip(devices, replicas, strict=True):
        own = [attrgetter(name)(replica) for name in names]  # they are no leaves: `parameters()` has none of them
        shared = sum(one.data_ptr() == other.data_ptr() for one, other in zip(own, parameters, strict=True))
        about = {"device": str(device), "parameters": held[device]["parameters"], "shared": shared, "of": len(own)}
        copies.append({**about, "replicas_differ": largest_difference(own, parameters)})

    models, steps = [model.double(), copy.deepcopy(model)], list[Fields]()
    optimizers = [new_optimizer(each) for each in models]
    for step in range(1, settings.steps + 1):
        for each, optimizer, used in zip(models, optimizers, (devices, devices[:1]), strict=True):
            loss = partial(LOSSES["loss"], each, tuple(batch), used, devices[0])
            taken = training_step(optimizer, [loss], GradSync(each))
        apart = largest_difference(*(list(each.parameters()) for each in models))
        steps.append({"step": step, "loss": taken.item(), "from_one_device": apart})
    return copies, steps


def largest_difference(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Between two numbers in the same place, wherever the tensors lie."""
    return (flat(tensors).cpu() - flat(others).cpu()).abs().max().item()


def threads(rank: int, size: int, settings: DataParallelSettings) -> Fields:
    """Many small operations on one device, then as many on each at once: threads take turns at the GIL."""
    torch.set_num_threads(1)
    devices = resolve_devices(settings.devices)
    model, inputs = nn.Sequential(*[nn.Linear(8, 8)] * 1000).requires_grad_(False).to(devices[0]), torch.zeros(4, 8)
    replicas, chunks = replicate(model, devices), [(inputs.to(each),) for each in devices]
    calls = [partial(parallel_apply, replicas[:n], chunks[:n], None, devices[:n]) for n in (1, len(devices))]
    for call in calls:
        call()
    turns = interleave([timed(call, devices=devices) for call in calls], range(5), Random(0))  # five calls of each
    alone, together = (median(seconds) for seconds in turns)
    return {"alone": alone, "together": together}
