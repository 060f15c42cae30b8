"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab
    python -m playground ddp --lab hooks --comm-hook fp16,powersgd
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
from collections.abc import Callable
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
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.page import HOOKS, PARTS, STEPS, WARM_UP, CommHookSpec, LabSettings
from playground.measurement import Fields
from playground.runtime import PlaygroundError, UsageError, device, report
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
RESUMED = (
    "resumed from the checkpoint, parameters differ by up to {:.2g} from those of an uninterrupted run: they must not "
    "at all"
)
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
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

    def loss(self, model: nn.Module, batch: Batch, batches: int = 1) -> torch.Tensor:
        """This rank's part of the mean loss over `batches` batches, of which `batch` is one, or all."""
        images, labels = batch
        samples_per_rank = batches * self.training.batch_size / dist.get_world_size()
        return mean_loss_part(model(images), labels, samples_per_rank)

    def numbered_loss(self, model: nn.Module, number: int) -> torch.Tensor:
        """This rank's part of the mean loss over that batch, with the dropout masks drawn for it."""
        torch.manual_seed(self.training.seed + 1 + dist.get_rank() + dist.get_world_size() * number)
        return self.loss(model, self.batch(number))

    def backward(self, number: int) -> float:
        """Leave in every `param.grad` its mean over all ranks for one batch. This rank's part of the loss."""
        report(batch=number)
        return float(backward(self.optimizer, [partial(self.numbered_loss, self.ddp, number)], self.sync))

    def step(self, number: int) -> float:
        """The same, and the optimizer's step. The gradients stay."""
        report(batch=number)
        return float(training_step(self.optimizer, [partial(self.numbered_loss, self.ddp, number)], self.sync))

    def exact_mean(self, number: int) -> torch.Tensor:
        """The mean over all ranks of their own gradients, flat, added up in float64."""
        grads = torch.autograd.grad(self.numbered_loss(self.ddp.module, number), self.params)
        mean = flat(grads).double()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

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
    model = build_model(settings.training.seed)
    return DDPRun(model, settings.training, bucket_cap_mb or settings.caps[-1])


