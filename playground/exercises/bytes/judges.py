"""Judges of the exercises on bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from playground.exercises.cases import Case, Cases, choose_setting, counting, predict


def error_feedback(rank: int, size: int, seed: int) -> Cases:
    """Several steps with one residual, which is looked at after each of them."""
    for about, compress in (
        ("the largest element travels", keep_largest),
        ("multiples of 4 travel", round_to_4),
    ):
        given = [torch.tensor([6.0, 4, 1, -3] * 10).roll(other) + other for other in range(size)]
        residuals = [torch.zeros(40) for _ in range(size)]
        means = []
        sums = []
        compressed = []
        for _ in range(4):
            totals = [
                gradient + residual for gradient, residual in zip(given, residuals, strict=True)
            ]
            sent = [compress(total) for total in totals]
            residuals = [total - each for total, each in zip(totals, sent, strict=True)]
            compressed.append(sent)
            means.append(torch.stack(sent).mean(dim=0))
            sums.append(residuals[rank])
        returns = {
            f"{name}, step {step}": each
            for name, steps in (("gradient", means), ("residual", sums))
            for step, each in enumerate(steps)
        }
        run = partial(take_steps, rank, size, given[rank], compress)
        nonzero = [
            sum(int(each.count_nonzero()) for each in steps)
            for steps in zip(*compressed, strict=True)
        ]
        yield Case(
            f"4 steps, {about}",
            (),
            returns=returns,
            run=run,
            is_coded=False,
            most_moved=2 * size * max(nonzero),
            counts=torch.count_nonzero,
        )


def keep_largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (torch.arange(tensor.numel()) == tensor.abs().argmax())


def round_to_4(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor / 4).round() * 4


def take_steps(
    rank: int,
    size: int,
    given: torch.Tensor,
    compress: Callable[..., Any],
    function: Callable[..., Any],
) -> dict[str, torch.Tensor]:
    residual, held = torch.zeros(40), dict[str, torch.Tensor]()
    for step in range(4):
        gradient = given.clone()
        function(rank, size, gradient, residual, compress)
        held |= {f"gradient, step {step}": gradient, f"residual, step {step}": residual.clone()}
    return held


OUTER_STEPS = 3


def outer_step(rank: int, size: int, seed: int) -> Cases:
    """Several outer steps, between which the ranks go their own ways. torch's optimizer for the
    mean change is the oracle."""
    for rate, momentum in ((0.5, 0.5), (0.75, 0.875)):
        begin = [torch.arange(1.0, 4), torch.full((2, 2), 8.0)]
        ways = [(1.0 + other) * (-1) ** other for other in range(size)]
        params = [torch.nn.Parameter(each.clone()) for each in begin]
        optimizer = torch.optim.SGD(params, lr=rate, momentum=momentum, nesterov=True)
        due = []
        for _ in range(OUTER_STEPS):
            for param in params:
                param.grad = torch.full_like(param, -sum(ways) / size)
            optimizer.step()
            due.append([param.detach().clone() for param in params])
        yield Case(
            f"rate {rate}, momentum {momentum}",
            (),
            returns={
                f"{name}, step {step}": each
                for name in ("shared", "params")
                for step, each in enumerate(due)
            },
            run=partial(train_outside, rank, size, begin, ways[rank], rate, momentum),
            is_coded=False,
            most_moved=OUTER_STEPS * 2 * 7,
        )


def train_outside(
    rank: int, size: int, begin: list[torch.Tensor], way: float, rate: float, momentum: float,
    function: Callable[..., None],
) -> dict[str, list[torch.Tensor]]:  # fmt: skip
    """Outer steps, before each of which this rank's parameters change by `way`."""
    shared, own = ([each.clone() for each in begin] for _ in range(2))
    velocity = [torch.zeros_like(each) for each in begin]
    held = dict[str, list[torch.Tensor]]()
    for step in range(OUTER_STEPS):
        for param in own:
            param += way
        function(rank, size, shared, own, velocity, rate, momentum)
        held |= {
            f"{name}, step {step}": [each.clone() for each in tensors]
            for name, tensors in (("shared", shared), ("params", own))
        }
    return held


