"""What more ranks gain: the work that they share, and the batch that they make larger.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground scaling

Work is counted in floating point operations, messages in bytes, so the numbers are the same in
every run. The command measures times, too.
Source: Amdahl, Validity of the Single Processor Approach, 1967; Gustafson, Reevaluating Amdahl's
Law, 1988; Goyal et al., Accurate, Large Minibatch SGD, 2017, arXiv 1706.02677; McCandlish et al.,
An Empirical Model of Large-Batch Training, 2018, arXiv 1812.06162
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from playground.lessons.all_reduce.lesson import measure, ring

WORLDS = (1, 2, 4, 16, 64)
BATCHES = (64, 128, 256, 512, 1024, 2048)
SAMPLES, FEATURES, CLASSES, HIDDEN = 2**15, 20, 10, 32
RATE = 0.1
"""The learning rate of the smallest batch."""


def network(*widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def count_flops(batch: int, evaluated: int = 0) -> int:
    """Floating point operations of a step: forward and backward of a batch, and forward alone of
    the samples on which every rank evaluates the model."""
    model = network(FEATURES, HIDDEN, CLASSES)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, FEATURES)).sum().backward()
        model(torch.zeros(evaluated, FEATURES))
    return counter.get_total_flops()


def strong(rank: int, size: int, batch: int = 1024, evaluated: int = 128) -> dict[str, object]:
    """Strong scaling: N ranks share one batch, but each evaluates the model on all 128 samples.

    The speedup is the work of one process divided by that of a rank. Amdahl: with a share s that
    is not divided, it is 1 / (s + (1 - s) / N), never more than 1 / s.
    """
    alone = count_flops(batch, evaluated)
    serial = 1 - count_flops(batch) / alone
    counted = {n: alone / count_flops(batch // n, evaluated) for n in WORLDS}
    amdahl = {n: 1 / (serial + (1 - serial) / n) for n in WORLDS}
    return {"serial": round(serial, 3), "speedup": rounded(counted), "amdahl": rounded(amdahl)}


def weak(rank: int, size: int, batch: int = 1024, evaluated: int = 128) -> dict[str, object]:
    """Weak scaling: each of N ranks has a batch of its own, so the work grows with the ranks.

    Gustafson: with a share s of a rank's own work that is not divided, the speedup is
    s + (1 - s) N.
    """
    own = count_flops(batch, evaluated)
    serial = 1 - count_flops(batch) / own
    counted = {n: count_flops(batch * n, evaluated) / own for n in WORLDS}
    law = {n: serial + (1 - serial) * n for n in WORLDS}
    return {"serial": round(serial, 3), "speedup": rounded(counted), "gustafson": rounded(law)}


def rounded(values: dict[int, float]) -> dict[int, float]:
    return {key: round(value, 2) for key, value in values.items()}


def messages(rank: int, size: int, batch: int = 1024) -> dict[str, object]:
    """The bytes that a rank sends to average the gradients, by ring, and its work for each byte.

    However many ranks there are, the bytes are fewer than twice those of the gradients. Strong
    scaling divides the work, not the bytes.
    """
    model = network(FEATURES, HIDDEN, CLASSES)
    gradients = torch.zeros(sum(param.numel() for param in model.parameters()))
    _, sent = measure(ring, gradients)
    work = {"strong": count_flops(batch // size), "weak": count_flops(batch)}
    per_byte = {scaling: round(flops / sent, 1) for scaling, flops in work.items()}
    by_formula = 2 * (size - 1) * gradients.nbytes // size
    return {"sent": sent, "by_formula": by_formula, "flops_per_byte": per_byte}


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """[SAMPLES + 2048, FEATURES], and the class that a random network gives each."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES + 2048, FEATURES)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    return inputs, teacher(inputs).argmax(1)


def train(model: nn.Module, batch: int, rate: Callable[[int], float], seen: int, end: int) -> float:
    """See the samples from `seen` to `end` once, with rate(samples seen). Returns the loss on
    others."""
    inputs, labels = samples()
    params = list(model.parameters())
    for start in range(seen, end, batch):
        chosen = slice(start, start + batch)
        loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for param, gradient in zip(params, gradients, strict=True):
                param -= rate(start + batch) * gradient
    with torch.no_grad():
        return F.cross_entropy(model(inputs[SAMPLES:]), labels[SAMPLES:]).item()


def new_model() -> nn.Sequential:
    return network(FEATURES, HIDDEN, HIDDEN, CLASSES)


def batches(rank: int, size: int) -> dict[str, object]:
    """Train on the same samples in batches of 64 to 2,048, in each case once: the losses.

    Sums over ranks are exact, so one process shows what ranks that share a batch would do. A batch
    that is k times as large has k times fewer steps, and a rate k times as large may make up for
    that. Warm-up raises the rate to this value over the first eighth.
    """
    ways: dict[str, Callable[[int, int], float]] = {
        "unscaled": lambda factor, seen: RATE,
        "linear": lambda factor, seen: RATE * factor,
        "warm_up": lambda factor, seen: RATE * factor * min(1, 8 * seen / SAMPLES),
    }
    losses: dict[str, object] = {}
    for way, rate in ways.items():
        found = {
            batch: train(new_model(), batch, partial(rate, batch // BATCHES[0]), 0, SAMPLES)
            for batch in BATCHES
        }
        losses[way] = rounded(found)
    return losses


def noise_scale(model: nn.Module, rank: int, size: int, batch: int = 64) -> float:
    """Estimate it from two batch sizes: each rank's gradient, and their mean over the ranks.

    The squared length of a batch's gradient is |G|^2 + S / batch in expectation, where G is the
    gradient of all samples, and S the summed variance of its elements over samples. Two batch
    sizes are two equations. Returns S / |G|^2, in samples.
    """
    count = SAMPLES // size // batch * batch  # all ranks have as many batches
    mine = slice(rank * count, (rank + 1) * count)
    inputs, labels = (tensor[mine].split(batch) for tensor in samples())
    own = together = torch.zeros(())
    for each, label in zip(inputs, labels, strict=True):
        loss = F.cross_entropy(model(each), label)
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in parts])
        own = own + gradient.square().sum()
        dist.all_reduce(gradient)
        together = together + (gradient / size).square().sum()
    dist.all_reduce(own)
    small, large = own / size / len(inputs), together / len(inputs)
    signal = (size * large - small) / (size - 1)
    variance = (small - large) * batch * size / (size - 1)
    return (variance / signal).item()


def print_steps(rank: int, world_size: int) -> None:
    """Run every step, and print what it returns on rank 0."""
    found = {step.__name__: step(rank, world_size) for step in (strong, weak, messages, batches)}
    found["noise"] = {"scale": round(noise_scale(new_model(), rank, world_size))}
    for step, values in found.items() if rank == 0 else ():
        for name, value in values.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            said = ", ".join(f"{part} {each}".strip() for part, each in parts)
            print(f"{step}, {name}: {said}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # gives gloo's threads time to free the last tensors: they need the GIL
    dist.destroy_process_group()
