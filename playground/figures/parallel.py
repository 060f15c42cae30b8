"""Figures of work that is divided over ranks: remote calls, sharded layers, and meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from playground.explain.replay.render.bands import (
    Band,
    arrow,
    bands_scene,
    box,
    panels_scene,
)
from playground.explain.replay.render.bars import add_key
from playground.explain.replay.render.scene import (
    BOX,
    CELL,
    LANE,
    MARGIN,
    WIDTH,
    Mark,
    Scene,
    Size,
)
from playground.figures.collectives import numbers
from playground.figures.figure import Evidence, FigureRun, figure, work_of
from playground.ui.units import format_bytes

if TYPE_CHECKING:
    from playground.figures.ranks import MeshPlace

RPC = FigureRun("rpc", work_of("remote_call"), 2)
TENSOR = FigureRun("tensor", work_of("sharded_mlp"), 2)
CONTEXT = FigureRun("context", work_of("causal_pairs"), 4)
MESH = FigureRun(
    "mesh",
    work_of("train_on_mesh"),
    16,
    ({"dp": 2, "pp": 2, "cp": 2, "tp": 2}, 1),
)


@figure("rpc", "lessons/rpc/figures/call", RPC)
def remote_call(run: Evidence) -> Scene:
    before, after = run.results[0]["before"], run.results[0]["after"]
    idle = box("rank 1\nits program\nis busy", "idle")
    request = arrow(0, 2, f"request: f, {before:g}", meant=True)
    reply = arrow(2, 0, f"reply: {after:g}", meant=True)
    bands = [
        Band([box(f"rank 0\ncall(1, f, {before:g})"), idle, box("rank 1\na thread\nlistens")]),
        Band([box("waits", "wait"), idle, box(f"f({before:g}) = {after:g}", "compute")], [request]),
        Band([box(f"{after:g}", "value"), idle, box("listens")], [reply]),
    ]
    about = (
        f"The first call of the lesson on {len(run.results)} ranks. Dashed: requests and "
        "replies, as they are meant."
    )
    return bands_scene("A function runs on another rank", bands, about)


@figure("tensor", "lessons/tensor/figures/sharded_mlp", TENSOR)
def sharded_mlp(run: Evidence) -> Scene:
    ranks: Sequence[Mapping[str, tuple[float, ...]]] = run.results
    everyone = range(len(ranks))

    def row(name: str, style: str, text: str, label: str, arrows: Sequence[Mark]) -> Band:
        return Band([box(f"{text}\n{numbers(each[name])}", style) for each in ranks], arrows, label)

    same = [arrow(rank, rank) for rank in everyone]
    exchanged = [arrow(a, b) for a in everyone for b in everyone]
    forward = [
        row("token", "value", "token", "", ()),
        row("hidden", "compute", "times own columns", "f", same),
        row("summand", "compute", "times own rows", "", same),
        row("output", "value", "output", "g", exchanged),
    ]
    backward = [
        Band([box("d output\n1", "backward") for _ in ranks]),
        row("own", "backward", "own part", "g", same),
        row("gradient", "value", "d token", "f", exchanged),
    ]
    return panels_scene(
        "An MLP sharded over two ranks",
        [("forward: g adds up", forward), ("backward: f adds up", backward)],
        "Each rank has half of the first matrix's outputs, and of the second's inputs. f and g are "
        "those of lesson.py; crossed arrows: an all_reduce. d: the gradient of what follows. The "
        "numbers are those that the ranks returned.",
    )


@figure("context", "lessons/context/figures/causal_square", CONTEXT)
def causal_square(run: Evidence) -> Scene:
    scene = Scene("Who computes which pairs of causal attention")
    length = 1 + max(query for rank in run.results for query, *_ in rank["zigzag"])
    cell, top = (WIDTH / 2 - 4 * MARGIN) / length, 1.5 * CELL.height
    for column, order in enumerate(run.results[0]):
        x = 2 * MARGIN + column * WIDTH / 2
        ranks = [each[order] for each in run.results]
        counts = [sum(count for *_, count in rows) for rows in ranks]
        about = f"{order}: {min(counts)} to {max(counts)} pairs on a rank"
        scene.write(about, x, CELL.height / 2)
        for rank, rows in enumerate(ranks):
            for query, key, count in rows:
                title = f"rank {rank}: query {query}, keys {key} to {key + count - 1}"
                look = {"style": f"bucket {rank}", "title": title}
                scene.add(LANE, x + key * cell, top + query * cell, count * cell, cell, **look)
    add_key(scene, {f"bucket {rank}": f"rank {rank}" for rank in range(len(run.results))})
    return scene.with_caption(
        f"A row for each of {length} queries, a column for each key. The colour is the rank that "
        "has the query and, as blocks of keys come by, computes the pair."
    )


RANK_BOX, RANK_PITCH, APART = Size(128.0, 48.0), Size(136.0, 56.0), 32.0
"""A mesh's sizes: a rank's box, its distance to the next one, and the gap between two values of dp,
or of pp."""


@figure("mesh", "lessons/mesh/figures/cube", MESH)
def cube(run: Evidence) -> Scene:
    results: Sequence[MeshPlace] = run.results
    shown, groups = len(results) - 1, results[-1].groups
    styles = {axes: f"bucket {number}" for number, axes in enumerate(groups)}
    scene = Scene(f"{len(results)} ranks, and the groups of rank {shown}")
    for rank, (dp, pp, cp, tp) in enumerate(each.coordinates.values() for each in results):
        x = 2 * CELL.width + (2 * dp + tp) * RANK_PITCH.width + dp * APART
        y = CELL.height + (2 * pp + cp) * RANK_PITCH.height + pp * APART
        shared = [axes for axes, group in groups.items() if rank in group.ranks]
        style = "value" if rank == shown else styles[shared[0]] if shared else "plain"
        groups_of_rank = "in all of these" if rank == shown else ", ".join(shared)
        text = f"rank {rank}: {dp} {pp} {cp} {tp}\n{groups_of_rank}".rstrip()
        scene.add(BOX, x, y, *RANK_BOX, style=style, text=text)
    for axes, group in groups.items():
        others = ", ".join(str(rank) for rank in group.ranks if rank != shown)
        add_key(scene, {styles[axes]: f"{axes}, with {others}: {format_bytes(group.sent)} sent"})
    return scene.with_caption(
        f"What rank {shown} sends in a step, by group. In a box: the coordinates on dp, pp, cp and "
        f"tp, and the groups that the rank shares with rank {shown}."
    )
