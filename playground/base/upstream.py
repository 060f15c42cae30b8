"""What we use of Python and torch although nobody promises that it stays: private attributes, and
modules of multiprocessing that are not documented. All of it stands here, each with the version
whose source it was read from, and `tests/base/test_upstream.py` names what an upgrade breaks.

    a program    its command line, main module and working folder, as a fork is to have them
    a fork       what it takes over, forgets and ends: threads, exit functions, the interpreter
    torch there  logs, the compiler and the allocator of CUDA read the environment anew
    groups       backends, timeouts, streams, counters, the registry
    tensors      versions, memory, sparse and distributed ones; what a message came from
    models       DDP's hooks and buckets, FSDP's means, steps of optimizers
    data         a loader's iterator, sampler and workers
    torch        its version on the disk, the start of CUDA, the compiler, autograd

Methods of torch's that are replaced stand in the tables of `tap` and of `explain.hang`.
Importing this does not import torch.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import inspect
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import process, reduction, spawn
from multiprocessing.context import set_spawning_popen
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar

Function = TypeVar("Function", bound=Any)


# A program


def python_command(code: str) -> list[str]:
    """The command of a Python like this one, with its flags, that runs `code`. Its streams are not
    buffered (-u), those of C included.

    Source: subprocess._args_from_interpreter_flags (Python 3.11)
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags, "-u", "-c", code]


def is_importing_program() -> bool:
    """Whether this process, made by `run_pickled`, is importing the program's script.

    Source: `_inheriting` in multiprocessing.spawn._main (Python 3.11)
    """
    return bool(getattr(process.current_process(), "_inheriting", False))


def find_modules_as_here() -> list[str]:
    """This process's `sys.path`, as it means the same in another working folder. The first folder
    Python looks into may be the working folder ("") of the time it started.

    Source: multiprocessing.process.ORIGINAL_DIR (Python 3.11)
    """
    start = process.ORIGINAL_DIR  # type: ignore[attr-defined]
    return [folder or start for folder in sys.path if folder or start]


def describe_program() -> dict[str, Any]:
    """The data that `multiprocessing.spawn` needs in a new process to find this program's modules,
    the script among them, if there is one: not in a notebook, at a prompt, on stdin.

    Multiprocessing would fix the method by which it starts processes, here and there. That is for
    each program to do. Source: multiprocessing.spawn.get_preparation_data (Python 3.11)
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    program = spawn.get_preparation_data("") | {"sys_path": find_modules_as_here()}
    if chosen is None:
        multiprocessing.set_start_method(None, force=True)
    for choice in ("name", "start_method"):
        del program[choice]
    if not os.path.isfile(program.get("init_main_from_path", __file__)):
        del program["init_main_from_path"]
    return program


@dataclass(frozen=True)
class ForkedMain:
    """What a new process is to call: the part of a process of multiprocessing's that
    `multiprocessing.spawn` uses.

    (A process of multiprocessing's is another's child, and hands on how it was started: its own
    children, such as the workers of a DataLoader, would come from fork servers, too.)
    """

    main: Callable[..., object]
    args: tuple[Any, ...]

    def _bootstrap(self, parent_sentinel: int) -> None:
        self.main(*self.args)


@dataclass(frozen=True)
class InheritedFds:
    """Stands for multiprocessing's Popen while work is pickled: descriptors in it are added to
    `fds`, which the new process inherits."""

    fds: list[int]

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, index: int) -> InheritedFd:  # noqa: N802 (its name in multiprocessing)
        return InheritedFd(index)


inherited: list[int] = []
"""In a process that `run_pickled` runs: the descriptors it was given."""


@dataclass(frozen=True)
class InheritedFd:
    """Stands for a descriptor in what a new process unpickles."""

    index: int

    def detach(self) -> int:
        return inherited[self.index]


def pickle_main(
    main: Callable[..., object],
    args: tuple[Any, ...],
    fds: list[int],
    imports_program: bool = True,
) -> memoryview:
    """What `run_pickled` runs in a new process, as `multiprocessing.spawn` reads it: this program,
    unless `main` needs nothing of it, then `main(*args)`. Descriptors in it are added to `fds`.

    Source: multiprocessing.popen_spawn_posix.Popen._launch (Python 3.11)
    """
    work = io.BytesIO()
    set_spawning_popen(InheritedFds(fds))  # type: ignore[arg-type]
    try:
        reduction.dump(describe_program() if imports_program else {}, work)
        reduction.dump(ForkedMain(main, args), work)
    finally:
        set_spawning_popen(None)
    return work.getbuffer()


def run_module_as_main(name: str, compile_file: Callable[[str], CodeType] | None = None) -> None:
    """Run a module as `python -m` does; with the code that `compile_file` makes of its file, if
    that is given.

    Source: runpy._run_module_as_main (Python 3.11)
    """
    if compile_file is None:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    _, spec, _ = runpy._get_module_details(name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    code = compile_file(spec.origin)
    runpy._run_code(code, vars(sys.modules["__main__"]), None, "__main__", spec)  # type: ignore[attr-defined]


def run_first_folder_as_main() -> None:
    """Run the folder or the archive that is first on `sys.path`, as `python FOLDER` does.

    Source: runpy._run_module_as_main (Python 3.11)
    """
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def run_pickled(work: int, fds: list[int]) -> None:
    """In a new process that has inherited `fds`: run what `pickle_main` has left in the pipe
    `work`.

    Source: multiprocessing.spawn._main (Python 3.11)
    """
    inherited[:] = fds
    spawn._main(work, work)  # which needs its parent's end for a process of its own kind only


# A fork


def forget_parent() -> None:
    """In a fork: drop multiprocessing's finalizers, which are its parent's.

    Source: multiprocessing.process.BaseProcess._after_fork (Python 3.11)
    """
    process.BaseProcess._after_fork()  # type: ignore[attr-defined]


def renew_main_thread() -> None:
    """In a fork: let the main thread have its own native id.

    Source: threading.Thread._set_native_id (Python 3.11)
    """
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def join_threads() -> None:
    """Wait for the threads that are no daemons, as an orderly exit does.

    Source: threading._shutdown (Python 3.11)
    """
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Run what is registered with `atexit`, and forget it.

    Source: atexit._run_exitfuncs (Python 3.11)
    """
    atexit._run_exitfuncs()


