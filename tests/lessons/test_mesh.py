"""mesh: on every mesh the training of one process, by groups that are the library's, with the bytes
of the chapter's formulas."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Run, Worlds
from one_process import EXACT
from torch.nn.utils import parameters_to_vector

from playground import RankFailed, launch
from playground.base.remote import file_of
from playground.lessons import LESSONS
from playground.lessons.gpt import LAYERS, C, T, V, make_batch
from playground.training.mesh_costs import TrainingTask, cost_of, hosts_of_eight

PATIENCE = 300
"""Seconds: where other work is done, too, what the lesson imports takes a minute."""
Shape = tuple[int, int, int, int]
"""Ranks along dp, pp, cp and tp."""
CHAPTER = file_of(LESSONS["mesh"].module).parent / "README.md"
ROW = re.compile(
    r"^(\d+) x (\d+) x (\d+) x (\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\S+)$", re.MULTILINE
)


def lesson() -> Any:
    """Imported where it is needed: what its parts import takes seconds."""
    from playground.lessons.mesh import lesson

    return lesson


def shape_of(ranks: Shape) -> dict[str, int]:
    return dict(zip(lesson().AXES, ranks, strict=True))


H100 = TrainingTask(
    layers=32, width=4096, length=4096, sequences=64,
    gpus=8, memory=80e9, flops=400e12, machine=hosts_of_eight(50e9, 450e9),
)  # fmt: skip
LLAMA = replace(
    H100, layers=126, width=16384, length=8192, sequences=2048, gpus=16384, key_share=1 / 16
)
CLUSTERS = (
    H100,
    replace(H100, layers=80, width=8192, length=8192, sequences=512, gpus=512, key_share=1 / 8),
    LLAMA,
    replace(LLAMA, length=131072, sequences=128),
)
"""What the chapter's tables are about, in their order."""
COST_ROW = re.compile(
    r"^\| ([\d x]+) \| (?:DDP|zero(\d))(, recompute)?(?:, v = (\d))? \| (\d+)(: no)? \| (.*) \|$",
    re.MULTILINE,
)
"""Mesh, stage of ZeRO, recompute, parts, GB and whether they do not fit; seconds."""


def test_the_tables_of_clusters_are_computed() -> None:
    _, *tables = CHAPTER.read_text(encoding="utf-8").split("| dp x pp x cp x tp | |")
    assert len(tables) == len(CLUSTERS)
    for table, training in zip(tables, CLUSTERS, strict=True):
        rows = COST_ROW.findall(table)
        assert len(rows) == table.split("\n\n")[0].count("\n") - 1 > 2
        for mesh, stage, recompute, parts, held, too_much, seconds in rows:
            shape: Any = tuple(map(int, mesh.split(" x ")))
            assert prod(shape) == training.gpus
            options = {"recompute": bool(recompute), "parts": int(parts or 1)}
            cost = cost_of(shape, int(stage or 0), training, **options)  # type: ignore[arg-type]
            assert (held, bool(too_much)) == (f"{cost.held / 1e9:.0f}", cost.held > training.memory)
            names = ("compute", "tensor", "context", "data", "bubble", "step")
            assert seconds.split(" | ") == [f"{getattr(cost, name):.1f}" for name in names]


@contextmanager
def parts_in_float64() -> Iterator[Any]:
    """The lesson. What it changes in earlier ones is as before afterwards: other tests use them."""
    mesh = lesson()
    parts = (mesh.tensor, mesh.context, mesh.pipeline, mesh.zero)
    before = [dict(vars(part)) for part in parts]
    torch.set_default_dtype(torch.float64)
    mesh.make_group.cache_clear()  # of a world that was there before
    try:
        yield mesh
    finally:
        torch.set_default_dtype(torch.float32)
        for part, names in zip(parts, before, strict=True):
            vars(part).update(names)


