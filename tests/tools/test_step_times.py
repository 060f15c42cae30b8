"""`bench steps`: all variants come to one training, its counts are those of the messages, its times
add up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Run, Worlds
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from playground.base.remote import Remote
from playground.lessons.mnist import Net
from playground.tap import Call, observing
from playground.tools.bench.steps import agreement, hidden_text, result_texts
from playground.training.averaging import AllReduceCall
from playground.training.data import Images, partition_dataset
from playground.training.grad_syncs import DDP, GRAD_SYNCS
from playground.training.step_results import PARTS, Variant
from playground.training.step_settings import StepSettings
from playground.training.step_times import (
    WARM_UP,
    StepMessages,
    TimedReplica,
    build_sync,
    count_messages,
    run,
)
from playground.world import PlaygroundError
from playground.world.backends import BACKENDS

NAMES = [*GRAD_SYNCS, DDP]
NET = 87_360
"""Bytes of Net's gradients."""
CONV1 = 1040
"""Those of its first layer, which come last."""
FIRST = 66_240
"""The bytes of its linear layers, which come first."""
VARIANT = Variant(
    forward=1.0, backward=1.0, exposed=1.0, step=1.0, alone=1.0, hidden=0.0, messages=1, bytes=4,
    early_bytes=0, difference_to_ddp=0.0, name="flat", p50=4.0, loss=1.0,
    replicas_max_difference=0.0, speed_to_first=1.0, speed_to_ddp=1.0, caveat="",
)  # fmt: skip


@pytest.fixture
def bench(run_cli: Run, few_digits: None) -> Callable[..., Any]:
    """The document of a small run."""

    def run(*words: Any) -> Any:
        data = ("--dataset", "digits", "--json")
        shown = run_cli("bench", "steps", "--steps", 2, "--batch-size", 16, *data, *words)
        assert (shown.code, shown.err) == (0, "")
        return json.loads(shown.out)

    return run


def by_name(document: Any, field: str) -> dict[str, Any]:
    return {variant["name"]: variant[field] for variant in document["variants"]}


