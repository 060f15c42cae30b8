"""Snapshots as a rank of a training run takes them: it waits for a copy in memory, and a thread writes that.
Two of them can be compared, byte by byte.

snapshots = Snapshots(folder, fingerprint, rank=rank, size=size)
snapshots.save(step, State(shared={"model": model.state_dict()}, own={"rng": torch.get_rng_state()}))
…
snapshots.close()
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from playground.runtime.errors import UsageError
from playground.runtime.files import NO_ROOM
from playground.survival.comparison import Comparison
from playground.survival.disk import SPARE, make_folder, make_subfolder, overwrite, remove_folders, replace, sync_folder
from playground.survival.fingerprint import Fingerprint, to_plain
from playground.survival.folder import WHOLE, FolderLock, SnapshotFile, examine, find_steps, prune, step_folder
from playground.survival.manifest import Manifest, decode, encode, open_part, rank_file

Layout: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A tensor's dtype, shape, strides, and the offset of its bytes in the memory."""
PLAIN = (str, int, float, bool, type(None))
"""Types of values that JSON keeps as they are."""
ALIGNMENT = 64


@dataclass(frozen=True)
class Copy:
    """A state: `plain` is JSON data, with layouts in the place of tensors, and `memory` holds their bytes."""

    plain: object
    memory: torch.Tensor


class Buffers:
    """Memory on the CPU for one state at a time. A second `fill` with tensors of the same shapes allocates nothing."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.layouts: list[Layout] = []
        self.views: list[torch.Tensor] = []

    @torch.no_grad()
    def fill(self, state: Mapping[str, object]) -> Copy:
        """A copy of `state` whose tensors lie in this memory, until the next `fill`.

        When it returns, tensors may be changed, also those of a GPU. Raises `TypeError` for anything but tensors,
        numbers, strings, and dicts, lists and tuples of them.
        """
        walk = Walk()
        plain = walk.describe(state, ())
        if walk.layouts != self.layouts:
            self.layouts = []  # if there is too little memory, the next state is not taken for the one before
            if walk.nbytes != len(self.memory):
                is_cuda = any(tensor.is_cuda for tensor in walk.tensors)
                self.memory = torch.empty(walk.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
            self.views = [view(self.memory, layout) for layout in walk.layouts]
            self.layouts = walk.layouts
        for target, tensor in zip(self.views, walk.tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in walk.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Copy(plain, self.memory)


class Walk:
    """Through a state, to find its tensors and to describe the rest."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.layouts: list[Layout] = []
        self.nbytes = 0

    def describe(self, value: object, path: tuple[object, ...]) -> object:
        """`value`, to which these keys and indices lead, as JSON data. What JSON has not is an object with its type as
        the only key."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return {"tensor": self.add(value)}
        if isinstance(value, Mapping):
            items = [(self.describe(key, path), self.describe(each, (*path, key))) for key, each in value.items()]
            return {"dict": items}
        if isinstance(value, (list, tuple)):
            several = [self.describe(each, (*path, index)) for index, each in enumerate(value)]
            return several if isinstance(value, list) else {"tuple": several}
        where = ".".join(map(str, path))
        raise TypeError(f"a snapshot cannot hold {where}, a {type(value).__name__}: make a tensor or a number of it")

    def add(self, tensor: torch.Tensor) -> Layout:
        strides = tensor.stride()
        if not tensor.is_contiguous():  # those of a tensor that is a part of another leave gaps
            strides = torch.empty_like(tensor, device="meta").stride()
        layout = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides, self.nbytes)
        self.tensors.append(tensor)
        self.layouts.append(layout)
        self.nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return layout


def view(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor that lies there in the memory. Raises `UsageError` for a dtype that this version of torch has not."""
    name, shape, strides, offset = layout
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"a snapshot holds a tensor of {name}, which this torch has not: go on with the one it is of")
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).as_strided(shape, strides)


