"""PowerSGD: send each gradient matrix as the product of two thin ones, and keep what that leaves out for the next step.

Source: Vogels et al., 2019, arXiv 1905.13727, and
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html#powersgd-communication-hook
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.hooks_table import WARM_UP

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def register(model: DistributedDataParallel) -> None:
    """Thin matrices of rank one. The first passes average plainly: errors are kept per bucket, and buckets change."""
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP)
    model.register_comm_hook(state, one_at_a_time(powerSGD_hook))


def one_at_a_time(hook: Hook) -> Hook:
    """`hook`, done with each bucket before the next.

    PowerSGD sends again when its first message has arrived, and waits, in the threads of gloo. With several buckets
    under way all of those can be waiting, which hangs; or they send in an order of their own on every rank, and
    messages meet that do not belong together, which aborts the process.
    """

    def wait_for(future: torch.futures.Future[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        future.wait()
        return future

    return lambda state, bucket: wait_for(hook(state, bucket))
