"""The command `mesh`: its settings, the closed forms beside what is counted, and its text. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

import click

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.lessons import LESSONS
from playground.lessons.mesh.choose import GPUS, GRIDS, PARAMETERS, predict
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_flags, flag

LESSON = LESSONS["mesh"]
EXPERIMENT = LESSON.remote("run", "experiment")
Shape = tuple[int, int, int, int]
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 96, 12, 48, 48
"""The size of the model."""
BATCH, MICROBATCHES, ELEMENT = 24, 2, 8
"""Sequences in a batch, microbatches that a replica's are cut into, and the bytes of a number."""
EXACT, CLOSE = 1e-12, 0.05
"""How far losses and parameters may be from one process's, and by which fraction bytes from their closed form."""


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Raises `UsageError` if the model or its batch cannot be cut over a grid."""

    shapes: tuple[Shape, ...]
    """Ranks of data, pipeline, context and tensor parallelism, for each grid."""
    library: bool = False
    seed: int = 1234
    steps: int = flag(5, "Number of training steps, on each grid.", least=1)

    def __post_init__(self) -> None:
        check_flags(self)
        for shape in self.shapes:
            for ranks, number, what in zip(shape, (BATCH // 2, LAYERS + 2, LENGTH // 2, HEADS), CUT, strict=True):
                if number % ranks:
                    raise UsageError(f"{name_of(shape)}: {ranks} ranks for {number} {what}: choose a divisor")


CUT = ("samples of a microbatch", "layers, with embedding and head", "positions of a run, twice", "heads")


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def shapes_for(size: int, grid: str | None) -> tuple[Shape, ...]:
    """The grid that is asked for, or all that have one or two ranks on each axis. Raises `UsageError` for none."""
    if grid is None:
        shapes = tuple(shape for shape in product((1, 2), repeat=4) if prod(shape) == size)
        if not shapes:
            raise UsageError(f"{size} ranks: no grid has two ranks on some axes: choose 2, 4, 8 or 16, or add --grid")
        return shapes
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", grid):
        raise UsageError(f"--grid {grid}: give the ranks of data, pipeline, context and tensor, as in 2x2x1x2")
    dp, pp, cp, tp = map(int, grid.split("x"))
    if dp * pp * cp * tp != size:
        raise UsageError(f"--grid {grid} on {size} ranks: a grid has as many ranks as the world, so add -n")
    return ((dp, pp, cp, tp),)


def sent(shape: Shape, stage: int) -> dict[str, float]:
    """Bytes that a rank of this stage sends in a step, on each axis. Sums include the loss."""
    dp, pp, cp, tp = shape
    units = range((LAYERS + 2) * stage // pp, (LAYERS + 2) * (stage + 1) // pp)
    is_first, is_last, blocks = 0 in units, LAYERS + 1 in units, len({*units} - {0, LAYERS + 1})
    tokens = BATCH // dp * LENGTH // cp
    hidden = ELEMENT * tokens * WIDTH
    whole = is_first * LENGTH * WIDTH + (6 * blocks + 2 * is_last) * WIDTH
    parts = (is_first + is_last) * VOCABULARY * WIDTH + blocks * (12 * WIDTH**2 + 4 * WIDTH)
    ring = {size: 2 * (size - 1) / size for size in (tp, dp * cp)}
    return {
        "tp": ring[tp] * ((4 * blocks + is_first + is_last) * hidden + is_last * 3 * ELEMENT * tokens),
        "cp": blocks * (6 * cp - 4) * hidden / tp if cp > 1 else 0.0,
        "pp": ((not is_first) + (not is_last)) * hidden,
        "dp x cp": ring[dp * cp] * ELEMENT * (whole + parts / tp + 1),
    }


NUMBER = ("", ",.0f")
PLACEMENTS = {
    "Shard(0) to Replicate": "all_gather",
    "Partial to Replicate": "all_reduce",
    "Partial to Shard(0)": "reduce_scatter",
    "Replicate to Shard(0)": "none",
    "Shard(0) to Shard(1)": "all_to_all",
}
"""By change of a DTensor's placement, the collective that it calls. On CPU, all_gather does the work of all_to_all."""
GROUPS = {"axis": Column("axis"), "ranks": Column("group"), "calls": Column("calls in a step", wraps=True)}
GROUPS |= figures(("sent", "sent, bytes", *NUMBER), ("form", "closed form", *NUMBER))
TRAINED = {"grid": Column("grid")} | figures(
    ("step_seconds", "step", "ms", ".1f", 1000),
    ("library_seconds", "library's\nstep", "ms", ".1f", 1000),
    ("first", "first\nloss", "", ".3f"),
    ("last", "last\nloss", "", ".3f"),
    ("loss_difference", "loss, from\none process", "", ".1e"),
    ("parameter_difference", "parameters", "", ".1e"),
    ("library_difference", "library's\nloss", "", ".1e"),
)
PREDICTED = {"grid": Column("grid"), "state": Column("state")} | figures(
    ("held", "held", "GB", ".0f", 1e-9),
    *((name, name, "s", ".1f") for name in ("compute", "tensor", "context", "data", "bubble", "step")),
)


