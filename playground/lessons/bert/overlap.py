"""When backward has which gradients, and what that leaves to hide the averaging behind."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.lessons.bert.lesson import batches, build_model
from playground.lessons.bert.results import Averaging, PartReady
from playground.lessons.bert.settings import BertSettings
from playground.lessons.ladder.lesson import new_rung
from playground.lessons.ladder.measure import Clock, TimedReplica, count_messages, summarize, time_in_turn
from playground.measurement.interleave import Heartbeat
from playground.runtime import device
from playground.training.bert import Model

WARM_UP, STEPS = 3, 10
"""Rounds that are not counted, and rounds that are."""
WORDS = "word embeddings"


def ready(rank: int, size: int, settings: BertSettings) -> list[PartReady]:
    """When backward has the gradients of each part of the model. It goes from the last layer to the first, so the
    embeddings come last: when their average can start, there is no backward left to hide it behind."""
    model, clock, coming = build_model(Model, settings), Clock(), batches(settings, rank, size)
    parts: dict[str, int] = {}
    for name, param in model.named_parameters():
        part = part_of(name)
        parts[part] = parts.get(part, 0) + param.nbytes
        param.register_post_accumulate_grad_hook(lambda param, part=part: clock.take(part))
    shares: dict[str, list[float]] = {part: [] for part in parts}
    heartbeat = Heartbeat()
    for number in range(WARM_UP + STEPS):
        heartbeat.beat()
        batch = next(coming)
        loss = F.cross_entropy(model(*batch.inputs), batch.labels)
        clock.start()
        loss.backward()
        clock.take("end")
        [whole] = clock.seconds("start", "end")
        for part in parts if number >= WARM_UP else ():
            shares[part].append(clock.seconds("start", part)[0] / whole)
    words = count_words(batch.input_ids, settings.config.vocabulary)
    found = [
        PartReady(
            part=part, bytes=nbytes, ready=median(shares[part]), rows_used=words if part == WORDS else None
        )
        for part, nbytes in parts.items()
    ]  # fmt: skip
    return sorted(found, key=lambda part: part.ready)


def part_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to."""
    words = parameter.removeprefix("bert.").split(".")
    if words[0] == "embeddings":
        return WORDS if words[1] == "word_embeddings" else "other embeddings"
    return f"layer {words[2]}" if words[0] == "encoder" else words[0]


def count_words(input_ids: torch.Tensor, vocabulary: int) -> int:
    """How many rows of the word embeddings the batches of all ranks use."""
    used = torch.zeros(vocabulary, dtype=torch.int64, device=device())
    used[input_ids.unique()] = 1
    dist.all_reduce(used)
    return int((used > 0).sum())


def averaging(rank: int, size: int, settings: BertSettings) -> list[Averaging]:
    """What averaging the gradients costs in a step: with DDP, and with a rung that sends of the word embeddings'
    gradient only the rows that a step has used. Both take the same steps with Adam, in turn."""
    torch.set_num_threads(settings.threads)
    start, coming = build_model(Model, settings), batches(settings, rank, size)
    new_adam = partial(torch.optim.Adam, lr=settings.lr, fused=True)
    batch = next(coming)
    messages, replicas = [], []

    def take_step(replica: TimedReplica) -> list[float]:
        return replica.step(batch.inputs, batch.labels, settings.batch_size / size)

    for name in ("sparse-embeddings", "ddp"):
        new_sync = partial(new_rung, name, bucket_cap=settings.bucket_cap)
        messages.append(count_messages(new_sync, start, dist.all_reduce, batch.inputs))
        replicas.append(TimedReplica(name, start, new_sync, dist.all_reduce, new_adam, mean_loss))
        take_step(replicas[-1])
    seconds = time_in_turn(replicas, take_step, range(WARM_UP + STEPS), settings.seed, WARM_UP)
    return [
        Averaging(
            way=rung.rung, seconds=rung.p50, exposed=rung.exposed, alone=rung.alone, hidden=rung.hidden,
            messages=rung.messages, bytes=rung.bytes, early_bytes=rung.early_bytes,
            difference_to_ddp=rung.difference_to_ddp, caveat=rung.caveat,
        )
        for rung in summarize(replicas, messages, seconds)
    ]  # fmt: skip


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, samples_per_rank: float) -> torch.Tensor:
    """This rank's part of the mean loss over the global batch."""
    return F.cross_entropy(logits, labels, reduction="sum") / samples_per_rank
