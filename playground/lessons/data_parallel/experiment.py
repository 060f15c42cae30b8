"""DataParallel measured: what it shares out and moves, what fills a device and what helps; two claims; training; and
what it costs that processes do not.

"Two models sit on the first GPU": the replica there is made of the model's own memory. "The replicas differ, so
training does not go well": every forward makes new ones from the one model, which gets the sum of their gradients.

Why the path goes on to processes: the model is copied to every device at every step, and threads take turns at the GIL.
`copying` and `threads` run in one process, `averaging` and `processes` do the same on one rank per device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.algorithms import load_all_reduce
from playground.algorithms.messages import Messages, observed
from playground.algorithms.transport import Addressed
from playground.lessons.data_parallel import page
from playground.lessons.data_parallel.lesson import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from playground.lessons.data_parallel.losses import (
    LENGTH,
    LOSSES,
    ParallelLossModel,
    TokenLoss,
    gather_losses,
    new_batch,
    new_model_and_batch,
    new_optimizer,
    weighted_mean,
)
from playground.lessons.data_parallel.machine import HOST, copy_to, resolve_devices
from playground.lessons.data_parallel.memory import Account, largest_batch, track_memory, track_utilisation
from playground.lessons.data_parallel.page import MAX_BATCH_SIZE, MEANS, DataParallelSettings, Means, Shares, Way
from playground.measurement.interleave import Heartbeat, interleave, timed
from playground.runtime import device
from playground.training.data import Images, partition_dataset, partition_test_set, training_images
from playground.training.loop import train
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.step import training_step
from playground.training.sync import GradSync, new_grad_sync

ROUNDS = 5
"""Timed calls of each piece of work."""


def split(rank: int, size: int, settings: DataParallelSettings) -> list[Shares]:
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

    shares: list[Shares] = [{"device": device} for device in devices]
    for batch, many in [*((30, many) for many in range(1, len(devices) + 1)), (2, len(devices))]:
        seen.clear()
        data_parallel(Counting(), torch.arange(batch), devices[:many])
        sizes = [count for _, count in sorted(seen.items())]
        for number, mine in enumerate(shares):
            mine[f"{batch} on {many}"] = sizes[number] if number < len(sizes) else 0
    return shares


def one_step(rank: int, size: int, settings: DataParallelSettings) -> list[page.DeviceStep]:
    """One training step: what each part of it moves from where to where, and what every device holds after it."""
    devices, output_device = resolve_devices(settings.devices), torch.device(settings.output_device)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    optimizer = new_optimizer(model, settings.optimizer)

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

    steps = {each: page.DeviceStep(device=str(each), held={}, received=[]) for each in devices}
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        after("(before)")
        training_step(optimizer, [forward], GradSync(model), moment=moment)
        after("optimizer.step")
    for (part, source, target), count in account.bytes_moved().items():
        steps[target].received.append({"part": part, "from": "host" if source == HOST else str(source), "bytes": count})
    return list(steps.values())


def ways(rank: int, size: int, settings: DataParallelSettings) -> list[page.WayResult]:
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
        peak, at_peak = account.peak, account.at_peak
        loads = [
            page.DeviceLoad(device=str(each), peak=peak[each], at_peak=at_peak[each], share=share)
            for each, share in use.share.items()
        ]
        results.append(partial(page.WayResult, **vars(way), loss=first_loss, gathered=gathered, devices=loads))
    turns = interleave([timed(step, devices=devices) for step in steps], range(settings.steps), Random(settings.seed))
    return [result(seconds=median(seconds)) for result, seconds in zip(results, turns, strict=True)]


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


def largest_batches(rank: int, size: int, settings: DataParallelSettings, cap: int) -> list[page.LargestBatch]:
    """The largest batch with which no device holds more than the cap, found by steps that are really taken.

    For one device alone, then for each of `settings.ways`. Raises `UsageError` if one sample is too many.
    """
    together = [settings] if len(settings.devices) > 1 else []
    return [find_largest(each, way, cap) for each in (settings.on_first_device, *together) for way in each.ways]


def find_largest(settings: DataParallelSettings, way: Way, cap: int) -> page.LargestBatch:
    """By one way, on all devices of `settings`."""
    devices = resolve_devices(settings.devices)
    model, *sample = new_model_and_batch(1, settings.seed, devices[0])
    optimizer = new_optimizer(model, settings.optimizer)
    loss_on = partial(LOSSES[way.gather], model, devices=devices, output=torch.device(way.output_device))
    training_step(optimizer, [partial(loss_on, *sample)], GradSync(model))  # from here on it has its state
    accounts: dict[int, Account] = {}
    heartbeat = Heartbeat()

    def peak(batch_size: int) -> int:
        heartbeat.beat()
        accounts[batch_size] = track_step(model, optimizer, partial(loss_on, *new_batch(batch_size)), devices)
        return max(accounts[batch_size].peak.values())

    held = track_step(model, optimizer, partial(loss_on, *sample), devices).held_by_label[devices[0]]
    batch = largest_batch(peak, cap, model=held, limit=MAX_BATCH_SIZE)
    fullest = max(devices, key=accounts[batch].peak.__getitem__)
    return page.LargestBatch(
        **vars(way), devices=len(devices), batch=batch, fullest=str(fullest), at_peak=accounts[batch].at_peak[fullest]
    )


def two_means(rank: int, size: int, settings: DataParallelSettings) -> list[Means]:
    """The mean of the devices' mean losses is the mean over all samples only if all chunks are of one size; weighted
    by the sizes it always is.

    For two batches, with losses 1, 2, 3, …: one that the devices share evenly, and one with a sample less.
    """
    devices, found = resolve_devices(settings.devices), []
    for samples in (3 * len(devices), 3 * len(devices) - 1):
        losses = torch.arange(1, samples + 1, dtype=torch.float64)
        chunks = scatter(losses, devices)
        sizes = [len(chunk) for chunk in chunks]
        means = gather([chunk.mean() for chunk in chunks], devices[0])
        three = [mean.item() for mean in (losses.mean(), means.mean(), weighted_mean(means, sizes))]
        batch = {"samples": samples, "chunks": sizes, "means": means.tolist()}
        found.append({**batch, **dict(zip(MEANS, three, strict=True))})
    return found


def claims(rank: int, size: int, settings: DataParallelSettings) -> tuple[list[page.ModelCopy], list[page.ReplicaStep]]:
    """Two sentences put to the test: "two models sit on the first device" and "the replicas differ, so training does
    not go well"."""
    devices = resolve_devices(settings.devices)
    return count_models(settings, devices), compare_replicas(settings, devices)


