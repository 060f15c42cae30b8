"""A checkpoint in shards: every rank writes its own, and any number of ranks can resume.

    torchrun --nproc-per-node 4 lesson.py
    python -m playground checkpoint

A shard is a block of a whole tensor, whichever parallelism has cut it. Each rank writes its blocks
into a file, then rank 0 writes the index, which says what is where. A checkpoint without an index
does not exist. A rank that resumes copies what overlaps with its own blocks:

    40/0.pt  40/1.pt  40/2.pt  40/3.pt  the blocks that each rank writes
    40/index.pt                         which rank has written which block

On several hosts, TMPDIR must be a folder that all share.
Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from playground.lessons.elastic.lesson import write

INDEX = "index.pt"
LAYOUTS = "ddp", "zero-3", "tensor", "mesh"
Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A block of a tensor of shape `whole`. It begins at the index `start` of that."""

    block: torch.Tensor
    start: Sizes
    whole: Sizes

    @property
    def place(self) -> tuple[Sizes, Sizes, Sizes]:
        return self.start, tuple(self.block.shape), self.whole


def save(folder: Path, shards: Mapping[str, Shard], common: object = None, own: Any = None) -> None:
    """Write the shards of all ranks, what is `common` to the ranks, and what is each rank's `own`.
    All must call this. Raises `FileExistsError` for a folder that holds a checkpoint."""
    if (folder / INDEX).exists():
        raise FileExistsError(f"{folder} holds a checkpoint: choose another folder")
    rank, held = dist.get_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(held, ({name: shard.place for name, shard in shards.items()}, own))
    places, owns = zip(*held, strict=True)
    writers = choose_writers(places)
    blocks = {
        name: shard.block.detach().clone()  # of a view, torch.save would write the whole memory
        for name, shard in shards.items()
        if writers[name, shard.place] == rank
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / f"{rank}.pt", blocks)
    sync_names(folder)
    dist.barrier()  # every block is on the disk before the index says so
    if rank == 0:
        write(folder / INDEX, {"writers": writers, "common": common, "own": [*owns]})
        sync_names(folder)
    dist.barrier()


def choose_writers(places: Any) -> dict[tuple[str, Any], int]:
    """The rank that writes each block: of those that hold it, the one with the fewest elements so
    far. `places`: by rank, the place of its block of each tensor."""
    holders: dict[tuple[str, Any], list[int]] = {}
    for rank, held in enumerate(places):
        for block in held.items():
            holders.setdefault(block, []).append(rank)
    elements = [0] * len(places)
    writers = {}
    for block, ranks in holders.items():
        writers[block] = min(ranks, key=elements.__getitem__)
        _, (_, shape, _) = block
        elements[writers[block]] += prod(shape)
    return writers


def sync_names(folder: Path) -> None:
    """Force the names of the files in `folder` to the disk. Windows opens no folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(folder: Path, shards: Mapping[str, Shard]) -> Any:
    """Fill the shards, and return the index. A rank needs no other for this. Raises `ValueError`
    for a tensor that is not in the checkpoint, or not in this shape."""
    index = read(folder / INDEX)
    missing = {name: shard.block.numel() for name, shard in shards.items()}
    files: dict[int, Any] = {}
    for (name, place), writer in index["writers"].items():
        if name in shards and place[2] == shards[name].whole:
            shard = shards[name]
            if writer not in files:
                files[writer] = read(folder / f"{writer}.pt")
            part = files[writer][name][overlap(place, shard.place)]
            shard.block.detach()[overlap(shard.place, place)] = part.to(shard.block.device)
            missing[name] -= part.numel()
    if lacking := [f"{name} {shards[name].whole}" for name, count in missing.items() if count > 0]:
        raise ValueError(f"{folder} lacks all or a part of {', '.join(lacking)}")
    return index


def read(file: Path) -> Any:
    """Mapped into memory: the disk is read where blocks are copied from."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def overlap(place: tuple[Sizes, Sizes, Sizes], other: Any) -> tuple[slice, ...]:
    """Where the block at `place` has elements that the block at `other` has, too."""
    slices = []
    for first, length, begin, count in zip(*place[:2], *other[:2], strict=True):
        low, high = max(first, begin), min(first + length, begin + count)
        slices.append(slice(low - first, max(low, high) - first))
    return tuple(slices)


def newest(folder: Path) -> Any:
    """The newest whole checkpoint in `folder`, where their names are their steps; or None."""
    whole = [index.parent for index in folder.glob(f"*/{INDEX}")]
    return max(whole, key=lambda each: int(each.name), default=None)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0, on all ranks, until all have left the block."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        yield Path(folder[0])
        dist.barrier()


def cut(whole: torch.Tensor, *parts: tuple[int, int]) -> Shard:
    """Along dimension d the part `index` of `count`, if parts[d] is (index, count); further
    dimensions stay whole."""
    start, block = [0] * whole.dim(), whole
    for dim, (index, count) in enumerate(parts[: whole.dim()]):
        start[dim] = whole.shape[dim] * index // count
        stop = whole.shape[dim] * (index + 1) // count
        block = block.narrow(dim, start[dim], stop - start[dim])
    return Shard(block, tuple(start), tuple(whole.shape))


def cut_for(layout: str, whole: Mapping[str, torch.Tensor], rank: int, ranks: int) -> Any:
    """What that rank holds of each tensor of an MLP, whose layers are `up` and `down`."""
    mine, all_of_it, tp = (rank, ranks), (0, 1), 2 - ranks % 2
    of_mesh = [(rank // tp, ranks // tp), (rank % tp, tp)]
    up, down = {
        "ddp": ([], []),
        "zero-3": ([mine], [mine]),
        "tensor": ([mine], [all_of_it, mine]),  # column- and row-parallel
        "mesh": (of_mesh, of_mesh),
    }[layout]
    return {
        name: cut(each, *(up if name.startswith("up") else down)) for name, each in whole.items()
    }


def new_state() -> dict[str, torch.Tensor]:
    """The parameters of an MLP, and Adam's moments of each."""
    torch.manual_seed(1234)
    shapes = {"up.weight": (96, 64), "up.bias": (96,), "down.weight": (64, 96), "down.bias": (64,)}
    kinds = ("", ".exp_avg", ".exp_avg_sq")
    return {name + kind: torch.randn(shape) for name, shape in shapes.items() for kind in kinds}


def reshard(rank: int, size: int) -> dict[str, object]:
    """All ranks save a training's state in each layout, and half as many read it into each layout:
    how many of these pairs are equal bit for bit. By layout, the KiB that this rank writes.
    """
    whole = new_state()
    readers = max(1, size // 2)
    kib: dict[str, object] = {}
    equal = []
    with shared_folder() as folder:
        for saved in LAYOUTS:
            save(folder / saved, cut_for(saved, whole, rank, size))
            kib[saved] = round((folder / saved / f"{rank}.pt").stat().st_size / 1024, 1)
            for layout in LAYOUTS:
                zeros = {name: torch.zeros_like(each) for name, each in whole.items()}
                found = cut_for(layout, zeros, rank % readers, readers)
                load(folder / saved, found)
                expected = cut_for(layout, whole, rank % readers, readers)
                pairs = [(found[name].block, each.block) for name, each in expected.items()]
                equal.append(all(torch.equal(*pair) for pair in pairs))
    return {**kib, "pairs": len(equal), "equal_bits": sum(equal)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, value in reshard(dist.get_rank(), dist.get_world_size()).items():
        if dist.get_rank() == 0:
            print(f"{name}: {value}")
    dist.destroy_process_group()
