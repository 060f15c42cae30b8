"""The calculators of chapters, and their formulas. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from playground.algorithms.bytes_sent import times_sent
from playground.algorithms.cost_model import (
    Cost,
    Machine,
    Task,
    binary_tree_cost,
    halving_doubling_cost,
    power_of_two,
    recursive_doubling_cost,
    reduce_broadcast_cost,
    ring_cost,
)
from playground.site.calculators.calculator import Calculator, Cell, Chosen, Control, digits, scaled
from playground.training.formulas import COLLECTIVES_OF_STAGE, FLOAT32, MIXED
from playground.ui.units import BYTES, SECONDS


class Precision(NamedTuple):
    """Bytes of a parameter by what holds it."""

    value: int
    """The parameter, or its gradient."""
    master: int
    """Its copy in float32, which the optimizer holds."""


DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
WIDE, _, ADAM = FLOAT32
NARROW, _, ADAM_AND_MASTER = MIXED
STATES = {"Adam": ADAM, "SGD with momentum": ADAM // 2, "SGD": 0}
"""Bytes of a parameter's state, in float32."""
PRECISIONS = {
    "float32": Precision(value=WIDE, master=0),
    "mixed precision": Precision(value=NARROW, master=ADAM_AND_MASTER - ADAM),
    "bfloat16": Precision(value=NARROW, master=0),
}
ZERO_STAGES = ("data parallel", "zero1", "zero2", "zero3")
"""As the chapter names them."""
FIRST_SHARDED = (3, 2, 1)
"""ZeRO's first stage that shards parameters, gradients, and the optimizer's state."""


def in_gigabytes(nbytes: float) -> Cell:
    return nbytes, scaled(nbytes, DECIMAL)


def in_binary(nbytes: float) -> Cell:
    return nbytes, scaled(nbytes, BYTES)


def in_seconds(seconds: float) -> Cell:
    return seconds, scaled(seconds, SECONDS).replace("us", "µs")


def zero(chosen: Chosen) -> dict[str, list[Cell]]:
    """What a rank holds, and sends in a step, with each stage."""
    parameters, ranks = (int(chosen[name]) for name in ("parameters", "ranks"))
    precision = PRECISIONS[str(chosen["precision"])]
    own = precision.value
    sizes = (own, own, precision.master + STATES[str(chosen["optimizer"])])
    rows = {}
    of_stages = zip(ZERO_STAGES, COLLECTIVES_OF_STAGE.values(), strict=True)
    for number, (stage, collectives) in enumerate(of_stages):
        held = [
            parameters * nbytes / (ranks if number >= first else 1)
            for nbytes, first in zip(sizes, FIRST_SHARDED, strict=True)
        ]
        sent = times_sent(ranks, *collectives) * own * parameters
        rows[stage] = [in_gigabytes(each) for each in (*held, sum(held), sent)]
    return rows


def pipeline(chosen: Chosen) -> dict[str, list[Cell]]:
    """The slots of a step, the share in which a stage idles, and the microbatches whose activations
    the first stage and the last hold. With 1F1B, stage s of S holds at most S - s of them."""
    stages, microbatches = (int(chosen[name]) for name in ("stages", "microbatches"))
    filled = 3 * (microbatches + stages - 1)  # the last stage begins S - 1 forwards late
    forms = {
        "naive": (3 * microbatches * stages, 1, 1),
        "gpipe": (filled, microbatches, microbatches),
        "1f1b": (filled, min(microbatches, stages), 1),
    }
    return {
        name: [
            (slots, f"{slots}"),
            (idle := 1 - 3 * microbatches / slots, f"{digits(100 * idle)} %"),
            *((each, f"{each}") for each in held),
        ]
        for name, (slots, *held) in forms.items()
    }


COSTS: dict[str, Callable[[Task], Cost]] = {
    "ring": ring_cost,
    "recursive doubling": recursive_doubling_cost,
    "halving-doubling": halving_doubling_cost,
    "binary tree": binary_tree_cost,
    "reduce + broadcast": reduce_broadcast_cost,
}


