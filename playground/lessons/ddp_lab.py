"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab
    python -m playground ddp --only buckets --model resnet18 --bucket-cap-mb 1,5,25
    python -m playground ddp --only hooks --comm-hook fp16,powersgd --steps 20

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks.
Which samples a rank gets, and what happens where one has fewer: ddp_lab_inputs.py, beside this.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html and https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from playground.lab.comm_hooks import POWER_SGD_STARTS, Watch, register, sent_by_hooks
from playground.lab.trainee import Lab, Trainee, errors, fresh, medians
from playground.runtime import Impossible, PlaygroundError
from playground.runtime.agreement import everybodys
from playground.training.replicas import largest_difference

PASSES = 3
"""Backward passes after which buckets stay as they are: with a static graph they are rebuilt after the second."""
ROUNDING = 1e-12
"""How far apart two sums of the same float64 numbers may be, relative to their norm."""


def buckets(rank: int, size: int, lab: Lab) -> dict[str, Any]:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in which order they get
    ready. When it has seen that, it rebuilds: a bucket is full once it holds its cap, and leaves when its last gradient
    is ready, while backward goes on.

    {order: names as gradients got ready, caps: [{bucket_cap_mb, first, rebuilt: the buckets as they left (see
    `Watch.sent`), rebuilt_before: the backward that first had them, seconds: of a step}], memory: see `held`}
    """
    options = {"static_graph": lab.static_graph, "gradient_as_bucket_view": lab.gradient_as_bucket_view}
    order, caps, unwatched = [], [], []
    for cap in lab.caps:
        watch, passes = watched(lab.trainee(cap, **options))
        order, first, last = watch.ready, passes[0], passes[-1]
        since = passes.index(last) + 1
        caps.append({"bucket_cap_mb": cap, "first": first, "rebuilt": last, "rebuilt_before": since})
        unwatched.append(lab.trainee(cap, **options))
    for trainee in unwatched * PASSES:
        trainee.step(0)
    if any(theirs != [order, caps] for theirs in everybodys([order, caps])):
        raise PlaygroundError("the ranks' buckets differ, though all must send the same ones in the same order")
    seconds = medians([partial(trainee.step, 0) for trainee in unwatched], lab.steps)
    timed = [row | {"seconds": each} for row, each in zip(caps, seconds, strict=True)]
    return {"order": order, "caps": timed, "memory": [held(lab, view) for view in (False, True)]}


def watched(trainee: Trainee) -> tuple[Watch, list[list[dict[str, Any]]]]:
    """The buckets of each of `PASSES` backward passes, as they left. The watch has still noted the last."""
    watch, passes = Watch(trainee.ddp), []
    for number in range(PASSES):
        watch.forget()
        trainee.backward(number)
        passes.append(watch.sent)
    return watch, passes


def held(lab: Lab, view: bool) -> dict[str, Any]:
    """What gradients take after a backward: {gradient_as_bucket_view, gradients, outside: of buckets, bytes}."""
    trainee = lab.trainee(gradient_as_bucket_view=view)
    watch, _ = watched(trainee)
    total = sum(param.grad.nbytes for param in trainee.params)
    return {"gradient_as_bucket_view": view, "gradients": total, "outside": watch.outside()}


def hooks(rank: int, size: int, lab: Lab) -> list[dict[str, Any]]:
    """A communication hook averages buckets in a way of its own: as fp16 or bf16, or, as PowerSGD does, each matrix as
    the product of two thin ones (what that leaves out of a gradient it adds to the next). What is saved, the error of
    the first gradient, whose exact mean is added up in float64, and of the parameters after some steps, against those
    without a hook.

    A row a hook: {hook, types, messages, bytes: a step, gradient, parameters: see `errors`, loss} or {hook, refused}.
    """
    rows: list[dict[str, Any]] = []
    plain = torch.empty(0)
    for name in lab.hooks:
        trainee = lab.trainee()
        if words := register(trainee.ddp, name):
            if name in lab.required:
                raise Impossible(f"--comm-hook {name}: refused here ({words}): choose another")
            rows.append({"hook": name, "refused": words})
            continue
        row = trained(trainee, lab.steps)
        if name == "none":
            plain = trainee.parameters()
        rows.append({"hook": name, **row, "parameters": errors(trainee.parameters(), plain)})
    return rows


def trained(trainee: Trainee, steps: int) -> dict[str, Any]:
    """Take `steps` steps; what the first sent and how wrong its gradient was, and the loss of the last."""
    for _ in range(POWER_SGD_STARTS):
        trainee.backward(0)
    exact = trainee.exact_mean(0)
    first: dict[str, Any] = {}
    for number in range(steps):
        with sent_by_hooks() as sent:
            loss = trainee.backward(number)
        first = first or {
            "types": sorted({message["type"] for message in sent}),
            "messages": len(sent),
            "bytes": sum(message["bytes"] for message in sent),
            "gradient": errors(trainee.gradients(), exact),
        }
        trainee.optimizer.step()
    losses = everybodys(loss)
    if difference := largest_difference(trainee.ddp.module):
        raise PlaygroundError(f"with this hook replicas differ by up to {difference}: they must not at all")
    return first | {"loss": sum(losses) / len(losses)}


def accumulation(rank: int, size: int, lab: Lab) -> list[dict[str, Any]]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only the sum is needed;
    under no_sync backward only adds, and the last one sends what has come together. (In float64, without dropout: what
    differs is rounding.)

    A row a way: {way, batches, messages, difference: see `errors`, to the gradient of one batch of all samples}.
    """
    many = lab.settings.accumulate
    trainee = Trainee(fresh(lab.model, lab.settings).double().eval(), lab.settings, lab.caps[-1])
    watch, _ = watched(trainee)
    small = [trainee.batch(number) for number in range(many)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    rows, whole = [], torch.empty(0)
    for way, batches, quiet in (
        ("one large batch", [(images, labels)], 0),
        ("all send", small, 0),
        ("no_sync but for the last", small, many - 1),
    ):
        watch.forget()
        trainee.optimizer.zero_grad()
        for number, batch in enumerate(batches):
            with trainee.ddp.no_sync() if number < quiet else contextlib.nullcontext():
                trainee.loss(trainee.ddp, batch, many).backward()
        whole = whole if len(whole) else trainee.gradients()
        difference = errors(trainee.gradients(), whole)
        if not difference["relative"] <= ROUNDING:
            raise PlaygroundError(f"{way}: gradients differ by {difference['relative']}, more than rounding does")
        rows.append({"way": way, "batches": len(batches), "messages": len(watch.sent), "difference": difference})
    return rows
