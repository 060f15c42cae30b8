"""The measurement of each way: bytes held and sent, counted in a step; steps in turn with a clock; the same numbers?

Bytes are counted as torch's dispatcher sees operations and collectives: storages that are alive, at the size they have
now (zero-3 resizes them), of floating-point numbers alone. What an operation needs only within itself does not count.
"""

from __future__ import annotations

import ctypes
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from playground.lessons.zero.lesson import WAYS
from playground.lessons.zero.page import ZeroSettings
from playground.lessons.zero.results import CAPPED_STEPS, EXACT_STEPS, OUT_OF_MEMORY, TIMED_STEPS, WARM_UP
from playground.measurement import Fields
from playground.measurement.interleave import Heartbeat, gather_by_rank, interleave
from playground.runtime import PlaygroundError, device, report, synchronize
from playground.training import gpt
from playground.training.replicas import flat
from playground.training.step import training_step
from playground.training.sync import GradSync

COLLECTIVES = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1, "broadcast": 1}
"""Times (N - 1) / N of its largest tensor that a rank sends, as a ring does."""
M_MMAP_THRESHOLD, OWN_PAGES = -3, 64 * 2**10
"""malloc gives memory of this many bytes or more back to the kernel when it is freed. Source: mallopt(3)"""


def run(rank: int, size: int, settings: ZeroSettings) -> list[Fields]:
    """A row of figures for each way, on this rank."""
    rows = []
    for name in settings.ways:
        report(phase=f"{name}: counting bytes")
        rows.append({"way": name, **count(name, settings), "difference": compare(name, settings)})
    return [row | timing for row, timing in zip(rows, train_in_turn(settings), strict=True)]


class TorchZero1(GradSync):
    """DistributedDataParallel with torch's own ZeroRedundancyOptimizer."""

    def optimizer(self, new_optimizer: Callable[..., Any]) -> Any:
        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=gpt.LR, fused=True)


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def in_fsdp(model: nn.Module) -> GradSync:
    """Each child of the model as a unit."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    return GradSync(fully_shard(model, mesh=mesh))


TORCH_S_OWN: dict[str, Callable[[nn.Module], GradSync]] = {
    "torch-ddp": lambda model: GradSync(in_ddp(model)),
    "torch-zero-1": lambda model: TorchZero1(in_ddp(model)),
    "torch-fsdp": in_fsdp,
}


class Trainer:
    """This rank's model and optimizer, by one way; `alone` is one process."""

    def __init__(self, name: str, settings: ZeroSettings, dtype: torch.dtype = torch.float32) -> None:
        config = gpt.GPTConfig(layers=settings.layers, width=settings.width)
        self.model = gpt.new_model(config, settings.seed).to(device(), dtype)
        self.sync = GradSync(self.model) if name == "alone" else (WAYS | TORCH_S_OWN)[name](self.model)
        self.optimizer, self.steps = self.sync.optimizer(partial(torch.optim.AdamW, lr=gpt.LR, fused=True)), 0

    def step(
        self,
        batch: tuple[torch.Tensor, torch.Tensor],
        moment: Callable[[str], object] = lambda name: None,
        last: bool = False,
    ) -> torch.Tensor:
        """Train on a batch. Returns its loss."""
        gpt.set_lr(self.optimizer, self.steps)
        self.steps += 1
        tokens, targets = (each.to(device()) for each in batch)
        losses = [lambda: gpt.copying_loss(self.sync.model(tokens), targets)]
        return training_step(self.optimizer, losses, self.sync, last=last, moment=moment)

    def parameters(self) -> list[torch.Tensor]:
        """All memory that holds parameters, whole or in shares."""
        rows = getattr(self.sync, "rows", ())
        return [*self.model.parameters(), *(row.values for row in rows), *(row.share for row in rows)]

    def state(self) -> list[torch.Tensor]:
        """The optimizer's tensors, without single numbers."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]


def batches(samples: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield gpt.copying(samples, generator)


def own_part(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's of the sequences of a batch."""
    tokens, targets = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch)
    return tokens, targets


