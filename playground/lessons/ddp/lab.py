"""DistributedDataParallel taken apart: what it sends and when, and what each of its options
changes.

    python -m playground ddp --lab
    python -m playground ddp --lab hooks
    python -m playground ddp --lab checkpoint -n 3

Whatever is compared starts from the same parameters and takes the same samples with the same
dropout masks. Each part is a function that returns the rows of its table, the same ones on every
rank; page.py lists them. Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, save and load checkpoints
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.page import (
    ACCUMULATED,
    PARTS,
    STEPS,
    Accumulated,
    HookResult,
    JoinedRank,
    LabSettings,
    Resumed,
    SentBucket,
)
from playground.lessons.mnist import Net
from playground.lessons.partition import share
from playground.runtime import PlaygroundError, device, report
from playground.runtime.backends import backend_of
from playground.runtime.files import temporary_folder
from playground.runtime.rendezvous.agreement import all_gather_object
from playground.runtime.tap import Call, Observer, observing
from playground.training.data import Batch, Images, partition_dataset
from playground.training.replicas import find_largest_difference, flatten
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import GradSync

HOOKS = {
    "none": allreduce_hook,  # what DDP does without a hook
    "fp16": fp16_compress_hook,  # 11 bits of precision, and a largest value of 65,504
    "bf16": lambda state, bucket: bf16_compress_hook(
        state, bucket
    ),  # 8 bits, float32's range; torch wants CUDA for it
}
"""By name, communication hooks. The others are compared with the first."""
PASSES = 3
"""Backward passes after which buckets stay as they are: DDP arranges them in the first."""
BATCHES = 3
"""Batches of rank 0 in uneven_inputs; every further rank has one more."""
SAMPLES = 10
ROUNDING = 1e-12
"""How far apart two sums of the same float64 numbers may be, relative to their norm."""
DIFFER = "replicas differ by up to {:.2g}: they must not at all"
RESUMED = (
    "resumed from the checkpoint, parameters differ by {:.2g} of their norm from an "
    "uninterrupted run's"
)


class DDPRun:
    """`Net` in DistributedDataParallel, with its optimizer and data. Every run starts from the same
    parameters; the bucket cap is the lab's last, unless another is given."""

    def __init__(
        self,
        settings: LabSettings,
        bucket_cap_mb: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        backend_of().use_deterministic_kernels()
        self.training = training = settings.training
        torch.manual_seed(training.seed)
        self.ddp = DistributedDataParallel(
            Net().to(device(), dtype), bucket_cap_mb=bucket_cap_mb or settings.caps[-1]
        )
        self.images, self.sync = (
            Images(training.folder, "train", training.limit),
            GradSync(self.ddp),
        )
        self.optimizer = torch.optim.SGD(
            self.ddp.parameters(), lr=training.lr, momentum=training.momentum
        )

    def batch(self, number: int) -> Batch:
        """This rank's share of a batch: images [share, 1, 28, 28], labels [share]. After the last
        sample comes the first again."""
        *before, mine = (
            share(self.training.batch_size, r, dist.get_world_size())
            for r in range(dist.get_rank() + 1)
        )
        images, labels = self.images.span(number * self.training.batch_size + sum(before), mine)
        return images.to(device(), self.parameters().dtype), labels.to(device())

    def loss(self, batch: Batch, batches: int = 1) -> torch.Tensor:
        """This rank's part of the mean loss over `batches` batches, of which `batch` is one, or
        all."""
        images, labels = batch
        return mean_loss_part(
            self.ddp(images), labels, batches * self.training.batch_size / dist.get_world_size()
        )

    def numbered_loss(self, number: int) -> torch.Tensor:
        """This rank's part of the mean loss over that batch, with the dropout masks drawn for
        it."""
        report(batch=number)
        torch.manual_seed(self.training.seed + 1 + dist.get_rank() + dist.get_world_size() * number)
        return self.loss(self.batch(number))

    def backward(self, number: int) -> None:
        """Leave in every `param.grad` its mean over all ranks for one batch."""
        backward(self.optimizer, [partial(self.numbered_loss, number)], self.sync)

    def train(self, steps: range) -> float:
        """Take these steps; the last one's gradients stay. Returns this rank's part of its loss."""
        for number in steps:
            loss = training_step(self.optimizer, [partial(self.numbered_loss, number)], self.sync)
        return float(loss)

    def gradients(self) -> torch.Tensor:
        """All of them, flat."""
        return flatten(param.grad for param in self.ddp.parameters())

    def parameters(self) -> torch.Tensor:
        """All of them, flat."""
        return flatten(self.ddp.parameters())


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference of two flat vectors, relative to the reference's."""
    values, reference = values.double(), reference.double()
    return ((values - reference).norm() / reference.norm()).item()


def check(difference: float, text: str, most: float = 0) -> None:
    """Raise `PlaygroundError`, with the text and the difference in it, if that is more than `most`,
    or not a number."""
    if not difference <= most:
        raise PlaygroundError(text.format(difference))


def run_lab(rank: int, size: int, settings: LabSettings) -> list[list[object]]:
    """The rows of each part, in order."""
    tables = []
    for number, name in enumerate(settings.parts):
        report(phase=f"the lab: {name}", step=number, steps=len(settings.parts))
        tables.append(PARTS[name].code(rank, size, settings))
    return tables


class Bucket(NamedTuple):
    """A bucket as it leaves: fields of `SentBucket`."""

    bucket: int
    bytes: int
    ready: int
    parameters: list[str]


def record_buckets(ddp: DistributedDataParallel) -> tuple[list[str], list[Bucket]]:
    """Two lists that grow in every backward: the names of parameters as their gradients get ready,
    and the buckets as they leave."""
    names = {param: name for name, param in ddp.module.named_parameters()}
    ready: list[str] = []
    sent: list[Bucket] = []

    def send(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        params = [names[param] for param in bucket.parameters()]
        sent.append(Bucket(bucket.index(), bucket.buffer().nbytes, len(ready), params))
        return allreduce_hook(None, bucket)

    for param in names:
        param.register_post_accumulate_grad_hook(lambda param: ready.append(names[param]))
    ddp.register_comm_hook(None, lambda state, bucket: send(bucket))
    return ready, sent


def buckets(rank: int, size: int, settings: LabSettings) -> list[SentBucket]:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in
    which order they get ready. When it has seen that, it rebuilds: a bucket is full once it holds
    its cap, and leaves when its last gradient is ready, while backward goes on.

    One row per bucket, for each cap. Raises `PlaygroundError` if the ranks' buckets differ.
    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
    """
    rows = []
    for cap in settings.caps:
        run = DDPRun(settings, cap)
        passes = []
        ready, sent = record_buckets(run.ddp)
        for number in range(PASSES):
            ready.clear()
            sent.clear()
            run.backward(number)
            passes.append([*sent])
        since = passes.index(passes[-1]) + 1
        for when, seen in (("1", passes[0]), (f"{since} …", passes[-1])):
            rows += [
                SentBucket(bucket_cap_mb=cap, backward=when, **bucket._asdict()) for bucket in seen
            ]
    if any(theirs != rows for theirs in all_gather_object(rows)):
        raise PlaygroundError(
            "the ranks' buckets differ, though all must send the same ones in the same order"
        )
    return rows


class HookMessages(Observer):
    """The messages that hooks send, also in threads of gloo's: the type and the bytes of each."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def begun(self, call: Call) -> None:
        self.sent += [
            (str(tensor.dtype).removeprefix("torch."), tensor.nbytes) for tensor in call.inputs
        ]


def hooks(rank: int, size: int, settings: LabSettings) -> list[HookResult]:
    """A communication hook averages buckets in a way of its own, as fp16 or bf16. What is saved,
    and the errors of the first gradient and of the parameters after some steps, against those
    without a hook.

    One row per hook, that without a hook first. Raises `PlaygroundError` if replicas differ with
    one of them.
    """
    rows = []
    baseline: list[torch.Tensor] = []
    for name, hook in HOOKS.items():
        run = DDPRun(settings)
        messages = HookMessages()
        run.ddp.register_comm_hook(None, hook)
        for _ in range(PASSES - 1):
            run.backward(0)
        with observing(messages):
            run.train(range(1))
        results = [run.gradients()]
        loss = run.train(range(1, STEPS))
        results.append(run.parameters())
        baseline = baseline or results
        check(find_largest_difference(run.ddp.module)[0], f"with this hook {DIFFER}")
        gradient, parameters = map(relative_error, results, baseline)
        types, sizes = zip(*messages.sent, strict=True)
        row = HookResult(
            hook=name,
            sends=", ".join(sorted({*types})),
            messages=len(sizes),
            sent=sum(sizes),
            gradient_rel=gradient,
            parameters_rel=parameters,
            loss=mean(all_gather_object(loss)),
        )
        rows.append(row)
    return rows


class SendEveryTime(GradSync):
    """Without no_sync: DDP averages in every backward, though only the sum of the gradients is
    needed."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def accumulation(rank: int, size: int, settings: LabSettings) -> list[Accumulated]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only
    the sum is needed; under no_sync backward only adds, and the last one sends what has come
    together. (In float64, without dropout: what differs is rounding.)

    One row per way. Raises `PlaygroundError` if gradients differ by more than rounding. Source:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    (no_sync)
    """
    run = DDPRun(settings, dtype=torch.float64)
    run.ddp.eval()
    _, sent = record_buckets(run.ddp)
    for _ in range(PASSES - 1):
        run.backward(0)
    small = [run.batch(number) for number in range(ACCUMULATED)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    rows = []
    whole: torch.Tensor | None = None
    for way, batches, sync in (
        ("one large batch", [(images, labels)], run.sync),
        ("all send", small, SendEveryTime(run.ddp)),
        ("no_sync but for the last", small, run.sync),
    ):
        sent.clear()
        backward(run.optimizer, [partial(run.loss, batch, ACCUMULATED) for batch in batches], sync)
        gradients = run.gradients()
        whole = gradients if whole is None else whole
        error = relative_error(gradients, whole)
        check(error, f"{way}: gradients differ by {{}}, more than rounding does", ROUNDING)
        rows.append(Accumulated(way=way, batches=len(batches), messages=len(sent), rel_error=error))
    return rows


def uneven_inputs(rank: int, size: int, settings: LabSettings) -> list[JoinedRank]:
    """Rank r has 3 + r batches. Without Join the others would wait forever for the rank that is
    done first; within it that rank answers with zeros until all are done, and then takes over the
    parameters of the last.

    One row per rank. Raises `PlaygroundError` if replicas differ in the end.
    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    run = DDPRun(settings)
    batches = BATCHES + rank
    _, sent = record_buckets(run.ddp)
    with Join([run.ddp]):
        run.train(range(batches))
    difference, _ = find_largest_difference(run.ddp.module)
    check(difference, f"after Join {DIFFER}")
    row = JoinedRank(rank=rank, batches=batches, messages=len(sent), difference=difference)
    return all_gather_object(row)


def checkpoint(rank: int, size: int, settings: LabSettings) -> list[Resumed]:
    """Rank 0 writes model and optimizer into one file, all ranks read it, and training goes on. A
    rank hears where the file is when it is whole; a rank that looked for it before would find
    nothing, or that of an earlier run.

    One row per part of the file that is loaded. Raises `PlaygroundError` if the training that was
    resumed from all of it ends elsewhere than one that was never interrupted.
    """
    run = DDPRun(settings)
    run.train(range(STEPS))
    with temporary_folder("checkpoint") if rank == 0 else contextlib.nullcontext() as folder:
        place = [f"{folder}/checkpoint.pt"]
        if rank == 0:
            torch.save(
                {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()},
                place[0],
            )
        # orders what follows after writing, as a barrier would
        dist.broadcast_object_list(place, src=0)
        # which runs no code in it
        state = torch.load(place[0], map_location=device(), weights_only=True)
        # rank 0 removes the file when all have read it
        read = all_gather_object(Path(place[0]).stat().st_size)
    run.train(range(STEPS, 2 * STEPS))
    rows = []
    for names in (("model",), ("model", "optimizer")):
        error = relative_error(resume(settings, state, names), run.parameters())
        rows.append(Resumed(loaded=", ".join(names), read=read[rank], rel_error=error))
    check(error, RESUMED)
    return rows


def resume(settings: LabSettings, state: Any, names: tuple[str, ...]) -> torch.Tensor:
    """A new run takes what `names` says from the checkpoint, then the same steps as the
    uninterrupted one. Returns its parameters."""
    run = DDPRun(settings)
    # after its first backward DDP rebuilds its buckets, and they decide in which order it adds
    run.backward(0)
    run.ddp.module.load_state_dict(state["model"])
    if "optimizer" in names:
        run.optimizer.load_state_dict(state["optimizer"])
    run.train(range(STEPS, 2 * STEPS))
    return run.parameters()


def sampler(rank: int, size: int, settings: LabSettings) -> list[dict[str, str | list[int]]]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice,
    or, with drop_last, some to none. Every epoch has the same order, unless set_epoch tells it
    which one this is. Our partition_dataset gives each sample to one rank.

    One row per way. Source:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    seed = settings.training.seed
    padding, dropping = (
        DistributedSampler(samples, seed=seed, drop_last=drop_last) for drop_last in (False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": [*padding] for epoch in range(2)}
    for epoch in range(2):
        padding.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = [*padding]
    ways["drop_last"] = [*dropping]
    ways["partition_dataset"] = partition_dataset(samples, size, seed)[0].dataset.index.tolist()
    rows: list[dict[str, str | list[int]]] = []
    for way, mine in ways.items():  # the positions of this rank's samples, in order
        shares = all_gather_object(mine)
        counts = Counter(place for theirs in shares for place in theirs)
        unfair = {
            "doubled": [p for p in samples if counts[p] > 1],
            "left_out": [p for p in samples if not counts[p]],
        }
        rows.append(
            {"sampler": way, **{f"rank {r}": theirs for r, theirs in enumerate(shares)}, **unfair}
        )
    return rows
