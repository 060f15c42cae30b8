"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab
    python -m playground ddp --only hooks --comm-hook fp16,powersgd --steps 20
    python -m playground ddp --only checkpoint -n 3

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks. The parts,
and the hooks that one of them compares, are listed in settings.py.
Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, save and load checkpoints
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.ddp_run import (
    BucketRecorder,
    DDPRun,
    build_model,
    build_run,
    measure_difference,
    record_messages,
)
from playground.lessons.ddp.settings import (
    HOOKS,
    PARTS,
    WARM_UP,
    AccumulationResult,
    BucketsResult,
    CapBuckets,
    CheckpointResult,
    CommHookSpec,
    EarlyTermination,
    GradientMemory,
    HookResult,
    LabSettings,
    RefusedHook,
    ResumedRun,
    SamplerResult,
    SentBucket,
    UnevenResult,
    check_buckets,
    check_replicas,
)
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import UsageError, device, report
from playground.runtime.meeting.agreement import all_gather_object, require_same_on_all_ranks
from playground.runtime.rank import steps
from playground.runtime.temporary_folder import temporary_folder
from playground.training.data import partition_dataset
from playground.training.replicas import largest_difference
from playground.training.step import backward
from playground.training.sync import GradSync

PASSES = 3
"""Backward passes after which buckets stay as they are: with a static graph they are rebuilt after the second."""
BATCHES = 3
"""Batches of rank 0 in uneven_inputs; every further rank has one more."""
SAMPLES = 10
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
State = dict[str, Any]
"""state_dict() of the model and of the optimizer, under these names."""


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


def buckets(rank: int, size: int, settings: LabSettings) -> BucketsResult:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in which order they get
    ready. When it has seen that, it rebuilds: a bucket is full once it holds its cap, and leaves when its last gradient
    is ready, while backward goes on.

    Raises `PlaygroundError` if the ranks' buckets differ.
    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
    """
    options = {"static_graph": settings.static_graph, "gradient_as_bucket_view": settings.gradient_as_bucket_view}
    order, passes_per_cap = [], []
    for cap in settings.bucket_caps:
        recorder, passes = record_passes(build_run(settings, cap, **options))
        order = recorder.ready
        passes_per_cap.append(passes)
    check_buckets(all_gather_object((order, passes_per_cap)))
    seconds = time_steps([build_run(settings, cap, **options) for cap in settings.bucket_caps], settings)
    caps = []
    for cap, passes, each in zip(settings.bucket_caps, passes_per_cap, seconds, strict=True):
        first, last, before = passes[0], passes[-1], passes.index(passes[-1]) + 1
        caps.append(CapBuckets(bucket_cap_mb=cap, first=first, rebuilt=last, rebuilt_before=before, seconds=each))
    memory = [measure_memory(settings, as_view) for as_view in (False, True)]
    return BucketsResult(order=order, caps=caps, memory=memory)


def record_passes(run: DDPRun) -> tuple[BucketRecorder, list[list[SentBucket]]]:
    """The buckets of each of `PASSES` backward passes, as they left. The recorder still holds the last."""
    recorder, passes = BucketRecorder(run.ddp), []
    for number in range(PASSES):
        recorder.clear()
        run.backward(number)
        passes.append(recorder.sent)
    return recorder, passes


def time_steps(runs: list[DDPRun], settings: LabSettings) -> list[float]:
    """Seconds of each run's step on its slowest rank, the median. Nothing is recorded in them, which would be timed."""
    for run in runs * PASSES:
        run.step(0)
    calls = [timed(partial(run.step, 0)) for run in runs]
    seconds = interleave(calls, range(settings.steps), Random(settings.training.seed))
    return [median(slowest(each)) for each in seconds]


def measure_memory(settings: LabSettings, as_view: bool) -> GradientMemory:
    """The memory of gradients after a backward, with DDP's option gradient_as_bucket_view or without."""
    run = build_run(settings, gradient_as_bucket_view=as_view)
    recorder, _ = record_passes(run)
    total = sum(param.grad.nbytes for param in run.params)
    return GradientMemory(gradient_as_bucket_view=as_view, gradients=total, outside=recorder.bytes_outside_buckets())


