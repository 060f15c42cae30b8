"""Checkpoints in shards: whole or absent, read by any number of ranks bit for bit, beside torch's
own; random states, and samples that count once."""

from __future__ import annotations

import io
import os
import random
import signal
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fixtures import Worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardOf, distribute_tensor

from playground import RankFailed, launch
from playground.lessons.checkpoint import further, lesson
from playground.lessons.checkpoint.further import GlobalBatches
from playground.lessons.checkpoint.lesson import Shard, cut, load, newest, save
from playground.lessons.elastic.lesson import write
from playground.lessons.mesh.lesson import GPTStage, Mesh
from playground.lessons.tensor.lesson import (
    GPTConfig,
    copying,
    copying_loss,
    new_gpt,
    shard_gpt,
    vocab_parallel_cross_entropy,
)
from playground.training.sharding import METHODS

SMALL = GPTConfig(layers=1, width=24, heads=4)
Batch = tuple[torch.Tensor, torch.Tensor]


class Training:
    """A GPT in float64, of which each rank holds what its parallelism leaves it."""

    def __init__(self, kind: str, shape: tuple[int, int, int, int]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = new_gpt(SMALL, seed=1234).double()
        self.wholes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        self.part = rank, size
        self.flat: Any = None
        if kind in METHODS:
            self.flat = METHODS[kind](self.model)
            params = self.flat.shards()
        elif kind == "tensor":
            shard_gpt(self.model)
            params = [*self.model.parameters()]
        else:
            mesh = Mesh(shape)
            self.part = mesh.coordinates["tp"], shape[3]
            self.stage = GPTStage(self.model, mesh)
            params = [*self.stage.model.parameters()]
        self.kind = kind
        self.params = params
        self.optimizer = torch.optim.Adam(params, lr=1e-3)

    def make_state(self) -> None:
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.optimizer.step()

    def step(self, batch: Batch) -> float:
        """Returns this rank's part of the loss."""
        rank, size = dist.get_rank(), dist.get_world_size()
        tokens, targets = batch
        if self.flat:
            self.flat.zero_grad()
            loss = copying_loss(self.model(tokens.chunk(size)[rank]), targets.chunk(size)[rank])
            loss.backward()
            self.flat.after_backward()
            self.optimizer.step()
            self.flat.after_step()
            return loss.item() / size
        self.optimizer.zero_grad()
        if self.kind == "tensor":
            loss = vocab_parallel_cross_entropy(self.model(tokens), targets)
            loss.backward()
            self.optimizer.step()
            return loss.item() / size
        found = self.stage.step(tokens, targets, microbatches=2)
        self.optimizer.step()
        return found / self.mesh_ranks_with_loss(size)

    def mesh_ranks_with_loss(self, size: int) -> int:
        return size // len(self.stage.mesh.pp_ranks)

    def shards(self) -> dict[str, Shard]:
        return self.flat_shards() if self.flat else self.named_shards()

    def flat_shards(self) -> dict[str, Shard]:
        """Of the flat parameters, without the zeros that pad them."""
        found = {}
        for index, flat in enumerate(self.flat.flat_params):
            begin = min(dist.get_rank() % flat.shards * len(flat.shard), flat.numel)
            for key, value in self.state(flat.shard).items():
                place = ((begin,), (flat.numel,)) if value.dim() else ((), ())
                block = value[: flat.numel - begin] if value.dim() else value
                found[f"{index}.{key}"] = Shard(block, *place)
        return found

    def named_shards(self) -> dict[str, Shard]:
        """Of the parameters on this rank. A dimension is sharded if it is shorter than the
        model's."""
        index, _ = self.part
        held = {*self.params}
        found = {}
        for name, param in self.model.named_parameters():
            for key, value in self.state(param).items() if param in held else ():
                whole = self.wholes[name] if value.dim() else ()
                starts = (
                    index * n * (n != all_) for n, all_ in zip(value.shape, whole, strict=True)
                )
                found[f"{name}.{key}"] = Shard(value, (*starts,), whole)
        return found

    def state(self, param: Any) -> dict[str, torch.Tensor]:
        return {"values": param.detach(), **self.optimizer.state[param]}


def assemble(by_rank: list[dict[str, Shard]]) -> dict[str, torch.Tensor]:
    """The whole tensors, each element of which some rank holds."""
    found: dict[str, torch.Tensor] = {}
    for shards in by_rank:
        for name, shard in shards.items():
            whole = found.setdefault(name, torch.full(shard.whole, torch.nan).to(shard.block.dtype))
            at = [slice(s, s + n) for s, n in zip(shard.start, shard.block.shape, strict=True)]
            whole[tuple(at)] = shard.block
    assert not any(each.isnan().any() for each in found.values())
    return found


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [copying(8, generator, SMALL.length) for _ in range(count)]


def whole_state(training: Training) -> dict[str, torch.Tensor]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, training.shards())
    return assemble(held)