class Silence:
    """When it is deleted, what this process writes to descriptor 2 is dropped."""

    def __init__(self) -> None:
        self.nowhere = os.open(os.devnull, os.O_WRONLY)

    def __del__(self, redirect: Callable[[int, int], object] = os.dup2) -> None:
        redirect(self.nowhere, 2)


def end_interpreter(code: int, spared: Mapping[str, ModuleType]) -> NoReturn:
    """End this process as the interpreter ends a program: threads, exit functions, and then all
    modules but the `spared` are taken down. What C++ would do after that is left out, and is not
    heard: nanobind complains of each spared object of its own.

    Source: finalize_modules in Python/pylifecycle.c, which knows the modules in `sys.modules` and
    clears sys after them, and Py_Exit (Python 3.11); on_exit(3)
    """
    kept = {name: module for name, module in spared.items() if module is not sys}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    vars(sys)["silence"] = Silence()
    for name, module in kept.items():
        if name != "builtins" and sys.modules.get(name) is module:
            del sys.modules[name]
    library = ctypes.CDLL(None)
    library.fflush(None)
    library.on_exit(library._exit, None)
    ctypes.pythonapi.Py_Exit(code & 0xFF)
    os._exit(code & 0xFF)


def find_own_excepthook() -> Callable[..., object] | None:
    """`sys.excepthook`, if the program has set it; None if it is Python's, which prints, or torch's
    around that, which puts the rank before each line.

    Source: `_distributed_excepthook` in torch.distributed.distributed_c10d (torch 2.15)
    """
    hook: Any = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        hook = inspect.getclosurevars(hook).nonlocals["old_hook"]
    return None if hook is sys.__excepthook__ else sys.excepthook


def detach_finalizers() -> None:
    """Leave torch's table of operators as it is at the end: it would be taken down, piece by piece.

    Source: weakref.finalize._registry (Python 3.11)
    """
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        if (found := each.peek()) and found[1].__module__ == "torch.library":
            each.detach()


def find_interpreter() -> int:
    """The address of the interpreter's own state.

    Source: _PyRuntime in Include/internal/pycore_runtime.h (Python 3.11)
    """
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))


def is_foreign(thread: threading.Thread) -> bool:
    """Whether Python did not start it: a thread of C++, known here since it ran a callback.

    Source: threading._DummyThread (Python 3.11)
    """
    return isinstance(thread, threading._DummyThread)


# Torch there


def takes_remote_calls() -> bool:
    """Whether torch's RPC is initialised in this process.

    Source: torch.distributed.rpc.api._is_current_rpc_agent_set (torch 2.15)
    """
    api = sys.modules.get("torch.distributed.rpc.api")
    return bool(api and api._is_current_rpc_agent_set())


