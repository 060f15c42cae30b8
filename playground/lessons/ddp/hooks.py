"""Communication hooks: what DistributedDataParallel calls with each bucket of gradients, instead of its all-reduce.

    python -m playground ddp --only hooks --comm-hook fp16,powersgd --steps 20

A hook gets a bucket with this rank's gradients and returns the future of their mean over all ranks. Which hooks there
are, and where the code of each is: `HOOKS` in settings.py.
Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.ddp_run import DDPRun, build_run, measure_difference, record_messages
from playground.lessons.ddp.settings import (
    HOOKS,
    WARM_UP,
    CommHookSpec,
    HookResult,
    LabSettings,
    Message,
    RefusedHook,
    check_replicas,
)
from playground.runtime import UsageError, device
from playground.runtime.meeting.agreement import all_gather_object
from playground.training.replicas import largest_difference


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
    sent: list[Message] = []
    gradient = exact
    for number in range(steps):
        with record_messages() as messages:
            loss = run.step(number)
        if number == 0:
            sent, gradient = messages, run.gradients()
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


Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


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
