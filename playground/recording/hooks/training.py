"""Training: forward, backward and the optimizer's step, gradients as they get ready, buckets as they leave."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from playground.recording.hooks.buckets import BucketHooks
from playground.recording.hooks.replace import replaced
from playground.recording.layout import LANE_CODES
from playground.recording.recorder import Recorder
from playground.recording.recording import COMPUTE, GRADIENT, MAIN, PHASE
from playground.training import gradients
from playground.training.overlap import Bucket, OverlappedAverage


class TrainingHooks:
    """A training step begins with a forward pass that is to be followed by a backward one, and ends with the
    optimizer's step; on a rank that takes none, with the next forward pass before which `zero_grad` was called."""

    def __init__(self, recorder: Recorder, buckets: BucketHooks) -> None:
        self.recorder, self.buckets = recorder, buckets
        self.here = threading.local()
        """`forward`: whether this thread is in the forward pass of some module; `step`: the number of the training step
        that it is in; `gradients`: whether there has been a backward pass in that."""
        self.models: WeakSet[nn.Module] = WeakSet()
        """Those whose gradients are watched."""
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            replaced(nn.Module, "__call__", self.wrap_forward),
            replaced(torch.autograd, "backward", self.wrap_backward),
            replaced(DistributedDataParallel, "__init__", self.wrap_new_replica),
            replaced(OverlappedAverage, "__init__", self.wrap_new_replica),
            replaced(Bucket, "start", self.buckets.wrap_start),
            replaced(gradients, "average_together", self.buckets.wrap_average_together),
        ):
            self.handles += [
                register_optimizer_step_pre_hook(self.before_step),
                register_optimizer_step_post_hook(self.after_step),
            ]
            try:
                yield
            finally:
                for handle in self.handles:
                    handle.remove()
                self.buckets.remove()

    def wrap_forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record calls of modules that are not part of another one's."""
        recorder, here = self.recorder, self.here

        @functools.wraps(real)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(here, "forward", False):
                return real(module, *args, **kwargs)
            learns = module.training and torch.is_grad_enabled()
            if learns:
                self.begin_step(module)
                self.watch_gradients(module)
            here.forward = True
            try:
                with recorder.span(COMPUTE, "forward" if learns else "inference"):
                    return real(module, *args, **kwargs)
            finally:
                here.forward = False

        return forward

    def wrap_backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.here.gradients = True
            with self.recorder.span(COMPUTE, "backward") as number, self.buckets.during_backward(number):
                return real(*args, **kwargs)

        return backward

    def wrap_new_replica(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What sends gradients while backward computes others: hear of a gradient before it does."""

        @functools.wraps(real)
        def init(replica: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.watch_gradients(model)
            if isinstance(replica, DistributedDataParallel):
                self.buckets.listen(kwargs.get("process_group") or dist.group.WORLD)
            real(replica, model, *args, **kwargs)

        return init

    def begin_step(self, module: nn.Module) -> None:
        """A forward pass of this module begins: and with it a training step, unless there is one that goes on."""
        recorder, here = self.recorder, self.here
        if recorder.thread.lane != LANE_CODES[MAIN]:
            return  # a replica of DataParallel: its caller takes the step; or a remote call: its caller learns
        step = getattr(here, "step", None)
        if step is not None and step == recorder.thread.parent and here.gradients and has_no_gradients(module):
            recorder.close(step)
        if step is None or not recorder.is_open(step):
            number = recorder.begin(PHASE, "training step", source=recorder.sources.find())
            here.step, here.gradients = recorder.open(number), False

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        source = self.recorder.sources.find()
        self.here.optimizer = self.recorder.open(self.recorder.begin(COMPUTE, "step", source=source))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.recorder.close(self.here.optimizer)
        if getattr(self.here, "step", None) is not None:
            self.recorder.close(self.here.step)
            self.here.step = None

    def watch_gradients(self, model: nn.Module) -> None:
        """From now on, record when gradients of this model's parameters are ready."""
        model = model.module if isinstance(model, DistributedDataParallel) else model
        if model in self.models:
            return
        self.models.update(model.modules())  # a loss that wraps the model is no other model
        for name, param in model.named_parameters():
            if param.requires_grad and param.is_leaf:
                hook = functools.partial(self.note_gradient, name)
                self.handles.append(param.register_post_accumulate_grad_hook(hook))

    def note_gradient(self, name: str, param: torch.Tensor) -> None:
        recorder = self.recorder
        recorder.instant(GRADIENT, name, nbytes=param.nbytes, shape=param.shape, parent=recorder.around())


def has_no_gradients(module: nn.Module) -> bool:
    """Whether `zero_grad` has been called and backward has not. (A module without parameters, a loss, says nothing.)"""
    return {param.grad is None for param in module.parameters()} == {True}
