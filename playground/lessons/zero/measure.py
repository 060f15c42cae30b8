"""The measurement of each way: bytes held and sent, counted in a step; steps in turn with a clock;
the same numbers?

Bytes are counted as torch's dispatcher sees operations and collectives: storages that are alive, at
the size they have now (zero-3 resizes them), of floating-point numbers alone. What an operation
needs only within itself does not count.
"""

from __future__ import annotations

import contextlib
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from playground.lessons.tensor.lesson import GPTConfig, copying_loss, new_gpt
from playground.lessons.zero.lesson import BytesSent
from playground.lessons.zero.page import CAPPED_STEPS, OUT_OF_MEMORY, WARM_UP, ZeroSettings
from playground.measurement import Fields
from playground.measurement.interleave import interleave, slowest
from playground.runtime import PlaygroundError, device, report, synchronize
from playground.training.gpt_run import LR, Batch, backward_alone, batches, set_lr, train
from playground.training.one_process import EXACT_STEPS
from playground.training.replicas import flat
from playground.training.step import training_step
from playground.training.sync import GradSync
from playground.training.zero_sync import SYNCS

M_MMAP_THRESHOLD, OWN_PAGES = -3, 64 * 2**10
"""malloc gives memory of this many bytes or more back to the kernel when it is freed. Source:
mallopt(3)"""


def run(rank: int, size: int, settings: ZeroSettings) -> list[Fields]:
    """A row of figures for each way: the largest of any rank."""
    rows = []
    for way, timing in zip(settings.ways, train_in_turn(settings), strict=True):
        report(phase=f"{way}: counting bytes")
        figures = {**count(way, settings), "difference": compare(way, settings)}
        figures.pop("series")
        rows.append(
            {"way": way, **dict(zip(figures, slowest([*figures.values()]), strict=True)), **timing}
        )
    return rows


class TorchZero1(GradSync):
    """DistributedDataParallel with torch's own ZeroRedundancyOptimizer."""

    def optimizer(self, new_optimizer: Callable[..., Any]) -> Any:
        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=LR, fused=True
        )


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


