"""Hooks that send a bucket as it is, or cast to half its bytes and back.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html#default-communication-hooks
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel


def register_none(model: DistributedDataParallel) -> None:
    """Do what DDP does without a hook."""
    model.register_comm_hook(None, allreduce_hook)


def register_fp16(model: DistributedDataParallel) -> None:
    """11 bits of precision, and a largest value of 65,504."""
    model.register_comm_hook(None, fp16_compress_hook)


def register_bf16(model: DistributedDataParallel) -> None:
    """8 bits of precision, and the range of float32. Raises `TypeError` where torch was built without it."""
    model.register_comm_hook(None, bf16_compress_hook)
