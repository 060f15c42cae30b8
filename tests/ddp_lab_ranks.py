"""What tests of the DDP lab let ranks do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ddp.ddp_run import DDPRun, build_model, build_run
from playground.lessons.ddp.hooks import hooks, refusal
from playground.lessons.ddp.hooks_table import HOOKS
from playground.lessons.ddp.lab import run_lab
from playground.lessons.ddp.recording import record_messages
from playground.lessons.ddp.results import HookResult, Message, RefusedHook
from playground.lessons.ddp.settings import LabSettings
from playground.runtime.remote import Remote
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import TrainingSettings


def lab(folder: Path, **changes: Any) -> LabSettings:
    """A lab with batches that cannot be shared out evenly."""
    defaults = {"caps": (25.0,), "hooks": ("none",), "steps": 1}
    return LabSettings(training=TrainingSettings(folder=folder, batch_size=7), **{**defaults, **changes})


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What the backend says of types; and what an all-reduce of ones leaves after that."""

    float32: str
    float8: str
    after: list[float]


def refusals(rank: int, size: int) -> Refusals:
    words = [refusal(getattr(torch, name)) for name in ("float32", "float8_e4m3fn")]
    after = torch.ones(3)
    dist.all_reduce(after)
    return Refusals(float32=words[0], float8=words[1], after=after.tolist())


def a_hook_that_is_refused(rank: int, size: int, folder: Path, required: bool) -> list[HookResult | RefusedHook]:
    HOOKS["fp8"] = replace(HOOKS["none"], name="fp8", dtype="float8_e4m3fn")
    return hooks(rank, size, lab(folder, hooks=("none", "fp8"), required=("fp8",) * required))


def register_hook_that_averages_nothing(model: DistributedDataParallel) -> None:
    def keep(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda state, bucket: keep(bucket))


def a_hook_that_averages_nothing(rank: int, size: int, folder: Path) -> None:
    """A new hook takes a function and an entry in the table."""
    code = Remote(__name__, register_hook_that_averages_nothing.__name__)
    HOOKS["own"] = replace(HOOKS["none"], name="own", code=code)
    hooks(rank, size, lab(folder, hooks=("none", "own")))


@dataclass(frozen=True, kw_only=True)
class ExactMean:
    to_one_process: float
    """The largest difference between a run's exact mean and the gradient of one process with the whole batch."""
    to_ddp: float
    """And to what DDP leaves."""
    has_share: bool
    """Whether this rank's part of the batch has as many samples as it should."""
    largest: float
    """Of the elements of the gradient."""


def exact_mean(rank: int, size: int, folder: Path) -> ExactMean:
    training = TrainingSettings(folder=folder, batch_size=7)
    run = DDPRun(build_model("net", training.seed).double().eval(), training, 25)
    mean = run.exact_mean(1)
    images, labels = run.images.__getitems__(range(7, 14))
    alone = build_model("net", training.seed).double().eval()
    F.nll_loss(alone(images.double()), labels).backward()
    whole = flat(param.grad for param in alone.parameters())
    run.backward(1)
    return ExactMean(
        to_one_process=(mean - whole).abs().max().item(),
        to_ddp=(mean - run.gradients()).abs().max().item(),
        has_share=len(run.batch(1)[1]) == share(7, rank, size),
        largest=whole.abs().max().item(),
    )


def masks(rank: int, size: int, folder: Path) -> list[float]:
    """Losses with dropout: of a batch twice, and of another."""
    run = build_run(lab(folder))
    return [run.backward(number) for number in (0, 0, 1)]


def steps(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether a step leaves the gradients of its backward, and whether it changes the parameters."""
    stepped, backed = build_run(lab(folder)), build_run(lab(folder))
    before = stepped.parameters()
    losses = stepped.step(0), backed.backward(0)
    return [
        losses[0] == losses[1],
        torch.equal(stepped.gradients(), backed.gradients()),
        torch.equal(before, backed.parameters()),
        not torch.equal(before, stepped.parameters()),
    ]


def record(rank: int, size: int) -> tuple[list[Message], bool]:
    """What is recorded of two messages, and not of the third; whether all_reduce is then what it was."""
    real = dist.all_reduce
    with record_messages() as recorded:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2, dtype=torch.float16), async_op=True).wait()
    dist.all_reduce(torch.ones(1))
    return recorded, dist.all_reduce is real


def own_steps(rank: int, size: int, settings: LabSettings) -> None:
    """Every rank was asked for another number of steps."""
    run_lab(rank, size, replace(settings, steps=settings.steps + rank))
