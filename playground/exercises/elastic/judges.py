"""Judges of the exercises on elastic."""

from __future__ import annotations

import contextlib
import io
import operator
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from playground.base.files import temporary_folder
from playground.exercises.cases import Case, Cases, digits
from playground.tap.replacement import replaced

STEPS = 12
BEFORE, HALF, AFTER = "before", "half-way through", "after"
SAVE, REPLACE = "torch.save", "os.replace"
AGAIN = "steps taken again, but for one after each kill"
SHARED = "files of other ranks that it changed"


class Killed(BaseException):
    """Ends a life; what catches `Exception` does not catch it."""


def snapshot(rank: int, size: int, seed: int) -> Cases:
    """Training that is killed and started again. One that is never killed is the oracle, to the
    bit."""
    due = live(
        rank, seed, lambda model, optimizer, train: [train(step) for step in range(STEPS)], []
    )
    with temporary_folder("snapshot") if rank == 0 else contextlib.nullcontext() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        for number, (about, kills, kill) in enumerate((
            ("never killed", 0, (BEFORE, SAVE, 0)),
            ("killed between two steps", 1, (BEFORE, SAVE, 3)),
            ("killed before its first snapshot", 1, (BEFORE, SAVE, 1)),
            ("killed half-way through torch.save", 1, (HALF, SAVE, 2)),
            ("killed after torch.save", 1, (AFTER, SAVE, 2)),
            ("killed before os.replace", 1, (BEFORE, REPLACE, 3)),
            ("killed after os.replace", 1, (AFTER, REPLACE, 3)),
            ("killed again and again", STEPS - 1, (HALF, SAVE, 2)),
        )):  # fmt: skip
            folder = (folders[0] or Path()) / str(number)
            run = partial(live_on, rank, size, seed, folder, kills, kill)
            yield Case(about, (), run=run, returns={AGAIN: 0, SHARED: 0} | due, is_coded=False)


def live_on(
    rank: int, size: int, seed: int, folder: Path, kills: int, kill: tuple[str, str, int],
    function: Callable[..., object],
) -> dict[str, object]:  # fmt: skip
    """Call the solution until it is not killed any more. Ranks take turns, so that a file which
    they share holds the same in every run."""
    taken, found = list[int](), dict[str, object]()
    mine, shared, module = set[Path](), set[Path](), sys.modules[function.__globals__["__name__"]]
    folder.mkdir(exist_ok=True)  # not before: of a case that is not run, rank 0 may have removed it

    def solve(model: object, optimizer: object, train: Callable[[int], None]) -> None:
        function(rank, size, folder, model, optimizer, STEPS, train)

    for life in range(kills + 1):
        for turn in range(size):
            if turn == rank:
                before = read_times(folder)
                with (
                    contextlib.suppress(Killed),
                    killing(module, *kill) if life < kills else contextlib.nullcontext(),
                ):
                    found = live(rank, seed, solve, taken)
                after = read_times(folder)
                changed = {
                    file
                    for file in before.keys() | after.keys()
                    if before.get(file) != after.get(file)
                }
                shared |= (changed & before.keys()) - mine
                mine |= changed
            dist.group.WORLD.barrier().wait()
    again = max(0, len(taken) - STEPS - kills)
    return {AGAIN: again, SHARED: len(shared)} | found


def read_times(folder: Path) -> dict[Path, tuple[int, int]]:
    """A mark of each file that changes when it is written or replaced."""
    found = ((file, file.stat()) for file in folder.rglob("*") if file.is_file())
    return {file: (about.st_mtime_ns, about.st_ino) for file, about in found}


