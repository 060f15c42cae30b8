"""What a rank holds and sends in a training step, by ZeRO's stages.

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from playground.algorithms.traffic import Traffic
from playground.base.upstream import local_of
from playground.figures.counted_step import CountedStep, CountSettings
from playground.tap import observing
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


def new_model(settings: CountSettings) -> nn.Sequential:
    config = GPTConfig(layers=settings.layers, width=settings.width)
    return new_gpt(config, settings.seed).to(device())


class Trainer:
    """This rank's model, trained by a gradient synchronisation, and its optimizer."""

    def __init__(self, model: nn.Module, new_sync: Callable[[nn.Module], GradSync]) -> None:
        self.model = model
        self.taken = 0
        """Number of steps."""
        self.losses: list[Tensor] = []
        """Those of this rank's shards of batches, by step."""
        self.sync = new_sync(model)
        self.optimizer = self.sync.optimizer(partial(torch.optim.AdamW, lr=LR, fused=True))

    def step(
        self, batch: Batch, moment: Callable[[str], object] = lambda name: None, last: bool = False
    ) -> None:
        """Train on this rank's sequences of a batch."""
        set_lr(self.optimizer, self.taken)
        self.taken += 1
        tokens, targets = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch)
        loss = training_step(
            self.optimizer,
            lambda: copying_loss(self.sync.model(tokens), targets),
            self.sync,
            last=last,
            on_moment=moment,
        )
        self.losses.append(loss)

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


class BytesHeld(TorchDispatchMode):
    """Counts bytes held while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.series: list[int] = []
        """Bytes held after each operation since the last `take_series`."""

    def hold(self, *tensors: Tensor) -> None:
        """Count these from now on."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.storages.add(storage_of(tensor))

    def held(self, tensors: list[Tensor] | None = None) -> int:
        """The bytes of everything held, or of the memory of these tensors."""
        if tensors is None:
            return sum(storage.nbytes() for storage in self.storages)
        return sum(storage.nbytes() for storage in {*map(storage_of, tensors)})

    def take_series(self) -> list[int]:
        """Return `series`, and begin another."""
        series = self.series
        self.series = []
        return series

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # views make no memory, and may be of a backend's own
            self.hold(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        self.series.append(self.held())
        return result


def storage_of(tensor: Tensor) -> Any:
    """The memory of a tensor; of a DTensor that of this rank's shard."""
    local = local_of(tensor)
    return (tensor if local is None else local).untyped_storage()


def count_methods(rank: int, size: int, settings: CountSettings) -> list[CountedStep]:
    """The bytes of each method, on this rank."""
    return [count(method, SYNCS[method], settings) for method in settings.methods]


def count(
    method: str, new_sync: Callable[[nn.Module], GradSync], settings: CountSettings
) -> CountedStep:
    """Count the bytes of this rank in a step, the second."""
    model = new_model(settings)
    model_bytes = sum(param.nbytes for param in model.parameters())
    trainer = Trainer(model, new_sync)
    counter = BytesHeld()
    traffic = Traffic()
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
        with observing(traffic):
            trainer.step(second, moment)
        series["step"] += counter.take_series()
    return CountedStep(
        method=method,
        parameters=held["parameters"],
        gradients=held["together"] - held["parameters"] - held["optimizer"],
        optimizer=held["optimizer"],
        held=held["together"],
        peak=max(map(max, series.values())),
        sent=round(traffic.sent),
        model_bytes=model_bytes,
        series=series,
    )
