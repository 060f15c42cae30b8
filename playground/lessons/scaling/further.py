"""Scaling by the clock: steps on one, two and more ranks, over links; the noise scale while a model
trains; and the share of a core's peak that a step reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from playground.algorithms.cost_model import times_sent
from playground.algorithms.link import Link
from playground.lessons.scaling.lesson import (
    BATCHES,
    RATE,
    SAMPLES,
    network,
    new_model,
    noise_scale,
    train,
)
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime.host import cores
from playground.training.averaging import flat

LINKS = {"no link": float("inf"), "1 Gbit/s": 1.0, "0.1 Gbit/s": 0.1}
"""Simulated links, one for each rank: their speeds in 10^9 bits per second."""
WIDTHS = (256, 256, 256, 256)
BATCH = 480
"""Samples, which up to six ranks share evenly."""


def over_links(rank: int, size: int, rounds: int = 8) -> dict[str, object]:
    """Time a training step on 1, 2, 4, … ranks, without a link and over two: the speedups, beside
    those of a formula.

    In strong scaling the ranks share a batch, in weak scaling each has its own. By the formula a
    step takes as long as one rank computes its samples alone, and the link carries its gradients.
    That assumes a core for each rank.
    """
    seconds = time_steps(rounds)
    found: dict[str, object] = {"cores": cores()}
    for scaling in ("strong", "weak"):
        rows = {}
        for ranks, link in product(worlds(size)[1:], LINKS):
            work = seconds["alone", 1, "no link"] * (1 if scaling == "strong" else ranks)
            computing = seconds["alone", ranks if scaling == "strong" else 1, "no link"]
            speedup = work / seconds[scaling, ranks, link]
            by_formula = work / (computing + seconds_on_link(ranks, link))
            rows[f"{ranks} ranks, {link}"] = {
                "speedup": round(speedup, 2),
                "by_formula": round(by_formula, 2),
                "off": round(abs(speedup / by_formula - 1), 2),
            }
        found[scaling] = rows
    return found


def worlds(size: int) -> list[int]:
    """1, 2, 4, … ranks, and at last all."""
    return [2**power for power in range(size.bit_length()) if 2**power < size] + [size]


def seconds_on_link(ranks: int, link: str) -> float:
    """How long a rank's link carries what the rank sends to average the gradients."""
    gradients = sum(param.nbytes for param in network(*WIDTHS).parameters())
    return times_sent(ranks, "all_reduce") * gradients * Link(LINKS[link]).seconds_per_byte


def time_steps(rounds: int) -> dict[tuple[str, int, str], float]:
    """Time steps of the first ranks in turns, while the others wait in a barrier. Of each the
    seconds of the fastest, on its slowest rank, by scaling, ranks and link; "alone" is rank 0 with
    its part of a batch that so many ranks share."""
    rank, sizes = dist.get_rank(), worlds(dist.get_world_size())
    groups = {ranks: dist.new_group(range(ranks)) for ranks in sizes}
    settings = [("alone", ranks, "no link") for ranks in sizes]
    settings += product(("strong", "weak"), sizes[1:], LINKS)
    steps: list[Callable[[], object]] = []
    for scaling, ranks, link in settings:
        members = 1 if scaling == "alone" else ranks
        if rank < members:
            over_link = Link(LINKS[link]).all_reduce(dist.all_reduce)
            all_reduce = partial(over_link, group=groups[members])
            steps.append(new_step(scaling, ranks, all_reduce))
        else:
            steps.append(lambda: None)
    by_step = interleave([timed(step) for step in steps], range(rounds), Random(0))
    return {
        setting: min(slowest(seconds)) for setting, seconds in zip(settings, by_step, strict=True)
    }


def new_step(scaling: str, ranks: int, all_reduce: Callable[..., Any]) -> Callable[[], None]:
    """This rank's part of a training step on so many ranks, to be called again and again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if scaling == "weak" else 0)
    inputs = torch.randn(BATCH, WIDTHS[0])
    samples = BATCH * ranks
    if scaling != "weak":
        inputs = inputs.tensor_split(ranks)[rank]
        samples = BATCH
    model = network(*WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean(dim=1).sum() / samples
        (loss * size).backward()  # `flat` divides by all ranks of the world
        flat(model, all_reduce)
        optimizer.step()

    return step


def noise(rank: int, size: int) -> dict[str, object]:
    """The noise scale of the gradient: the batch above which larger ones gain little.

    By the number of samples that have trained the model, in batches of 64.
    """
    model = new_model()
    found = {0: round(noise_scale(model, rank, size))}
    for seen, end in pairwise((0, SAMPLES // 4, SAMPLES // 2, SAMPLES)):
        train(model, BATCHES[0], lambda seen: RATE, seen, end)
        found[end] = round(noise_scale(model, rank, size))
    return {"noise_scale": found}


def flops_by_formula(batch: int, *widths: int) -> int:
    """A layer multiplies its input, the gradient of its output with the input, and, unless it is
    the first, with the weights: each 2 * batch * (width before) * (width after)."""
    first, *others = (before * after for before, after in pairwise(widths))
    return 2 * batch * (2 * first + 3 * sum(others))


def utilization(rank: int, size: int, batch: int = 256, width: int = 512) -> dict[str, object]:
    """Model FLOPs utilization: the share of the peak, which a product of matrices shows.

    `flops` are those of a training step; the peak and what the step reaches are in GFLOP/s. The
    other shares are where the fastest step of ten spends its time.
    """
    widths = (width, width, width, width)
    model, inputs = network(*widths), torch.randn(batch, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    matrix = torch.randn(width, width)
    peak = 2 * width**3 / min(clocked(lambda: torch.mm(matrix, matrix)) for _ in range(10))
    with FlopCounterMode(display=False) as counter:
        model(inputs).square().mean().backward()
    parts: dict[str, Callable[[], object]] = {
        "compute": lambda: model(inputs).square().mean().backward(),
        "averaging": lambda: flat(model),
        "optimizer": optimizer.step,
    }
    steps = [{name: clocked(part) for name, part in parts.items()} for _ in range(10)]
    fastest = min(steps, key=lambda times: sum(times.values()))
    seconds = sum(fastest.values())
    flops = {"counted": counter.get_total_flops(), "by_formula": flops_by_formula(batch, *widths)}
    reached = flops["counted"] / seconds
    speeds = {"peak": round(peak / 1e9, 1), "reached": round(reached / 1e9, 1)}
    shares = {name: round(spent / seconds, 3) for name, spent in fastest.items()}
    return {"flops": flops, **speeds, "mfu": round(reached / peak, 3), **shares}


def clocked(part: Callable[[], object]) -> float:
    """Seconds until it is done, on a GPU, too."""
    start = time.perf_counter()
    part()
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