def train_and_save(rank: int, size: int, folder: Path, kind: str, shape: Any) -> Any:
    """What was saved, and this rank's parts of the losses in two more steps."""
    training = Training(kind, shape)
    coming = batches(4)
    for batch in coming[:2]:
        training.step(batch)
    save(folder, training.shards())
    return whole_state(training), [training.step(batch) for batch in coming[2:]]


def load_and_train(rank: int, size: int, folder: Path, kind: str, shape: Any) -> Any:
    training = Training(kind, shape)
    training.make_state()
    load(folder, training.shards())
    state = whole_state(training)
    if training.flat:
        training.flat.after_step()
    return state, [training.step(batch) for batch in batches(4)[2:]]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("ddp", None, None),
        ("zero-3", None, None),
        ("tensor", None, None),
        pytest.param("mesh", (2, 1, 1, 2), (1, 1, 1, 2), marks=pytest.mark.stress),
        ("mesh", (1, 2, 1, 2), (1, 2, 1, 1)),
    ],
)
def test_two_ranks_resume_what_four_have_saved(
    kind: str, before: Any, after: Any, world: Worlds, tmp_path: Path
) -> None:
    saved = world(4).run(train_and_save, tmp_path / "2", kind, before)
    loaded = world(2).run(load_and_train, tmp_path / "2", kind, after)
    for (expected, _), (found, _) in zip(saved, loaded * 2, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    undisturbed, resumed = (
        [sum(step) for step in zip(*(losses for _, losses in each), strict=True)]
        for each in (saved, loaded)
    )
    assert resumed == pytest.approx(undisturbed, abs=1e-10)
    assert undisturbed[0] != undisturbed[1]


class Killed(BaseException):
    """What ends a process that has no lives left."""


class Lives:
    """Bytes that may be written, and files that may be renamed, before the process is killed."""

    def __init__(self, left: float) -> None:
        self.left = left
        self.spent = 0

    def spend(self, wanted: int) -> int:
        allowed = int(min(wanted, self.left))
        self.left -= allowed
        self.spent += allowed
        return allowed


class MortalFile(io.FileIO):
    lives: Lives

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        allowed = self.lives.spend(len(content))
        super().write(content[:allowed])
        if allowed < len(content):
            raise Killed
        return allowed


def save_with(lives: Lives, folder: Path, shards: dict[str, Shard]) -> None:
    """Save, on one rank, until the lives are spent."""

    def open_mortal(path: Path, mode: str) -> MortalFile:
        file = MortalFile(path, mode)
        file.lives = lives
        return file

    def replace(source: Path, target: Path) -> None:
        if not lives.spend(1):
            raise Killed
        os.rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_mortal)
        patch.setattr(os, "replace", replace)
        patch.setattr(os, "fsync", lambda descriptor: None)
        save(folder, shards, common="all of it")


def kill_at_each_byte(rank: int, size: int, folder: Path, stride: int) -> tuple[int, int]:
    """Returns how often it was killed, and how often the checkpoint was there after all."""
    first, second = ({"w": cut(torch.arange(6.0) + base)} for base in (10, 20))
    save(folder / "1", first, common="all of it")
    lives = Lives(float("inf"))
    save_with(lives, folder / "2", second)
    assert newest(folder) == folder / "2"
    whole = 0
    points = range(0, lives.spent + stride, stride)
    for left in points:
        (folder / "2" / lesson.INDEX).unlink(missing_ok=True)
        try:
            save_with(Lives(left), folder / "2", second)
        except (Killed, RuntimeError):
            assert left < lives.spent
        found = {"w": cut(torch.zeros(6))}
        checkpoint = newest(folder)
        assert load(checkpoint, found)["common"] == "all of it"
        base = {folder / "1": 10, folder / "2": 20}[checkpoint]
        assert found["w"].block.tolist() == [base + each for each in range(6)]
        whole += checkpoint == folder / "2"
    return len(points), whole


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.stress)])
def test_a_checkpoint_is_whole_or_absent_wherever_its_writer_is_killed(
    stride: int, world: Worlds, tmp_path: Path
) -> None:
    """The points before and after a rename are among them. In between, the old one is the
    newest."""
    [(points, whole)] = world(1).run(kill_at_each_byte, tmp_path, stride)
    assert points > 2000 / stride
    assert whole == 1, "the last point, at which nothing is left to do"


