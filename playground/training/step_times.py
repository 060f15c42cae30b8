"""The measurement of training steps with each gradient synchronisation: replicas that train in
turn, with a clock on each part of a step.

| part     | from       | to                                                                       |
|----------|------------|--------------------------------------------------------------------------|
| forward  | zero_grad  | the loss                                                                 |
| backward | the loss   | this rank's last gradient                                                |
| exposed  | that       | the last average: packing, sending and receiving, waiting for the others |
| step     | that       | the end of the optimizer's step                                          |

Where it is parameters that are averaged, after the optimizer's step, `exposed` is the time that
this takes.

What of the averaging is done before this rank's last gradient is hidden behind backward. To show
how much that is, a replica also averages gradients that are all ready at once, with no backward to
hide behind.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import chain, count, pairwise
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.algorithms.link import Link
from playground.base import host
from playground.measurement import environment
from playground.measurement.interleave import Heartbeat, interleave
from playground.tap import Call, Observer, observing
from playground.training.averaging import AllReduceCall, trainable_parameters
from playground.training.data import Images, batches, partition_dataset
from playground.training.grad_syncs import DDP, SPARSE
from playground.training.replicas import (
    all_gather_stacked,
    broadcast_parameters,
    find_largest_difference,
    flatten,
)
from playground.training.sparse_embeddings import SparseEmbeddings, ZipfSequences
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.step_results import PARTS, StepParts, StepResult, Variant
from playground.training.step_settings import BERT, MODELS, StepSettings, candidates
from playground.training.sync import GradSync, new_grad_sync
from playground.world import device, report
from playground.world.backends import backend_of
from playground.world.rendezvous.agreement import require_same_on_all_ranks

WARM_UP = 3
"""Rounds that are trained but not timed: DistributedDataParallel rebuilds its buckets after the
first."""
NewSync = Callable[[nn.Module, AllReduceCall], GradSync]
"""Makes the gradient synchronisation of a model, by that all-reduce."""
Moment = Any
"""Seconds, or an event on a GPU."""


def build_sync(name: str, model: nn.Module, all_reduce: AllReduceCall, bucket_cap: int) -> GradSync:
    """The gradient synchronisation of that name for `model`; `bucket_cap` is the bytes of a full
    bucket."""
    if name == SPARSE:
        return SparseEmbeddings(model, all_reduce, bucket_cap)
    if name == DDP:
        return in_ddp(model, bucket_cap)
    return new_grad_sync(name, model, all_reduce=all_reduce, bucket_cap=bucket_cap)


def run(rank: int, size: int, settings: StepSettings) -> StepResult:
    """Train the model with every gradient synchronisation, and in DistributedDataParallel, with a
    clock on each. All ranks return the same.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model]().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(model)
    names = candidates(settings.model, settings.link)
    variants = {name: partial(build_sync, name, bucket_cap=settings.bucket_cap) for name in names}
    return measure(variants, model, settings)


def measure(
    new_syncs: Mapping[str, NewSync], start: nn.Module, settings: StepSettings
) -> StepResult:
    """Train copies of the model `start`, one for each variant, in turn; the last variant is
    DistributedDataParallel. All ranks return the same."""
    rounds = Rounds(settings)
    rounds.advance()
    all_reduce = load_all_reduce(settings.all_reduce)
    link = Link(settings.link) if settings.link else None
    new_sgd = partial(torch.optim.SGD, lr=settings.lr, momentum=settings.momentum)
    messages: list[list[Message]] = []
    replicas: list[TimedReplica] = []
    for name, new_sync in new_syncs.items():
        rounds.heartbeat.beat()
        messages.append(count_messages(new_sync, start, rounds.inputs))
        timed_sync = partial(over_link, link, new_sync) if link else new_sync
        replicas.append(TimedReplica(name, start, timed_sync, all_reduce, new_sgd))

    for replica in replicas:
        # in the first round only this: DistributedDataParallel has no buckets before a backward
        rounds.step(replica)
    seconds = time_in_turn(replicas, rounds.step, rounds, settings.seed, WARM_UP - 1)
    variants = summarize(replicas, messages, seconds)
    parts = [  # on each rank, of each replica
        {
            replica.name: step_parts(its[:, : len(PARTS)])
            for replica, its in zip(replicas, mine, strict=True)
        }
        for mine in seconds
    ]
    return StepResult(variants=variants, parts=parts, environment=environment.describe())


