"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab
    python -m playground ddp --lab hooks
    python -m playground ddp --lab checkpoint -n 3

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks. Each part
is a function that returns the rows of its table, the same ones on every rank. The parts, and the hooks that one of them
compares, are listed in page.py.
Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, save and load checkpoints
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.page import ACCUMULATED, HOOKS, PARTS, STEPS, WARM_UP, LabSettings
from playground.measurement import Fields
from playground.runtime import PlaygroundError, device, report
from playground.runtime.backends import backend_of
from playground.runtime.files import temporary_folder
from playground.runtime.meeting.agreement import all_gather_object, require_same_on_all_ranks
from playground.runtime.rank import steps
from playground.runtime.tap import Call, Observer, observing
from playground.training.data import Batch, Images, partition_dataset
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import find_largest_difference, flat
from playground.training.settings import TrainingSettings
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import GradSync

PASSES = 3
"""Backward passes after which buckets stay as they are."""
BATCHES = 3
"""Batches of rank 0 in uneven_inputs; every further rank has one more."""
SAMPLES = 10
ROUNDING = 1e-12
"""How far apart two sums of the same float64 numbers may be, relative to their norm."""
DIFFER = "replicas differ by up to {:.2g}: they must not at all"
RESUMED = "resumed from the checkpoint, parameters differ by {:.2g} of their norm from an uninterrupted run's"
State = dict[str, Any]
"""state_dict() of the model and of the optimizer, under these names."""


class DDPRun:
    """A DistributedDataParallel with its optimizer and data."""

    def __init__(self, model: nn.Module, training: TrainingSettings, bucket_cap_mb: float) -> None:
        backend_of().use_deterministic_kernels()
        self.training = training
        self.images = Images(training.folder, "train", training.limit)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        self.sync = GradSync(self.ddp)
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=training.lr, momentum=training.momentum)

    def batch(self, number: int) -> Batch:
        """This rank's share of a batch: images [share, 1, 28, 28] in the model's type, labels [share]. After the last
        sample comes the first again."""
        batch_size, size = self.training.batch_size, dist.get_world_size()
        shares = [share(batch_size, rank, size) for rank in range(dist.get_rank() + 1)]
        first = number * batch_size + sum(shares[:-1])
        images, labels = self.images.span(first, shares[-1])
        return images.to(device(), self.params[0].dtype), labels.to(device())

    def loss(self, batch: Batch, batches: int = 1) -> torch.Tensor:
        """This rank's part of the mean loss over `batches` batches, of which `batch` is one, or all."""
        images, labels = batch
        samples_per_rank = batches * self.training.batch_size / dist.get_world_size()
        return mean_loss_part(self.ddp(images), labels, samples_per_rank)

    def numbered_loss(self, number: int) -> torch.Tensor:
        """This rank's part of the mean loss over that batch, with the dropout masks drawn for it."""
        report(batch=number)
        torch.manual_seed(self.training.seed + 1 + dist.get_rank() + dist.get_world_size() * number)
        return self.loss(self.batch(number))

    def backward(self, number: int) -> float:
        """Leave in every `param.grad` its mean over all ranks for one batch. This rank's part of the loss."""
        return float(backward(self.optimizer, [partial(self.numbered_loss, number)], self.sync))

    def step(self, number: int) -> float:
        """The same, and the optimizer's step. The gradients stay."""
        return float(training_step(self.optimizer, [partial(self.numbered_loss, number)], self.sync))

    def train(self, steps: range) -> None:
        for number in steps:
            self.step(number)

    def gradients(self) -> torch.Tensor:
        """All of them, flat, as float64."""
        return flat(param.grad for param in self.params).double()

    def parameters(self) -> torch.Tensor:
        """All of them, flat, as float64."""
        return flat(self.params).double()


def build_model(seed: int) -> nn.Module:
    """A `Net` with the same parameters at every call, on this rank's device."""
    torch.manual_seed(seed)
    model: nn.Module = Net().to(device())
    return model


def build_run(settings: LabSettings, bucket_cap_mb: float | None = None) -> DDPRun:
    """A run from its start, with the lab's last bucket cap unless another is given."""
    return DDPRun(build_model(settings.training.seed), settings.training, bucket_cap_mb or settings.caps[-1])


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference of two flat vectors, relative to the reference's."""
    return ((values - reference).norm() / reference.norm()).item()


