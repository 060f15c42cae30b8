"""The command `mesh`: its settings, what it checks, and its text. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, figures, tabulate
from playground.console.text import good, heading, prose
from playground.console.training import TRAINED
from playground.lessons import LESSONS
from playground.lessons.mesh.costs import CLUSTER, MESHES, MODEL, SHARDED, Shape, name_of, predict
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag, like
from playground.training.one_process import ComparedTraining, check, check_counts

LESSON = LESSONS["mesh"]
EXPERIMENT = LESSON.remote("run", "experiment")
AXES = ("data", "pipeline", "context", "tensor")
"""The axes of a mesh, in the order of a `Shape`."""


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Raises `UsageError` if the model or its batch cannot be sharded over a mesh."""

    shapes: tuple[Shape, ...]
    """The ranks of data, pipeline, context and tensor parallelism, by mesh."""
    seed: int = 1234
    steps: int = flag(5, "Number of training steps, on each mesh.", least=1)

    def __post_init__(self) -> None:
        check_flags(self)
        for ranks, (what, number) in (
            pair for shape in self.shapes for pair in zip(shape, SHARDED.items(), strict=True)
        ):
            if number % ranks:
                raise UsageError(
                    f"{ranks} ranks for {number} {what}: each gets as many, so choose a divisor"
                )


def shapes_for(size: int, grid: Shape | None = None) -> tuple[Shape, ...]:
    """The mesh that is asked for, or all that have one or two ranks on each axis. Raises
    `UsageError` for none."""
    chosen = [grid] if grid else product((1, 2), repeat=4)
    shapes = tuple((dp, pp, cp, tp) for dp, pp, cp, tp in chosen if dp * pp * cp * tp == size)
    if not shapes:
        asked = f"--grid {' '.join(map(str, grid))}" if grid else "no --grid"
        raise UsageError(
            f"{size} ranks, and {asked}: choose numbers whose product is -n, as in -n 6 --grid 3 1 "
            "1 2"
        )
    return shapes


@dataclass(frozen=True)
class GroupTraffic:
    """What a rank exchanges in a step with its group on an axis."""

    ranks: list[int]
    """Those of the group."""
    calls: dict[str, int]
    """Their number, by operation."""
    sent: float
    """Bytes that this rank sends."""
    form: float
    """The closed form of `sent`."""


@dataclass(frozen=True, kw_only=True)
class MeshTraining(ComparedTraining):
    """A rank's training on a mesh. Its differences are the largest of any rank."""

    place: dict[str, int]
    """This rank's coordinates, by axis."""
    groups: dict[str, GroupTraffic]
    """By axis, if several ranks are on it."""


GROUPS = {name: Column(name) for name in ("axis", "ranks", "calls")}
GROUPS |= figures(("sent", "sent, bytes", "", ",.0f"), ("form", "closed form", "", ",.0f"))
MESH = {"grid": Column("mesh")}
PREDICTED = (
    MESH
    | {name: Column(name) for name in ("state", "fits")}
    | figures(
        ("held", "held", "GB", ".0f", 1e-9),
        *(
            (name, name, "s", ".1f")
            for name in ("compute", "tensor", "context", "data", "bubble", "step")
        ),
    )
)


def check_mesh(shape: Shape, found: MeshTraining) -> None:
    """Raise `PlaygroundError` if a rank's training is not one process's, or it sent other than the
    closed forms say."""
    check(name_of(shape), found, {})
    for axis, group in found.groups.items():
        check_counts(f"{name_of(shape)}: {axis}", {"sent": group.sent}, {"sent": group.form})


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    grid: Shape | None = flag(
        None, "Ranks of data, pipeline, context, tensor.", least=1, metavar="D P C T"
    )
    steps: int = like(MeshSettings, "steps")


@LESSON.run_by(flags(MeshOptions))
def command(session: Session, grid: Shape | None, steps: int) -> None:
    world, shapes = session.world, shapes_for(session.world.size, grid)
    settings = MeshSettings(shapes=shapes, steps=steps)
    world.warm_up(EXPERIMENT)
    session.say(f"{LESSON.name}: {world}, {MODEL}")
    *_, last = by_rank = session.launch(EXPERIMENT, settings)
    trained = {name_of(shape): found for shape, found in zip(shapes, last, strict=True)}
    for shape, (name, found) in zip(shapes, trained.items(), strict=True):
        place = ", ".join(f"{axis} {at}" for axis, at in found.place.items())
        rows = (
            {
                "axis": axis,
                "ranks": ", ".join(map(str, group.ranks)),
                "calls": ", ".join(f"{count} {call}" for call, count in group.calls.items()),
                "sent": group.sent,
                "form": group.form,
            }
            for axis, group in found.groups.items()
        )
        axes = " x ".join(f"{axis} {ranks}" for axis, ranks in zip(AXES, shape, strict=True))
        about = f": {axes}; rank {world.size - 1} is {place}"
        session.say("", prose(heading(name), about), tabulate(rows, GROUPS))
    about = f": {' x '.join(AXES)}; AdamW in float64, steps: {steps}"
    rows = ({"grid": name, **vars(found)} for name, found in trained.items())
    session.say("", prose(heading("training"), about), tabulate(rows, MESH | TRAINED))
    about = f", not measured: {CLUSTER}, by scale's cost model"
    predicted = [predict(shape, state) for shape, state in MESHES.items()]
    session.say("", prose(heading("predicted"), about), tabulate(predicted, PREDICTED))
    session.print_document({}, ranks=by_rank, predicted=predicted)
    for shape, found in (pair for rank in by_rank for pair in zip(shapes, rank, strict=True)):
        check_mesh(shape, found)
    largest = max(found.largest for found in last)
    session.say("", prose("Shown: ", good(LESSON.conclude(world.size, largest=largest)), "."))