def hooks(rank: int, size: int, settings: LabSettings) -> list[HookResult | RefusedHook]:
    """A communication hook averages buckets in a way of its own: as fp16 or bf16, or, as PowerSGD does, each matrix as
    the product of two thin ones (what that leaves out of a gradient it adds to the next). What is saved, the error of
    the first gradient, whose exact mean is added up in float64, and of the parameters after some steps, against those
    without a hook.

    One result per hook, the baseline first. Raises `UsageError` if a required one is refused.
    """
    results: list[HookResult | RefusedHook] = []
    baseline: torch.Tensor | None = None
    for name in settings.hooks:
        run = build_run(settings)
        if words := register(run.ddp, HOOKS[name]):
            if name in settings.required:
                raise UsageError(f"--comm-hook {name}: refused here ({words}): choose another")
            results.append(RefusedHook(hook=name, refused=words))
            continue
        result, parameters = train_with(name, run, settings.steps, baseline)
        baseline = parameters if baseline is None else baseline
        results.append(result)
    return results


def train_with(name: str, run: DDPRun, steps: int, baseline: torch.Tensor | None) -> tuple[HookResult, torch.Tensor]:
    """Take `steps` steps with the hook of that name. What came of them, and the parameters. `baseline` are the
    parameters after as many steps without a hook; None where these are they."""
    for _ in range(WARM_UP):
        run.backward(0)
    exact = run.exact_mean(0)
    with record_messages() as sent:
        loss = run.step(0)
    gradient = run.gradients()
    for number in range(1, steps):
        loss = run.step(number)
    losses = all_gather_object(loss)
    check_replicas(largest_difference(run.ddp.module), "with this hook")
    parameters = run.parameters()
    result = HookResult(
        hook=name,
        types=sorted({message.type for message in sent}),
        messages=len(sent),
        bytes=sum(message.bytes for message in sent),
        gradient=measure_difference(gradient, exact),
        loss=sum(losses) / len(losses),
        parameters=measure_difference(parameters, parameters if baseline is None else baseline),
    )
    return result, parameters


def register(model: DistributedDataParallel, hook: CommHookSpec) -> str:
    """Let `model` average by that hook. Empty, or the words in which torch or the backend refuses it. All ranks must
    call this, and get the same answer."""
    words = refusal(getattr(torch, hook.dtype))
    try:
        hook.code(model)
    except TypeError as error:  # what torch says of bf16 where it was built without CUDA
        words = words or str(error).splitlines()[0]
    return next(filter(None, all_gather_object(words)), "")


def refusal(dtype: torch.dtype) -> str:
    """The backend's words if it cannot add up numbers of this type; empty if it can. All ranks must call this."""
    try:
        dist.all_reduce(torch.ones(1, device=device()).to(dtype))
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""


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


def accumulation(rank: int, size: int, settings: LabSettings) -> list[AccumulationResult]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only the sum is needed;
    under no_sync backward only adds, and the last one sends what has come together. (In float64, without dropout: what
    differs is rounding.)

    One result per way. Raises `PlaygroundError` if gradients differ by more than rounding.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
    """
    many = settings.training.accumulate
    model = build_model(settings.model, settings.training.seed).double().eval()
    run = DDPRun(model, settings.training, settings.bucket_caps[-1])
    recorder, _ = record_passes(run)
    small = [run.batch(number) for number in range(many)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    results: list[AccumulationResult] = []
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
        difference, messages = measure_difference(gradients, whole), len(recorder.sent)
        result = AccumulationResult(way=way, batches=len(batches), messages=messages, difference=difference)
        result.check()
        results.append(result)
    return results


def uneven_inputs(rank: int, size: int, settings: LabSettings) -> UnevenResult:
    """Rank r has 3 + r batches. Without Join the others would wait forever for the rank that is done first; within it
    that rank answers with zeros until all are done, and then takes over the parameters of the last.

    Raises `PlaygroundError` if replicas differ in the end.
    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    batches, steps = BATCHES + rank, 0
    run = build_run(settings)
    recorder = BucketRecorder(run.ddp)
    with Join([run.ddp]):
        for number in range(batches):
            run.step(number)
            steps += 1
    difference = largest_difference(run.ddp.module)
    check_replicas(difference, "after Join")
    counts = {"batches": batches, "steps": steps, "messages": len(recorder.sent)}
    early = terminate_early(build_run(settings), batches)
    return UnevenResult(**counts, difference=difference, without_joining=early)