def live(rank: int, seed: int, solve: Callable[..., object], taken: list[int]) -> dict[str, object]:
    """One process from its start: `solve(model, optimizer, train)` trains. The steps that are taken
    are noted; what is returned is the model in the end."""
    torch.manual_seed(seed + rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.arange(STEPS * 6).reshape(STEPS, 2, 3).double().cos()

    def train(step: int) -> None:
        if not 0 <= step < STEPS:
            raise IndexError(f"train({step}): the steps are 0, …, {STEPS - 1}")
        taken.append(step)
        optimizer.zero_grad()
        (model(batches[step]) - rank).square().mean().backward()
        optimizer.step()

    solve(model, optimizer, train)
    params = [param.detach().clone() for param in model.parameters()]
    return {"model": params, "bits of the model": [param.view(torch.int64) for param in params]}


@contextlib.contextmanager
def killing(module: ModuleType, when: str, operation: str, number: int) -> Iterator[None]:
    """Raise `Killed` before, after or half-way through the write, or the renaming, of this number.
    `module`: the solution's, which may have imported them by their names."""
    calls = 0

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and when == HALF:
            write_half(real, *args, **kwargs)
        elif calls != number or when == AFTER:
            real(*args, **kwargs)
        if calls == number:
            raise Killed

    functions = (torch.save,) if operation == SAVE else (os.replace, os.rename)
    with contextlib.ExitStack() as replacements:
        for owner in (torch, os, module):
            for name in [
                name
                for name, value in vars(owner).items()
                if any(value is each for each in functions)
            ]:
                replacements.enter_context(replaced(owner, name, lambda real: partial(call, real)))
        yield


def write_half(
    save: Callable[..., None], state: object, file: str | os.PathLike[str] | BinaryIO, **kwargs: Any
) -> None:
    """The bytes that torch.save leaves in a file if the process is killed meanwhile."""
    whole = io.BytesIO()
    save(state, whole, **kwargs)
    half = whole.getvalue()[: whole.tell() // 2]
    if isinstance(file, (str, os.PathLike)):
        Path(file).write_bytes(half)
    else:
        file.write(half)


def agree(rank: int, size: int, seed: int) -> Cases:
    """All ranks choose one snapshot, which all of them have whole."""
    draw = random.Random(seed)  # the same on all ranks
    last = size - 1
    many = [[*draw.sample(range(2, 40), 30), 1] for _ in range(size)]
    situations: dict[str, tuple[list[list[int]], dict[int, int]]] = {
        "the last rank lacks the newest": ([[20, 10, 30]] * last + [[10, 20]], {}),
        "the newest is damaged on the last rank": ([[20, 10, 30]] * size, {last: 30}),
        "the last rank lacks one in the middle": ([[10, 20]] * last + [[30, 10]], {}),
        "many, with gaps": (many, {0: max(many[0])}),
        "the first step alone": ([[0]] * size, {}),
        "the last rank has none": ([[10]] * last + [[]], {}),
        "the only one is damaged on rank 0": ([[10]] * size, {0: 10}),
        "none in common": ([[10 + 5 * (other % 2), 1000 + other] for other in range(size)], {}),
    }
    for about, (everyones, damaged) in situations.items():
        whole = [
            [step for step in steps if damaged.get(other) != step]
            for other, steps in enumerate(everyones)
        ]
        common = [step for step in whole[0] if all(step in each for each in whole)]
        newest = sorted(common)[-1] if common else None
        given = list(everyones[rank]), partial(operator.ne, damaged.get(rank))
        yield Case(about, given, returns=newest, is_coded=False)


def resumed(rank: int, size: int, seed: int) -> Cases:
    """One rank lacks the newest snapshots; rank 0 is not it."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, newest = draw.randrange(1, size), draw.randrange(4, 9)
        last = [newest - 2 * (other == culprit) for other in range(size)]
        shares = [
            {step: digits(other, 2) * step for step in range(1, last[other] + 1)}
            for other in range(size)
        ]
        step = min(last)
        state = sum(share[step] for share in shares)
        yield Case(
            f"steps up to {newest}",
            (shares[rank],),
            (step, state),
            names=("step", "sum of the shares"),
            is_coded=False,
            culprit=culprit,
        )


def reshard(rank: int, size: int, seed: int) -> Cases:
    """Parts of a tensor whose elements are numbered. What is read is counted."""
    for lengths in ([6, 6], [5, 5, 4], [7], [3, 0, 4, 4], [1, 1]):
        whole = torch.arange(sum(lengths)) + 1.0
        shards, due = whole.split(lengths), whole.tensor_split(size)[rank]
        disk = Disk(shards)
        yield Case(
            f"shards of {', '.join(map(str, lengths))} elements",
            (lengths, disk.read),
            returns=due,
            held=disk.describe,
            expected={"elements read": len(due)},
            is_coded=False,
            most_moved=0,
        )


class Disk:
    """Shards that are read in parts. The elements that are read are counted."""

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self.shards = shards
        self.elements = 0

    def read(self, shard: int, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= len(self.shards[shard]):
            raise ValueError("there are no such elements in this shard")
        self.elements += stop - start
        return self.shards[shard][start:stop].clone()

    def describe(self) -> dict[str, int]:
        return {"elements read": self.elements}
