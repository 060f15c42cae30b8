"""What DistributedDataParallel and its hooks send, recorded while they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.results import Message, SentBucket


@contextlib.contextmanager
def record_messages() -> Iterator[list[Message]]:
    """What hooks send in this block: what they hand to `dist.all_reduce`, as all of torch's do.

    They call it in threads of gloo's too, which is why it is the function that is exchanged.
    """
    sent: list[Message] = []
    real = dist.all_reduce

    def record(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        sent.append(Message(type=str(tensor.dtype).removeprefix("torch."), bytes=tensor.nbytes))
        return real(tensor, *args, **how)

    dist.all_reduce = record
    try:
        yield sent
    finally:
        dist.all_reduce = real


class BucketRecorder:
    """Records which gradients get ready in backward, and which buckets a DistributedDataParallel sends."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names = {param: name for name, param in model.module.named_parameters()}
        self.ready: list[str] = []
        """Names of parameters, as their gradients got ready."""
        self.sent: list[SentBucket] = []
        """The buckets, as they left."""
        self.storages: set[int] = set()
        """Where the memory of these buckets is."""
        for param in self.names:
            param.register_post_accumulate_grad_hook(lambda param: self.ready.append(self.names[param]))
        model.register_comm_hook(None, lambda state, bucket: self.record(bucket))

    def record(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A communication hook that also sends the bucket, as DDP would."""
        buffer = bucket.buffer()
        names = [self.names[param] for param in bucket.parameters()]
        self.sent.append(
            SentBucket(bucket=bucket.index(), bytes=buffer.nbytes, ready=len(self.ready), parameters=names)
        )
        self.storages.add(buffer.untyped_storage().data_ptr())
        return allreduce_hook(None, bucket)

    def clear(self) -> None:
        """Begin anew."""
        self.ready, self.sent, self.storages = [], [], set()

    def bytes_outside_buckets(self) -> int:
        """Bytes of gradients that are held beside the buckets, not in them."""
        grads = [param.grad for param in self.names if param.grad is not None]
        return sum(grad.nbytes for grad in grads if grad.untyped_storage().data_ptr() not in self.storages)