class Rounds:
    """In each round all replicas step on the same batch with the same dropout masks; after the last
    sample comes the first. All batches are whole, so that all steps are alike. Iterating advances
    through the rounds that are left."""

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.heartbeat = Heartbeat()
        self.total = WARM_UP + settings.steps
        self.number = -1
        """Index of the current round."""
        samples = len(training_set(settings))
        samples -= samples % settings.batch_size
        train_set, _ = partition_dataset(
            training_set(settings, samples), settings.batch_size, settings.seed
        )
        self.batches = chain.from_iterable(batches(train_set, settings.batch_size) for _ in count())

    def __iter__(self) -> Iterator[None]:
        while self.number + 1 < self.total:
            self.advance()
            yield

    def advance(self) -> None:
        """Begin the next round, with the next batch."""
        inputs, self.labels, self.samples_per_rank = next(self.batches)
        self.inputs = (inputs,)
        self.number += 1
        phase = "measuring all variants side by side"
        self.heartbeat.beat(phase=phase, step=self.number, steps=self.total)

    def step(self, replica: TimedReplica) -> list[float]:
        """Take this round's step with the replica. Returns the seconds of each of `PARTS`."""
        of_rank = self.number * dist.get_world_size() + dist.get_rank()
        torch.manual_seed(self.settings.seed + 1 + of_rank)
        report(variant=replica.name)
        return replica.step(self.inputs, self.labels, self.samples_per_rank)


def training_set(settings: StepSettings, limit: int | None = None) -> Images | ZipfSequences:
    """The training data of the model: images, or sequences of token ids. `limit` keeps the
    first."""
    return (
        ZipfSequences(limit) if settings.model == BERT else Images(settings.folder, "train", limit)
    )


class Clock:
    """Takes the time of named moments. On a GPU, when the GPU gets there: the processor, which
    hands it work, runs ahead of it."""

    def __init__(self) -> None:
        self.on_gpu = device().type == "cuda"
        self.moments: dict[str, Moment] = {}

    def start(self) -> None:
        """Take the moment "start", at which nothing is under way, neither here nor on another rank;
        forget the others. All ranks must call this."""
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()
        self.moments = {"start": self.now()}

    def take(self, moment: str) -> None:
        """Take this moment; if it comes more than once, the last counts."""
        self.moments[moment] = self.now()

    def now(self) -> Moment:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, *moments: str) -> list[float]:
        """From each of these moments to the next."""
        taken = [self.moments[moment] for moment in moments]
        if not self.on_gpu:
            return [after - before for before, after in pairwise(taken)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(taken)]