class SentMessages(Observer):
    """The messages that hooks send, also in threads of gloo's: the type and the bytes of each."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def begun(self, call: Call) -> None:
        self.sent += [(str(tensor.dtype).removeprefix("torch."), tensor.nbytes) for tensor in call.inputs]


class BucketRecorder:
    """Records which gradients get ready in backward, and which buckets a DistributedDataParallel sends."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {param: name for name, param in model.module.named_parameters()}
        self.ready: list[str] = []
        """Names of parameters, as their gradients got ready."""
        self.sent: list[Fields] = []
        """The buckets, as they left: rows of the part buckets."""
        for param in self.names:
            param.register_post_accumulate_grad_hook(lambda param: self.ready.append(self.names[param]))
        model.register_comm_hook(None, lambda state, bucket: self.record(bucket))

    def record(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A communication hook that also sends the bucket, as DDP would."""
        names = [self.names[param] for param in bucket.parameters()]
        about = {"bucket": bucket.index(), "bytes": bucket.buffer().nbytes, "ready": len(self.ready)}
        self.sent.append({**about, "parameters": names})
        return allreduce_hook(None, bucket)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.ready, self.sent = [], []


def run_lab(rank: int, size: int, settings: LabSettings) -> list[Any]:
    """The results of this rank for each part, in order; {"refused": words} for what the backend cannot do.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    torch.manual_seed(settings.training.seed)
    outcomes = []
    for number, name in enumerate(settings.parts):
        report(phase=f"the lab: {name}", step=number, steps=len(settings.parts))
        outcomes.append(steps.attempt(PARTS[name].code, rank, size, settings))
    return outcomes


def buckets(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in which order they get
    ready. When it has seen that, it rebuilds: a bucket is full once it holds its cap, and leaves when its last gradient
    is ready, while backward goes on.

    One row per bucket, for each cap. Raises `PlaygroundError` if the ranks' buckets differ.
    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
    """
    rows = []
    for cap in settings.caps:
        _, passes = record_passes(build_run(settings, cap))
        since = passes.index(passes[-1]) + 1
        for when, sent in (("1", passes[0]), (f"{since} …", passes[-1])):
            rows += [{"bucket_cap_mb": cap, "backward": when, **bucket} for bucket in sent]
    if any(theirs != rows for theirs in all_gather_object(rows)):
        raise PlaygroundError("the ranks' buckets differ, though all must send the same ones in the same order")
    return rows


def record_passes(run: DDPRun) -> tuple[BucketRecorder, list[list[Fields]]]:
    """The buckets of each of `PASSES` backward passes, as they left. The recorder still holds the last."""
    recorder, passes = BucketRecorder(run.ddp), []
    for number in range(PASSES):
        recorder.clear()
        run.backward(number)
        passes.append(recorder.sent)
    return recorder, passes


def hooks(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """A communication hook averages buckets in a way of its own, as fp16 or bf16. What is saved, and the errors of the
    first gradient and of the parameters after some steps, against those without a hook.

    One row per hook, that without a hook first. Raises `PlaygroundError` if replicas differ with one of them.
    """
    rows: list[Fields] = []
    baseline: tuple[torch.Tensor, torch.Tensor] | None = None
    for name, register in HOOKS.items():
        run = build_run(settings)
        register(run.ddp)
        messages, gradients, loss = train_with_hook(run)
        results = gradients, run.parameters()
        baseline = baseline or results
        errors = [relative_error(mine, theirs) for mine, theirs in zip(results, baseline, strict=True)]
        sent = {
            "sends": ", ".join(sorted({dtype for dtype, _ in messages})),
            "messages": len(messages),
            "sent": sum(nbytes for _, nbytes in messages),
        }
        changed = {"gradient_rel": errors[0], "parameters_rel": errors[1], "loss": mean(all_gather_object(loss))}
        rows.append({"hook": name, **sent, **changed})
    return rows


def train_with_hook(run: DDPRun) -> tuple[list[tuple[str, int]], torch.Tensor, float]:
    """Take `STEPS` steps. Returns the messages of the first, its gradients, and this rank's part of the last loss."""
    for _ in range(WARM_UP):
        run.backward(0)
    messages = SentMessages()
    with observing(messages):
        loss = run.step(0)
    gradients = run.gradients()
    for number in range(1, STEPS):
        loss = run.step(number)
    check(find_largest_difference(run.ddp.module)[0], f"with this hook {DIFFER}")
    return messages.sent, gradients, loss


def check(difference: float, text: str, most: float = 0) -> None:
    """Raise `PlaygroundError`, with the text and the difference in it, if that is more than `most`, or not a number."""
    if not difference <= most:
        raise PlaygroundError(text.format(difference))


def register_none(model: DistributedDataParallel) -> None:
    """Do what DDP does without a hook."""
    model.register_comm_hook(None, allreduce_hook)


def register_fp16(model: DistributedDataParallel) -> None:
    """11 bits of precision, and a largest value of 65,504."""
    model.register_comm_hook(None, fp16_compress_hook)


def register_bf16(model: DistributedDataParallel) -> None:
    """8 bits of precision, and the range of float32."""
    model.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(None, bucket))  # torch wants CUDA for its own


class SendEveryTime(GradSync):
    """Without no_sync: DDP averages in every backward, though only the sum of the gradients is needed."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def accumulation(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only the sum is needed;
    under no_sync backward only adds, and the last one sends what has come together. (In float64, without dropout: what
    differs is rounding.)

    One row per way. Raises `PlaygroundError` if gradients differ by more than rounding.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
    """
    model = build_model(settings.training.seed).double().eval()
    run = DDPRun(model, settings.training, settings.caps[-1])
    recorder, _ = record_passes(run)
    small = [run.batch(number) for number in range(ACCUMULATED)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    rows: list[Fields] = []
    whole: torch.Tensor | None = None
    for way, batches, sync in (
        ("one large batch", [(images, labels)], run.sync),
        ("all send", small, SendEveryTime(run.ddp)),
        ("no_sync but for the last", small, run.sync),
    ):
        recorder.clear()
        backward(run.optimizer, [partial(run.loss, batch, ACCUMULATED) for batch in batches], sync)
        gradients = run.gradients()
        whole = gradients if whole is None else whole
        error = relative_error(gradients, whole)
        check(error, f"{way}: gradients differ by {{}}, more than rounding does", ROUNDING)
        counts = {"batches": len(batches), "messages": len(recorder.sent)}
        rows.append({"way": way, **counts, "rel_error": error})
    return rows


def uneven_inputs(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Rank r has 3 + r batches. Without Join the others would wait forever for the rank that is done first; within it
    that rank answers with zeros until all are done, and then takes over the parameters of the last.

    One row per rank. Raises `PlaygroundError` if replicas differ in the end.
    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    batches, steps = BATCHES + rank, 0
    run = build_run(settings)
    recorder = BucketRecorder(run.ddp)
    with Join([run.ddp]):
        for number in range(batches):
            run.step(number)
            steps += 1
    difference, _ = find_largest_difference(run.ddp.module)
    check(difference, f"after Join {DIFFER}")
    counts = {"rank": rank, "batches": batches, "steps": steps, "messages": len(recorder.sent)}
    rows: list[Fields] = all_gather_object({**counts, "difference": difference})
    return rows


def checkpoint(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Rank 0 writes model and optimizer into one file, all ranks read it, and training goes on. A rank hears where the
    file is when it is whole; a rank that looked for it before would find nothing, or that of an earlier run.

    One row per part of the file that is loaded. Raises `PlaygroundError` if the training that was resumed from all of
    it ends elsewhere than one that was never interrupted.
    """
    run = build_run(settings)
    run.train(range(STEPS))
    with temporary_folder("checkpoint") if rank == 0 else contextlib.nullcontext() as folder:
        place = [f"{folder}/checkpoint.pt"]
        if rank == 0:
            torch.save({"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}, place[0])
        dist.broadcast_object_list(place, src=0)  # orders what follows after writing, as a barrier would
        file = Path(place[0])
        state: State = torch.load(file, map_location=device(), weights_only=True)  # which runs no code in it
        read = all_gather_object(file.stat().st_size)  # rank 0 removes the file when all have read it
    run.train(range(STEPS, 2 * STEPS))
    rows: list[Fields] = []
    for names in (("model",), ("model", "optimizer")):
        error = relative_error(resume(settings, state, names), run.parameters())
        rows.append({"loaded": ", ".join(names), "read": read[rank], "rel_error": error})
    check(error, RESUMED)
    return rows


def resume(settings: LabSettings, state: State, names: tuple[str, ...]) -> torch.Tensor:
    """A new run takes what `names` says from the checkpoint, then the same steps as the uninterrupted one. Returns its
    parameters."""
    run = build_run(settings)
    run.backward(0)  # after its first backward DDP rebuilds its buckets, and they decide in which order it adds
    run.ddp.module.load_state_dict(state["model"])
    if "optimizer" in names:
        run.optimizer.load_state_dict(state["optimizer"])
    run.train(range(STEPS, 2 * STEPS))
    return run.parameters()


def sampler(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice, or, with drop_last,
    some to none. Every epoch has the same order, unless set_epoch tells it which one this is. Our partition_dataset
    gives each sample to one rank.

    One row per way.
    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    seed = settings.training.seed
    without_set_epoch, with_set_epoch, dropping = (
        DistributedSampler(samples, seed=seed, drop_last=drop_last) for drop_last in (False, False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": list(without_set_epoch) for epoch in range(2)}
    for epoch in range(2):
        with_set_epoch.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = list(with_set_epoch)
    ways["drop_last"] = list(dropping)
    ways["partition_dataset"] = list(partition_dataset(samples, size, seed)[0].dataset.index)
    rows = []
    for way, mine in ways.items():  # the positions of this rank's samples, in order
        shares = all_gather_object(mine)
        counts = Counter(place for theirs in shares for place in theirs)
        doubled = [place for place in samples if counts[place] > 1]
        left_out = [place for place in samples if not counts[place]]
        by_rank = {f"rank {number}": theirs for number, theirs in enumerate(shares)}
        rows.append({"sampler": way, **by_rank, "doubled": doubled, "left_out": left_out})
    return rows