def by_itself(
    rank: int, size: int, folder: Path, steps: int, samples: int, batch_size: int, seed: int
) -> float:
    """The mean loss of the last batch, by a loop of its own: no clock, no variants, no other
    replica."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    train_set, _ = partition_dataset(Images(folder, "train", samples), batch_size, seed)
    batches = iter(train_set)
    for step in range(steps):
        images, labels = next(batches)
        torch.manual_seed(seed + 1 + step * size + rank)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum") / batch_size
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def test_all_variants_are_one_training(bench: Run, world: Worlds, digits_folder: Path) -> None:
    document = bench("-n", 3, "--all-reduce", "tutorial-ring")
    alone = world(3).run(by_itself, digits_folder, WARM_UP + 2, 592, 16, 1234)[0]
    assert by_name(document, "loss") == pytest.approx(dict.fromkeys(NAMES, alone), rel=1e-6)
    assert max(by_name(document, "difference_to_ddp").values()) < 1e-6
    assert by_name(document, "difference_to_ddp")["ddp"] == 0


def forget_the_average(model: torch.nn.Module, all_reduce: AllReduceCall = dist.all_reduce) -> None:
    """Send everything, and leave every gradient as it was."""
    all_reduce(torch.cat([param.grad.flatten() for param in model.parameters()]))


def with_a_forgetful_variant(rank: int, size: int, settings: StepSettings) -> Any:
    forgetful = Remote(forget_the_average.__module__, forget_the_average.__name__)
    few = {name: GRAD_SYNCS[name] for name in ("per-parameter", "flat", "bucketed")}
    few["flat"] = replace(few["flat"], code=forgetful)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(GRAD_SYNCS, few, clear=True):
        patch.setattr(BACKENDS["gloo"], "describe_overlap", lambda: "it hides nothing here")
        return run(rank, size, settings)


def test_a_variant_that_does_not_average_is_found_out(world: Worlds, digits_folder: Path) -> None:
    """And where the backend keeps DistributedDataParallel from hiding messages, a line says so."""
    settings = StepSettings(folder=digits_folder, batch_size=16, steps=1)
    for result in world(2).run(with_a_forgetful_variant, settings):
        variants = result.variants
        assert {variant.name for variant in variants if variant.replicas_max_difference > 1e-6} == {
            "flat"
        }
        assert {variant.name for variant in variants if variant.difference_to_ddp > 1e-6} == {
            "flat"
        }
        with pytest.raises(PlaygroundError, match="the replicas differ"):
            agreement(variants, "backend")
        assert [variant.name for variant in variants if variant.caveat] == [DDP]
        assert "  ddp: it hides nothing here." in result_texts(variants)


@pytest.mark.parametrize(
    ("differences", "all_reduce", "verdict"),
    [
        ((0.0, 0.0), "backend", "bit-identical"),
        ((1e-8, 0.0), "tutorial-ring", "an order of its own"),
        ((1e-8, 0.0), "ring", None),
        ((0.0, 1e-8), "tutorial-ring", None),
        ((math.nan, 0.0), "backend", None),
    ],
)
def test_replicas_must_agree(
    differences: tuple[float, float], all_reduce: str, verdict: str | None
) -> None:
    variants = [replace(VARIANT, replicas_max_difference=difference) for difference in differences]
    if verdict:
        assert verdict in agreement(variants, all_reduce)
    else:
        with pytest.raises(PlaygroundError, match="must not"):
            agreement(variants, all_reduce)


def test_messages_are_counted(bench: Run) -> None:
    """Also where the first epoch, of 3 whole batches, ends with the warm-up. And times add
    up."""
    document = bench("--batch-size", 190, "--steps", 1)
    assert document["dataset"]["train"] == 600
    assert max(by_name(document, "difference_to_ddp").values()) < 1e-6
    assert set(by_name(document, "replicas_max_difference").values()) == {0.0}
    assert by_name(document, "messages") == {
        "per-parameter": 8, "none-safe": 8, "flat": 1, "parameters": 1, "flat-step": 1,
        "shared-step": 0,
        "zero-1": 2, "zero-2": 8, "zero-3": 12, "bucketed": 2, "overlapped": 2, "ddp": 2,
    }  # fmt: skip
    assert by_name(document, "bytes") == dict.fromkeys(NAMES, NET) | {
        "shared-step": 0,
        "zero-3": 3 * NET // 2,
    }
    left = by_name(document, "early_bytes")
    assert [left.pop(name) for name in ("overlapped", "ddp")] == [
        pytest.approx(FIRST, rel=0.02)
    ] * 2
    assert (left.pop("zero-2"), left.pop("zero-3")) == (
        (NET - CONV1) // 2,
        NET + (NET - CONV1) // 2,
    )
    assert set(left.values()) == {0}
    assert document["timed_steps"] == 1
    for variant in document["variants"]:
        assert document["steps"][0]["ranks"][0][variant["name"]].keys() == {*PARTS}
        assert min(variant[name] for name in (*PARTS, "alone")) > 0
        assert 0 <= variant["hidden"] <= 1
        assert variant["speed_to_ddp"] == pytest.approx(
            document["variants"][-1]["p50"] / variant["p50"]
        )


class SentAlone(StepMessages):
    """Those of averaging alone, without the barrier before it."""

    def begun(self, call: Call) -> None:
        if call.name != "barrier":
            super().begun(call)


def averaging_alone(rank: int, size: int) -> dict[str, tuple[list[int], list[int]]]:
    """By variant, the bytes of the messages counted for a step, and of those that averaging without
    a backward sends."""
    found, images = {}, torch.zeros(2, 1, 28, 28)
    for name in NAMES:
        new_sync = partial(build_sync, name, bucket_cap=50_000)
        counted = [nbytes for nbytes, _ in count_messages(new_sync, Net(), (images,))]
        replica = TimedReplica(
            name, Net(), new_sync, dist.all_reduce, partial(torch.optim.SGD, lr=0.01)
        )
        if name == DDP:
            replica.sync.model.register_comm_hook(None, allreduce_hook)
        replica.step((images,), torch.zeros(2, dtype=torch.int64), 2)
        messages = SentAlone()
        with observing(messages):
            replica.average_alone()
        found[name] = counted, [nbytes for nbytes, _ in messages.sent]
    return found


def test_averaging_alone_sends_what_a_step_does(world: Worlds) -> None:
    """But zero-3, whose layers gather their parameters for a backward that computes something."""
    for found in world(2).run(averaging_alone):
        step, alone = found.pop("zero-3")
        assert (len(step), sum(step), len(alone), sum(alone)) == (12, 3 * NET // 2, 8, NET)
        for name, (counted, sent) in found.items():
            assert sent == counted, name
            assert sum(sent) == (0 if name == "shared-step" else NET), name


@pytest.mark.stress
def test_bert(run_cli: Run) -> None:
    shown = run_cli("bench", "steps", "--model", "bert", "--steps", 2, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert (document["dataset"]["name"], document["batch_size"]) == ("zipf", 16)
    assert set(by_name(document, "replicas_max_difference").values()) == {0.0}
    assert max(by_name(document, "difference_to_ddp").values()) < 1e-5
    sent = by_name(document, "bytes")
    assert sent["overlapped"] == sent["ddp"] == 4 * 13_307_907 > 5 * sent["sparse-embeddings"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "1"), "--batch-size 1 for 2 ranks"),
        (("--batch-size", "601", "--dataset", "digits"), "there are 600 samples"),
        (
            ("--model", "resnet18", "--batch-size", "3"),
            "BatchNorm needs two samples or more on each, so at least 4",
        ),
        (
            ("--model", "bert", "--dataset", "digits"),
            "--dataset has no effect with --model bert: it is for --model net or",
        ),
    ],
)
@pytest.mark.usefixtures("few_digits")
def test_bad_input(words: tuple[str, ...], message: str, run_cli: Run) -> None:
    shown = run_cli("bench", "steps", *words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_it_says_how_much_was_hidden_by_what_can_hide() -> None:
    overlapped = replace(VARIANT, name="overlapped", early_bytes=4, hidden=0.226)
    ddp = replace(VARIANT, name="ddp", early_bytes=4)
    said = hidden_text([VARIANT, overlapped, ddp])
    assert said == "of the averaging, backward hid here: overlapped 23%, ddp 0%"
    assert hidden_text([VARIANT]).endswith(": nothing")
