"""Judges of the exercises on checkpoint."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from playground.exercises.cases import Case, Cases, choose_setting, predict
from playground.tap import Call, Observer, observing
from playground.ui.units import plural

PATIENCE = 2.0
"""Seconds that a file is held back at most."""


@dataclass(frozen=True)
class Shard:
    """A block of a whole tensor. It begins at the index `start` of the tensor."""

    block: torch.Tensor
    start: tuple[int, ...]


def cut(whole: torch.Tensor, *parts: tuple[int, int]) -> Shard:
    """Along dimension d the part `index` of `count`, if parts[d] is (index, count); further
    dimensions stay whole."""
    start, block = [0] * whole.dim(), whole
    for dim, (index, count) in enumerate(parts):
        start[dim] = whole.shape[dim] * index // count
        stop = whole.shape[dim] * (index + 1) // count
        block = block.narrow(dim, start[dim], stop - start[dim])
    return Shard(block, tuple(start))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0, on all ranks, until all have left the block."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        yield Path(folder[0])
        dist.barrier()


class Writes(Observer):
    """The files that the ranks write, in a folder that they share. A rank's calls are files, too.

    A file that could be late is: the last rank's blocks until the index comes, and the index until
    all other ranks return. That shows what does not wait for them. A rank that waits is known by
    its calls: it has begun one more than the rank that writes.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self.calls = 0
        folder.mkdir(exist_ok=True)

    def begun(self, call: Call) -> None:
        self.mark(f"call{self.calls}")
        self.calls += 1

    def mark(self, what: str, text: str = "") -> None:
        (self.folder / f"{what}-{self.rank}").write_text(text)

    def count(self, what: str) -> int:
        return len([*self.folder.glob(f"{what}-*")])

    def hold_back(self, ranks: Sequence[int], until: Callable[[], bool]) -> None:
        """Wait until that is so, or these ranks are done."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not until() and not all(map(self.is_done, ranks)):
            time.sleep(0.001)

    def is_done(self, rank: int) -> bool:
        """Whether it has returned, or waits for this rank."""
        marks = f"call{self.calls}-{rank}", f"returned-{rank}"
        return any((self.folder / mark).exists() for mark in marks)

    def write_blocks(self) -> None:
        if self.rank == self.size - 1:
            self.hold_back([0], lambda: self.count("begun") > 0)
        self.mark("blocks")

    def write_index(self) -> None:
        is_whole = self.count("blocks") == self.size
        self.mark("begun", "" if is_whole else "before all blocks")
        self.hold_back([rank for rank in range(self.size) if rank != self.rank], lambda: False)
        self.mark("index")

    def call(self, function: Callable[..., object]) -> dict[str, object]:
        with observing(self):
            function(self.rank, self.size, self.write_blocks, self.write_index)
        is_there = self.count("index") > 0
        self.mark("returned")
        dist.group.WORLD.barrier().wait()
        early = any(file.read_text() for file in self.folder.glob("begun-*"))
        return {
            "blocks": f"written by {plural(self.count('blocks'), 'rank')}",
            "index": f"written by {plural(self.count('index'), 'rank')}",
            "the index came": "before all blocks" if early else "after all blocks",
            "this rank returned": "with the index" if is_there else "before the index",
        }


def commit(rank: int, size: int, seed: int) -> Cases:
    """Files that are written late. What matters is the order: nothing is timed."""
    with shared_folder() as folder:
        for number in range(2):
            writes = Writes(rank, size, folder / str(number))
            yield Case(
                f"checkpoint {number + 1}",
                (),
                {
                    "blocks": f"written by {plural(size, 'rank')}",
                    "index": "written by 1 rank",
                    "the index came": "after all blocks",
                    "this rank returned": "with the index",
                },
                is_coded=False,
                run=writes.call,
            )


def fill_block(rank: int, size: int, seed: int) -> Cases:
    """Blocks of a matrix of numbered elements, read into other blocks. What is read is counted."""
    for about, shape, saved, mine in (
        ("rows of 2 ranks, read as columns", (4, 6), rows(2), columns(size)),
        ("columns of 3, as rows", (5, 7), columns(3), rows(size)),
        ("4 blocks, as rows", (5, 4), blocks(2, 2), rows(size)),
        ("rows of 3, as 2 columns of blocks", (6, 5), rows(3), blocks(-(-size // 2), 2)),
        ("one block, as rows", (3, 2), rows(1), rows(size)),
        ("rows of 4, one of them empty, as columns", (3, 5), rows(4), columns(size)),
    ):
        whole = torch.arange(shape[0] * shape[1]).view(shape) + 1
        files = [cut(whole, *parts) for parts in saved]
        own = cut(torch.zeros_like(whole), *mine[rank])
        elements = [0]
        yield Case(
            about,
            (
                own.block,
                own.start,
                [(shard.start, tuple(shard.block.shape)) for shard in files],
                partial(read, files, elements),
            ),
            held=partial(describe_read, own.block, elements),
            expected={
                "block": cut(whole, *mine[rank]).block.clone(),
                "elements read": own.block.numel(),
            },
            is_coded=False,
            most_moved=0,
        )


def describe_read(block: torch.Tensor, elements: list[int]) -> dict[str, object]:
    return {"block": block, "elements read": elements[0]}


Parts = list[tuple[tuple[int, int], ...]]


def rows(count: int) -> Parts:
    """The parts of each of so many ranks, as `cut` takes them."""
    return blocks(count, 1)


def columns(count: int) -> Parts:
    return blocks(1, count)


def blocks(high: int, wide: int) -> Parts:
    return [((row, high), (column, wide)) for row, column in product(range(high), range(wide))]


def read(
    files: Sequence[Shard], elements: list[int], file: int, rows: slice, columns: slice
) -> torch.Tensor:
    block = files[file].block
    for part, length in zip((rows, columns), block.shape, strict=True):
        if not 0 <= part.start <= part.stop <= length:
            raise ValueError(f"{part} in a block of shape {tuple(block.shape)}")
    elements[0] += block[rows, columns].numel()
    return block[rows, columns].clone()


def elements_written(rank: int, size: int, seed: int) -> Cases:
    """The files that the ranks write."""
    with shared_folder() as folder:
        for number, elements in enumerate(([7, 5, 3, 3, 2], [4, 9, 4, 4, 1, 1], [10])):
            counted = {}
            for layout, parts in (("ddp", ()), ("zero_3", ((rank, size),))):
                file = folder / f"{layout}{number}"
                save([cut(torch.ones(length), *parts) for length in elements], file)
                counted[layout] = [
                    sum(block.numel() for block in torch.load(f"{file}-{writer}"))
                    for writer in range(size)
                ]
            about = f"tensors of {', '.join(map(str, elements))} elements"
            yield predict(about, (size, elements), counted)


def save(shards: Sequence[Shard], file: Path) -> None:
    """Write each block of one-dimensional tensors once: of the ranks that hold it, the one with the
    fewest elements so far does so. A rank's file ends in its number. All ranks call this."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [(number, shard.start, len(shard.block)) for number, shard in enumerate(shards)]
    held: list[list[tuple[int, tuple[int, ...], int]]] = [[] for _ in range(size)]
    dist.all_gather_object(held, own)
    holders: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for holder, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(holder)
    elements, blocks = [0] * size, []
    for (number, _, length), ranks in holders.items():
        writer = min(ranks, key=elements.__getitem__)
        elements[writer] += length
        if writer == rank:
            blocks.append(shards[number].block.clone())
    torch.save(blocks, f"{file}-{rank}")
    dist.barrier()


def repeated(rank: int, size: int, seed: int) -> Cases:
    """One rank has taken more samples than the others; rank 0 is not it."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, usual = draw.randrange(1, size), draw.randrange(2, 4)
        taken = [usual + 2 * (other == culprit) for other in range(size)]
        order = draw.sample(range(100), 30)
        yield Case(
            f"{len(order)} samples",
            (order, taken[rank]),
            order[sum(taken) :][rank::size],
            is_coded=False,
            culprit=culprit,
        )


EVERY = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def how_often(rank: int, size: int, seed: int) -> Cases:
    """What saves and failures cost, as Young and Daly add it up."""
    between, restart, step = 25_000 * 3600 / 500, 600, 8
    kinds = {"synchronous": (90, 0), "asynchronous": (6, 180)}

    def lost(save: str, every: int) -> float:
        stands_still, later = kinds[save]
        interval = every * step
        failures = 3600 / between
        return 3600 * stands_still / interval + failures * (restart + later + interval / 2)

    settings: list[dict[str, str | int]] = [
        {"save": kind, "every": every} for kind, every in product(kinds, EVERY)
    ]
    yield choose_setting("500 hosts", settings, lost, "seconds lost of each hour")