def read_jit_again() -> None:
    """Have `torch.jit` obey PYTORCH_JIT as it now is in the environment.

    Source: torch.jit._state.EnabledProxy (torch 2.15)
    """
    from torch.jit import _state

    _state._enabled.__init__()


def read_logs_again() -> None:
    """Have torch's loggers obey TORCH_LOGS and TORCH_LOGS_OUT as they now are in the environment.

    Source: torch._logging._internal._init_logs (torch 2.15)
    """
    from torch._logging import _internal

    _internal.log_state.clear()
    _internal._init_logs()


def read_allocator_again(settings: str) -> None:
    """Have the allocator of the accelerator's memory obey these settings, as those in
    PYTORCH_ALLOC_CONF.

    Source: torch._C._accelerator_setAllocatorSettings (torch 2.15)
    """
    import torch

    if torch.accelerator.is_available():
        torch._C._accelerator_setAllocatorSettings(settings)


# Groups

STORE_MAKER = "_create_c10d_store"
"""The function of torch.distributed.rendezvous by which env:// and tcp:// come to a store, given
host, port, rank, size and timeout (torch 2.15)."""
DEFAULT_TIMEOUTS = "default_pg_timeout", "default_pg_nccl_timeout"
"""What torch.distributed.distributed_c10d calls the timeouts of groups that are formed without one
(torch 2.15)."""
FUNCTIONS = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
"""The modules of torch.distributed's functions, and of what is around each of them."""


class Caller(NamedTuple):
    """The function of torch.distributed that has called an operation."""

    waits: bool
    """Whether it waits for the operation."""
    hands_to_torch: bool
    """Whether the work of a collective goes to torch itself, which may wait for it in C++. (Older
    versions of torch do not tell its groups.)"""


WAITS = Caller(waits=True, hands_to_torch=False)


def find_caller(is_message: bool) -> Caller:
    """The caller of an operation. To be called by what stands in the operation's place.

    Source: the local variable `async_op` in torch.distributed.distributed_c10d (torch 2.15)
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")) in FUNCTIONS:
        code = frame.f_code
        if code.co_name in ("send", "recv", "monitored_barrier"):
            return WAITS
        if "async_op" in code.co_varnames and not frame.f_locals["async_op"]:
            return WAITS
        frame = frame.f_back
    is_torchs = frame is not None and not is_message and module.startswith("torch.")
    return Caller(waits=False, hands_to_torch=is_torchs)


def carrier_of(group: Any, device: Any) -> Any:
    """The backend, an object of C++ or Python, that carries a group's tensors on this device.

    Source: ProcessGroup._get_backend (torch 2.15)
    """
    return group._get_backend(device)


def timeout_of(group: Any, device: Any) -> timedelta:
    """The time that an operation of the group may take on this device.

    Source: Backend.Options._timeout (torch 2.15)
    """
    found: timedelta = carrier_of(group, device).options._timeout
    return found


def is_carried_by_gloo(group: Any, device: Any) -> bool:
    """Whether gloo itself carries a group's tensors on this device, without a backend around it.

    Source: torch.distributed.ProcessGroupGloo (torch 2.15)
    """
    from torch import distributed

    kind = getattr(distributed, "ProcessGroupGloo", ())
    return isinstance(carrier_of(group, device), kind)


def devices_of(group: Any) -> list[Any]:
    """The devices, without a number, whose tensors a group has a backend for.

    Source: ProcessGroup._device_types (torch 2.15)
    """
    return [*group._device_types]


def read_timeout(group: Any) -> timedelta | None:
    """The shortest of its backends'; None if one cannot be read.

    Source: Backend.Options._timeout (torch 2.15)
    """
    try:
        return min(timeout_of(group, device) for device in devices_of(group))
    except (RuntimeError, AttributeError, ValueError, NotImplementedError):
        return None


def is_carried_by_nccl(group: Any) -> bool:
    """Whether NCCL carries a group's tensors of GPUs.

    Source: torch.distributed.ProcessGroupNCCL (torch 2.15)
    """
    import torch

    try:
        backend = carrier_of(group, torch.device("cuda"))
        return type(backend).__name__.startswith("ProcessGroupNCCL")
    except (RuntimeError, AttributeError):
        return False


def current_stream(device: int | None = None) -> tuple[int, int]:
    """A GPU, the current one by default, and the handle of its current stream in this thread.

    Source: torch._C._cuda_getCurrentRawStream (torch 2.15)
    """
    import torch

    index = torch._C._cuda_getDevice() if device is None else device
    return index, torch._C._cuda_getCurrentRawStream(index)


def count_collectives(group: Any) -> int | None:
    """How many collectives a group has counted, those that C++ calls included; None if it does not
    tell, as a backend in Python, which hands on some of them to another.

    Source: ProcessGroup._get_sequence_number_for_group (torch 2.15)
    """
    try:
        if any(hasattr(carrier_of(group, each), "__dict__") for each in devices_of(group)):
            return None
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


FUNCTIONAL = "torch.distributed._functional_collectives"
"""The module of functional collectives, which `DTensor` calls. Torch imports it when needed."""


def resolve_group(group: Any, tag: str) -> Any:
    """The process group that a functional collective is passed as a group, a mesh, or ranks. The
    module has to be imported.

    Source: torch.distributed._functional_collectives._resolve_group_name (torch 2.15)
    """
    from torch.distributed import distributed_c10d

    name = sys.modules[FUNCTIONAL]._resolve_group_name(group, tag)
    return distributed_c10d._resolve_process_group(name)


def is_registered(group: Any) -> bool:
    """Whether torch.distributed knows the group's ranks.

    Source: torch.distributed.distributed_c10d._world (torch 2.15)
    """
    from torch.distributed import distributed_c10d

    return group in distributed_c10d._world.pg_group_ranks


def list_groups() -> list[Any]:
    """All process groups of this process.

    Source: torch.distributed.distributed_c10d._world (torch 2.15)
    """
    from torch.distributed import distributed_c10d

    return [*distributed_c10d._world.pg_map]


def default_store() -> Any:
    """The store of the default process group.

    Source: torch.distributed.distributed_c10d._get_default_store (torch 2.15)
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# Tensors