def find_differences(rank: int, size: int, shapes: list[Shape]) -> list[float]:
    """By mesh, the largest difference of one of this rank's trained parameters from the same
    parameter of one process."""
    found = []
    with parts_in_float64() as mesh:
        batches = [make_batch(mesh.SEQUENCES * size, seed=step) for step in range(mesh.STEPS)]
        expected = mesh.train_one_process(batches)
        for shape in map(shape_of, shapes):
            mesh.give_worlds(shape)
            params = mesh.train(shape, batches)
            part = mesh.divide(mesh.deepcopy(expected))
            found.append(float((params - parameters_to_vector(part.parameters())).abs().max()))
    return found


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1, 1, 3), (1, 1, 3, 1)],
        [(1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4)],
        pytest.param([(3, 1, 1, 2), (1, 1, 3, 2), (1, 2, 3, 1)], marks=pytest.mark.stress),
        pytest.param([(1, 4, 1, 2), (1, 2, 1, 4), (2, 1, 4, 1)], marks=pytest.mark.stress),
    ],
)
def test_meshes_beyond_the_table_train_as_one_process(world: Worlds, shapes: list[Shape]) -> None:
    for found in world(prod(shapes[0]), timeout=PATIENCE).run(find_differences, shapes):
        assert [each for each in found if not each <= EXACT] == []


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.stress) for n in (6, 8, 16))]
)
def test_all_meshes_of_a_run_train_as_one_process(size: int, run_cli: Run) -> None:
    """Of two ranks or one along pp, cp and tp, as far as they divide the number of ranks."""
    ran = run_cli("mesh", "-n", size)
    assert ran.code == 0, ran.err
    rows = ROW.findall(ran.out)
    meshes = [(size // prod(each), *each) for each in product((1, 2), repeat=3)]
    assert [tuple(map(int, row[:4])) for row in rows] == [
        mesh for mesh in meshes if prod(mesh) == size
    ]
    assert [row for row in rows if not float(row[-1]) <= EXACT] == []
    assert ran.out.count("library same") == size


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (3, 1, 2, 1), (1, 2, 3, 4)])
def test_the_last_coordinate_changes_fastest(shape: Shape) -> None:
    places = [
        tuple(lesson().coordinates_of(rank, shape_of(shape)).values())
        for rank in range(prod(shape))
    ]
    assert places == [*product(*map(range, shape))]


def find_groups(rank: int, size: int, shape: Shape) -> dict[tuple[str, ...], list[list[int]]]:
    mesh = lesson()
    return {axes: [*map(list, mesh.groups_along(axes, shape_of(shape)))] for axes in mesh.GROUPS}


@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (1, 3, 1, 1), (2, 1, 1, 2)])
def test_ranks_of_a_group_differ_only_on_its_axes(shape: Shape, world: Worlds) -> None:
    axes_of = dict(zip(("dp", "pp", "cp", "tp"), range(4), strict=True))
    ranks = torch.arange(prod(shape)).view(shape)
    [groups, *others] = world(prod(shape), timeout=PATIENCE).run(find_groups, shape)
    assert others == [groups] * len(others)
    for axes, found in groups.items():
        dims = [axes_of[axis] for axis in axes]
        last = [*range(-len(dims), 0)]
        expected = ranks.movedim(dims, last).flatten(-len(dims)).flatten(0, -2).tolist()
        assert sorted(found) == sorted(expected)


