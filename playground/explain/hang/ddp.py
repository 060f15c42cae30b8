"""In a rank: what DistributedDataParallel calls writes to its flight recorder.

It averages in C++, where no method of Python's is called: its backward pass counts as one
collective.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from playground.base.upstream import find_tensors, is_joining, may_rebuild_buckets
from playground.explain.hang.box import Box
from playground.explain.hang.box_format import MAIN, Description
from playground.explain.hang.recording import FlightRecorder
from playground.explain.hang.states import BACKWARD, BUCKETS, BUFFERS, FORWARDS, MAKE_DDP, UNUSED
from playground.tap import number_of, ranks_of


class DDPCalls:
    """Records what models wrapped in `DistributedDataParallel` call."""

    def __init__(self, recording: FlightRecorder) -> None:
        self.recording = recording
        self.forwarded: dict[int, Any] = {}
        """The groups of models whose gradients a backward pass through their outputs averages, and
        the models' numbers, by the model's id."""
        self.reached: set[int] = set()
        """Those that the backward pass under way has come to."""
        self.passes: dict[int, list[int]] = {}
        """The operations that this pass is, by the same ids, as `inside` has them."""
        self.reducers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """The groups of models and their numbers, by the object of C++ that averages."""
        self.models: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The numbers of models among those of their group, from 1 on."""
        self.made: Counter[tuple[tuple[int, ...], int]] = Counter()
        """How many models have been made on each group."""
        self.stand_ins: dict[tuple[Any, str], Callable[..., Any]] = {
            (DistributedDataParallel, "__init__"): partial(self.call_method, MAKE_DDP),
            (DistributedDataParallel, "_sync_buffers"): partial(self.call_method, BUFFERS),
            (DistributedDataParallel, "forward"): self.forward,
            (dist.Reducer, "_rebuild_buckets"): self.rebuild_buckets,
            (torch.autograd, "backward"): self.backward,
        }
        """What is called in the place of torch's own methods."""

    def forget_models(self) -> None:
        """A world begins."""
        self.forwarded.clear()
        self.made.clear()

    def call_method(
        self, name: str, real: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record a method of `DistributedDataParallel` as a collective."""
        group = getattr(ddp, "process_group", None) or find_group(real, ddp, *args, **kwargs)
        if self.recording.box is None or group is None:
            return real(ddp, *args, **kwargs)
        if name == MAKE_DDP:
            made = ranks_of(group), number_of(group)
            self.made[made] += 1
            self.models[ddp] = self.made[made]
        elif is_joining(ddp):  # a rank without batches makes these calls elsewhere
            return real(ddp, *args, **kwargs)
        with self.recording.around(self.recording.box, name, group, self.models.get(ddp, 0)):
            return real(ddp, *args, **kwargs)

    def forward(self, real: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass averages gradients once it has come to an output of such a forward pass,
        and then no more until the next: see `torch.nn.parallel.DistributedDataParallel`."""
        if self.recording.box is None or torch.compiler.is_compiling():
            return real(ddp, *args, **kwargs)
        key, rebuilds = id(ddp), ddp.static_graph or not ddp.find_unused_parameters
        if rebuilds and may_rebuild_buckets(ddp):
            self.reducers[ddp.reducer] = ddp.process_group, self.models.get(ddp, 0)
        joins = is_joining(ddp)  # then others answer for a rank that has no batch left
        averages = ddp.require_backward_grad_sync and torch.is_grad_enabled() and not joins
        if averages:
            is_second = key in self.forwarded
            count_forward(self.recording.box, ddp.process_group, is_second=is_second)
        output = real(ddp, *args, **kwargs)
        if averages:
            self.forwarded[key] = ddp.process_group, self.models.get(ddp, 0)
            for node in {tensor.grad_fn for tensor in find_tensors(output)} - {None}:
                node.register_prehook(lambda _: self.reach(key))
        return output

    def rebuild_buckets(self, real: Callable[..., Any], reducer: Any) -> Any:
        box, model = self.recording.box, self.reducers.get(reducer)
        if box is None or model is None:
            return real(reducer)
        with self.recording.around(box, BUCKETS, *model) as calls:
            if rebuilt := real(reducer):
                calls.clear()
        return rebuilt

    def backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the pass as one collective of each model that it may average. It is none of a
        model whose outputs it does not come to."""
        box = self.recording.box
        forwarded = self.forwarded
        self.forwarded = {}  # those that forward again inside this pass
        if box is None or not forwarded:
            self.forwarded |= forwarded
            return real(*args, **kwargs)
        self.reached -= forwarded.keys()
        with contextlib.ExitStack() as passes:
            calls = {
                key: passes.enter_context(self.recording.around(box, BACKWARD, *model))
                for key, model in forwarded.items()
            }
            outer = self.passes
            self.passes = calls
            try:
                return real(*args, **kwargs)
            finally:
                self.passes = outer
                for key in calls.keys() & self.reached:
                    calls[key].clear()
                    forwarded.pop(key)
                self.forwarded = forwarded | self.forwarded

    def reach(self, key: int) -> None:
        """A backward pass has come to an output of a model. If it may average the gradients of
        several, this is the one that the main thread is at."""
        self.reached.add(key)
        if (
            self.recording.box
            and key in self.passes
            and get_ident() == self.recording.box.main_thread
        ):
            [place] = self.passes[key]
            self.recording.box.words[MAIN] = place


def find_group(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The group of a model that is made by DistributedDataParallel with these arguments; None if
    they are wrong."""
    try:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    if mesh := given.get("device_mesh"):
        return mesh.get_group(0) if mesh.ndim == 1 else None
    return given.get("process_group") or dist.group.WORLD


def count_forward(box: Box, group: Any, *, is_second: bool) -> None:
    """Count a forward pass; `is_second`: the model has made one before, and no backward pass
    since."""
    for kind in (FORWARDS, UNUSED) if is_second else (FORWARDS,):
        box.count((kind, id(group)), partial(describe_passes, kind, group))


def describe_passes(kind: str, group: Any) -> Description:
    """The passes of this kind, which are counted by group."""
    return Description(kind, kind, ranks_of(group), number=number_of(group))