def sender_of(work: Any) -> int:
    """The rank in the group that has sent what a receive from anyone has received.

    Source: Work._source_rank (torch 2.15)
    """
    return int(work._source_rank())


def version_of(tensor: Any) -> int:
    """How often a tensor's memory has been written, as far as autograd was told.

    Source: torch.Tensor._version (torch 2.15)
    """
    return int(tensor._version)


def memory_of(tensor: Any) -> int:
    """A number that tensors in the same memory share.

    Source: torch.UntypedStorage._cdata (torch 2.15)
    """
    return int(tensor.untyped_storage()._cdata)


def parts_of_sparse(tensor: Any) -> tuple[Any, Any]:
    """The indices and the values of a sparse tensor, in which an index may occur twice.

    Source: torch.Tensor._indices and _values (torch 2.15)
    """
    return tensor._indices(), tensor._values()


def print_options() -> Any:
    """How tensors are printed.

    Source: torch._tensor_str.get_printoptions (torch 2.15)
    """
    from torch import _tensor_str

    return _tensor_str.get_printoptions()


def local_of(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds; None of another tensor.

    Source: torch.distributed.tensor.DTensor._local_tensor (torch 2.15)
    """
    return getattr(tensor, "_local_tensor", None) if hasattr(tensor, "device_mesh") else None


# Models


def hooks_of(model: Any) -> list[str]:
    """The communication hooks of a DistributedDataParallel after which gradients may differ between
    ranks: those that are not torch's, and those of local SGD. By name.

    Source: DistributedDataParallel._comm_hooks (torch 2.15)
    """
    hooks = (getattr(hook, "func", hook) for hook, _ in model._comm_hooks)
    named = [(getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) for hook in hooks]
    torchs = "torch.distributed.algorithms."
    return [name for module, name in named if not module.startswith(torchs) or "localSGD" in name]


def has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks of the optimizer itself are called after its steps.

    Source: torch.optim.Optimizer._optimizer_step_post_hooks (torch 2.15)
    """
    return bool(optimizer._optimizer_step_post_hooks)


MEANS = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "MeanBackward")
"""How the names of nodes of autograd's graph begin whose result may be a mean."""
MEAN = 1
"""The number of `reduction="mean"`."""


def elements_of_mean(root: Any) -> int:
    """Of how many elements the root of a backward pass is the mean, if a loss function of torch's
    has returned it; 0 if it is none, or weighs its elements, or that is not known.

    Source: the attributes of the nodes of autograd's graph (torch 2.15)
    """
    roots = root if isinstance(root, list | tuple) else [root]
    node = getattr(roots[0], "grad_fn", None) if len(roots) == 1 else None
    name = type(node).__name__
    if not name.startswith(MEANS) or getattr(node, "_saved_reduction", MEAN) != MEAN:
        return 0
    if name.startswith("Mean"):
        return int(getattr(node, "_saved_self_sym_numel", 0))
    try:
        if getattr(node, "_saved_weight", None) is not None:
            return 0
        if name.startswith("Nll"):  # without the elements to ignore
            return int(getattr(node, "_saved_total_weight").item())  # noqa: B009
        return int(getattr(node, "_saved_self").numel())  # noqa: B009
    except RuntimeError:  # it was freed, or written since
        return 0


