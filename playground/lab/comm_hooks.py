"""Communication hooks: what DistributedDataParallel calls with each bucket of gradients, instead of its all-reduce.

A hook gets a bucket with this rank's gradients and returns the promise of their mean over all ranks.
Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

from playground.runtime import device
from playground.runtime.agreement import everybodys

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
POWER_SGD_STARTS = 2
"""Backward passes in which PowerSGD still averages plainly: it keeps errors by bucket, and buckets change first."""


def one_at_a_time(hook: Hook) -> Hook:
    """`hook`, done with each bucket before the next.

    PowerSGD sends again when its first message has arrived, and waits, in the threads of gloo. With several buckets
    under way all of those can be waiting, which hangs; or they send in an order of their own on every rank, and
    messages meet that do not belong together, which aborts the process.
    """

    def done(promise: Any) -> Any:
        promise.wait()
        return promise

    return lambda state, bucket: done(hook(state, bucket))


def power_sgd() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=POWER_SGD_STARTS)


HOOKS: dict[str, tuple[Callable[[], Any], Hook, torch.dtype]] = {
    "none": (lambda: None, allreduce_hook, torch.float32),
    "fp16": (lambda: None, fp16_compress_hook, torch.float16),
    "bf16": (lambda: None, bf16_compress_hook, torch.bfloat16),
    "powersgd": (power_sgd, one_at_a_time(powerSGD_hook), torch.float32),
}
"""What `--comm-hook` offers: what makes a hook's state, the hook, and the type of what it sends. "none" does what
DistributedDataParallel does without a hook."""


def register(model: DistributedDataParallel, name: str) -> str:
    """Let `model` average by that hook. Empty, or the words in which torch or the backend refuses it.

    All ranks must call this, and get the same answer.
    """
    new_state, hook, dtype = HOOKS[name]
    words = refusal(dtype)
    try:
        model.register_comm_hook(new_state(), hook)
    except TypeError as error:  # what torch says of bf16 where it was built without CUDA
        words = words or str(error).splitlines()[0]
    return next(filter(None, everybodys(words)), "")


def refusal(dtype: torch.dtype) -> str:
    """The backend's words if it cannot add up numbers of this type; empty if it can. All ranks must call this."""
    try:
        dist.all_reduce(torch.ones(1, device=device()).to(dtype))
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""


@contextlib.contextmanager
def sent_by_hooks() -> Iterator[list[dict[str, Any]]]:
    """What hooks send in this block, {type, bytes} each: what they hand to `dist.all_reduce`, as all of torch's do.

    They call it in threads of gloo's too, which is why it is the function that is exchanged.
    """
    sent: list[dict[str, Any]] = []
    real = dist.all_reduce

    def noting(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        sent.append({"type": str(tensor.dtype).removeprefix("torch."), "bytes": tensor.nbytes})
        return real(tensor, *args, **how)

    dist.all_reduce = noting
    try:
        yield sent
    finally:
        dist.all_reduce = real


class Watch:
    """Notes what a DistributedDataParallel does in backward: which gradients get ready, and which buckets it sends."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {param: name for name, param in model.module.named_parameters()}
        self.ready: list[str] = []
        """Names of parameters, as their gradients got ready."""
        self.sent: list[dict[str, Any]] = []
        """The buckets, as they left: {bucket: number, bytes, ready: gradients that were, parameters: names}."""
        self.storages: set[int] = set()
        """Where the memory of these buckets is."""
        for param in self.names:
            param.register_post_accumulate_grad_hook(lambda param: self.ready.append(self.names[param]))
        model.register_comm_hook(None, lambda state, bucket: self.note(bucket))

    def note(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        names = [self.names[param] for param in bucket.parameters()]
        self.sent.append(
            {"bucket": bucket.index(), "bytes": buffer.nbytes, "ready": len(self.ready), "parameters": names}
        )
        self.storages.add(buffer.untyped_storage().data_ptr())
        return allreduce_hook(None, bucket)

    def forget(self) -> None:
        """Begin anew."""
        self.ready, self.sent, self.storages = [], [], set()

    def outside(self) -> int:
        """Bytes of gradients that are held beside the buckets, not in them."""
        grads = [param.grad for param in self.names if param.grad is not None]
        return sum(grad.nbytes for grad in grads if grad.untyped_storage().data_ptr() not in self.storages)
