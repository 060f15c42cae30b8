"""Records training: forward, backward and the optimizer's step, gradients as they get ready,
buckets as they leave, and copies between the devices of one process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from playground.algorithms.traffic import bytes_of
from playground.base.event_log import NONE
from playground.base.upstream import hide_from_compiler
from playground.explain.replay.record.layout import LANE_CODES
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.recording import (
    BUCKET,
    COMPUTE,
    GRADIENT,
    MAIN,
    MOVE,
    PHASE,
    name_of_move,
)
from playground.tap import Call, Observer, observing
from playground.tap.replacement import replaced

TRAINING_STEP = "training step"


class BackwardRecorder(Observer):
    """Records backward passes, and in them the buckets of DistributedDataParallel, whose all_reduce
    is called in C++. (torch 2.13 tells of no calls in C++.)"""

    looks_inside = True
    looks_at_ends = False

    def __init__(self, recorder: Recorder, here: threading.local) -> None:
        """`here.gradients` is set in a thread that begins a backward pass; `here.passes` are the
        numbers of those that are under way in it."""
        self.recorder = recorder
        self.here = here
        self.left = 0
        """Number of buckets that have left since backward began."""
        self.under_way: dict[int, tuple[int, int]] = {}
        """Numbers of the backward pass and of the event of a bucket, by the number of the call."""

    def backward_begun(self, root: Any) -> None:
        recorder = self.recorder
        self.here.gradients = True
        if not recorder.backwards:
            self.left = 0
        number = recorder.begin(COMPUTE, "backward", source=recorder.sources.find())
        recorder.backwards.append(recorder.open(number))
        self.here.passes = [*getattr(self.here, "passes", ()), number]

    def backward_ended(self) -> None:
        """Its buckets are over, for which DistributedDataParallel has waited: the thread that tells
        so may be late."""
        recorder = self.recorder
        number = self.here.passes.pop()
        recorder.backwards.remove(number)
        for call, (around, _) in [*self.under_way.items()]:
            if around == number:
                self.end(call)
        recorder.close(number)

    def begun(self, call: Call) -> None:
        """An all_reduce that is called in C++ is a bucket of the backward pass around it."""
        if not call.is_native or call.method != "allreduce":
            return
        recorder, around = self.recorder, self.recorder.around()
        if recorder.thread.is_inside or around not in recorder.backwards:
            return  # part of a recorded function, or no bucket
        [flat] = call.inputs
        if flat.is_floating_point():
            event = recorder.begin(
                BUCKET,
                f"bucket {self.left}",
                nbytes=bytes_of(flat),
                shape=flat.shape,
                group=call.ranks,
                source=recorder.sources.find(),
                parent=around,
            )
            self.under_way[call.number] = around, event
            self.left += 1

    def completed(self, call: Call) -> None:
        self.end(call.number)

    def end(self, call: int) -> None:
        """Record the end of a bucket, unless that is done: two threads learn of it."""
        _, event = self.under_way.pop(call, (NONE, NONE))
        if event != NONE:
            self.recorder.end(event)


class DeviceRecorder:
    """Records the copies between devices, and the work of threads for them: an observer of
    `playground.lessons.devices`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @contextlib.contextmanager
    def copying(
        self, part: str, tensor: torch.Tensor, source: torch.device, target: torch.device
    ) -> Iterator[None]:
        """Record that a part of a training step copies a tensor."""
        recorder = self.recorder
        number = recorder.begin(
            MOVE,
            name_of_move(part, str(source), str(target)),
            nbytes=bytes_of(tensor),
            shape=tensor.shape,
            source=recorder.sources.find(),
            parent=recorder.around(),
        )
        try:
            yield
        finally:
            recorder.end_all([number])

    def working_for(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Record it as a phase with the name of the device. The main thread works for all
        devices."""
        is_main = self.recorder.thread.lane == LANE_CODES[MAIN]
        return contextlib.nullcontext() if is_main else self.recorder.span(PHASE, str(device))


class TrainingHooks:
    """A training step begins with a forward pass that is to be followed by a backward one, and ends
    with the optimizer's step; on a rank that takes none, with the next forward pass before which
    `zero_grad` was called."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.name = TRAINING_STEP
        """The name of each training step in the recording."""
        self.here = threading.local()
        """`forward`: whether this thread is in the forward pass of a module; `step`: the number of
        its training step; `gradients`: whether there has been a backward pass in that."""
        self.models: WeakSet[nn.Module] = WeakSet()
        """Modules whose gradients are recorded."""
        self.handles: list[Any] = []

    def hear(self, event: dict[str, object]) -> None:
        """Name training steps after the variant that is trained, if that is reported."""
        if "variant" in event:
            self.name = f"{event['variant']}: {TRAINING_STEP}"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            replaced(nn.Module, "__call__", self.wrap_forward),
            observing(BackwardRecorder(self.recorder, self.here)),
        ):
            self.handles.append(register_optimizer_step_pre_hook(self.before_step))
            self.handles.append(register_optimizer_step_post_hook(self.after_step))
            try:
                yield
            finally:
                for handle in self.handles:
                    handle.remove()

    def wrap_forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record calls of modules, but not those inside of another module's."""
        here = self.here

        @functools.wraps(real)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(here, "forward", False):
                return real(module, *args, **kwargs)
            number = self.begin_forward(module)
            try:
                return real(module, *args, **kwargs)
            finally:
                self.end_forward(number)

        return hide_from_compiler(forward)

    @functools.partial(hide_from_compiler, with_calls=True)
    def begin_forward(self, module: nn.Module) -> int:
        """A module is called, and not inside of another. Returns the number of the event."""
        learns = module.training and torch.is_grad_enabled()
        if learns:
            self.begin_step(module)
            self.watch_gradients(module)
        self.here.forward = True
        recorder = self.recorder
        name = "forward" if learns else "inference"
        return recorder.open(recorder.begin(COMPUTE, name, source=recorder.sources.find()))

    @functools.partial(hide_from_compiler, with_calls=True)
    def end_forward(self, number: int) -> None:
        self.recorder.close(number)
        self.here.forward = False

    def begin_step(self, module: nn.Module) -> None:
        """A forward pass of this module begins: begin a training step, unless the current one
        continues."""
        recorder, here = self.recorder, self.here
        if recorder.thread.lane != LANE_CODES[MAIN]:
            return  # a replica of DataParallel, or a remote call: the step is the caller's
        step, around = getattr(here, "step", None), recorder.thread.parent
        if step is not None and step == around and here.gradients and has_no_gradients(module):
            recorder.close(step)
        if step is None or not recorder.is_open(step):
            number = recorder.begin(PHASE, self.name, source=recorder.sources.find())
            here.step = recorder.open(number)
            here.gradients = False

    def before_step(self, *called: Any) -> None:
        number = self.recorder.begin(COMPUTE, "step", source=self.recorder.sources.find())
        self.here.optimizer = self.recorder.open(number)

    def after_step(self, *called: Any) -> None:
        self.recorder.close(self.here.optimizer)
        if getattr(self.here, "step", None) is not None:
            self.recorder.close(self.here.step)
            self.here.step = None

    def watch_gradients(self, model: nn.Module) -> None:
        """Record when gradients of this model's parameters are ready, from now on."""
        model = model.module if isinstance(model, DistributedDataParallel) else model
        if model in self.models:
            return
        self.models.update(model.modules())  # a loss that wraps the model is not a second model
        for name, param in model.named_parameters():
            if param.requires_grad and param.is_leaf:
                hook = functools.partial(self.note_gradient, name)
                self.handles.append(param.register_post_accumulate_grad_hook(hook))

    def note_gradient(self, name: str, param: torch.Tensor) -> None:
        recorder = self.recorder
        recorder.instant(
            GRADIENT, name, nbytes=param.nbytes, shape=param.shape, parent=recorder.around()
        )


def has_no_gradients(module: nn.Module) -> bool:
    """Whether `zero_grad` has been called and backward has not. (A module without parameters, a
    loss, says nothing.)"""
    return {param.grad is None for param in module.parameters()} == {True}