def is_joining(model: Any) -> bool:
    """Whether a DistributedDataParallel is called in the context of `Join`.

    Source: DistributedDataParallel._join_config (torch 2.15)
    """
    return bool(model._join_config.enable)


def may_rebuild_buckets(model: Any) -> bool:
    """Whether a DistributedDataParallel has yet to arrange its buckets by the order in which
    gradients are ready.

    Source: DistributedDataParallel._has_rebuilt_buckets (torch 2.15)
    """
    return not model._has_rebuilt_buckets


def find_tensors(output: Any) -> list[Any]:
    """The tensors in what the forward of a DistributedDataParallel has returned.

    Source: torch.nn.parallel.distributed._find_tensors (torch 2.15)
    """
    from torch.nn.parallel import distributed

    return [*distributed._find_tensors(output)]


# Data


def batch_iterator() -> Any:
    """The class of all iterators of a `DataLoader`.

    Source: torch.utils.data.dataloader._BaseDataLoaderIter (torch 2.15)
    """
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def sampler_of(iterator: Any) -> Any:
    """The sampler of samples that an iterator of a `DataLoader` goes through; None if it has none.

    Source: torch.utils.data.dataloader._BaseDataLoaderIter._index_sampler (torch 2.15)
    """
    batches = iterator._index_sampler
    return getattr(batches, "sampler", batches)


def count_workers(iterator: Any) -> int:
    """The number of workers of an iterator of a `DataLoader` whose data set is an
    `IterableDataset`; 0 of any other.

    Source: torch.utils.data.dataloader._BaseDataLoaderIter (torch 2.15)
    """
    is_iterable = iterator._dataset_kind == 1  # _DatasetKind.Iterable
    return int(iterator._num_workers) if is_iterable else 0


def count_batches(iterator: Any) -> int:
    """The number of batches that an iterator of a `DataLoader` returns in one pass over a data set
    with indices; 0 of any other.

    Source: torch.utils.data.dataloader._BaseDataLoaderIter (torch 2.15)
    """
    has_indices = iterator._dataset_kind == 0  # _DatasetKind.Map
    batches = iterator._index_sampler
    return len(batches) if has_indices and hasattr(batches, "__len__") else 0


# Torch


def without_modes() -> Any:
    """A context manager: no mode of the program's hears of the operators that are called in it.

    Source: torch.utils._python_dispatch._disable_current_modes (torch 2.15)
    """
    from torch.utils import _python_dispatch

    return _python_dispatch._disable_current_modes()


def torch_folder() -> str:
    """The folder of the package torch, which need not be imported; empty if there is none.

    Source: importlib.util.find_spec (Python 3.11)
    """
    spec = importlib.util.find_spec("torch")
    return os.path.dirname((spec and spec.origin) or "")


def find_older_torch(first: tuple[int, int]) -> str:
    """The version of torch, which need not be imported, if it is older than `first`; else empty.

    Source: importlib.metadata.version (Python 3.11)
    """
    from importlib.metadata import version  # which takes longer to import than this package

    found = version("torch")
    return found if tuple(map(int, found.split(".")[:2])) < first else ""


def when_cuda_starts(function: Callable[[], None]) -> None:
    """Call `function` when torch initialises CUDA in this process; now if it has.

    Source: torch.cuda._lazy_call (torch 2.15)
    """
    import torch

    torch.cuda._lazy_call(function)


def hide_from_compiler(function: Function, *, with_calls: bool = False) -> Function:
    """`function`, which `torch.compile` does not trace; with `with_calls`, nor what it calls.

    The compiler traces every function of Python that is called while a compiled model runs, also
    one that C++ calls back. Source: torch._C._dynamo.eval_frame (torch 2.15)
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    calls = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, calls))
    return function


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass.

    Source: torch._C._current_graph_task_id (torch 2.15)
    """
    import torch

    return torch._C._current_graph_task_id() != -1


def below_autograd() -> Any:
    """A context manager: neither autograd nor the versions of tensors hear of what is done.

    Source: torch._C._AutoDispatchBelowADInplaceOrView (torch 2.15)
    """
    import torch

    return torch._C._AutoDispatchBelowADInplaceOrView()