def count_sent(shape: Shape, stage: int, sequences: int) -> dict[str, float]:
    """The bytes of float64 that a rank of this stage sends in a step, by axis, as the chapter's
    table says. The first ranks of tp have the biases of the row-parallel matrices, too."""
    dp, pp, cp, tp = shape
    parts = range((LAYERS + 2) * stage // pp, (LAYERS + 2) * (stage + 1) // pp)
    embeds, ends = 0 in parts, LAYERS + 1 in parts
    blocks, tokens = len(parts) - embeds - ends, sequences // dp * T // cp
    activations = 8 * tokens * C
    params = embeds * (V + T) * C + ends * (2 * C + V * C + V)
    params += blocks * ((12 * C**2 + 7 * C) // tp + 6 * C)
    group = dp * cp
    return {
        "tp": blocks * 8 * (tp - 1) / tp * activations,
        "cp": blocks * (6 * cp - 4) * activations / tp * (cp > 1),
        "pp": ((stage > 0) + (stage < pp - 1)) * activations,
        "dp x cp": 2 * (group - 1) / group * 8 * params,
    }


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.stress)])
def test_the_table_and_the_profile_have_the_bytes_of_the_formulas(
    size: int, run_cli: Run, tmp_path: Path
) -> None:
    file, steps = tmp_path / "profile.json", 2
    ran = run_cli("mesh", "-n", size, "--steps", steps, "--profile", file)
    assert ran.code == 0, ran.err
    total = Counter[str]()
    for row in ROW.findall(ran.out):
        shape: Any = tuple(map(int, row[:4]))
        dp, pp, cp, tp = shape
        stages = [count_sent(shape, stage, lesson().SEQUENCES * size) for stage in range(pp)]
        largest = [max(sent[name] for sent in stages) for name in stages[0]]
        assert [int(kib) for kib in row[4:8]] == [round(each / 1024) for each in largest]
        for sent in stages:
            total["all_reduce"] += steps * dp * cp * tp * sent["tp"]
            total["isend"] += steps * dp * cp * tp * (sent["pp"] + sent["cp"])
            for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
                # the ranks of tp that have no biases of row-parallel matrices have less
                total[name] += steps * dp * cp * tp * sent["dp x cp"] / 2
    counted = Counter[str]()
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        counted[row["operation"]] += row["sent"]
    assert counted["isend"] + counted["batch_isend_irecv"] == pytest.approx(total["isend"])
    few = 2 * (size - 1) * 8 * 5 * len(ROW.findall(ran.out))  # the numbers of the table's rows
    assert counted["all_reduce"] == pytest.approx(total["all_reduce"] + few)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        assert counted[name] == pytest.approx(total[name], rel=0.01)


def die_in_a_step(rank: int, size: int) -> None:
    with parts_in_float64() as mesh:
        shape = shape_of((1, 2, 1, 2))
        mesh.give_worlds(shape)
        divide = mesh.divide

        def divide_and_die(gpt: Any) -> Any:
            layers = divide(gpt)
            if rank == 3:
                layers[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return layers

        mesh.divide = divide_and_die
        mesh.train(shape, [make_batch(8, seed=0)])


def test_a_rank_that_is_killed_in_a_step_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 3 of 4 was killed by SIGKILL"):
        launch(die_in_a_step, 4, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-n", "5"), "ranks must divide 48"),
        (("-n", "2", "--sequences", "3"), "MICROBATCHES must divide SEQUENCES"),
    ],
    ids=["ranks", "sequences"],
)
def test_a_run_that_cannot_be_divided_is_refused_in_one_line(
    words: tuple[str, ...], said: str, run_cli: Run
) -> None:
    ran = run_cli("mesh", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert said in ran.err


@pytest.mark.torch(2, 15)  # older ones warn of fully_shard's root
@pytest.mark.parametrize("size", [2, 4])
def test_the_chapter_s_program_trains_the_same_on_any_mesh(
    size: int, run_cli: Run, tmp_path: Path
) -> None:
    """fully_shard over dp, parallelize_module over tp: the loss that the chapter shows."""
    chapter = CHAPTER.read_text(encoding="utf-8")
    program = re.search(
        r"^```python\n(import torch\n.*?init_device_mesh.*?)^```$", chapter, re.M | re.S
    )
    assert program
    file = tmp_path / "train.py"
    file.write_text(program[1], encoding="utf-8")
    ran = run_cli("run", "-n", size, file)
    assert ran.code == 0, ran.err
    shown = set(re.findall(r"^Rank \d is at .*: (loss \S+)$", chapter, re.MULTILINE))
    assert len(shown) == 1
    assert set(re.findall(r"(loss \S+)$", ran.out, re.MULTILINE)) == shown