class ByteCounter(TorchDispatchMode):
    """Counts, while it is entered: bytes held, now and at most, and sent. With `cap`, holding more is an error."""

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.cap, self.series, self.sent = cap, list[int](), 0.0

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count these from now on; of a DTensor this rank's part."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.storages.add(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def held(self, tensors: list[torch.Tensor] | None = None) -> int:
        """The bytes of everything held, or of the memory of these tensors."""
        if tensors is None:
            return sum(storage.nbytes() for storage in self.storages)
        memory = {getattr(each, "_local_tensor", each).untyped_storage() for each in tensors}
        return sum(storage.nbytes() for storage in memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # views make no memory, and may be of a backend's own
            self.hold(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        if func.namespace == "c10d":
            size = dist.get_world_size()
            times = next((times for name, times in COLLECTIVES.items() if name in func.name()), 0)
            tensors = [leaf.nbytes for leaf in tree_leaves([*args]) if isinstance(leaf, torch.Tensor)]
            self.sent += times * (size - 1) / size * max(tensors, default=0)
        self.series.append(self.held())
        if self.cap and self.series[-1] > self.cap:
            raise MemoryError(f"{self.series[-1]:,} bytes held, and the cap is {self.cap:,}")
        return result


def count_ways(rank: int, size: int, settings: ZeroSettings) -> list[Fields]:
    """The bytes of each way, on this rank."""
    return [{"way": name, **count(name, settings)} for name in settings.ways]


def count(name: str, settings: ZeroSettings) -> Fields:
    """Bytes in a step with one sequence for each rank, so that activations are few: `parameters`, `gradients` and
    `optimizer` as held before the optimizer's step, `peak` at most in the step, `sent` in it; `series`, held after each
    operation of "forward", of backward until "synced", and of the "step"; `model_bytes` and `unit_bytes`, those of the
    parameters of the model and of its largest unit."""
    trainer, counter, rows, series = Trainer(name, settings), ByteCounter(), Fields(), dict[str, list[int]]()
    coming = batches(dist.get_world_size(), settings.seed)
    units = [sum(param.nbytes for param in unit.parameters()) for unit in gpt_units(settings)]

    def moment(what: str) -> None:
        series[what], counter.series = counter.series, []
        if what == "synced":
            parameters, state = counter.held(trainer.parameters()), counter.held(trainer.state())
            rows.update(parameters=parameters, optimizer=state, gradients=counter.held() - parameters - state)

    counter.hold(*trainer.parameters())
    with counter:
        trainer.step(own_part(next(coming)))
        counter.series, counter.sent = [], 0.0
        trainer.step(own_part(next(coming)), moment)
        series["step"] += counter.series
    peak = max(max(part) for part in series.values())
    sizes = {"peak": peak, "sent": round(counter.sent), "model_bytes": sum(units), "unit_bytes": max(units)}
    return {**rows, **sizes, "series": series}


def gpt_units(settings: ZeroSettings) -> list[nn.Module]:
    return [*gpt.new_model(gpt.GPTConfig(layers=settings.layers, width=settings.width), settings.seed)]


def compare(name: str, settings: ZeroSettings) -> float:
    """The largest difference of a loss or parameter from one process with the whole batch, after a few steps in
    float64."""
    trainer, found, (expected, alone) = Trainer(name, settings, torch.float64), 0.0, train_alone(settings)
    for step, batch in zip(range(EXACT_STEPS), batches(settings.batch_size, settings.seed), strict=False):
        loss = trainer.step(own_part(batch), last=step == EXACT_STEPS - 1)
        dist.all_reduce(loss)
        found = max(found, abs(loss.item() / dist.get_world_size() - expected[step]))
    params = [getattr(each, "full_tensor", lambda each=each: each)() for each in trainer.model.parameters()]
    return max(found, (flat(params) - alone).abs().max().item())


@cache
def train_alone(settings: ZeroSettings) -> tuple[list[float], torch.Tensor]:
    """The losses of one process, by step, and its parameters at the end, in one row."""
    alone = Trainer("alone", settings, torch.float64)
    coming = zip(range(EXACT_STEPS), batches(settings.batch_size, settings.seed), strict=False)
    return [alone.step(batch).item() for _, batch in coming], flat(alone.model.parameters())


def train_in_turn(settings: ZeroSettings) -> list[Fields]:
    """For each way the median `seconds` of a step on its slowest rank, and the `losses` of whole batches, by step. As
    long as steps are timed, all ways take one in turn; then torch's own stop."""
    trainers = {name: Trainer(name, settings) for name in settings.ways}
    coming, order = batches(settings.batch_size, settings.seed), Random(settings.seed)
    mine: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rounds(steps: int) -> Iterator[None]:
        for _ in range(steps):
            mine[:] = [own_part(next(coming))]
            yield

    def step(name: str) -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter()
        loss = trainers[name].step(mine[0])
        synchronize()
        seconds = time.perf_counter() - start
        beat(phase="training by each way in turn", step=trainers[name].steps, steps=settings.steps)
        return seconds, loss.item()

    beat, timed = Heartbeat().beat, min(settings.steps, WARM_UP + TIMED_STEPS)
    outcomes = dict(
        zip(trainers, interleave([partial(step, name) for name in trainers], rounds(timed), order), strict=True)
    )
    ours = [name for name in trainers if name in WAYS]
    rest = interleave([partial(step, name) for name in ours], rounds(settings.steps - timed), order)
    found = []
    for name, first in outcomes.items():
        more = dict(zip(ours, rest, strict=True)).get(name, [])
        by_rank = gather_by_rank([seconds for seconds, _ in first[WARM_UP:] or first])
        losses = torch.tensor([loss for _, loss in [*first, *more]], dtype=torch.float64, device=device())
        dist.all_reduce(losses)
        seconds = median(map(max, zip(*by_rank, strict=True)))
        found.append({"seconds": seconds, "losses": (losses / dist.get_world_size()).tolist()})
    return found


def train_under_cap(rank: int, size: int, settings: ZeroSettings) -> list[Fields]:
    """For each way: `died`, the error of the step that held more than the cap, empty if none did; `steps` that were
    taken, and the most bytes held, `peak`. Ranks hold as many bytes as each other, so that all stop at the same
    operation, and none waits for another."""
    rows = []
    for name in settings.ways:
        report(phase=f"{name}: training under a cap")
        trainer, counter, died = Trainer(name, settings), ByteCounter(settings.cap), ""
        counter.hold(*trainer.parameters())
        try:
            with counter:
                for _, batch in zip(range(CAPPED_STEPS), batches(size, settings.seed), strict=False):
                    trainer.step(own_part(batch))
        except MemoryError as error:
            died = f"{OUT_OF_MEMORY} in step {trainer.steps}: {error}"
        taken = trainer.steps - bool(died)
        rows.append({"way": name, "died": died, "steps": taken, "peak": max(counter.series)})
    return rows


def train_under_limit(rank: int, size: int, settings: ZeroSettings, name: str) -> Fields:
    """The same for one way, with a cap that the kernel keeps, on the bytes beyond those that the process has without a
    model. What it refuses is an error, which ends this rank."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
    small = Trainer("zero-3", replace(settings, width=12, layers=1))  # starts threads, whose stacks count, too
    small.step(own_part(next(batches(size, settings.seed))))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (settings.cap or 0), before[1]))
    try:
        trainer = Trainer(name, settings)
        for _, batch in zip(range(CAPPED_STEPS), batches(size, settings.seed), strict=False):
            trainer.step(own_part(batch))
    except RuntimeError as error:
        if "allocate memory" in str(error):
            refused = re.sub(r"^.*DefaultCPUAllocator: |\. Error.*", "", str(error).partition("\n")[0])
            raise PlaygroundError(f"{OUT_OF_MEMORY}: {refused}") from None
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return {"way": name, "died": "", "steps": CAPPED_STEPS}


def data_bytes() -> int:
    """The memory that RLIMIT_DATA counts, of this process. Source: proc(5)"""
    [line] = [line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if "VmData" in line]
    return 1024 * int(line.split()[1])