def count_models(settings: DataParallelSettings, devices: list[torch.device]) -> list[page.ModelCopy]:
    """How many bytes of parameters each device holds once there are replicas, and what of them the replicas share."""
    model, _, _ = new_model_and_batch(1, settings.seed, devices[0])
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        replicas = replicate(model, devices)
        held = account.held_by_label
    own = {parameter.data_ptr() for parameter in model.parameters()}
    shared = [sum(tensor.data_ptr() in own for tensor in parameters_of(replica, model)) for replica in replicas]
    return [
        page.ModelCopy(device=str(device), parameters=held[device]["parameters"], of=len(own), shared=count)
        for device, count in zip(devices, shared, strict=True)
    ]


def compare_replicas(settings: DataParallelSettings, devices: list[torch.device]) -> list[page.ReplicaStep]:
    """Steps of DataParallel with two samples per device, and as many on one device with all of them, in float64."""
    models = [
        ParallelLossModel(new_model_and_batch(1, settings.seed, devices[0])[0], TokenLoss()).double() for _ in range(2)
    ]
    optimizers = [new_optimizer(model, settings.optimizer) for model in models]
    _, *batch = new_model_and_batch(2 * len(devices), settings.seed, devices[0])
    return [compare_step(step, models, optimizers, batch, devices) for step in range(1, settings.steps + 1)]


def compare_step(
    step: int,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Sequence[torch.Tensor],
    devices: list[torch.device],
) -> page.ReplicaStep:
    """One step of the first model on all devices, and of the second on the first device alone."""
    parallel, alone = models
    chunks = scatter(tuple(batch), devices)
    used = devices[: len(chunks)]
    replicas = replicate(parallel, used)
    first, *others = (parameters_of(replica, parallel) for replica in replicas)
    for parameter in chain(first, *others):
        parameter.retain_grad()
    replicas_differ = max((largest_difference(first, other) for other in others), default=0.0)
    losses = gather(parallel_apply(replicas, chunks, None, used), devices[0])
    together = weighted_mean(losses, [len(tokens) for tokens, _ in chunks])
    on_one_device = alone(*(tensor.to(devices[0]) for tensor in batch))
    for optimizer, loss in zip(optimizers, (together, on_one_device), strict=True):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gradients = [[parameter.grad for parameter in replica] for replica in (first, *others)]
    return page.ReplicaStep(
        step=step,
        loss=together.item(),
        replicas_differ=replicas_differ,
        gradients_differ=max((largest_difference(gradients[0], other) for other in gradients[1:]), default=0.0),
        from_one_device=largest_difference(list(parallel.parameters()), list(alone.parameters())),
    )