def new_model(settings: ZeroSettings, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    config = GPTConfig(layers=settings.layers, width=settings.width)
    return new_gpt(config, settings.seed).to(device(), dtype)


class Trainer:
    """This rank's model and optimizer, by one way, the steps `taken`, and the `losses` of its parts
    of batches."""

    def __init__(
        self, way: str, settings: ZeroSettings, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.losses, self.taken = new_model(settings, dtype), list[Tensor](), 0
        self.sync = (SYNCS | TORCH_S_OWN)[way](self.model)
        self.optimizer = self.sync.optimizer(partial(torch.optim.AdamW, lr=LR, fused=True))

    def step(
        self, batch: Batch, moment: Callable[[str], object] = lambda name: None, last: bool = False
    ) -> None:
        """Train on this rank's sequences of a batch."""
        set_lr(self.optimizer, self.taken)
        self.taken += 1
        tokens, targets = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch)
        losses = [lambda: copying_loss(self.sync.model(tokens), targets)]
        self.losses.append(
            training_step(self.optimizer, losses, self.sync, last=last, moment=moment)
        )

    def mean_losses(self) -> list[float]:
        """The losses of whole batches, by step. All must call this."""
        losses = torch.stack(self.losses).double()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()

    def parameters(self) -> list[Tensor]:
        """All memory that holds parameters, replicated or in shards."""
        flat_params = getattr(self.sync, "flat_params", ())
        flat = (tensor for each in flat_params for tensor in (each.data, each.shard))
        return [*self.model.parameters(), *flat]

    def state(self) -> list[Tensor]:
        """The optimizer's tensors, without single numbers."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor) and value.dim()]


class ByteCounter(BytesSent):
    """Counts, while it is entered: bytes held, now and at most, and sent. With `cap`, holding more
    is an error."""

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.cap, self.series = cap, list[int]()

    def hold(self, *tensors: Tensor) -> None:
        """Count these from now on; of a DTensor this rank's part."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.storages.add(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def held(self, tensors: list[Tensor] | None = None) -> int:
        """The bytes of everything held, or of the memory of these tensors."""
        if tensors is None:
            return sum(storage.nbytes() for storage in self.storages)
        memory = {getattr(each, "_local_tensor", each).untyped_storage() for each in tensors}
        return sum(storage.nbytes() for storage in memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:  # views make no memory, and may be of a backend's own
            self.hold(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        self.series.append(self.held())
        if self.cap and self.series[-1] > self.cap:
            raise MemoryError(f"{self.series[-1]:,} bytes held, and the cap is {self.cap:,}")
        return result


def count_ways(rank: int, size: int, settings: ZeroSettings) -> list[Fields]:
    """The bytes of each way, on this rank."""
    return [{"way": way, **count(way, settings)} for way in settings.ways]


def count(way: str, settings: ZeroSettings) -> Fields:
    """Bytes in a step with one sequence for each rank, so that activations are few: `parameters`,
    `gradients` and `optimizer` as held before the optimizer's step, `held` together, `peak` at most
    in the step, `sent` in it; `series`, held after each operation of "forward", of backward until
    "synced", and of the "step"; `model_bytes` and `unit_bytes`, those of the parameters of the
    model and of its largest unit."""
    trainer = Trainer(way, settings)
    counter = ByteCounter()
    figures = Fields()
    series = dict[str, list[int]]()
    first, second = batches(dist.get_world_size(), 2, settings.seed)
    units = [sum(param.nbytes for param in unit.parameters()) for unit in new_model(settings)]

    def moment(what: str) -> None:
        series[what] = counter.series
        counter.series = []
        if what == "synced":
            held, parameters, state = map(
                counter.held, (None, trainer.parameters(), trainer.state())
            )
            figures.update(
                parameters=parameters,
                gradients=held - parameters - state,
                optimizer=state,
                held=held,
            )

    counter.hold(*trainer.parameters())
    with counter:
        trainer.step(first)
        counter.series = []
        counter.sent = 0.0
        trainer.step(second, moment)
        series["step"] += counter.series
    figures |= {"peak": max(map(max, series.values())), "sent": round(counter.sent)}
    return {**figures, "model_bytes": sum(units), "unit_bytes": max(units), "series": series}


def compare(way: str, settings: ZeroSettings) -> float:
    """The largest difference of a loss or parameter from one process with the whole batch, after a
    few steps in float64."""
    trainer, (expected, alone) = Trainer(way, settings, torch.float64), train_alone(settings)
    for step, batch in enumerate(batches(settings.batch_size, EXACT_STEPS, settings.seed), start=1):
        trainer.step(batch, last=step == EXACT_STEPS)
    params = [
        getattr(each, "full_tensor", lambda each=each: each)()
        for each in trainer.model.parameters()
    ]
    pairs = zip(trainer.mean_losses(), expected, strict=True)
    return max(
        (flat(params) - alone).abs().max().item(), *(abs(one - other) for one, other in pairs)
    )


@cache
def train_alone(settings: ZeroSettings) -> tuple[list[float], Tensor]:
    """The losses of one process, by step, and its parameters at the end, flat."""
    model = new_model(settings, torch.float64)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    return train("alone", model, backward_alone(model), exact).losses, flat(model.parameters())


def train_in_turn(settings: ZeroSettings) -> list[Fields]:
    """For each way the median `seconds` of a step on its slowest rank, and the `losses` of whole
    batches, by step."""
    trainers = [Trainer(way, settings) for way in settings.ways]
    coming = iter(batches(settings.batch_size, settings.steps, settings.seed))
    now = list[Batch]()

    def rounds() -> Iterator[None]:
        for number, batch in enumerate(coming):
            report(phase="training by each way in turn", step=number, steps=settings.steps)
            now[:] = [batch]
            yield

    def step(trainer: Trainer) -> float:
        dist.barrier()
        start = time.perf_counter()
        trainer.step(now[0])
        synchronize()
        return time.perf_counter() - start

    steps = [partial(step, trainer) for trainer in trainers]
    found = []
    for trainer, seconds in zip(
        trainers, interleave(steps, rounds(), Random(settings.seed)), strict=True
    ):
        losses, by_step = trainer.mean_losses(), slowest(seconds)
        ends = {"first_loss": losses[0], "last_loss": losses[-1]}
        found.append({"seconds": median(by_step[WARM_UP:] or by_step), "losses": losses, **ends})
    return found


def train_under_cap(rank: int, size: int, settings: ZeroSettings, way: str) -> None:
    """Raises `PlaygroundError` if the steps need more memory than the cap."""
    coming = batches(size, CAPPED_STEPS, settings.seed)
    # starts threads, whose stacks count, too
    Trainer("zero-3", replace(settings, width=12, layers=1)).step(coming[0])
    counter = ByteCounter(None if settings.kernel else settings.cap)
    try:
        with kernel_limit(settings.cap or 0) if settings.kernel else contextlib.nullcontext():
            trainer = Trainer(way, settings)
            counter.hold(*trainer.parameters())
            with contextlib.nullcontext() if settings.kernel else counter:
                for batch in coming:
                    trainer.step(batch)
    except (MemoryError, RuntimeError) as error:
        refused = re.search(r"can't allocate memory[^.]*|.* bytes held.*", str(error))
        if refused is None:
            raise
        raise PlaygroundError(f"{OUT_OF_MEMORY}: {refused[0]}") from None


@contextlib.contextmanager
def kernel_limit(cap: int) -> Iterator[None]:
    """Let the kernel refuse this process more than `cap` bytes beyond what it has now. Source:
    proc(5), VmData is what RLIMIT_DATA counts"""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    [kib] = re.findall(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(kib) + cap, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
