"""What tests of the DDP lab let ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.cli.ddp import start
from playground.lab.comm_hooks import HOOKS, refusal, sent_by_hooks
from playground.lab.trainee import Lab, Trainee, fresh
from playground.lessons import ddp_lab
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import Settings


def lab(folder: Path, **changes: Any) -> Lab:
    usual = {
        "model": "net", "caps": [25.0], "static_graph": False, "gradient_as_bucket_view": False, "hooks": ["none"],
        "required": [], "steps": 1,
    }  # fmt: skip
    return Lab(settings=Settings(folder=folder, batch_size=7), **{**usual, **changes})


def refusals(rank: int, size: int) -> dict[str, Any]:
    """What the backend says of types; and whether the group still works after that."""
    words = {name: refusal(getattr(torch, name)) for name in ("float32", "float8_e4m3fn")}
    after = torch.ones(3)
    dist.all_reduce(after)
    return {**words, "after": after.tolist()}


def a_hook_that_is_refused(rank: int, size: int, folder: Path, required: bool) -> list[dict[str, Any]]:
    HOOKS["fp8"] = (lambda: None, HOOKS["none"][1], torch.float8_e4m3fn)
    return ddp_lab.hooks(rank, size, lab(folder, hooks=["none", "fp8"], required=["fp8"] * required))


def exact_mean(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A trainee's exact mean beside the gradient of one process with the whole batch, and what it steps by."""
    settings = Settings(folder=folder, batch_size=7)
    trainee = Trainee(fresh("net", settings).double().eval(), settings, 25)
    mean = trainee.exact_mean(1)
    images, labels = trainee.images.__getitems__(range(7, 14))
    alone = fresh("net", settings).double().eval()
    F.nll_loss(alone(images.double()), labels).backward()
    whole = flat(param.grad for param in alone.parameters())
    trainee.backward(1)
    return {
        "to one process": (mean - whole).abs().max().item(),
        "to DDP": (mean - trainee.gradients()).abs().max().item(),
        "share": len(trainee.batch(1)[1]) == share(7, rank, size),
        "learns": whole.abs().max().item(),
    }


def masks(rank: int, size: int, folder: Path) -> list[float]:
    """Losses with dropout: of a batch twice, and of another."""
    trainee = lab(folder).trainee()
    return [trainee.backward(number) for number in (0, 0, 1)]


def sent(rank: int, size: int) -> dict[str, Any]:
    """What is noted of two messages, and that the third is not."""
    real = dist.all_reduce
    with sent_by_hooks() as noted:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2, dtype=torch.float16), async_op=True).wait()
    dist.all_reduce(torch.ones(1))
    return {"noted": noted, "restored": dist.all_reduce is real}


def own_steps(rank: int, size: int, parts: list[str], settings: dict[str, Any], lab: dict[str, Any]) -> None:
    """Every rank was asked for another number of steps."""
    start(rank, size, parts, settings, {**lab, "steps": lab["steps"] + rank})