def parameters_of(replica: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    """A replica's parameters, in the order of the model's. They are no leaves: `parameters()` has none of them."""
    return [attrgetter(name)(replica) for name, _ in model.named_parameters()]


def largest_difference(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Between two numbers in the same place, wherever the tensors lie."""
    return (flat(tensors).cpu() - flat(others).cpu()).abs().max().item()


def copying(rank: int, size: int, settings: DataParallelSettings) -> tuple[float, list[page.DeviceTraffic]]:
    """Steps of DataParallel, the loss inside forward: every device gets the model, one gets all gradients.

    Returns the median time of a step in seconds, and the traffic of each device.
    """
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    loss = partial(gather_losses, model, tokens, targets, devices, devices[0])
    step = partial(training_step, new_optimizer(model), [loss], GradSync(model))
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        step()
    moves = [move for move in account.moves if move.part in ("replicate", "reduce")]
    [seconds] = median_seconds([step], devices, settings.steps)
    traffic = []
    for each in devices:
        sent = sum(move.bytes for move in moves if move.source == each)
        received = sum(move.bytes for move in moves if move.target == each)
        traffic.append(page.DeviceTraffic(device=str(each), sent=sent, received=received))
    return seconds, traffic


def averaging(rank: int, size: int, settings: DataParallelSettings) -> page.Averaging:
    """The same steps as sgd takes them: every rank keeps its replica, and gradients are averaged."""
    batch_size = settings.batch_size
    model, tokens, targets = new_model_and_batch(batch_size, settings.seed, device())
    first = sum(share(batch_size, other, size) for other in range(rank))
    mine = slice(first, first + share(batch_size, rank, size))
    tokens, targets = tokens[mine].to(device()), targets[mine].to(device())

    def part_of_mean_loss() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss * size / (batch_size * LENGTH)

    def step_by(all_reduce: str) -> Callable[[], torch.Tensor]:
        sync = new_grad_sync("flat", model, load_all_reduce(all_reduce))
        return partial(training_step, new_optimizer(model), [part_of_mean_loss], sync)

    sent = 0

    def count(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        nonlocal sent
        sent += sum(part.nbytes for part, _ in send)

    with observed(count):
        step_by("ring")()
    [seconds] = median_seconds([step_by("backend")], [device()], settings.steps)
    return page.Averaging(seconds=seconds, sent=sent)


def threads(rank: int, size: int, settings: DataParallelSettings) -> dict[str, page.WorkSeconds]:
    """Work on one device, then as much on each at once: by threads, and by processes."""
    torch.set_num_threads(1)
    devices, results = resolve_devices(settings.devices), {}
    for name, (model, inputs) in new_work(devices[0]).items():
        replicas = replicate(model, devices)
        chunks = [(inputs.to(each),) for each in devices]
        calls = [
            partial(parallel_apply, replicas[:count], chunks[:count], None, devices[:count])
            for count in (1, len(devices))
        ]
        alone, together = median_seconds(calls, devices)
        results[name] = page.WorkSeconds(alone=alone, together=together)
    return results


def processes(rank: int, size: int) -> dict[str, page.WorkSeconds]:
    """The same by processes: on rank 0 while the others wait, then on every rank at once."""
    torch.set_num_threads(1)
    results = {}
    for name, (model, inputs) in new_work(device()).items():
        work = partial(model, inputs)
        calls = [work if rank == 0 else do_nothing, partial(work_together, work)]
        alone, together = median_seconds(calls, [device()])
        results[name] = page.WorkSeconds(alone=alone if rank == 0 else 0.0, together=together)
    return results


def do_nothing() -> None:
    """Wait while another rank works."""


def work_together(work: Callable[[], object]) -> None:
    """Done when every rank is."""
    work()
    dist.barrier()


def new_work(place: torch.device) -> Mapping[str, tuple[nn.Module, torch.Tensor]]:
    """Two loads of some 5 to 30 ms: one mostly Python, which holds the GIL, one mostly arithmetic."""
    small = nn.Sequential(*[nn.Linear(8, 8)] * 1000)
    large = nn.Sequential(*[nn.Linear(1024, 1024)] * 4)
    return {
        "many small operations": (small.requires_grad_(False).to(place), torch.zeros(4, 8, device=place)),
        "few large operations": (large.requires_grad_(False).to(place), torch.zeros(256, 1024, device=place)),
    }


def median_seconds(
    calls: Sequence[Callable[[], object]], devices: Sequence[torch.device], rounds: int = ROUNDS
) -> list[float]:
    """Seconds that each call takes: the median of `rounds`, after an uncounted one. All ranks must call this."""
    for call in calls:
        call()
    turns = interleave([timed(call, devices=devices) for call in calls], range(rounds), Random(0))
    return [median(seconds) for seconds in turns]


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
    train_set, _ = partition_dataset(training_images(settings), settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = NetWithoutDropout().to(first, memory_format=torch.channels_last)
    return train(GradSync(DataParallel(model, devices)), train_set, test_set, settings)
