"""What a rank holds and sends in a training step, by ZeRO's stages and by torch's own ways.

Bytes are counted as torch's dispatcher sees operations and collectives: storages that are alive, at
the size they have now (zero-3 resizes them), of floating-point numbers only. Memory that an
operation frees before it returns does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

from playground.figures.ways import CountedStep, WaysSettings
from playground.training.activations import Checkpoint
from playground.training.sharding import BytesSent
from playground.training.step import training_step
from playground.training.sync import GradSync
from playground.training.tiny_gpt import (
    LR,
    Batch,
    GPTConfig,
    batches,
    copying_loss,
    new_gpt,
    set_lr,
)
from playground.training.zero_sync import SYNCS
from playground.world import device


class Recomputed(nn.Module):
    """Keeps its first input alone for backward, which must need a gradient; the others must not."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            # a cached cast of `x`, a leaf in backward, would add up its gradients in bfloat16
            with torch.autocast(
                x.device.type, torch.bfloat16, enabled=is_autocast, cache_enabled=False
            ):
                return run(x, *others)

        is_autocast = torch.is_autocast_enabled(x.device.type)
        run = super().forward
        return Checkpoint.apply(forward, x)


def recompute(module: nn.Module) -> None:
    """Let the forward of a module be that of `Recomputed`, around its own."""
    module.__class__ = type("Recomputed", (Recomputed, type(module)), {})


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


def new_model(settings: WaysSettings, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    config = GPTConfig(layers=settings.layers, width=settings.width)
    model = new_gpt(config, settings.seed).to(device(), dtype)
    if settings.checkpoint_activations:
        for block in model[1:-1]:
            recompute(block)
    return model


class Trainer:
    """This rank's model and optimizer, by one way."""

    def __init__(
        self, way: str, settings: WaysSettings, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = new_model(settings, dtype)
        self.taken = 0
        """Number of steps."""
        self.losses: list[Tensor] = []
        """Those of this rank's shards of batches, by step."""
        self.dtype = dtype
        dtypes = {}
        if settings.dtype == "bfloat16":
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
    """Counts bytes held and sent while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
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
        return result


def count_ways(rank: int, size: int, settings: WaysSettings) -> list[CountedStep]:
    """The bytes of each way, on this rank."""
    return [count(way, settings) for way in settings.ways]


def count(way: str, settings: WaysSettings) -> CountedStep:
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
    return CountedStep(
        way=way,
        parameters=held["parameters"],
        gradients=held["together"] - held["parameters"] - held["optimizer"],
        optimizer=held["optimizer"],
        held=held["together"],
        peak=max(map(max, series.values())),
        sent=round(counter.sent),
        model_bytes=sum(param.nbytes for param in new_model(settings).parameters()),
        series=series,
    )