def measure_errors(values: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The largest difference of an element of two flat vectors, and the norm of all, relative to the reference's."""
    difference = values - reference
    return difference.abs().max().item(), (difference.norm() / reference.norm()).item()


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
    check_buckets(all_gather_object(rows))
    return rows


def check_buckets(recorded: list[list[Fields]]) -> None:
    """Raise `PlaygroundError` unless every rank, in rank order, recorded the same buckets."""
    if any(theirs != recorded[0] for theirs in recorded):
        raise PlaygroundError("the ranks' buckets differ, though all must send the same ones in the same order")


def record_passes(run: DDPRun) -> tuple[BucketRecorder, list[list[Fields]]]:
    """The buckets of each of `PASSES` backward passes, as they left. The recorder still holds the last."""
    recorder, passes = BucketRecorder(run.ddp), []
    for number in range(PASSES):
        recorder.clear()
        run.backward(number)
        passes.append(recorder.sent)
    return recorder, passes


def hooks(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """A communication hook averages buckets in a way of its own: as fp16 or bf16, or, as PowerSGD does, each matrix as
    the product of two thin ones (what that leaves out of a gradient it adds to the next). What is saved, the error of
    the first gradient, whose exact mean is added up in float64, and of the parameters after some steps, against those
    without a hook.

    One row per hook, the baseline first. Raises `UsageError` if a required one is refused.
    """
    rows: list[Fields] = []
    baseline: torch.Tensor | None = None
    for name in settings.hooks:
        run = build_run(settings)
        if words := register(run.ddp, HOOKS[name]):
            if name in settings.required:
                raise UsageError(f"--comm-hook {name}: refused here ({words}): choose another")
            rows.append({"hook": name, "sends": f"refused here: {words}"})
            continue
        row = train_with(run, baseline)
        baseline = run.parameters() if baseline is None else baseline
        rows.append({"hook": name, **row})
    return rows


def train_with(run: DDPRun, baseline: torch.Tensor | None) -> Fields:
    """Take `STEPS` steps. `baseline` are the parameters after as many steps without a hook; None if these are they."""
    for _ in range(WARM_UP):
        run.backward(0)
    exact = run.exact_mean(0)
    messages = SentMessages()
    with observing(messages):
        loss = run.step(0)
    gradient = measure_errors(run.gradients(), exact)
    for number in range(1, STEPS):
        loss = run.step(number)
    check(find_largest_difference(run.ddp.module)[0], f"with this hook {DIFFER}")
    parameters = run.parameters()
    changed = measure_errors(parameters, parameters if baseline is None else baseline)
    return {
        "sends": ", ".join(sorted({dtype for dtype, _ in messages.sent})),
        "messages": len(messages.sent),
        "sent": sum(nbytes for _, nbytes in messages.sent),
        **dict(zip(("gradient_max", "gradient_rel"), gradient, strict=True)),
        **dict(zip(("parameters_max", "parameters_rel"), changed, strict=True)),
        "loss": mean(all_gather_object(loss)),
    }


def check(difference: float, text: str, most: float = 0) -> None:
    """Raise `PlaygroundError`, with the text and the difference in it, if that is more than `most`, or not a number."""
    if not difference <= most:
        raise PlaygroundError(text.format(difference))


def register(model: DistributedDataParallel, hook: CommHookSpec) -> str:
    """Let `model` average by that hook. Empty, or the words in which torch refuses it, or the backend to add up numbers
    of its type. All ranks must call this, and get the same answer."""
    words = ""
    try:
        dist.all_reduce(torch.ones(1, device=device()).to(getattr(torch, hook.dtype)))
    except (RuntimeError, TypeError) as error:
        words = str(error).splitlines()[0]
    try:
        hook.code(model)
    except TypeError as error:  # what torch says of bf16 where it was built without CUDA
        words = words or str(error).splitlines()[0]
    return next(filter(None, all_gather_object(words)), "")


def register_none(model: DistributedDataParallel) -> None:
    """Do what DDP does without a hook."""
    model.register_comm_hook(None, allreduce_hook)


def register_fp16(model: DistributedDataParallel) -> None:
    """11 bits of precision, and a largest value of 65,504."""
    model.register_comm_hook(None, fp16_compress_hook)


def register_bf16(model: DistributedDataParallel) -> None:
    """8 bits of precision, and the range of float32. Raises `TypeError` where torch was built without it."""
    model.register_comm_hook(None, bf16_compress_hook)


def register_power_sgd(model: DistributedDataParallel) -> None:
    """PowerSGD with matrices of rank one; what that leaves out is kept for the next step. The first passes average
    plainly: errors are kept per bucket, and buckets change.

    Source: Vogels et al., 2019, arXiv 1905.13727
    """
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP)
    model.register_comm_hook(state, one_at_a_time(powerSGD_hook))


def one_at_a_time(hook: Hook) -> Hook:
    """`hook`, done with each bucket before the next. PowerSGD sends again when its first message has arrived, and
    waits, in the threads of gloo. With several buckets under way all of those can be waiting, which hangs; or they send
    in an order of their own on every rank, and messages meet that do not belong together, which aborts the process."""

    def wait_for(future: torch.futures.Future[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        future.wait()
        return future

    return lambda state, bucket: wait_for(hook(state, bucket))


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
    many = settings.training.accumulate
    model = build_model(settings.training.seed).double().eval()
    run = DDPRun(model, settings.training, settings.caps[-1])
    recorder, _ = record_passes(run)
    small = [run.batch(number) for number in range(many)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    rows: list[Fields] = []
    whole: torch.Tensor | None = None
    for way, batches, sync in (
        ("one large batch", [(images, labels)], run.sync),
        ("all send", small, SendEveryTime(run.ddp)),
        ("no_sync but for the last", small, run.sync),
    ):
        recorder.clear()
        backward(run.optimizer, [partial(run.loss, run.ddp, batch, many) for batch in batches], sync)
        gradients = run.gradients()
        whole = gradients if whole is None else whole
        largest, relative = measure_errors(gradients, whole)
        check(relative, f"{way}: gradients differ by {{}}, more than rounding does", ROUNDING)
        counts = {"batches": len(batches), "messages": len(recorder.sent)}
        rows.append({"way": way, **counts, "max_error": largest, "rel_error": relative})
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
    row = {**counts, "difference": difference, **terminate_early(build_run(settings), batches)}
    rows: list[Fields] = all_gather_object(row)
    return rows


def terminate_early(run: DDPRun, batches: int) -> Fields:
    """Take as many steps as there are until the first rank is done. What Join, told to raise, then says on this one."""
    steps, says = 0, "none: no rank had to wait"
    try:
        with Join([run.ddp], throw_on_early_termination=True):
            for number in range(batches):
                run.step(number)
                steps += 1
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    return {"early_end": steps, "error": says}


def checkpoint(rank: int, size: int, settings: LabSettings) -> list[Fields]:
    """Rank 0 writes model and optimizer into one file, all ranks read it, and training goes on. A rank hears where the
    file is when it is whole; a rank that looked for it before would find nothing, or that of an earlier run.

    One row per part of the file that is loaded. Raises `PlaygroundError` if the training that was resumed from all of
    it ends elsewhere than one that was never interrupted.
    """
    run = build_run(settings)
    train(run, range(STEPS))
    with contextlib.ExitStack() as stack:
        file = save_on_rank_0(run, rank, stack)
        state: State = torch.load(file, map_location=device(), weights_only=True)  # which runs no code in it
        read = all_gather_object(file.stat().st_size)  # rank 0 removes the file when all have read it
    train(run, range(STEPS, 2 * STEPS))
    rows: list[Fields] = []
    for names in (("model",), ("model", "optimizer")):
        errors = measure_errors(resume(settings, state, names), run.parameters())
        rows.append({"loaded": ", ".join(names), "read": read[rank], "max_error": errors[0], "rel_error": errors[1]})
    check(errors[0], RESUMED)
    return rows


def train(run: DDPRun, steps: range) -> None:
    for number in steps:
        run.step(number)


def save_on_rank_0(run: DDPRun, rank: int, stack: contextlib.ExitStack) -> Path:
    """The file that rank 0 has written, on every rank; `stack` removes it. Raises `UsageError` on all ranks if one of
    them, on another host, does not see it."""
    message: list[str | None] = [None]
    if rank == 0:
        folder = stack.enter_context(temporary_folder("checkpoint"))
        state: State = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save(state, folder / "checkpoint.unfinished")  # under its name it is whole or not there
        message = [str((folder / "checkpoint.unfinished").replace(folder / "checkpoint.pt"))]
    dist.broadcast_object_list(message, src=0)  # orders what follows after writing, as a barrier would
    file = Path(str(message[0]))
    if not all(all_gather_object(file.exists())):
        raise UsageError(f"checkpoint: not all ranks see {file}: set TMPDIR to a folder that all hosts share")
    return file


def resume(settings: LabSettings, state: State, names: tuple[str, ...]) -> torch.Tensor:
    """A new run takes what `names` says from the checkpoint, then the same steps as the uninterrupted one. Returns its
    parameters."""
    run = build_run(settings)
    run.backward(0)  # after its first backward DDP rebuilds its buckets, and they decide in which order it adds
    run.ddp.module.load_state_dict(state["model"])
    if "optimizer" in names:
        run.optimizer.load_state_dict(state["optimizer"])
    train(run, range(STEPS, 2 * STEPS))
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