def kill_in_save(rank: int, size: int, folder: Path) -> None:
    shards = {"w": cut(torch.arange(12.0), (rank, size))}
    save(folder / "1", shards)
    if rank == 1:
        lesson.sync_names = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
    save(folder / "2", shards)


def test_a_rank_killed_in_save_is_named_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 3 was killed by SIGKILL"):
        launch(kill_in_save, 3, args=(tmp_path,))
    assert (tmp_path / "2" / "1.pt").exists()
    assert newest(tmp_path) == tmp_path / "1"
    found = {"w": cut(torch.zeros(12))}
    load(tmp_path / "1", found)
    assert found["w"].block.tolist() == [*range(12)]


def save_parts(rank: int, size: int, folder: Path, missing: int) -> int:
    """Save a matrix in rows, without those of rank `missing`, and a vector that all hold. Returns
    the bytes that this rank writes."""
    torch.manual_seed(1)
    whole = torch.randn(60, 1000)
    shards = {"v": cut(torch.ones(3))}
    if rank != missing:
        shards["w"] = cut(whole, (rank, size))
    save(folder, shards, own=rank)
    return (folder / f"{rank}.pt").stat().st_size


def test_each_block_is_written_once_and_as_long_as_it_is(world: Worlds, tmp_path: Path) -> None:
    """A block that is a view of a larger memory, too."""
    sizes = world(3).run(save_parts, tmp_path / "1", -1)
    assert all(20 * 1000 * 4 < size < 20 * 1000 * 4 + 2500 for size in sizes)
    files = [torch.load(tmp_path / "1" / f"{rank}.pt") for rank in range(3)]
    assert Counter(name for file in files for name in file) == {"w": 3, "v": 1}
    assert load(tmp_path / "1", {})["own"] == [0, 1, 2]


def test_what_a_checkpoint_lacks_is_named(world: Worlds, tmp_path: Path) -> None:
    world(3).run(save_parts, tmp_path / "1", 1)
    for name, whole in (("w", (60, 1000)), ("v", (4,)), ("v", (3, 1)), ("u", (3,))):
        with pytest.raises(ValueError, match=rf"1 lacks all or a part of {name} \({whole[0]}, ?"):
            load(tmp_path / "1", {name: cut(torch.zeros(whole))})
    load(tmp_path / "1", {"v": cut(torch.zeros(3)), "w": cut(torch.zeros(60, 1000), (0, 3))})


def save_again(rank: int, size: int, folder: Path) -> str:
    save(folder, {"w": cut(torch.ones(3))})
    with pytest.raises(FileExistsError, match="holds a checkpoint: choose another folder"):
        save(folder, {"w": cut(torch.zeros(3))})
    found = {"w": cut(torch.zeros(3))}
    load(folder, found)
    return str(found["w"].block.tolist())


