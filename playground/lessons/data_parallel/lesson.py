"""DataParallel by its parts: one process drives all devices, with a thread for each.

    python -m playground data-parallel
    python -m playground data-parallel --devices cpu:0,cpu:1 --gather logits
    python -m playground data-parallel --train --limit 6000

A forward pass of DataParallel (module.py) is four calls, each a file of its own beside this one:

    chunks = scatter(inputs, devices)
    replicas = replicate(module, devices)
    outputs = parallel_apply(replicas, chunks, None, devices)
    output = gather(outputs, output_device)

Without GPUs the devices are virtual ones, `cpu:0` and on: each with its own thread and its own account of memory, and
what moves between them is copied. On GPUs the same code runs on the real ones: --devices cuda:0,cuda:1. (One process
drives them all, so what --world-size and --backend say to other lessons, --devices says here.)
What DataParallel costs beside processes: limits.py.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html and
https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median

import torch
from torch import nn

from playground.lessons.data_parallel.account import HOST, Account
from playground.lessons.data_parallel.criterion import (
    DataParallelCriterion,
    DataParallelModel,
    LossModel,
    weighted_mean,
)
from playground.lessons.data_parallel.devices import resolve_devices
from playground.lessons.data_parallel.gather import gather
from playground.lessons.data_parallel.language import TokenLoss, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.memory import track_memory
from playground.lessons.data_parallel.module import DataParallel, data_parallel
from playground.lessons.data_parallel.moves import copy_to
from playground.lessons.data_parallel.parallel_apply import parallel_apply
from playground.lessons.data_parallel.replicate import replicate
from playground.lessons.data_parallel.results import DeviceLoad, DeviceShares, DeviceStep, Means, Received, WayResult
from playground.lessons.data_parallel.scatter import chunk_sizes, scatter
from playground.lessons.data_parallel.settings import DataParallelSettings
from playground.lessons.data_parallel.utilisation import Utilisation, track_utilisation
from playground.measurement.interleave import interleave, timed
from playground.training.data import Images, partition_dataset, partition_test_set, training_images
from playground.training.loop import train
from playground.training.net import Net
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.step import training_step
from playground.training.sync import GradSync


def split(rank: int, size: int, settings: DataParallelSettings) -> list[DeviceShares]:
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

    shares: dict[str, dict[str, int]] = {device: {} for device in devices}
    for batch, many in [*((30, many) for many in range(1, len(devices) + 1)), (2, len(devices))]:
        seen.clear()
        data_parallel(Counting(), torch.arange(batch), devices[:many])
        sizes = [count for _, count in sorted(seen.items())]
        for number, device in enumerate(devices):
            shares[device][f"{batch} on {many}"] = sizes[number] if number < len(sizes) else 0
    return [DeviceShares(device=device, samples=samples) for device, samples in shares.items()]


def one_step(rank: int, size: int, settings: DataParallelSettings) -> list[DeviceStep]:
    """One training step: what each part of it moves from where to where, and what every device holds after it."""
    devices, output_device = resolve_devices(settings.devices), torch.device(settings.output_device)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    optimizer = new_optimizer(model, settings.optimizer)

    def forward() -> torch.Tensor:
        chunks = scatter((tokens,), devices)
        account.snapshot("scatter")
        used = devices[: len(chunks)]  # of fewer samples than devices some devices get none
        replicas = replicate(model, used)
        account.snapshot("replicate")
        outputs = parallel_apply(replicas, chunks, None, used)
        account.snapshot("parallel_apply")
        logits = gather(outputs, output_device)
        account.snapshot("gather")
        loss = TokenLoss()(logits, copy_to(targets, output_device, "loss"))
        account.snapshot("loss")
        return loss

    def after(moment: str) -> None:
        if moment == "synced":
            account.snapshot("backward")

    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        account.snapshot("(before)")
        training_step(optimizer, [forward], GradSync(model), moment=after)
        account.snapshot("optimizer.step")
    return [device_step(account, device) for device in devices]


def device_step(account: Account, device: torch.device) -> DeviceStep:
    """What the account of a step says of one device."""
    return DeviceStep(
        device=str(device),
        held={part: held[device] for part, held in account.snapshots.items()},
        received=[
            Received(part=part, source="host" if source == HOST else str(source), bytes=count)
            for (part, source, target), count in account.bytes_moved().items()
            if target == device
        ],
    )


def gather_logits(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """As DataParallel is mostly used: all logits come together on one device, and the loss is computed there."""
    logits = data_parallel(model, tokens, devices, output)
    return TokenLoss()(logits, copy_to(targets, output, "targets"))


def gather_losses(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """A cure: each replica computes its loss in forward, and only the losses are gathered, one number per replica."""
    losses = data_parallel(LossModel(model, TokenLoss()), (tokens, targets), devices, output)
    return weighted_mean(losses, chunk_sizes(len(tokens), len(devices)))


def keep_outputs(
    model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, devices: list[torch.device], output: torch.device
) -> torch.Tensor:
    """A cure that leaves the model as it is: outputs stay where they are, and the criterion runs in parallel too."""
    outputs = DataParallelModel(model, devices)(tokens)
    return DataParallelCriterion(TokenLoss(), devices, output)(outputs, targets)


LOSSES = {"logits": gather_logits, "loss": gather_losses, "outputs": keep_outputs}
"""Every way to the mean loss over the batch, on the output device; named after what is gathered, or is not."""


def ways(rank: int, size: int, settings: DataParallelSettings) -> list[WayResult]:
    """What fills the memory of a device and keeps it busy, and what helps: gathering logits on one device, or on
    another; computing the loss inside forward; leaving outputs where they are, with the criterion in parallel.

    For each of `settings.ways`, in order. All take their first step from the same parameters.
    """
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    start = {name: value.clone() for name, value in model.state_dict().items()}
    steps, results = [], []
    for way in settings.ways:
        loss = partial(LOSSES[way.gather], model, tokens, targets, devices, torch.device(way.output_device))
        optimizer = new_optimizer(model, settings.optimizer)
        model.load_state_dict(start)
        steps.append(partial(training_step, optimizer, [loss], GradSync(model)))
        first_loss = steps[-1]().item()  # from here on the optimizer has its state
        account = track_step(model, optimizer, loss, devices)
        gathered = sum(move.bytes for move in account.moves if move.part == "gather")
        with track_utilisation(devices) as use:
            for _ in range(settings.steps):
                steps[-1]()
        result = partial(WayResult, gather=way.gather, output_device=way.output_device, loss=first_loss)
        results.append(partial(result, gathered=gathered, devices=device_loads(account, use)))
    turns = interleave([timed(step, devices=devices) for step in steps], range(settings.steps), Random(settings.seed))
    return [result(seconds=median(seconds)) for result, seconds in zip(results, turns, strict=True)]


def track_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    devices: Sequence[torch.device],
) -> Account:
    """The account of a training step that is not the first: `optimizer` has its state already."""
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        account.put_state(optimizer, devices[0])
        training_step(optimizer, [loss], GradSync(model), moment=account.moment)
    return account


def device_loads(account: Account, use: Utilisation) -> list[DeviceLoad]:
    """What a step takes of each device."""
    peak, at_peak = account.peak, account.at_peak
    return [
        DeviceLoad(device=str(device), peak=peak[device], at_peak=at_peak[device], share=share)
        for device, share in use.share.items()
    ]


def two_means(rank: int, size: int, settings: DataParallelSettings) -> list[Means]:
    """The mean of the devices' mean losses is the mean over all samples only if all chunks are of one size; weighted
    by the sizes it always is.

    For two batches, with losses 1, 2, 3, …: one that the devices share evenly, and one with a sample less.
    """
    devices = resolve_devices(settings.devices)
    return [take_means(samples, devices) for samples in (3 * len(devices), 3 * len(devices) - 1)]


def take_means(samples: int, devices: list[torch.device]) -> Means:
    losses = torch.arange(1, samples + 1, dtype=torch.float64)
    chunks = scatter(losses, devices)
    sizes = [len(chunk) for chunk in chunks]
    means = gather([chunk.mean() for chunk in chunks], devices[0])
    return Means(
        samples=samples, chunks=sizes, means=means.tolist(), mean=losses.mean().item(),
        mean_of_means=means.mean().item(), weighted_mean=weighted_mean(means, sizes).item(),
    )  # fmt: skip


class NetWithoutDropout(Net):
    """Net as it is in evaluation. Threads draw their dropout masks from one generator, in an order that is left to
    chance: with dropout no two runs would be the same, and none the same as on one device."""

    def train(self, mode: bool = True) -> NetWithoutDropout:
        super().train(False)
        return self


def run(rank: int, size: int, settings: TrainingSettings, devices: Sequence[str]) -> TrainingResult:
    """Train as sgd does, but in one process, with each batch on all devices."""
    torch.manual_seed(settings.seed)
    first = resolve_devices(devices)[0]
    if first.type == "cuda":
        torch.cuda.set_device(first)  # where this rank's batches are put, and so their labels: beside the outputs
    train_set = partition_dataset(training_images(settings), settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = NetWithoutDropout().to(first, memory_format=torch.channels_last)
    return train(GradSync(DataParallel(model, devices)), train_set, test_set, settings)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("data-parallel")