def top_k(rank: int, size: int, seed: int) -> Cases:
    """Gradients of which all ranks send one place, and each sends others; the largest are of either
    sign."""
    for k in (2, 3, 1):
        given = [
            (torch.arange(24.0) * 7 + 5 * other) % 24 * (-1) ** (torch.arange(24) + other)
            for other in range(size)
        ]
        for other, gradient in enumerate(given):
            gradient[4] = -100.0 * (other + 1)
        mean = torch.zeros(24)
        for gradient in given:
            kept = gradient.abs() >= gradient.abs().sort().values[-k]
            mean += gradient * kept / size
        yield Case(
            f"24 elements, k = {k}",
            (given[rank].clone(), k),
            returns=mean,
            is_coded=False,
            most_moved=2 * k * (size - 1),
        )


def compressed_traffic(rank: int, size: int, seed: int) -> Cases:
    """What each method sends for one gradient: what it passes to collectives is sent for real."""
    for rows, columns in ((120, 120), (60, 240)):
        gradient = torch.linspace(-1, 1, rows * columns).view(rows, columns)
        counted = {}
        for method, passed in messages_of(gradient).items():
            collective = SENT_BY[method]
            with counting() as counter:
                for message in passed:
                    collective(message)
            counted[method] = round(counter.sent)
        yield predict(f"{rows} x {columns}", (size, rows, columns), counted)


def messages_of(gradient: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """What each method passes to a collective, one tensor after the other."""
    flat = gradient.flatten()
    blocks = flat.view(-1, 64)  # of as many numbers as share a scale
    scales = blocks.abs().amax(dim=1) / 127
    bits = (flat > 0).view(-1, 8) * 2 ** torch.arange(8)
    places = flat.abs().topk(len(flat) // 50).indices
    right = torch.ones(gradient.shape[1])
    return {
        "float32": [gradient],
        "int8": [(blocks / scales[:, None]).round().to(torch.int8), scales],
        "sign": [bits.sum(dim=1).byte(), flat.abs().mean().view(1)],
        "top_2_percent": [places.int(), flat[places]],
        "rank_1": [gradient @ right, gradient.T @ (gradient @ right)],
    }


def gather(message: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(message) for _ in range(dist.get_world_size())], message)


SENT_BY: dict[str, Callable[[torch.Tensor], object]] = {
    "float32": dist.all_reduce,
    "int8": gather,
    "sign": gather,
    "top_2_percent": gather,
    "rank_1": dist.all_reduce,
}


SENT = {
    "float32": (4, "all-reduce", 1.0),
    "int8": (1 + 4 / 64, "all-gather", 1.0),
    "sign": (1 / 8, "all-gather", 1.05),
    "top 2 %": (8 / 50, "all-gather", 1.06),
    "rank 4": (4 * 4 * 2048 / 1024**2, "all-reduce", 1.5),
}
"""Bytes per parameter that are passed in, the collective, and the factor of the steps."""
EVERY = {1: 1.0, 8: 1.06, 32: 1.2, 128: 1.7}
"""The factor of the steps, by how many of them are between two averages."""


def slow_link(rank: int, size: int, seed: int) -> Cases:
    """Computing and sending of 32 ranks."""
    ranks, parameters, bandwidth, computing, steps = 32, 400e6, 1e9 / 8, 2.0, 20_000

    def hours(method: str, every: int) -> float:
        passed, collective, factor = SENT[method]
        times = 2 * (ranks - 1) / ranks if collective == "all-reduce" else ranks - 1
        sending = times * passed * parameters / bandwidth / every
        return steps * factor * EVERY[every] * (computing + sending) / 3600

    settings: list[dict[str, str | int]] = [
        {"method": method, "every": every} for method, every in product(SENT, EVERY)
    ]
    yield choose_setting("400 million parameters on 32 ranks", settings, hours, "hours")