def terminate_early(run: DDPRun, batches: int) -> EarlyTermination:
    """Take as many steps as there are until the first rank is done. What Join, told to raise, then says on this one."""
    steps, says = 0, None
    try:
        with Join([run.ddp], throw_on_early_termination=True):
            for number in range(batches):
                run.step(number)
                steps += 1
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    all_gather_object(says)  # a failure of another kind would show here, at the ranks that are gone
    return EarlyTermination(steps=steps, says=says)


def checkpoint(rank: int, size: int, settings: LabSettings) -> CheckpointResult:
    """Rank 0 writes model and optimizer into one file, all ranks read it, and training goes on. A rank hears where the
    file is when it is whole; a rank that looked for it before would find nothing, or that of an earlier run.

    Raises `PlaygroundError` if the training that was resumed ends elsewhere than one that was never interrupted.
    """
    run = build_run(settings)
    train(run, range(settings.steps))
    with contextlib.ExitStack() as stack:
        file = save_on_rank_0(run, rank, stack)
        state: State = torch.load(file, map_location=device(), weights_only=True)  # which runs no code in it
        read = file.stat().st_size
        all_gather_object(read)  # rank 0 removes the file when all have read it
    train(run, range(settings.steps, 2 * settings.steps))
    resumed = [resume(settings, state, names, run.parameters()) for names in (("model",), ("model", "optimizer"))]
    written, place = read if rank == 0 else 0, str(device())
    result = CheckpointResult(steps=settings.steps, written=written, read=read, device=place, resumed=resumed)
    result.check()
    return result


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


def resume(settings: LabSettings, state: State, names: tuple[str, ...], expected: torch.Tensor) -> ResumedRun:
    """A new run takes what `names` says from the checkpoint, then the same steps as the uninterrupted one. `expected`:
    the parameters of that one in the end."""
    run = build_run(settings)
    run.backward(0)  # after its first backward DDP rebuilds its buckets, and they decide in which order it adds
    run.ddp.module.load_state_dict(state["model"])
    if "optimizer" in names:
        run.optimizer.load_state_dict(state["optimizer"])
    train(run, range(settings.steps, 2 * settings.steps))
    return ResumedRun(loaded=", ".join(names), difference=measure_difference(run.parameters(), expected))


def sampler(rank: int, size: int, settings: LabSettings) -> list[SamplerResult]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice, or, with drop_last,
    some to none. Every epoch has the same order, unless set_epoch tells it which one this is. Our partition_dataset
    gives each sample to one rank.

    One result per way.
    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    results = []
    for way, mine in share_out(samples, size, settings.training.seed).items():
        counts = Counter(place for theirs in all_gather_object(mine) for place in theirs)
        doubled = [place for place in samples if counts[place] > 1]
        left_out = [place for place in samples if not counts[place]]
        results.append(SamplerResult(way=way, mine=mine, doubled=doubled, left_out=left_out))
    return results


def share_out(samples: range, size: int, seed: int) -> dict[str, list[int]]:
    """The positions of this rank's samples, in order, for each way."""
    without_set_epoch, with_set_epoch, dropping = (
        DistributedSampler(samples, seed=seed, drop_last=drop_last) for drop_last in (False, False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": list(without_set_epoch) for epoch in range(2)}
    for epoch in range(2):
        with_set_epoch.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = list(with_set_epoch)
    ways["drop_last"] = list(dropping)
    train_set, _ = partition_dataset(samples, size, seed)
    ways["partition_dataset"] = list(train_set.dataset.index)
    return ways
