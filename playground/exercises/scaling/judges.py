"""Judges of the exercises on scaling."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from playground.exercises.cases import ENOUGH, Case, Cases, describe_keys, predict
from playground.exercises.repair import of_fault
from playground.lessons.all_reduce.lesson import measure, ring
from playground.training.mesh_costs import TrainingTask, cost_of, hosts_of_eight

MICROBATCHES = 4


def rank_work(rank: int, size: int, seed: int) -> Cases:
    """The work of a step by torch's counter, and the bytes of a lesson's ring."""
    for batch, *widths in ((24, 12, 24, 12), (48, 24, 12, 36)):
        inputs, hidden, outputs = widths
        model = nn.Sequential(
            nn.Linear(inputs, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, outputs, bias=False),
        )
        gradients = torch.zeros(sum(param.numel() for param in model.parameters()))
        strong, weak, evaluated = (
            count_flops(model, inputs, *samples)
            for samples in ((batch // size, 0), (batch, 0), (batch // size, batch))
        )
        sent = [measure(ring, gradients)[1] for _ in range(MICROBATCHES)]
        counted = {
            "strong": strong,
            "weak": weak,
            "evaluated": evaluated,
            "sent": sent[0],
            "sent_per_microbatch": sum(sent),
        }
        about = f"{batch} samples, {' → '.join(map(str, widths))}"
        yield predict(about, (size, batch, *widths), counted)


def count_flops(model: nn.Module, inputs: int, samples: int, evaluated: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(evaluated, inputs))
        model(torch.zeros(samples, inputs)).sum().backward()
    return counter.get_total_flops()


def lost_speedup(rank: int, size: int, seed: int) -> Cases:
    """Documents that a program with a fault divides unevenly: one rank has most tokens by far. Work
    is counted, not timed."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        while True:
            lengths = [draw.randrange(5, 60) for _ in range(draw.randrange(8, 12))]
            due, faulty = divide(lengths, size), divide(lengths, size, of_fault(seed, FAULTS))
            *_, second, most = sorted(map(sum, faulty))
            if most > max(1.1 * second, 1.1 * max(map(sum, due))):
                break
        computed: list[int] = []
        yield Case(
            f"documents of {', '.join(map(str, lengths))} tokens",
            ([*lengths], partial(compute, lengths, computed)),
            sum(lengths) / max(map(sum, due)),
            held=partial(describe_work, computed),
            expected={"tokens computed": sum(due[rank])},
            is_coded=False,
            culprit=[sum(share) for share in faulty].index(most),
        )


def compute(lengths: list[int], computed: list[int], number: int) -> None:
    """The work on a document. `computed`: the tokens of those so far."""
    computed.append(lengths[number])


def describe_work(computed: list[int]) -> dict[str, int]:
    return {"tokens computed": sum(computed)}


IN_TURN, SHORTEST_FIRST = FAULTS = "documents in turn", "the shortest document first"
"""Those of the program that divides documents."""


def divide(lengths: Sequence[int], size: int, fault: str = "") -> list[list[int]]:
    """The lengths of each rank's documents, by the repaired program or with one of its faults."""
    shares: list[list[int]] = [[] for _ in range(size)]
    longest_first = fault != SHORTEST_FIRST
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first):
        share = shares[number % size] if fault == IN_TURN else min(shares, key=sum)
        share.append(lengths[number])
    return shares


TASK = TrainingTask(
    layers=24, width=2048, length=2048, sequences=0,
    gpus=512, memory=80e9, flops=150e12, machine=hosts_of_eight(2e9, 200e9),
)  # fmt: skip
"""The model, and the whole cluster; the batch is to be chosen."""
LEAST_STEPS, NOISE, DAY = 40_000, 1024, 86_400
GPUS, SEQUENCES = (8, 16, 32, 64, 128, 256, 512), (128, 256, 512, 1024, 2048, 4096)


def train(gpus: int, sequences: int) -> dict[str, float]:
    """What a training costs, with these GPUs and sequences in a batch."""
    cost = cost_of((gpus, 1, 1, 1), 1, replace(TASK, gpus=gpus, sequences=sequences))
    steps = LEAST_STEPS * (1 + NOISE / sequences)
    seconds = steps * cost.step
    return {
        "million sequences": steps * sequences / 1e6,
        "s of a step": cost.step,
        "share that waits": cost.data / cost.step,
        "hours": seconds / 3600,
        "GPU hours": seconds / 3600 * gpus,
    }


def find_fault(gpus: int, sequences: int) -> dict[str, str]:
    """The rule of the task that a choice breaks, by the choice; empty if it breaks none."""
    for number, name, choices in ((gpus, "gpus", GPUS), (sequences, "sequences", SEQUENCES)):
        if number not in choices:
            is_power = number > 0 and not number & (number - 1)
            limits = f"{number}: the task has {choices[0]} to {choices[-1]:,}"
            return {name: limits if is_power else f"{number} is no power of two"}
    return {"gpus": f"{gpus} for {sequences} sequences"} if gpus > sequences else {}


def compare(
    mine: Mapping[str, float], best: Mapping[str, float], shown: Collection[str]
) -> Iterator[str]:
    """A table of two costs. `shown`: the rows in which the cheapest one is shown, too: the others
    together would be the answer."""
    yield f"{'':24}{'chosen':>10}{'cheapest':>10}"
    for name, cost in mine.items():
        least = f"{best[name]:10.2f}" if name in shown else ""
        yield f"{name:24}{cost:10.2f}{least}"


def choose_batch(rank: int, size: int, seed: int) -> Cases:
    """The batch against the noise scale, and the GPUs against what they wait for."""
    costed = {
        (gpus, sequences): train(gpus, sequences)
        for gpus, sequences in product(GPUS, SEQUENCES)
        if sequences % gpus == 0
    }
    in_time = [cost for cost in costed.values() if cost["hours"] <= DAY / 3600]
    best = min(in_time, key=lambda cost: cost["GPU hours"])
    right = {"answer": "fits", "gpus": "fits", "sequences": "fits"}
    right |= {"time": "within a day", "price": "within 5 % of the cheapest"}
    notes: list[str] = []

    def run(function: Callable[[], Any]) -> object:
        answer = function()
        if not isinstance(answer, dict) or {*answer} != {"gpus", "sequences"}:
            return right | {"answer": describe_keys(("gpus", "sequences"))}
        gpus, sequences = int(answer["gpus"]), int(answer["sequences"])
        if fault := find_fault(gpus, sequences):
            return right | fault
        mine = costed[gpus, sequences]
        has_passed = mine["hours"] <= DAY / 3600 and mine["GPU hours"] <= ENOUGH * best["GPU hours"]
        notes[:] = compare(mine, best, [*mine] if has_passed else ["GPU hours"])
        if mine["hours"] > DAY / 3600:
            is_cheap = mine["GPU hours"] < best["GPU hours"]
            why = "cheaper, but not done within a day; " if is_cheap else ""
            hours = f"{mine['hours']:.1f} of {DAY / 3600:.0f} hours"
            return right | {"time": f"{hours}: {why}use more GPUs, or fewer samples"}
        if not has_passed:
            times = mine["GPU hours"] / best["GPU hours"]
            return right | {"price": f"{times:.2f} times the cheapest"}
        return right

    about = f"{TASK.parameters / 1e9:.1f} billion parameters within a day"
    yield Case(about, (), right, is_coded=False, run=run, gives_rank=False, notes=notes)
