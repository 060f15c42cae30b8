"""The devices of one process: GPUs or, where there are too few, virtual ones. Given: read it once.

A virtual device is a share of the CPU's memory. While it is tracked, each tensor lies on one
device, as with GPUs. The result of an operation lies where its operands lie, and an operation on
tensors of two devices is an error. Only `copy_to` takes a tensor to another device.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakKeyDictionary, finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = torch.device("cpu")
"""The memory of no device. Batches come from there."""
KINDS = "parameters", "gradients", "optimizer state", "activations", "gathered outputs", "inputs"
"""What a device holds."""
KIND_OF_COPY = {
    "scatter": "inputs",
    "targets": "inputs",
    "replicate": "parameters",
    "gather": "gathered outputs",
}
"""What a part of the forward pass copies. All parts of the backward pass copy gradients."""

observers = []
"""Objects that are told of copies and of threads: see `Memory` for their methods."""
homes = WeakKeyDictionary()
"""By storage of a tensor: the virtual device where it lies."""
held = defaultdict(Counter)
"""By virtual device: the bytes of each of `KINDS` that it holds, and of what is in `released`."""
released = deque()
"""(device, kind, bytes) of storages that are gone. The garbage collector adds to it at any time."""
lock = threading.RLock()
"""Held by a thread that changes `homes` or `held`."""
here = threading.local()
"""`target`: the device and the kind of what this thread is copying, or None."""


def find_devices(count):
    """The first GPUs or, if the machine has fewer than `count`, virtual devices."""
    kind = "cuda" if torch.cuda.device_count() >= count else "cpu"
    return [torch.device(kind, number) for number in range(count)]


def device_of(tensor):
    """Where a tensor lies."""
    if tensor.device.type != "cpu":
        return tensor.device
    return homes.get(tensor.untyped_storage(), HOST)


def place(module, device):
    """Move a module to a device. Returns it."""
    if device.type != "cpu":
        return module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        put(tensor, device, "parameters")
    return module


def put(tensor, device, kind):
    """From now on a tensor lies on a virtual device, unless it lies on one already."""
    storage = tensor.untyped_storage()
    with lock:
        if storage not in homes:
            homes[storage] = device
            held[device][kind] += storage.nbytes()
            gone = device, kind, storage.nbytes()
            finalize(storage, released.append, gone).atexit = False


def bytes_held(device):
    """What a virtual device holds: bytes by kind."""
    with lock:
        while released:
            home, kind, count = released.popleft()
            held[home][kind] -= count
        return +held[device]  # without the kinds of which there is nothing


def copy_to(tensor, device, part):
    """The tensor on a device: itself if it lies there, and a copy otherwise.

    `part` names the part of a training step that copies. Backward copies the gradient from the copy
    to the tensor's device, as the part "backward of ...".
    """
    return tensor if device_of(tensor) == device else Copy.apply(tensor, device, part)


class Copy(torch.autograd.Function):
    """The differentiable part of `copy_to`."""

    @staticmethod
    def forward(ctx, tensor, device, part):
        ctx.source = device_of(tensor)
        ctx.part = part
        with ExitStack() as told:
            for observer in observers:
                told.enter_context(observer.copying(part, tensor, ctx.source, device))
            return tensor.to(device, copy=True)

    @staticmethod
    def backward(ctx, grad):
        return copy_to(grad, ctx.source, f"backward of {ctx.part}"), None, None


@contextmanager
def use(device):
    """In this block, this thread works for a device."""
    with ExitStack() as told:
        if device.type == "cuda":
            told.enter_context(torch.cuda.device(device))
        for observer in observers:
            told.enter_context(observer.working_for(device))
        yield


@contextmanager
def observing(observer):
    """Tell an observer of copies and of threads in this block."""
    observers.append(observer)
    try:
        yield observer
    finally:
        observers.remove(observer)


class Memory:
    """The bytes that are copied to each device, and those that each device holds.

    The memory that an operation needs only while it runs does not count on virtual devices.
    """

    def __init__(self, devices):
        self.devices = devices
        self.copied = Counter()
        """Bytes by (part of the step, source, target)."""
        self.at_peak = {device: bytes_held(device) for device in devices}
        """What a virtual device held when it held the most: bytes by kind."""
        self.busy = Counter()
        """Seconds that the operations of each virtual device have computed."""
        self.kind = "activations"
        """Which of `KINDS` the results of operations are."""

    def peak(self, device):
        """The most bytes that a device has held since it is tracked."""
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return self.at_peak[device].total()

    def copied_to(self, device, part):
        """The bytes that a part of the step has copied to a device."""
        return sum(self.copied[key] for key in self.copied if key[::2] == (part, device))

    def note_peak(self, device):
        """Look whether a virtual device holds more than ever."""
        with lock:
            holds = bytes_held(device)
            if holds.total() > self.at_peak[device].total():
                self.at_peak[device] = holds

    @contextmanager
    def copying(self, part, tensor, source, target):
        """In this block, a part of the step copies a tensor."""
        self.copied[part, source, target] += tensor.nbytes
        here.target = target, KIND_OF_COPY.get(part, "gradients")
        yield
        here.target = None

    def working_for(self, device):
        """A context in which this thread's operations are seen. Results without operands lie on the
        device. On GPUs nothing need be seen: torch knows what they hold."""
        return Tracker(self, device) if self.devices[0].type == "cpu" else nullcontext()


class Tracker(TorchDispatchMode):
    """Sees each operation of a thread, also in backward, and counts its results."""

    def __init__(self, memory, device):
        super().__init__()
        self.memory = memory
        self.device = device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.thread_time()
        result = function(*args, **kwargs or {})
        seconds = time.thread_time() - start
        copying = getattr(here, "target", None)
        device, kind = copying or (self.find_device(function, args, kwargs), self.memory.kind)
        if device.type == "cpu" and device != HOST:
            for tensor in tensors_in(result):
                put(tensor, device, kind)
            self.memory.note_peak(device)
        if not copying:
            self.memory.busy[device] += seconds
        return result

    def find_device(self, function, *operands):
        """Where all operands lie. A number may lie elsewhere, as with GPUs."""
        tensors = tensors_in(operands)
        devices = {device_of(tensor) for tensor in tensors if tensor.dim()} - {HOST}
        devices = devices or {device_of(tensor) for tensor in tensors} - {HOST}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise RuntimeError(f"{function}: operands on {names}: copy them to one device")
        return devices.pop() if devices else self.device


@contextmanager
def track_memory(devices):
    """Count what the devices hold and copy in this block. It makes each operation slower."""
    if devices[0].type == "cuda":
        torch.cuda.init()  # else there is nothing to reset
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    with observing(Memory(devices)) as memory, memory.working_for(HOST):
        yield memory


def tensors_in(value):
    """Every tensor in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
