"""A checkpoint that any number of ranks can load: N ranks save it, and M ranks load it.

Of a tensor with R rows, rank r of N holds the rows from R*r//N up to R*(r+1)//N. Each rank writes
its rows to a file, with the number of the first one. A rank of M takes the rows that it needs from
the files that have them. The second part saves blocks of any kind. An index, which is written last,
says what each file has. torch.distributed.checkpoint (DCP) does the same.

    python -m playground checkpoint
    torchrun --nproc-per-node 4 lesson.py

    Rank 0 of 4 saves rows 0-2
    …
    Rank 0 of 3 loads rows 0-3: 3 from 0.pt, 1 from 1.pt
    …
    all         145  145  145    1 KiB   largest difference 0e+00
    rows        110  110  110  110 KiB   largest difference 0e+00
    …
    DCP         113  113  113  113 KiB   largest difference 0e+00

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import tempfile
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = 12  # of the tensor that is saved in rows
WIDTH = 192  # inputs and outputs of the layer whose training is saved in blocks


def bounds(length, part, parts):
    """Where part number ``part`` begins and ends, if a length is divided into ``parts``."""
    return length * part // parts, length * (part + 1) // parts


def save_rows(folder, rows, first):
    """Write this rank's rows. ``first``: the number of the first of them in the whole tensor."""
    folder.mkdir(exist_ok=True)
    torch.save({"first": first, "rows": rows}, folder / f"{dist.get_rank()}.pt")


def load_rows(folder, rows, first):
    """Fill ``rows`` from the files of any number of ranks. Return how many came from which."""
    taken = []
    for file in sorted(folder.iterdir()):
        saved = torch.load(file, mmap=True)  # maps the file: pages are read when they are touched
        start = saved["first"]
        low = max(first, start)
        high = min(first + len(rows), start + len(saved["rows"]))
        if low < high:
            rows[low - first : high - first] = saved["rows"][low - start : high - start]
            taken.append(f"{high - low} from {file.name}")
    return taken


def rows_from_n_to_m(folder, rank, size, readers):
    """All ranks save, and the first ``readers`` of them load. Return the largest difference."""
    whole = torch.arange(ROWS * 2.0).view(ROWS, 2)
    first, end = bounds(ROWS, rank, size)
    print(f"Rank {rank} of {size} saves rows {first}-{end - 1}")
    save_rows(folder, whole[first:end].clone(), first)
    dist.barrier()  # all files are there; --check hints says if it is missing
    if rank >= readers:
        return torch.zeros(())
    first, end = bounds(ROWS, rank, readers)
    rows = torch.full((end - first, 2), torch.inf)
    taken = load_rows(folder, rows, first)
    print(f"Rank {rank} of {readers} loads rows {first}-{end - 1}: {', '.join(taken)}")
    return (rows - whole[first:end]).abs().max()


class Block:
    """A rank's part of a whole tensor: ``begin`` is the index of its first element."""

    def __init__(self, tensor, begin):
        self.tensor = tensor
        self.begin = tuple(begin)
        self.end = tuple(map(sum, zip(self.begin, tensor.shape, strict=True)))

    def part(self, low, high):
        """A view of the elements between two indices of the whole tensor."""
        return self.tensor[
            tuple(
                slice(first - begin, end - begin)
                for first, end, begin in zip(low, high, self.begin, strict=True)
            )
        ]


def choose_writers(held):
    """The index, with an entry for each block. Of the ranks that hold the block, the one with the
    fewest elements to write so far writes it. ``held``: for each rank, (name, begin, end)s."""
    holders = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    elements, index = [0] * len(held), []
    for (name, begin, end), ranks in holders.items():
        writer = min(ranks, key=lambda rank: elements[rank])
        elements[writer] += prod(high - low for low, high in zip(begin, end, strict=True))
        index.append({"name": name, "begin": begin, "end": end, "writer": writer})
    return index


def save(folder, blocks):
    """All ranks call this. Together they write all blocks, each of them once.

    ``blocks``: this rank's block of each tensor, by the tensor's name.
    """
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, [(name, each.begin, each.end) for name, each in blocks.items()])
    index = choose_writers(held)
    names = (entry["name"] for entry in index if entry["writer"] == dist.get_rank())
    # A block can be a view. Without clone, torch.save would write all the memory behind the view.
    own = {name: blocks[name].tensor.clone() for name in names}
    torch.save(own, folder / f"{dist.get_rank()}.pt")
    dist.barrier()  # the index is written when the blocks of all ranks are there
    if dist.get_rank() == 0:
        torch.save(index, folder / "index.part")
        (folder / "index.part").replace(folder / "index")  # the whole index, or none
    dist.barrier()  # no rank goes on before the checkpoint is whole