def restore(plain: Any, memory: torch.Tensor) -> Any:
    """The state that `fill` has described so. Its tensors have memory of their own."""
    if isinstance(plain, list):
        return [restore(each, memory) for each in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "tensor":
        return view(memory, content).clone()
    if kind == "tuple":
        return tuple(restore(each, memory) for each in content)
    return {restore(key, memory): restore(each, memory) for key, each in content}


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a run needs to go on: tensors, numbers, strings, and dicts, lists and tuples of them."""

    shared: Mapping[str, object] = field(default_factory=dict)
    """State that is the same on all ranks (model, optimizer): rank 0 writes its own, the others' is ignored."""
    own: Mapping[str, object] = field(default_factory=dict)
    """State of this rank alone: random numbers, totals; parameters, where replicas differ."""


class Snapshots:
    """The snapshots that one rank of a run takes. Every rank has one and saves at the same steps.

    All ranks write into `folder`, which they share. It belongs to one run: two at a time would remove each other's.
    Raises `UsageError` if it cannot be written to, and on rank 0 if another run is writing there.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, rank: int, size: int, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep}: it must be at least 1")
        make_folder(folder)
        self.lock = FolderLock(folder) if rank == 0 else None
        if rank == 0:
            remove_folders(folder, [SPARE])  # of a run that was killed, maybe with more ranks
        self.folder, self.fingerprint = folder, to_plain(fingerprint)
        self.rank, self.size, self.keep = rank, size, keep
        self.problem = ""
        """Why the last save that failed has failed, in one line; empty if none has."""
        self.written: int | None = None
        """The newest step whose part of this rank lies on the disk."""
        self.seconds_waited = 0.0
        """Seconds that calls of `save` have waited for the previous save."""
        self.steps_before = find_steps(folder)
        """Steps that an earlier run saved: needed until a whole snapshot replaces them."""
        self.known_whole: set[int] = set()
        self.buffers: dict[int, Buffers] = {}
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self.writing: Future[None] | None = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, step: int, state: State) -> None:
        """Copy `state`, have a thread write it, and return; training may change the tensors then.

        If the save before is not written yet, wait for it: there is memory for one copy, and if a rank left steps out
        that others save, no snapshot might ever be whole. A disk that is full raises nothing: see `problem`.
        """
        self._start(step, {self.rank: state})

    def save_all(self, step: int, states: Sequence[State]) -> None:
        """As `save`, for a process that has gathered the states of all ranks and writes a whole snapshot by itself."""
        self._start(step, dict(enumerate(states)))

    def _start(self, step: int, states: Mapping[int, State]) -> None:
        started = time.perf_counter()
        self.wait()
        self.seconds_waited += time.perf_counter() - started
        copies = {rank: self._copy(rank, state) for rank, state in states.items()}
        self.writing = self.writer.submit(self._write, step, copies)

    def _copy(self, rank: int, state: State) -> Copy:
        parts = {"own": state.own, "shared": state.shared} if rank == 0 else {"own": state.own}
        return self.buffers.setdefault(rank, Buffers()).fill(parts)

    def wait(self) -> None:
        """Return when all that was saved lies on the disk, or has failed: see `problem`."""
        if self.writing:
            writing, self.writing = self.writing, None
            writing.result()

    def close(self) -> None:
        """Wait for what is being written, and let go of the memory, the spare folder, and the lock."""
        self.wait()
        self.writer.shutdown()
        self.buffers = {}
        remove_folders(self.folder, [SPARE])
        if self.lock:
            self.lock.release()

    def _write(self, step: int, copies: Mapping[int, Copy]) -> None:
        try:
            for rank, copy in copies.items():
                self._write_part(step, rank, copy)
            self.written = step
            # The rank whose part was the last gives up what is too old: whole, now, is what all ranks have written.
            if examine(self.folder, step, read_contents=step in self.steps_before).condition == WHOLE:
                sync_folder(self.folder)
                self.known_whole = prune(self.folder, step, self.size, self.keep, self.known_whole)
        except OSError as error:
            done = self.written == step
            what = f"snapshots before step {step} were not removed" if done else f"step {step} has no snapshot"
            no_room = f"there is no room in {self.folder}"
            why = no_room if error.errno in NO_ROOM else f"{self.folder} cannot be written to"
            self.problem = f"{what}: {why} ({error.strerror}); training went on"

    def _write_part(self, step: int, rank: int, copy: Copy) -> None:
        folder = step_folder(self.folder, step)
        make_subfolder(folder)
        line, tensors = json.dumps(copy.plain).encode() + b"\n", memoryview(copy.memory.numpy())
        digest = hashlib.sha256(line)
        digest.update(tensors)
        manifest = Manifest(
            step=step,
            size=self.size,
            nbytes=len(line) + len(tensors),
            sha256=digest.hexdigest(),
            written=time.time(),
            fingerprint=self.fingerprint,
        )
        is_needed = step == self.written or step in self.steps_before
        write = replace if is_needed else overwrite
        if write(folder / rank_file(rank), encode(manifest) + line, tensors):
            sync_folder(folder)


def load(snapshot: SnapshotFile, rank: int) -> State:
    """What `snapshot` holds for this rank, on the CPU. The format has no place for code. `own` is empty for a rank that
    the run had not."""
    first = load_part(snapshot.folder / rank_file(0))
    own = first if rank == 0 else load_part(snapshot.folder / rank_file(rank)) if rank < snapshot.size else {"own": {}}
    return State(shared=first["shared"], own=own["own"])


def load_all(snapshot: SnapshotFile) -> list[State]:
    """What `snapshot` holds for each rank of the run that took it, for a run with another number of ranks."""
    parts = [load_part(snapshot.folder / rank_file(rank)) for rank in range(snapshot.size)]
    return [State(shared=parts[0]["shared"], own=part["own"]) for part in parts]


def load_part(file: Path) -> Mapping[str, Any]:
    """The contents of a rank's file: "own" and, for rank 0, "shared". Raises `UsageError` if it is damaged."""
    with open_part(file) as stream:
        nbytes = decode(stream).nbytes
        line = stream.readline()
        memory = torch.empty(nbytes - len(line), dtype=torch.uint8)
        stream.readinto(memory.numpy())
    part = restore(json.loads(line), memory)
    names = {"own", "shared"} if file.name == rank_file(0) else {"own"}
    if not isinstance(part, Mapping) or not all(isinstance(part.get(name), Mapping) for name in names):
        raise UsageError(f"{file} holds no state that a run has written: go on from another snapshot")
    return part


def compare(rank: int, size: int, one: SnapshotFile, other: SnapshotFile) -> Comparison:
    """Every tensor of two snapshots, of all ranks: parameters, momentum, totals, random numbers. Raises `ValueError` if
    one has tensors that the other has not."""
    tensors = nbytes = differing = 0
    for number in range(max(one.size, other.size)):
        mine, its = load(one, number), load(other, number)
        pairs = zip(tensors_in([mine.shared, mine.own]), tensors_in([its.shared, its.own]), strict=True)
        for first, second in pairs:
            tensors, nbytes = tensors + 1, nbytes + first.nbytes
            differing += count_differing(first, second)
    return Comparison(tensors=tensors, nbytes=nbytes, differing=differing)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested structure, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors differ: all, if they have not the same shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return max(one.nbytes, other.nbytes)
    return int((bytes_of(one) != bytes_of(other)).sum())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