def all_reduce(chosen: Chosen) -> dict[str, list[Cell]]:
    """Messages one after another, their bytes, the time, and the bytes up to which it is faster
    than the ring."""
    ranks, nbytes = (int(chosen[name]) for name in ("ranks", "bytes"))
    machine = Machine(float(chosen["alpha"]) * 1e-6, 1 / (float(chosen["bandwidth"]) * 1e9))
    rows = {}
    for name, cost_of in COSTS.items():
        cost = cost_of(Task(ranks, nbytes))
        messages, crossover = cost.between.messages, find_crossover(cost_of, ranks, machine)
        below = {0: "never", inf: "always"}.get(crossover) or in_binary(crossover)[1]
        rows[name] = [
            (messages, f"{messages:g}"),
            in_binary(cost.between.bytes),
            in_seconds(machine.seconds(cost)),
            (crossover, below if cost_of is not ring_cost else "\N{EN DASH}"),
        ]
    return rows


def find_crossover(cost_of: Callable[[Task], Cost], ranks: int, machine: Machine) -> float:
    """The bytes of a tensor below which this all-reduce is faster than the ring: 0 if it never is,
    and infinity if it always is."""
    nbytes = 4 * ranks * power_of_two(ranks)  # equal chunks
    own, ring = (each(Task(ranks, nbytes)).between for each in (cost_of, ring_cost))
    fewer, more = ring.messages - own.messages, (own.bytes - ring.bytes) / nbytes
    if fewer <= 0:
        return 0
    return fewer * machine.alpha / (more * machine.beta) if more > 0 else inf


def in_billions(parameters: float) -> str:
    return f"{parameters / 1e9:g} billion"


CALCULATORS = {
    "zero": Calculator(
        title="The memory of ZeRO's stages",
        controls=(
            Control(
                "parameters",
                "Parameters",
                tuple(each * 1e9 for each in (0.1, 0.3, 1, 3, 7, 13, 30, 70, 175, 405, 1000)),
                7e9,
                in_billions,
            ),
            Control("ranks", "Ranks", tuple(2**each for each in range(13)), 64),
            Control("stage", "Stage", ZERO_STAGES, "zero1"),
            Control("optimizer", "Optimizer", tuple(STATES), "Adam"),
            Control("precision", "Precision", tuple(PRECISIONS), "mixed precision"),
        ),
        columns=(
            "stage", "parameters", "gradients", "optimizer", "held by a rank", "sent in a step",
        ),
        compute=zero,
        marked="stage",
        note="Activations, the layers that zero3 has gathered, and buffers come on top.",
    ),
    "pipeline": Calculator(
        title="The bubble of a pipeline",
        controls=(
            Control("stages", "Stages", tuple(range(1, 13)), 4),
            Control("microbatches", "Microbatches", tuple(range(1, 33)), 8),
            Control("schedule", "Schedule", ("naive", "gpipe", "1f1b"), "1f1b"),
        ),
        columns=("schedule", "slots", "bubble", "held by the first stage", "held by the last"),
        compute=pipeline,
        marked="schedule",
        note="A forward takes one slot, a backward two, and a message none. Held: microbatches "
        "whose activations a stage has to keep.",
    ),
    "allreduce": Calculator(
        title="The time of an all-reduce",
        controls=(
            Control("ranks", "Ranks", (*range(2, 17), *(2**each for each in range(5, 13))), 8),
            Control(
                "bytes",
                "Tensor",
                tuple(4 << each for each in range(29)),
                2**20,
                lambda nbytes: in_binary(nbytes)[1],
            ),
            Control("alpha", f"Latency {ALPHA}", (1, 2, 5, 10, 20, 50, 100), 5, "{:g} µs".format),
            Control(
                "bandwidth", "Bandwidth 1/β", (1, 2, 5, 10, 25, 50, 100, 400), 25,
                "{:g} GB/s".format,
            ),
            Control("algorithm", "Algorithm", tuple(COSTS)[1:], "recursive doubling"),
        ),
        columns=("algorithm", "messages", "bytes", "time", "faster than ring below"),
        compute=all_reduce,
        marked="algorithm",
        note="Messages and bytes are those that follow one another. Adding takes no time here; "
        '<a href="scale.html">scale</a> counts it, too.',
    ),
}  # fmt: skip
"""By name: that of the page."""