def load(folder, blocks):
    """Fill this rank's blocks from the saved blocks with which they overlap."""
    for entry in torch.load(folder / "index"):
        if entry["name"] in blocks:
            block = blocks[entry["name"]]
            low = [max(pair) for pair in zip(block.begin, entry["begin"], strict=True)]
            high = [min(pair) for pair in zip(block.end, entry["end"], strict=True)]
            if all(first < end for first, end in zip(low, high, strict=True)):
                # it is opened again for each block: this is cheap, because the file is mapped
                saved = torch.load(folder / f"{entry['writer']}.pt", mmap=True)[entry["name"]]
                block.part(low, high).copy_(Block(saved, entry["begin"]).part(low, high))


def cut(whole, parts, rank):
    """A rank's block of a matrix. ``parts``: into how many its rows and its columns are divided.

    If there are more ranks than blocks, some ranks hold the same block.
    """
    row, column = divmod(rank % prod(parts), parts[1])  # the place of the block among the others
    top, bottom = bounds(whole.shape[0], row, parts[0])
    left, right = bounds(whole.shape[1], column, parts[1])
    return Block(whole[top:bottom, left:right], (top, left))


def blocks_from_n_to_m(folder, state, parts, rank, readers):
    """All ranks save in these parts. Each loads one of ``readers`` parts of the columns: with one
    rank more than parts, the last rank loads the first part again. Return the largest difference.
    """
    folder.mkdir(exist_ok=True)
    save(folder, {name: cut(whole, parts, rank) for name, whole in state.items()})
    expected = {name: cut(whole, (1, readers), rank) for name, whole in state.items()}
    loaded = {
        name: Block(torch.full_like(block.tensor, torch.inf), block.begin)
        for name, block in expected.items()
    }
    load(folder, loaded)
    return max((loaded[name].tensor - expected[name].tensor).abs().max() for name in state)


def dcp_from_n_to_m(folder, state, rank, size, readers):
    """The library's save and load. A DTensor knows which block of the whole tensor it is."""
    device = torch.get_default_device().type  # "cpu" or "cuda"
    mesh = dist.DeviceMesh(device, range(size))
    small_mesh = dist.DeviceMesh(device, range(readers))  # all ranks must create it
    dcp.save(
        {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in state.items()},
        checkpoint_id=folder,
    )
    if rank >= readers:
        return torch.zeros(())
    loaded = {
        name: distribute_tensor(torch.full_like(whole, torch.inf), small_mesh, [Shard(1)])
        for name, whole in state.items()
    }
    dcp.load(loaded, checkpoint_id=folder, process_group=small_mesh.get_group())
    return max((loaded[name].full_tensor() - state[name]).abs().max() for name in state)


def print_row(folder, difference):
    """The KiB of each rank's file, and the largest difference on any rank."""
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        files = [*folder.glob("*.pt"), *folder.glob("*.distcp")]
        sizes = [file.stat().st_size for file in sorted(files)]
        columns = "".join(f"{size / 1024:5.0f}" for size in sizes)
        print(f"{folder.name:10}{columns} KiB   largest difference {difference:.0e}")
    assert difference == 0, f"{folder.name}: not what was saved"


def run(rank, size):
    readers = max(1, size - 1)  # as after the loss of a machine
    layouts = {
        "all": (1, 1),  # each rank holds the whole matrix, as with DDP
        "rows": (size, 1),  # as with FSDP
        "columns": (1, size),  # as in a row-parallel layer
        "grid": (max(1, size // 2), min(2, size)),  # as with FSDP and tensor parallelism
    }
    torch.manual_seed(1234)  # the same on all ranks
    state = {name: torch.randn(WIDTH, WIDTH) for name in ("weight", "exp_avg", "exp_avg_sq")}
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)  # all ranks use the folder of rank 0
        one, library = Path(folders[0], "one tensor"), Path(folders[0], "DCP")
        print_row(one, rows_from_n_to_m(one, rank, size, readers))
        for name, parts in layouts.items():
            folder = Path(folders[0], name)
            print_row(folder, blocks_from_n_to_m(folder, state, parts, rank, readers))
        print_row(library, dcp_from_n_to_m(library, state, rank, size, readers))
        dist.barrier()  # rank 0 removes its folder when all ranks are done


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