class TimedReplica:
    """A copy of the model `start`, with its gradient synchronisation, its optimizer and a clock."""

    def __init__(
        self,
        name: str,
        start: nn.Module,
        new_sync: NewSync,
        all_reduce: AllReduceCall,
        new_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.name = name
        self.clock = Clock()
        self.model = copy.deepcopy(start)
        # before the synchronisation's own: hooks are called in order
        for param in trainable_parameters(self.model):
            param.register_post_accumulate_grad_hook(self.take_gradient)
        self.sync = new_sync(self.model, all_reduce)
        self.optimizer = self.sync.optimizer(new_optimizer)
        self.loss = 0.0
        """This rank's part of the last batch's mean loss."""
        self.inputs: tuple[torch.Tensor, ...] = ()
        """The first samples of the last batch."""
        self.sparse: dict[torch.Tensor, torch.Tensor] = {}
        """The last gradients of the parameters for which backward computes sparse ones."""

    def take_gradient(self, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        self.clock.take("gradient")
        if param.grad is not None and param.grad.is_sparse:
            self.sparse[param] = param.grad

    def step(
        self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, samples_per_rank: float
    ) -> list[float]:
        """Train on this rank's shard of a batch: the model is called with `*inputs`. Returns the
        seconds of each of `PARTS`."""

        def loss() -> torch.Tensor:
            return mean_loss_part(self.sync.model(*inputs), labels, samples_per_rank)

        self.inputs = tuple(each[:2] for each in inputs)  # BatchNorm wants two
        self.clock.start()
        self.loss = training_step(self.optimizer, loss, self.sync, on_moment=self.clock.take).item()
        self.clock.take("end")
        moments = ("start", "forward", "gradient", "synced", "step", "end")
        forward, backward, averaging, step, averaging_parameters = self.clock.seconds(*moments)
        return [forward, backward, averaging + averaging_parameters, step]

    def average_alone(self) -> list[float]:
        """Average gradients that are all ready at once, or parameters. Returns the seconds, in a
        list. A step must come first: DistributedDataParallel arranges its buckets in the order of
        its gradients, and sparse gradients are as sparse as that step's."""
        params = trainable_parameters(self.model)

        def ready_gradients() -> torch.Tensor:
            # without a forward before it DistributedDataParallel ignores a backward
            self.sync.model(*self.inputs)
            return ReadyGradients.apply(
                self.clock, [self.sparse.get(param) for param in params], *params
            )

        backward(self.optimizer, ready_gradients, self.sync)
        self.sync.after_step(last=False)
        self.clock.take("end")
        return self.clock.seconds("start", "end")


class ReadyGradients(torch.autograd.Function):
    """A loss whose backward computes nothing: the gradients of all parameters are ready at once.
    Those that are not among the `known`, which has None in their place, are zero. That moment is
    the clock's "start"."""

    @staticmethod
    def forward(
        ctx: Any, clock: Clock, known: list[torch.Tensor | None], *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.clock = clock
        ctx.known = known
        ctx.save_for_backward(*params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.known, ctx.saved_tensors, strict=True)
        gradients = [
            torch.zeros_like(param) if known is None else known.clone() for known, param in pairs
        ]
        ctx.clock.start()
        return None, None, *gradients


class Message(NamedTuple):
    """A message that a rank sends in a step."""

    nbytes: int
    is_early: bool
    """Whether it leaves before the last gradient is ready, so that it can be hidden."""


def count_messages(
    new_sync: NewSync, start: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> list[Message]:
    """The messages of a rank in a step on its shard of a batch. Counted on a replica that is not
    timed: DistributedDataParallel shows them only to a communication hook, which would be timed
    too."""
    model = copy.deepcopy(start)
    params = trainable_parameters(model)
    messages = StepMessages()
    for param in params:
        param.register_post_accumulate_grad_hook(messages.missing.discard)
    sync = new_sync(model, dist.all_reduce)
    if isinstance(sync.model, DistributedDataParallel):
        sync.model.register_comm_hook(None, allreduce_hook)
    optimizer = sync.optimizer(torch.optim.SGD)
    for _ in range(2):  # DistributedDataParallel rebuilds its buckets after the first backward
        messages.sent.clear()
        messages.missing.update(params)
        with observing(messages):
            training_step(optimizer, lambda: sync.model(*inputs).sum(), sync)
    return messages.sent


class StepMessages(Observer):
    """What is sent in a step. A collective on shards is half of an all-reduce of the whole."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.missing: set[torch.Tensor] = set()
        """Parameters whose gradients are not ready yet."""

    def begun(self, call: Call) -> None:
        whole = max(tensor.nbytes for tensor in (*call.inputs, *call.outputs))
        is_early = bool(self.missing)
        if call.name == "all_reduce":
            self.sent.append(Message(whole, is_early))
        elif call.name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
            self.sent.append(Message(whole // 2, is_early))


def over_link(
    link: Link, new_sync: NewSync, model: nn.Module, all_reduce: AllReduceCall
) -> GradSync:
    """The synchronisation of `new_sync`, its messages over `link`."""
    sync = new_sync(model, link.all_reduce(all_reduce))
    if isinstance(sync.model, DistributedDataParallel):
        link.put_under(sync.model)
    return sync


def in_ddp(model: nn.Module, bucket_cap: int) -> GradSync:
    """DistributedDataParallel, with buckets as full as the others', and buffers left to each rank
    as theirs are."""
    # what torch calls it depends on its version
    options = signature(DistributedDataParallel).parameters
    buffers = next(
        name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options
    )
    return GradSync(
        DistributedDataParallel(model, bucket_cap_mb=bucket_cap / 2**20, **{buffers: False})
    )


def time_in_turn(
    replicas: Sequence[TimedReplica],
    step: Callable[[TimedReplica], list[float]],
    rounds: Iterable[object],
    seed: int,
    warm_up: int,
) -> torch.Tensor:
    """Let every replica take a step and average alone, once in each of `rounds`, and time both.
    Returns [rank, replica, round, `PARTS` and then averaging alone], float64, the same on every
    rank, without the first `warm_up` rounds."""
    steps = [partial(step, replica) for replica in replicas]
    averagings = [replica.average_alone for replica in replicas]
    calls = [call for pair in zip(steps, averagings, strict=True) for call in pair]
    timed = interleave(calls, rounds, Random(seed))  # the same order on every rank
    of_steps = torch.tensor(timed[::2], dtype=torch.float64, device=device())
    alone = torch.tensor(timed[1::2], dtype=torch.float64, device=device())
    return all_gather_stacked(torch.cat([of_steps, alone], dim=-1)[:, warm_up:]).cpu()


def summarize(
    replicas: Sequence[TimedReplica],
    messages: Sequence[Sequence[Message]],
    seconds: torch.Tensor,
) -> list[Variant]:
    """The result of each replica, in order; the last is the one in DistributedDataParallel.
    `seconds` are those of `time_in_turn`, `messages` those of `count_messages`. All ranks must call
    this; all return the same."""
    of_steps = seconds[..., : len(PARTS)].sum(-1).amax(0)  # [replica, round], on the slowest rank
    p50 = of_steps.quantile(0.5, dim=1).tolist()
    for replica in replicas:
        replica.sync.after_step(last=True)  # a comparison follows
    variants = []
    for number, (replica, sent) in enumerate(zip(replicas, messages, strict=True)):
        of_parts = seconds[:, number, :, : len(PARTS)]  # [rank, round, part]
        # the rank that came last waited for the shortest time
        last = of_parts[..., PARTS.index("exposed")].argmin(0)
        parts = step_parts(of_parts[last, range(len(last))])
        alone = seconds[:, number, :, -1].amin(0).quantile(0.5).item()
        early = [message.nbytes for message in sent if message.is_early]
        mine = [len(sent), sum(message.nbytes for message in sent), sum(early)]
        of_ranks = all_gather_stacked(torch.tensor(mine, device=device()))
        message_count, nbytes, early_bytes = of_ranks.amax(0).tolist()
        loss, difference_to_ddp = compare_outcomes(replica, replicas[-1])
        difference, _ = find_largest_difference(replica.model, with_buffers=False)
        variant = Variant(
            **vars(parts),
            alone=alone,
            hidden=max(0.0, 1 - parts.exposed / alone) if early_bytes else 0.0,
            messages=message_count,
            bytes=nbytes,
            early_bytes=early_bytes,
            difference_to_ddp=difference_to_ddp,
            name=replica.name,
            p50=p50[number],
            loss=loss,
            replicas_max_difference=difference,
            speed_to_first=p50[0] / p50[number],
            speed_to_ddp=p50[-1] / p50[number],
            caveat=backend_of().describe_overlap() if replica is replicas[-1] else "",
        )
        variants.append(variant)
    return variants


def step_parts(seconds: torch.Tensor) -> StepParts:
    """The medians over rounds of `seconds` [round, `PARTS`]."""
    medians = seconds.quantile(0.5, dim=0).tolist()
    return StepParts(**dict(zip(PARTS, medians, strict=True)))


def compare_outcomes(replica: TimedReplica, ddp: TimedReplica) -> tuple[float, float]:
    """The mean loss of the last batch, and the largest difference of any parameter to
    DistributedDataParallel's. That is rounding, 1e-8, since sums in another order are rounded
    differently. Over many steps rounding now and then decides which of two numbers a ReLU or
    max_pool lets through: 1e-4. (In float64 all agree to 1e-16.)"""
    difference = (
        (flatten(replica.model.parameters()) - flatten(ddp.model.parameters())).abs().max().double()
    )
    of_ranks = all_gather_stacked(
        torch.stack([torch.full_like(difference, replica.loss), difference])
    )
    return of_ranks[:, 0].mean().item(), of_ranks[:, 1].max().item()