def check(shape: Shape, found: Fields) -> None:
    """Raise `PlaygroundError` if a rank's training is not one process's, or it sent other than the closed forms say."""
    differences = ("loss_difference", "parameter_difference", "library_difference")
    if not (largest := max(found.get(name, 0.0) for name in differences)) <= EXACT:
        raise PlaygroundError(f"{name_of(shape)}: differs by {largest:.1e} from one process, more than rounding")
    for axis, group in found["groups"].items():
        if not abs(group["sent"] - group["form"]) <= CLOSE * group["form"]:
            counted = f"{group['sent']:,.0f} bytes sent, and the closed form is {group['form']:,.0f}"
            raise PlaygroundError(f"{name_of(shape)}: {axis}: {counted}")


def check_placements(found: Fields, device: str) -> None:
    """Raise `PlaygroundError` if DTensor has called something else than `PLACEMENTS` says."""
    expected = PLACEMENTS | ({"Shard(0) -> Shard(1)": "all_gather"} if device == "cpu" else {})
    if found != expected:
        raise PlaygroundError(f"DTensor has called {found}, and {expected} was expected")


def summarize(shape: Shape, ranks: list[Fields]) -> Fields:
    """A row of the table of trainings: the slowest rank's steps, the last stage's losses, the largest differences."""
    names = ("step_seconds", "library_seconds", "loss_difference", "parameter_difference", "library_difference")
    row = {name: max(rank[name] for rank in ranks) for name in names if name in ranks[0]}
    return {"grid": name_of(shape), "first": ranks[-1]["losses"][0], "last": ranks[-1]["losses"][-1], **row}


@LESSON.run_by(
    click.option(
        "--grid", metavar="DxPxCxT", help="Ranks of data, pipeline, context and tensor; 2x2x1x2, for example."
    ),
    click.option("--library", is_flag=True, help="Train in the library's words, too."),
    flags(MeshSettings, "steps"),
)
def command(session: Session, grid: str | None, library: bool, steps: int) -> None:
    world = session.world
    shapes = shapes_for(world.size, grid)
    settings = MeshSettings(shapes=shapes, library=library, seed=session.run.seed, steps=steps)
    world.warm_up(EXPERIMENT)
    model = f"a GPT of {LAYERS} blocks, width {WIDTH}, {HEADS} heads, sequences of {LENGTH}"
    session.say(f"{LESSON.name}: {world}, {model}, {BATCH} in a batch, {MICROBATCHES} microbatches")
    by_rank = session.launch(EXPERIMENT, settings)
    placements, found = by_rank[0]["placements"], [[rank["grids"][n] for rank in by_rank] for n in range(len(shapes))]
    changes = ({"change": change, "collective": name} for change, name in placements.items())
    about = ": what a DTensor calls when its placement changes, counted by CommDebugMode"
    texts = tabulate(changes, {"change": Column("change"), "collective": Column("collective")})
    session.say("", prose(heading("placements"), about), texts)
    for shape, ranks in zip(shapes, found, strict=True):
        place = ", ".join(f"{axis} {at}" for axis, at in ranks[-1]["place"].items())
        rows = ({"axis": axis, **group} for axis, group in ranks[-1]["groups"].items())
        about = f" (dp x pp x cp x tp): rank {world.size - 1} is at {place}"
        session.say("", prose(heading(name_of(shape)), about), tabulate(rows, GROUPS))
    trained = [summarize(shape, ranks) for shape, ranks in zip(shapes, found, strict=True)]
    about = f": {steps} steps of AdamW in float64; differences are from one process"
    columns = {name: column for name, column in TRAINED.items() if name in trained[0]}
    session.say("", prose(heading("training"), about), tabulate(trained, columns))
    predicted = [predict(*each) for each in GRIDS]
    about = (
        f": {PARAMETERS / 1e9:.0f} billion parameters on {GPUS} GPUs, by scale's cost model: predicted, not measured"
    )
    session.say("", prose(heading("choosing"), about), tabulate(predicted, PREDICTED))
    document = {name_of(shape): ranks for shape, ranks in zip(shapes, found, strict=True)}
    session.print_document({}, placements=placements, grids=document, predicted=predicted)
    check_placements(placements, world.device)
    for shape, ranks in zip(shapes, found, strict=True):
        for rank in ranks:
            check(shape, rank)
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size)), "."))
