"""The measurement of each way: bytes held and sent in a step, seconds of steps taken in turn, and
the difference from one process.

Bytes are counted as torch's dispatcher sees operations and collectives: storages that are alive, at
the size they have now (zero-3 resizes them), of floating-point numbers alone. Memory that an
operation frees before it returns does not count.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from playground.lessons.prove.lesson import max_abs_diff
from playground.lessons.tensor.lesson import GPTConfig, copying_loss, new_gpt
from playground.lessons.zero.page import CAPPED_STEPS, OUT_OF_MEMORY, WARM_UP, ZeroSettings
from playground.lessons.zero.results import (
    CountedStep,
    Counts,
    WayResult,
    closed_forms,
    expect_kept,
)
from playground.measurement.interleave import interleave, slowest
from playground.runtime import PlaygroundError, device, report, synchronize
from playground.training.gpt_run import (
    LR,
    Backward,
    Batch,
    backward_alone,
    batches,
    set_lr,
    train,
)
from playground.training.memory import Recomputed, bytes_kept, change
from playground.training.one_process import EXACT_STEPS
from playground.training.replicas import flatten
from playground.training.settings import BFLOAT16
from playground.training.sharding import BytesSent
from playground.training.step import training_step
from playground.training.sync import GradSync
from playground.training.zero_sync import SYNCS

M_MMAP_THRESHOLD, OWN_PAGES = -3, 64 * 2**10
"""malloc gives memory of this many bytes or more back to the kernel when it is freed. Source:
mallopt(3)"""


def run(rank: int, size: int, settings: ZeroSettings) -> list[WayResult]:
    """The results of all ways, in order. Every rank returns the same."""
    results = []
    kept = count_kept(settings)
    for way, (seconds, losses) in zip(settings.ways, train_in_turn(settings), strict=True):
        report(phase=f"{way}: counting bytes")
        counts = largest_of_ranks(count(way, settings))
        [difference] = slowest([compare(way, settings)])
        forms = closed_forms(way, counts.model_bytes, size, settings.dtype, settings.reduce_dtype)
        result = WayResult(
            way=way,
            **vars(counts),
            difference=difference,
            kept=kept,
            expected_kept=expect_kept(
                settings.layers,
                settings.width,
                settings.dtype,
                recompute=settings.checkpoint_activations,
            ),
            seconds=seconds,
            losses=losses,
            first_loss=losses[0],
            last_loss=losses[-1],
            expected_held=forms["held"],
            expected_sent=forms["sent"],
        )
        results.append(result)
    return results


def largest_of_ranks(counts: Counts) -> Counts:
    """The maximum of each count. All ranks must call this."""
    names = [field.name for field in fields(Counts)]
    largest = slowest([getattr(counts, name) for name in names])
    return Counts(**dict(zip(names, largest, strict=True)))


class TorchZero1(GradSync):
    """DistributedDataParallel with torch's own ZeroRedundancyOptimizer."""

    def optimizer(self, new_optimizer: Callable[..., Any]) -> Any:
        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=LR, fused=True
        )


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def in_fsdp(model: nn.Module, **dtypes: torch.dtype) -> GradSync:
    """Each child of the model as a unit. `dtypes`: fields of `MixedPrecisionPolicy`."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**dtypes)
    for unit in model.children():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return GradSync(fully_shard(model, mesh=mesh, mp_policy=policy))


TORCH_SYNCS: dict[str, Callable[..., GradSync]] = {
    "torch-ddp": lambda model: GradSync(in_ddp(model)),
    "torch-zero-1": lambda model: TorchZero1(in_ddp(model)),
    "torch-fsdp": in_fsdp,
}


def new_model(settings: ZeroSettings, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    config = GPTConfig(layers=settings.layers, width=settings.width)
    model = new_gpt(config, settings.seed).to(device(), dtype)
    if settings.checkpoint_activations:
        for block in model[1:-1]:
            change(block, Recomputed)
    return model


def count_kept(settings: ZeroSettings) -> int:
    """The bytes that autograd keeps for backward of a sequence, in one process."""
    [(tokens, targets)] = batches(1, 1, settings.seed)
    model = new_model(settings, getattr(torch, settings.dtype))
    return bytes_kept(model, lambda: copying_loss(model(tokens).float(), targets))


class Trainer:
    """This rank's model and optimizer, by one way."""

    def __init__(
        self, way: str, settings: ZeroSettings, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = new_model(settings, dtype)
        self.taken = 0
        """Number of steps."""
        self.losses: list[Tensor] = []
        """Those of this rank's shards of batches, by step."""
        self.dtype = dtype
        dtypes = {}
        if settings.dtype == BFLOAT16:
            reduced = getattr(torch, settings.reduce_dtype) if dtype == torch.float32 else dtype
            dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduced}
        self.sync = (SYNCS | TORCH_SYNCS)[way](self.model, **dtypes)
        self.optimizer = self.sync.optimizer(partial(torch.optim.AdamW, lr=LR, fused=True))

    def step(
        self, batch: Batch, moment: Callable[[str], object] = lambda name: None, last: bool = False
    ) -> None:
        """Train on this rank's sequences of a batch."""
        set_lr(self.optimizer, self.taken)
        self.taken += 1
        tokens, targets = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch)
        losses = [lambda: copying_loss(self.sync.model(tokens).to(self.dtype), targets)]
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

    def masters(self) -> list[Tensor]:
        """The parameters that the optimizer steps for, of all ranks together, in order. All must
        call this."""
        if self.dtype == next(self.model.parameters()).dtype:
            return [
                param.full_tensor() if isinstance(param, DTensor) else param
                for param in self.model.parameters()
            ]
        gathered = []
        for flat in getattr(self.sync, "flat_params", ()):
            whole = flat.shard.new_empty(flat.data.shape)
            dist.all_gather_into_tensor(whole, flat.shard.detach())
            gathered.append(whole[: flat.numel])
        return gathered

    def state(self) -> list[Tensor]:
        """The optimizer's tensors, without single numbers."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor) and value.dim()]


class ByteCounter(BytesSent):
    """Counts bytes held and sent while it is entered. With `cap`, holding more raises
    `MemoryError`."""

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.cap = cap
        self.series: list[int] = []
        """Bytes held after each operation since the last `take_series`."""

    def hold(self, *tensors: Tensor) -> None:
        """Count these from now on; of a DTensor this rank's shard."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.storages.add(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def held(self, tensors: list[Tensor] | None = None) -> int:
        """The bytes of everything held, or of the memory of these tensors."""
        if tensors is None:
            return sum(storage.nbytes() for storage in self.storages)
        memory = {getattr(each, "_local_tensor", each).untyped_storage() for each in tensors}
        return sum(storage.nbytes() for storage in memory)

    def take_series(self) -> list[int]:
        """Return `series`, and begin another."""
        series = self.series
        self.series = []
        return series

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:  # views make no memory, and may be of a backend's own
            self.hold(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        self.series.append(self.held())
        if self.cap and self.series[-1] > self.cap:
            raise MemoryError(f"{self.series[-1]:,} bytes held, and the cap is {self.cap:,}")
        return result


def count_ways(rank: int, size: int, settings: ZeroSettings) -> list[CountedStep]:
    """The bytes of each way, on this rank."""
    return [count(way, settings) for way in settings.ways]


def count(way: str, settings: ZeroSettings) -> CountedStep:
    """Count the bytes of this rank in a step, the second."""
    trainer = Trainer(way, settings)
    counter = ByteCounter()
    series: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    first, second = batches(dist.get_world_size(), 2, settings.seed)

    def moment(name: str) -> None:
        series[name] = counter.take_series()
        if name == "synced":
            held["together"] = counter.held()
            held["parameters"] = counter.held(trainer.parameters())
            held["optimizer"] = counter.held(trainer.state())

    counter.hold(*trainer.parameters())
    with counter:
        trainer.step(first)
        counter.take_series()
        counter.sent = 0.0
        trainer.step(second, moment)
        series["step"] += counter.take_series()
    units = [sum(param.nbytes for param in unit.parameters()) for unit in new_model(settings)]
    return CountedStep(
        way=way,
        parameters=held["parameters"],
        gradients=held["together"] - held["parameters"] - held["optimizer"],
        optimizer=held["optimizer"],
        held=held["together"],
        peak=max(map(max, series.values())),
        sent=round(counter.sent),
        model_bytes=sum(units),
        unit_bytes=max(units),
        series=series,
    )


def compare(way: str, settings: ZeroSettings) -> float:
    """The largest difference of a loss or parameter from one process with the whole batch, after a
    few steps in float64. With parameters cast to bfloat16, shards and sums over ranks are
    float64: one process then computes as many parts of the batch."""
    trainer = Trainer(way, settings, torch.float64)
    expected_losses, expected_params = train_alone(settings)
    for step, batch in enumerate(batches(settings.batch_size, EXACT_STEPS, settings.seed), start=1):
        trainer.step(batch, last=step == EXACT_STEPS)
    params, losses = flatten(trainer.masters()), trainer.mean_losses()
    return max(
        max_abs_diff(params, expected_params),
        max_abs_diff(params.new_tensor(losses), params.new_tensor(expected_losses)),
    )


@cache
def train_alone(settings: ZeroSettings) -> tuple[list[float], Tensor]:
    """The losses of one process, by step, and its parameters at the end, flat."""
    model = new_model(settings, torch.float64)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    backward = (
        backward_in_bfloat16(model, settings.size)
        if settings.dtype == BFLOAT16
        else backward_alone(model)
    )
    return train("alone", model, backward, exact).losses, flatten(model.parameters())


def backward_in_bfloat16(model: nn.Module, parts: int) -> Backward:
    """One process that computes in bfloat16 as many parts of a batch as there are ranks, and adds
    up their gradients in the type of the model's parameters."""

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for own_tokens, own_targets in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            cast = copy.deepcopy(model).bfloat16()
            loss = copying_loss(cast(own_tokens).double(), own_targets)
            loss.backward()
            losses.append(loss.detach() / parts)
            for param, own in zip(model.parameters(), cast.parameters(), strict=True):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad = grad + own.grad.to(param.dtype) / parts
        return torch.stack(losses).sum()

    return backward


def train_in_turn(settings: ZeroSettings) -> list[tuple[float, list[float]]]:
    """For each way the median seconds of a step, on its slowest rank, and the losses of whole
    batches, by step."""
    trainers = [Trainer(way, settings) for way in settings.ways]
    coming = batches(settings.batch_size, settings.steps, settings.seed)

    def rounds() -> Iterator[None]:
        for step in range(settings.steps):
            report(phase="training by each way in turn", step=step, steps=settings.steps)
            yield

    def step(way: str, trainer: Trainer) -> float:
        report(way=way)
        dist.barrier()
        start = time.perf_counter()
        trainer.step(coming[trainer.taken])
        synchronize()
        return time.perf_counter() - start

    steps = [partial(step, *each) for each in zip(settings.ways, trainers, strict=True)]
    turns = interleave(steps, rounds(), Random(settings.seed))
    found = []
    for trainer, seconds in zip(trainers, turns, strict=True):
        losses = trainer.mean_losses()
        by_step = slowest(seconds)
        found.append((median(by_step[WARM_UP:] or by_step), losses))
    return found


def train_under_cap(rank: int, size: int, settings: ZeroSettings, way: str) -> None:
    """Raises `PlaygroundError` if the steps need more memory than the cap."""
    coming = batches(size, CAPPED_STEPS, settings.seed)
    # starts threads, whose stacks count, too
    Trainer("zero-3", replace(settings, width=12, layers=1)).step(coming[0])
    nothing = contextlib.nullcontext()
    counter = ByteCounter(settings.cap)
    try:
        with kernel_limit(settings.cap or 0) if settings.kernel else nothing:
            trainer = Trainer(way, settings)
            counter.hold(*trainer.parameters())
            with nothing if settings.kernel else counter:
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