def test_a_checkpoint_is_not_written_over(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(save_again, tmp_path / "1") == ["[1.0, 1.0, 1.0]"] * 2


def draw_blocks(generator: random.Random, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Blocks that make up a tensor: it is halved somewhere, in any dimension, some times."""
    blocks = [tuple(slice(0, n) for n in shape)]
    for _ in range(generator.randrange(6)):
        block = blocks.pop(generator.randrange(len(blocks)))
        dim = generator.randrange(len(shape))
        middle = generator.randint(block[dim].start, block[dim].stop)
        for part in (slice(block[dim].start, middle), slice(middle, block[dim].stop)):
            blocks.append((*block[:dim], part, *block[dim + 1 :]))
    return blocks


def shard_at(whole: torch.Tensor, block: tuple[slice, ...]) -> Shard:
    return Shard(whole[block], tuple(each.start for each in block), tuple(whole.shape))


@pytest.mark.parametrize("trial", range(30))
def test_blocks_drawn_at_random_are_read_into_others(trial: int, tmp_path: Path) -> None:
    generator = random.Random(trial)
    shape = tuple(generator.randint(0, 6) for _ in range(generator.randint(1, 4)))
    whole = torch.arange(prod(shape)).view(shape) + 1
    saved = [shard_at(whole, block) for block in draw_blocks(generator, shape)]
    for writer, shard in enumerate(saved):
        write(tmp_path / f"{writer}.pt", {"w": shard.block.clone()})
    writers = {("w", shard.place): writer for writer, shard in enumerate(saved)}
    write(tmp_path / lesson.INDEX, {"writers": writers})
    for block in draw_blocks(generator, shape):
        found = torch.zeros_like(whole)
        load(tmp_path, {"w": shard_at(found, block)})
        assert torch.equal(found[block], whole[block])
        assert found.count_nonzero() == whole[block].numel()


def test_of_the_ranks_that_hold_a_block_the_one_with_least_to_write_writes_it() -> None:
    sizes = [5, 3, 2, 2, 1, 4]
    held = {f"w{index}": ((0,), (size,), (size,)) for index, size in enumerate(sizes)}
    writers = lesson.choose_writers([held] * 3)
    elements = Counter(dict.fromkeys(range(3), 0))
    for (name, _), rank in writers.items():
        elements[rank] += sizes[int(name[1:])]
    assert len(writers) == len(sizes)
    assert elements == {0: 5, 1: 8, 2: 4}
    own = {**held, "w0": ((5,), (5,), (10,))}
    assert lesson.choose_writers([held, own])["w0", own["w0"]] == 1


def save_both(rank: int, size: int, folder: Path, whole: torch.Tensor) -> None:
    """Rows, by hand and by torch."""
    rows = distribute_tensor(whole, init_device_mesh("cpu", (size,)), [ShardOf(0)])
    dcp.save({"w": rows}, checkpoint_id=folder / "torch")
    save(folder / "ours", {"w": cut(whole, (rank, size))})


def load_both(rank: int, size: int, folder: Path, shape: tuple[int, ...]) -> list[Any]:
    """Columns, by hand and by torch."""
    columns = distribute_tensor(torch.zeros(shape), init_device_mesh("cpu", (size,)), [ShardOf(1)])
    dcp.load({"w": columns}, checkpoint_id=folder / "torch")
    ours = cut(torch.zeros(shape), (0, 1), (rank, size))
    load(folder / "ours", {"w": ours})
    return [each.tolist() for each in (ours.block, columns.to_local())]


def test_what_is_read_is_what_torch_reads(world: Worlds, tmp_path: Path) -> None:
    whole = torch.arange(13.0 * 6).view(13, 6) + 1
    world(3).run(save_both, tmp_path, whole)
    for rank, (ours, theirs) in enumerate(world(2).run(load_both, tmp_path, (13, 6))):
        assert ours == theirs == whole.chunk(2, dim=1)[rank].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_layout_is_read_into_each(size: int, world: Worlds) -> None:
    by_rank = world(size).run(lesson.reshard)
    for values in by_rank:
        assert values["pairs"] == values["equal_bits"] == 16
    for layout in lesson.LAYOUTS:  # together they write one copy of 12,448 numbers, thrice
        kib = sum(values[layout] for values in by_rank)
        assert 3 * 12_448 * 4 / 1024 < kib < 3 * 12_448 * 4 / 1024 + 6 * size


@pytest.mark.parametrize("size", [1, 3])
def test_dropout_goes_on_as_it_was_where_random_states_are_restored(
    size: int, world: Worlds
) -> None:
    for values in world(size).run(further.random_states):
        assert values["equal_bits"]
        assert abs(values["seeded_again"] - values["undisturbed"]) > 1e-4


@pytest.mark.parametrize(("size", "twice"), [(1, 0), (2, 192), (4, 192)])
def test_no_sample_counts_twice_or_never(size: int, twice: int, world: Worlds) -> None:
    for values in world(size).run(further.samples):
        assert values["with_state"] == {"twice": 0, "never": 0}
        assert values["skipping"] == {"twice": twice, "never": 0}


@pytest.mark.parametrize("trial", range(20))
def test_samples_count_once_however_often_a_run_is_killed(trial: int) -> None:
    """Killed at a random step, and resumed by a random number of ranks from one before it."""
    generator = random.Random(trial)
    samples, batch_size = generator.randint(1, 200), generator.randint(1, 20)
    state = {"epoch": 0, "seen": 0}
    counted: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    while state["epoch"] < 2:
        size = generator.randint(1, 7)
        samplers = [GlobalBatches(samples, batch_size, rank, size, **state) for rank in range(size)]
        ahead = [[*sampler] for sampler in samplers]  # as a loader that fetches all at once
        for step in range(generator.randint(0, len(ahead[0]))):
            counted[state["epoch"]].update(each for batches in ahead for each in batches[step])
            for sampler in samplers:
                sampler.advance()
            state = samplers[0].state_dict()
            assert all(sampler.state_dict() == state for sampler in samplers)
    for times in counted.values():
        assert times == Counter(range(samples))
    orders = [[*GlobalBatches(samples, samples, 0, 1, epoch)] for epoch in (0, 1)]
    assert samples < 5 or orders[0] != orders[1]


def test_torch_s_checkpoints_beside_ours(world: Worlds) -> None:
    for values in world(2).run(further.beside_torch):
        for way, counted in values["ways"].items():
            assert counted["files"] == 3, way
            assert counted["mib"] == pytest.approx(32, abs=0.1)
            assert counted["equal_bits"]
            assert counted["seconds"] > 0
        assert [*values["ways"]] == ["by_hand", "dcp", "async_dcp"]
