"""checkpoint: blocks of any kind are read by any number of ranks, bit for bit; it is whole or
absent."""

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
from boards import source_of
from fixtures import Run, Worlds
from sharded_functions import shard_gpt, vocab_parallel_cross_entropy

from playground import RankFailed, launch
from playground.lessons.checkpoint import lesson
from playground.training.sharding import METHODS
from playground.training.tiny_gpt import GPTConfig, copying, copying_loss, new_gpt

checkpoint: Any = lesson
Block = checkpoint.Block
LAYOUTS = ("all", "rows", "columns", "grid")


def layouts_of(ranks: int) -> dict[str, tuple[int, int]]:
    """Of a matrix: parts of its rows, and of its columns."""
    grid = (max(1, ranks // 2), min(2, ranks))
    return dict(zip(LAYOUTS, ((1, 1), (ranks, 1), (1, ranks), grid), strict=True))


def read_into_every_layout(rank: int, size: int, folder: Path, readers: int) -> int:
    """How many pairs of a layout that is saved and one that is read have the same bits."""
    torch.manual_seed(1)
    state = {"up": torch.randn(7, 5), "down": torch.randn(4, 9)}
    equal = 0
    for saved, parts in layouts_of(size).items():
        (folder / saved).mkdir(exist_ok=True)
        blocks = {name: checkpoint.cut(whole, parts, rank) for name, whole in state.items()}
        checkpoint.save(folder / saved, blocks)
        for wanted in layouts_of(readers).values():
            expected = {name: checkpoint.cut(each, wanted, rank) for name, each in state.items()}
            found = {
                name: Block(torch.zeros_like(block.tensor), block.begin)
                for name, block in expected.items()
            }
            checkpoint.load(folder / saved, found)
            equal += all(found[name].tensor.equal(expected[name].tensor) for name in state)
    return equal


@pytest.mark.parametrize(("size", "readers"), [(1, 1), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_each_layout_is_read_into_each_by_another_number_of_ranks(
    size: int, readers: int, world: Worlds, tmp_path: Path
) -> None:
    pairs = len(LAYOUTS) ** 2
    assert world(size).run(read_into_every_layout, tmp_path, readers) == [pairs] * size


def rows_of_all(rank: int, size: int, folder: Path, readers: int) -> float:
    folder = folder / f"{readers}"
    difference = checkpoint.rows_from_n_to_m(folder, rank, size, readers)
    return float(difference)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_are_read_by_fewer_ranks(size: int, world: Worlds, tmp_path: Path) -> None:
    for readers in range(1, size + 1):
        assert world(size).run(rows_of_all, tmp_path, readers) == [0.0] * size


SMALL = GPTConfig(layers=1, width=24, heads=4)
Batch = tuple[torch.Tensor, torch.Tensor]


class Training:
    """A GPT in float64, of which each rank holds what its parallelism leaves it."""

    def __init__(self, kind: str) -> None:
        self.model = new_gpt(SMALL, seed=1234).double()
        self.wholes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        self.flat: Any = None
        if kind in METHODS:
            self.flat = METHODS[kind](self.model)
            params = self.flat.shards()
        else:
            shard_gpt(self.model)
            params = [*self.model.parameters()]
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
        loss = vocab_parallel_cross_entropy(self.model(tokens), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item() / size

    def blocks(self) -> dict[str, Any]:
        return self.flat_blocks() if self.flat else self.named_blocks()

    def flat_blocks(self) -> dict[str, Any]:
        """Of the flat parameters, without the zeros that pad them."""
        found = {}
        for index, flat in enumerate(self.flat.flat_params):
            begin = min(dist.get_rank() % flat.shards * len(flat.shard), flat.numel)
            for key, value in self.state(flat.shard).items():
                part = value[: flat.numel - begin] if value.dim() else value
                found[f"{index}.{key}"] = Block(part, (begin,) * value.dim())
        return found

    def named_blocks(self) -> dict[str, Any]:
        """Of the parameters on this rank. A dimension is sharded if it is shorter than the
        model's."""
        found = {}
        for name, param in self.model.named_parameters():
            for key, value in self.state(param).items():
                whole = self.wholes[name] if value.dim() else ()
                begin = (
                    dist.get_rank() * n * (n != all_)
                    for n, all_ in zip(value.shape, whole, strict=True)
                )
                found[f"{name}.{key}"] = Block(value, (*begin,))
        return found

    def state(self, param: Any) -> dict[str, torch.Tensor]:
        return {"values": param.detach(), **self.optimizer.state[param]}


def assemble(by_rank: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole tensors, each element of which some rank holds."""
    found: dict[str, torch.Tensor] = {}
    for name, first in by_rank[0].items():
        blocks = [shards[name] for shards in by_rank]
        shape = [max(ends) for ends in zip(*(block.end for block in blocks), strict=True)]
        found[name] = torch.full(shape, torch.nan).to(first.tensor.dtype)
        for block in blocks:
            at = [slice(*bounds) for bounds in zip(block.begin, block.end, strict=True)]
            found[name][tuple(at)] = block.tensor
    assert not any(each.isnan().any() for each in found.values())
    return found


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [copying(8, generator, SMALL.length) for _ in range(count)]


def whole_state(training: Training) -> dict[str, torch.Tensor]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, training.blocks())
    return assemble(held)


def train_and_save(rank: int, size: int, folder: Path, kind: str) -> Any:
    """What was saved, and this rank's parts of the losses in two more steps."""
    training = Training(kind)
    coming = batches(4)
    for batch in coming[:2]:
        training.step(batch)
    checkpoint.save(folder, training.blocks())
    return whole_state(training), [training.step(batch) for batch in coming[2:]]


def load_and_train(rank: int, size: int, folder: Path, kind: str) -> Any:
    training = Training(kind)
    training.make_state()
    checkpoint.load(folder, training.blocks())
    state = whole_state(training)
    if training.flat:
        training.flat.after_step()
    return state, [training.step(batch) for batch in batches(4)[2:]]


@pytest.mark.parametrize("kind", ["ddp", "zero-3", "tensor"])
def test_two_ranks_resume_what_four_have_saved(kind: str, world: Worlds, tmp_path: Path) -> None:
    """A GPT: state bit for bit, and the next losses."""
    saved = world(4).run(train_and_save, tmp_path, kind)
    loaded = world(2).run(load_and_train, tmp_path, kind)
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


def save_with(lives: Lives, folder: Path, blocks: dict[str, Any]) -> None:
    """Save, on one rank, until the lives are spent."""
    torch_save, rename = torch.save, Path.replace

    def save(state: object, file: Path) -> None:
        torch_save(state, buffer := io.BytesIO())
        allowed = lives.spend(len(buffer.getvalue()))
        file.write_bytes(buffer.getvalue()[:allowed])
        if allowed < len(buffer.getvalue()):
            raise Killed

    def replace(source: Path, target: Path) -> Path:
        if not lives.spend(1):
            raise Killed
        return rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save)
        patch.setattr(Path, "replace", replace)
        checkpoint.save(folder, blocks)


def newest(folder: Path) -> Path:
    """The newest whole checkpoint: their names are their steps."""
    return max(index.parent for index in folder.glob("*/index"))


def kill_at_each_byte(rank: int, size: int, folder: Path, stride: int) -> tuple[int, int]:
    """Returns how often it was killed, and how often the checkpoint was there after all."""
    first, second = ({"w": Block(torch.arange(6.0) + base, (0,))} for base in (10, 20))
    for step in ("1", "2"):
        (folder / step).mkdir()
    checkpoint.save(folder / "1", first)
    lives = Lives(float("inf"))
    save_with(lives, folder / "2", second)
    assert newest(folder) == folder / "2"
    whole = 0
    points = range(0, lives.spent + stride, stride)
    for left in points:
        (folder / "2" / "index").unlink(missing_ok=True)
        try:
            save_with(Lives(left), folder / "2", second)
        except Killed:
            assert left < lives.spent
        found = Block(torch.zeros(6), (0,))
        newest_one = newest(folder)
        checkpoint.load(newest_one, {"w": found})
        base = {folder / "1": 10, folder / "2": 20}[newest_one]
        assert found.tensor.tolist() == [base + each for each in range(6)]
        whole += newest_one == folder / "2"
    return len(points), whole


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.stress)])
def test_a_checkpoint_is_whole_or_absent_wherever_its_writer_is_killed(
    stride: int, world: Worlds, tmp_path: Path
) -> None:
    """The points before and after a rename are among them. In between, the old one is the
    newest."""
    [(points, whole)] = world(1).run(kill_at_each_byte, tmp_path, stride)
    assert points > 1500 / stride
    assert whole == 1, "the last point, at which nothing is left to do"


def kill_in_save(rank: int, size: int, folder: Path) -> None:
    blocks = {"w": checkpoint.cut(torch.arange(12.0).view(12, 1), (size, 1), rank)}
    for step in ("1", "2"):
        (folder / step).mkdir(exist_ok=True)
    checkpoint.save(folder / "1", blocks)
    if rank == 1:
        dist.barrier = lambda: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(folder / "2", blocks)


def test_a_rank_killed_in_save_is_named_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """It has written its blocks, and the index is not there."""
    with pytest.raises(RankFailed, match="rank 1 of 3 was killed by SIGKILL"):
        launch(kill_in_save, 3, args=(tmp_path,))
    assert (tmp_path / "2" / "1.pt").exists()
    assert newest(tmp_path) == tmp_path / "1"
    found = Block(torch.zeros(12, 1), (0, 0))
    checkpoint.load(tmp_path / "1", {"w": found})
    assert found.tensor.flatten().tolist() == [*range(12)]


def save_parts(rank: int, size: int, folder: Path) -> int:
    """Save a matrix in rows, a vector that all ranks hold, and one that only rank 1 holds. Returns
    the bytes that this rank writes."""
    torch.manual_seed(1)
    blocks = {
        "w": checkpoint.cut(torch.randn(60, 1000), (size, 1), rank),
        "v": Block(torch.ones(3), (0,)),
    }
    if rank == 1:
        blocks["own"] = Block(torch.full((2,), 7.0), (0,))
    checkpoint.save(folder, blocks)
    return (folder / f"{rank}.pt").stat().st_size


def test_each_block_is_written_once_and_as_long_as_it_is(world: Worlds, tmp_path: Path) -> None:
    """A block that is a view of a larger memory, too; and a tensor that one rank has."""
    sizes = world(3).run(save_parts, tmp_path)
    assert all(20 * 1000 * 4 < size < 20 * 1000 * 4 + 2500 for size in sizes)
    files = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert Counter(name for file in files for name in file) == {"w": 3, "v": 1, "own": 1}
    found = {"own": Block(torch.zeros(2), (0,)), "unknown": Block(torch.zeros(2), (0,))}
    checkpoint.load(tmp_path, found)
    assert found["own"].tensor.tolist() == [7, 7]
    assert found["unknown"].tensor.tolist() == [0, 0]


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


def block_at(whole: torch.Tensor, place: tuple[slice, ...]) -> Any:
    return Block(whole[place], tuple(each.start for each in place))


@pytest.mark.parametrize("trial", range(30))
def test_blocks_drawn_at_random_are_read_into_others(trial: int, tmp_path: Path) -> None:
    generator = random.Random(trial)
    shape = tuple(generator.randint(0, 6) for _ in range(generator.randint(1, 4)))
    whole = torch.arange(prod(shape)).view(shape) + 1
    saved = [block_at(whole, place) for place in draw_blocks(generator, shape)]
    index = checkpoint.choose_writers([[("w", block.begin, block.end)] for block in saved])
    for entry in index:
        holder = next(
            block for block in saved if (block.begin, block.end) == (entry["begin"], entry["end"])
        )
        torch.save({"w": holder.tensor.clone()}, tmp_path / f"{entry['writer']}.pt")
    torch.save(index, tmp_path / "index")
    for place in draw_blocks(generator, shape):
        found = torch.zeros_like(whole)
        checkpoint.load(tmp_path, {"w": block_at(found, place)})
        assert torch.equal(found[place], whole[place])


def test_of_the_ranks_that_hold_a_block_the_one_with_least_to_write_writes_it() -> None:
    sizes = [5, 3, 2, 2, 1, 4]
    held = [(f"w{index}", (0,), (size,)) for index, size in enumerate(sizes)]
    index = checkpoint.choose_writers([held] * 3)
    elements = Counter(dict.fromkeys(range(3), 0))
    for entry in index:
        elements[entry["writer"]] += sizes[int(entry["name"][1:])]
    assert len(index) == len(sizes)
    assert elements == {0: 5, 1: 8, 2: 4}
    own = [("w0", (5,), (10,)), *held[1:]]
    writers = {
        (entry["name"], entry["begin"]): entry["writer"]
        for entry in checkpoint.choose_writers([held, own])
    }
    assert writers["w0", (5,)] == 1


def test_a_barrier_that_is_missing_is_a_hint(run_cli: Run, tmp_path: Path) -> None:
    """Even if all files are there: here, ranks wait by the store, which is not seen."""
    text = source_of("checkpoint")
    barrier = "    dist.barrier()  # all files are there; --check hints says if it is missing\n"
    assert text.count(barrier) == 1
    wait = (
        "    store = dist.distributed_c10d._get_default_store()\n"
        '    store.add("saved", 1)\n'
        '    while store.add("saved", 0) < size:\n'
        "        pass\n"
    )
    file = tmp_path / "lesson.py"
    file.write_text(text.replace(barrier, wait), encoding="utf-8")
    ran = run_cli("run", "-n", 2, "--check", "hints", file)
    assert ran.code == 0
    assert "perhaps wrong [F4-race]" in ran.err
