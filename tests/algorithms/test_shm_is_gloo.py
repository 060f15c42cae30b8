"""`shm` is invisible: drawn programs do on it what they do on gloo.

Each program runs in the same processes on a group of gloo and on one of shm, of the same ranks.
Compared are, call by call, what is returned or raised, and every byte and property of all tensors:
`_version` and what autograd says, too.

What may differ, and is not drawn or not compared:
- the name of the backend: it is what the program has asked for. torch's object collectives look up
  a device by it;
- how floating-point numbers that have no exact sum are rounded, and which NaN is taken: gloo's
  order of addition depends on the size, ours is that of the ranks. What is drawn has exact sums;
- sums of `bool`, of which gloo makes bytes of 2 and more;
- tensors that are expanded or have gaps: gloo reads and writes the memory between and behind their
  elements;
- what gloo refuses when half is done: AVG of integers by `reduce_scatter`, types that it lacks
  there, shapes ();
- what gloo's threads do to autograd, by chance, where an all-gather's output requires a gradient,
  or a functional all_reduce's of complex numbers, of which gloo adds up a view as real ones;
- `reduce_scatter_tensor` has a future on shm and is completed before `wait`, in which gloo copies
  its result by operators that a dispatch mode sees, and that raise where the method has made the
  output part of a graph;
- two calls of different kinds at once, which can hang on gloo. That shm keeps them apart,
  test_backend.py holds;
- a barrier after a call that has failed: on some ranks gloo's may find that call still in its list
  and raise its error once more, and on the others it then waits;
- where a future's error was raised: torch adds the lines of Python, and that it was in a callback;
- questions to works that torch has deprecated, and what they say after an error;
- arguments that differ between ranks, for which gloo promises nothing: shm raises on all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_shm
from torch.distributed import distributed_c10d

from playground.testing import World

pytestmark = needs_shm
DTYPES = (
    *["float32"] * 6, "float64", "float16", "bfloat16", "complex64", "complex128", "uint8", "int8",
    "int32", "int64",
    "bool", "int16", "uint16", "uint32", "uint64", "float8_e5m2", "complex32",
)  # fmt: skip
SURE = DTYPES[:-6]
"""Those that gloo has."""
LAYOUTS = (
    *["contiguous"] * 4, "transposed", "every other", "offset", "channels last", "conj", "neg",
    "sparse",
    "csr", "meta", "parameter", "requires grad", "leaf view", "saved", "inference", "subclass",
    "unsqueezed",
)  # fmt: skip
STRIDED = [layout for layout in LAYOUTS if layout not in ("sparse", "csr", "meta")]
HISTORIES = ("parameter", "requires grad", "leaf view")
MODES = (
    *["none"] * 5, "inference_mode", "no_grad", "device meta", "function mode", "dispatch mode",
    "autocast",
    "default dtype",
)  # fmt: skip
COLLECTIVES = (
    *["all_reduce"] * 4, *["broadcast"] * 3, *["reduce_scatter_tensor"] * 3,
    *["all_gather_into_tensor"] * 3,
    "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
    "all_to_all_single", "barrier",
    "message", "batch", "objects", "coalesced", "allreduce_coalesced", "sparse", "functional",
)  # fmt: skip
OPS = (*["SUM"] * 4, "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL")
SHAPES = ((), (0,), (1,), (3,), (2, 3), (4, 6), (0, 4), (12, 5), (2, 2, 2, 3), (6, 1))
QUESTIONS = ("source_rank", "synchronize", "is_completed", "result")
LONG, SHORT = timedelta(seconds=30), timedelta(milliseconds=50)


class Tagged(torch.Tensor):
    """A subclass of a tensor."""


class Functions(torch.overrides.TorchFunctionMode):
    """Counts what is called of torch."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


class Program:
    """Some calls that all ranks of a group make, drawn from `seed`, and what comes of them on this
    rank."""

    def __init__(self, seed: int, group: Any, members: Sequence[int], rank: int) -> None:
        self.draw, self.group, self.members, self.rank = (
            Random(seed),
            group,
            members,
            members.index(rank),
        )
        self.size = len(members)
        self.told: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.works: list[Any] = []
        self.has_failed = False

    def tell(self, *what: Any) -> None:
        self.told.append(" ".join(map(str, what)))

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of this call; None if it has raised."""
        try:
            result = call()
        except Exception as error:
            self.tell(name, "raised", type(error).__mro__[:-1], normal(error))
            self.has_failed |= name not in QUESTIONS
            return None
        self.tell(name, describe(result))
        return result

    def run(self) -> list[str]:
        for _ in range(self.draw.choice([1, 1, 2, 3, 5])):
            with contextlib.ExitStack() as stack:
                mode = self.mode()
                self.tell(type(mode).__name__)
                stack.enter_context(mode)
                self.name = ""
                self.call()
            # torch's functions look up the device by the backend's name
            if self.name not in ("objects", "reduce_scatter_tensor"):
                self.tell(getattr(mode, "called", ""))
        return self.told

    def mode(self) -> Any:
        name = self.draw.choice(MODES)
        made = {
            "inference_mode": torch.inference_mode, "no_grad": torch.no_grad,
            "function mode": Functions,
            "device meta": lambda: torch.device("meta"), "dispatch mode": Dispatched,
            "none": contextlib.nullcontext,
            "autocast": lambda: torch.autocast("cpu"), "default dtype": default_dtype,
        }  # fmt: skip
        return made[name]()

    def tensor(self, dtype: str, layout: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor with this rank's numbers, whose sums and products are exact."""
        seed = self.draw.randrange(2**32)
        with torch._C.DisableTorchFunction(), contextlib.ExitStack() as stack:
            if layout == "inference":
                stack.enter_context(torch.inference_mode())
            tensor = make(dtype, layout, shape, seed * 8 + self.rank)
        self.tensors.append(tensor)
        return tensor

    def call(self) -> None:
        """One call, at once or asynchronous."""
        draw = self.draw
        name, dtype, layout = map(draw.choice, (COLLECTIVES, DTYPES, LAYOUTS))
        if name == "barrier" and self.has_failed:
            name = "all_reduce"
        shape: Sequence[int] = draw.choice(SHAPES)
        op = op_of(draw.choice(OPS))
        root = draw.randrange(self.size)
        asynchronous = draw.random() < 0.4
        self.name = name
        if draw.random() < 0.04:
            dtype = draw.choice(["float32", "float64", "int64"])
            layout = "contiguous"
            shape = (150_001,)
        # else gloo writes beyond them, hangs, or raises when half is done
        if name.startswith("reduce_scatter"):
            op = op_of(draw.choice(["SUM", "PRODUCT", "MIN", "MAX"]))
            dtype = draw.choice(SURE)
            shape = draw.choice([each for each in SHAPES if each and 0 not in each])
        if name == "coalesced":  # whose state torch forgets to clear after an error
            dtype, layout, op = draw.choice(SURE[:8]), "contiguous", op_of("SUM")
        # gloo takes what lies between
        if layout == "every other" and ("reduce" in name or name == "broadcast"):
            layout = "transposed"
        if dtype == "bool":  # of which gloo makes bytes of 2 and more
            op = op_of(draw.choice(["MIN", "MAX", "BAND", "BOR", "BXOR"]))
        # in whose threads gloo races with autograd
        if layout in HISTORIES and (
            name == "all_gather_into_tensor" or (name == "functional" and "complex" in dtype)
        ):
            layout = "contiguous"
        # which has one on shm, and is completed some time
        self.has_future = name != "reduce_scatter_tensor"
        # gloo reads the memory that one of two of them has not
        strange = layout in ("sparse", "csr", "meta")
        other = layout if strange else draw.choice([layout, *STRIDED]), dtype
        by_method, wrong = draw.random() < 0.3, draw.random() < 0.05
        self.recipe = dtype, layout, shape
        try:
            tensor = self.tensor(dtype, layout, shape)
        except Exception:  # there is no such tensor
            return
        call = self.prepare(name, tensor, op, root, asynchronous, by_method, other, wrong)
        work = self.attempt(
            f"{name} {dtype} {layout} {tuple(shape)} {asynchronous} {by_method}", call
        )
        if isinstance(work, list):
            self.works += [each for each in work if hasattr(each, "wait")]
        elif hasattr(work, "wait"):
            self.works.append(work)
        self.finish()  # two of different kinds at once can hang on gloo

    def prepare(
        self, name: str, tensor: torch.Tensor, op: Any, root: int, asynchronous: bool,
        by_method: bool,
        other: tuple[str, str], wrong: bool,
    ) -> Callable[[], Any]:  # fmt: skip
        group = self.group
        size = self.size
        rank = self.rank
        top = self.members[root]
        shape, (layout, dtype) = list(tensor.shape), other
        called: dict[str, Any] = {"group": group, "async_op": asynchronous}
        many = [size * shape[0], *shape[1:]] if shape else [size]
        if wrong:
            many = [*many, 2]

        def others(count: int = size) -> list[torch.Tensor]:
            return [self.plain() for _ in range(count)]

        def second(shape: Sequence[int]) -> torch.Tensor:
            try:
                return self.tensor(dtype, layout, shape)
            except Exception:
                return self.tensor("float32", "contiguous", shape)

        if name == "all_reduce":
            if by_method:
                return lambda: group.allreduce(
                    [tensor], options(dist.AllreduceOptions, op, asynchronous)
                )
            return lambda: dist.all_reduce(tensor, op, **called)
        if name == "broadcast":
            if by_method:
                return lambda: group.broadcast(tensor, root)
            return lambda: dist.broadcast(tensor, top, **called)
        if name == "reduce_scatter_tensor":
            layout = "contiguous" if by_method and layout in HISTORIES else layout
            whole = second(many)
            if by_method:
                return lambda: group._reduce_scatter_base(
                    tensor, whole, options(dist.ReduceScatterOptions, op, asynchronous)
                )
            return lambda: dist.reduce_scatter_tensor(tensor, whole, op, **called)
        if name == "all_gather_into_tensor":
            layout = "contiguous" if layout in HISTORIES else layout
            whole = second(many)
            if by_method:
                return lambda: group._allgather_base(whole, tensor)
            return lambda: dist.all_gather_into_tensor(whole, tensor, **called)
        if name == "reduce":
            if rank != root:  # where gloo leaves some part of the sum
                self.tensors = [each for each in self.tensors if each is not tensor]
            return lambda: dist.reduce(tensor, top, op, **called)
        if name == "all_gather":
            parts = others()
            return lambda: dist.all_gather(parts, tensor, **called)
        if name == "reduce_scatter":
            parts = others()
            return lambda: dist.reduce_scatter(tensor, parts, op, **called)
        if name == "gather":
            parts = others()
            return lambda: dist.gather(tensor, parts if rank == root else None, top, **called)
        if name == "scatter":
            parts = others()
            return lambda: dist.scatter(tensor, parts if rank == root else None, top, **called)
        if name == "all_to_all":
            parts, more = others(), others()
            return lambda: dist.all_to_all(parts, more, **called)
        if name == "all_to_all_single":
            whole = second(shape)
            return lambda: dist.all_to_all_single(whole, tensor, **called)
        if name == "barrier":
            time.sleep(0.05)  # a call of the program before may have failed
            return lambda: dist.barrier(**called)
        if name in ("message", "batch"):
            return partial(self.messages, tensor, name == "batch", asynchronous, by_method)
        if name == "objects":
            return partial(self.objects, top, rank == root)
        if name == "coalesced":
            parts = others(3)
            return partial(coalesce, parts, op, group, asynchronous)
        if name == "allreduce_coalesced":
            parts = others(2)
            return lambda: dist.all_reduce_coalesced(parts, op, group, asynchronous)
        if name == "sparse":
            rows = self.tensor("float32", "sparse", (6, 2))
            return lambda: dist.all_reduce(rows, op, **called)
        return partial(functional, self, tensor, op)

    def plain(self) -> torch.Tensor:
        """Another tensor like that of the call."""
        return self.tensor(*self.recipe)

    def messages(
        self, tensor: torch.Tensor, batch: bool, asynchronous: bool, by_method: bool
    ) -> Any:
        """In a ring."""
        if self.size == 1:
            return None
        group, after, before = self.group, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        incoming = self.plain()
        if batch:
            made = [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
                dist.P2POp(dist.irecv, incoming, group=group, group_peer=before),
            ]
            return dist.batch_isend_irecv(made)
        if by_method:
            return [group.send([tensor], after, 7), group.recv([incoming], before, 7)]
        if asynchronous:
            return [
                dist.isend(tensor, group=group, group_dst=after), dist.irecv(incoming, group=group,
                group_src=before)
            ]  # fmt: skip
        if self.rank % 2:
            return dist.recv(incoming, group=group, group_src=before), dist.send(
                tensor, group=group, group_dst=after
            )
        return dist.send(tensor, group=group, group_dst=after), dist.recv(
            incoming, group=group, group_src=before
        )

    def objects(self, top: int, is_root: bool) -> Any:
        gathered = [None] * self.size
        told = [{"from": top, "n": 3}, [1, 2]] if is_root else [None, None]
        dist.all_gather_object(gathered, (self.rank, "x" * self.rank), group=self.group)
        dist.broadcast_object_list(told, top, group=self.group)
        return gathered + told

    def finish(self) -> None:
        """Wait for all that is under way, in some order."""
        works, self.works = self.works, []
        how = self.draw.choice(["wait", "wait", "timeout", "future", "reversed"])
        for work in works[:: -1 if how == "reversed" else 1]:
            if how == "future" and self.has_future:
                self.attempt("future", partial(wait_for_future, work))
            timeout = [LONG] if how == "timeout" and isinstance(work, dist.Work) else []
            if self.attempt("wait", partial(work.wait, *timeout)) is None:
                continue
            for question in QUESTIONS[: 4 if self.has_future else 2]:
                self.attempt(question, partial(ask, work, question))
        self.look()

    def look(self) -> None:
        """Describe all tensors; go backward."""
        for tensor in self.tensors:
            with torch._C.DisableTorchFunction():
                self.tell(describe(tensor))
                saved = getattr(tensor, "saved_by", None)
            if saved is not None:
                self.attempt("backward", partial(backward, saved))


def wait_for_future(work: Any) -> Any:
    return work.get_future().wait()


def backward(saved: Any) -> Any:
    return torch.autograd.grad(saved[0], saved[1], retain_graph=True)


def ask(work: Any, question: str) -> Any:
    return getattr(work, question)()


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def op_of(name: str) -> Any:
    return dist._make_nccl_premul_sum(2.0) if name == "PREMUL" else getattr(dist.ReduceOp, name)


def options(kind: Any, op: Any, asynchronous: bool) -> Any:
    made = kind()
    made.reduceOp = op
    made.asyncOp = asynchronous
    return made


def coalesce(parts: list[torch.Tensor], op: Any, group: Any, asynchronous: bool) -> Any:
    with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
        for part in parts:
            dist.all_reduce(part, op, group=group)
    return manager.works if asynchronous else None


def functional(program: Program, tensor: torch.Tensor, op: Any) -> Any:
    import torch.distributed._functional_collectives as functions

    name = str(op).rpartition(".")[2].lower()
    result = functions.all_reduce(tensor, name, program.group)
    return functions.wait_tensor(result)


def make(dtype: str, layout: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype)
    shape = list(shape)
    if layout == "every other" and shape:
        shape[-1] *= 2
    numbers = torch.randint(-2, 3, [*shape], generator=generator)
    if dtype == "bool":
        numbers = numbers > 0
    if dtype.startswith("complex"):
        numbers = torch.complex(
            numbers.float(), torch.randint(-2, 3, [*shape], generator=generator).float()
        )
    tensor = numbers.to(kind)
    if layout == "transposed":
        return tensor.movedim(0, -1) if shape else tensor
    if layout == "every other":
        return tensor[..., ::2] if shape else tensor
    if layout == "offset":
        return torch.stack([tensor, tensor, tensor])[1]
    if layout == "channels last":
        return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor
    if layout == "conj":
        return tensor.conj()
    if layout == "neg":
        return torch._neg_view(tensor)
    if layout == "sparse":
        return tensor.to_sparse()
    if layout == "csr":
        return torch.ones_like(tensor).to_sparse_csr()
    if layout == "meta":
        return tensor.to("meta")
    if layout == "parameter":
        return torch.nn.Parameter(tensor)
    if layout == "requires grad":
        return tensor.requires_grad_()
    if layout == "unsqueezed":
        return tensor[None].transpose(0, -1) if shape else tensor[None]
    if layout == "subclass":
        return tensor.as_subclass(Tagged)
    if layout in ("leaf view", "saved"):
        leaf = tensor.requires_grad_()
        with torch.inference_mode(False), torch.enable_grad():
            if layout == "leaf view":
                return (leaf * 1).tensor_split(2)[0] if shape else leaf.view(())
            made = leaf * 2
            squared = (made * made).sum()
        seen = made.detach()
        seen.saved_by = squared, leaf
        return seen
    return tensor


def describe(what: Any) -> str:
    """All there is to see of what a call has returned, or of a tensor."""
    if isinstance(what, torch.Tensor):
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C.DisableTorchFunction():
            version = None if what.is_inference() else what._version
            seen = [type(what).__name__, what.dtype, what.shape, what.layout, what.device, version]
            seen += [what.requires_grad, history_of(what), what.is_inference()]
            seen += [what.is_conj(), what.is_neg()]
            if what.layout == torch.strided:
                seen += [what.stride(), what.storage_offset()]
                if what.device.type == "cpu":
                    seen.append(memory_of(what))
            elif what.layout == torch.sparse_coo:
                seen.append(str(what.coalesce().to_dense().tolist()))
            return str(seen)
    if isinstance(what, (list, tuple)):
        return f"{type(what).__name__}({', '.join(map(describe, what))})"
    if hasattr(what, "wait") and hasattr(what, "is_completed"):
        return "a work"
    return re.sub("0x[0-9a-f]+", "0x", str(what))


def history_of(tensor: torch.Tensor) -> str:
    """What autograd says when it is asked."""
    try:
        return "none" if tensor.grad_fn is None else tensor.grad_fn.name()
    except RuntimeError as error:
        return str(error)


def memory_of(tensor: torch.Tensor) -> str:
    """All bytes of its storage, of which it may be a view."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return (
        hashlib.md5(whole.numpy()).hexdigest()
        if len(whole) > 256
        else bytes(whole.numpy()).hex(" ", tensor.itemsize)
    )


def normal(error: Exception) -> str:
    """Its message without what names lines of torch or this machine."""
    text = re.sub(
        r"\[[^\]]*\.(cc|cpp|h):\d+\]",
        "[]",
        re.split("\nException raised from|\n\nAt:\n", str(error))[0],
    )
    text = re.sub("^Got the following error when running the callback: \\w+: ", "", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def compare(rank: int, size: int, seeds: Sequence[int]) -> list[tuple[Any, ...]]:
    """The first difference in each of the programs where there is one."""
    different: list[tuple[Any, ...]] = []
    subsets = [list(range(size)), *([[0, size - 1]] if size > 2 else [])]
    groups = [
        [dist.new_group(members, backend=backend, timeout=LONG) for backend in ("gloo", "shm")]
        for members in subsets
    ]
    for seed in seeds:
        which = seed % 4 == 0 and len(subsets) > 1
        members, pair = subsets[which], groups[which]
        if rank not in members:
            continue
        theirs, ours = (Program(seed, group, members, rank).run() for group in pair)
        if theirs != ours:
            pairs = enumerate(zip([*theirs, "the end"], [*ours, "the end"], strict=False))
            at, first = next((at, (a, b)) for at, (a, b) in pairs if a != b)
            different.append((seed, *first, theirs[:at][-20:]))
    return different


@pytest.mark.parametrize(
    ("size", "count", "start"),
    [(1, 10, 0), (2, 25, 0), (3, 40, 0)]
    + [
        pytest.param(size, 250, 1000 * k, marks=pytest.mark.stress)
        for size in (1, 2, 3, 4)
        for k in range(5)
    ],
)
def test_a_program_does_on_shm_what_it_does_on_gloo(
    size: int, count: int, start: int, world: Callable[..., World]
) -> None:
    for different in world(size, timeout=120).run(compare, range(start, start + count)):
        assert different == []


def limits(rank: int, size: int) -> list[Any]:
    """Waits that are shorter than the group's, a barrier behind what is under way, and groups made
    under a mode."""
    told: list[Any] = []
    with torch.device("meta"), torch.inference_mode():
        group = dist.new_group(timeout=LONG)
        dist.all_reduce(torch.ones(3, device="cpu"), group=group)
    late, whole = torch.ones(3), torch.tensor([rank])
    dist.all_reduce(late, group=group)
    if rank == 0:
        work = dist.all_reduce(late, group=group, async_op=True)
        for wait in (partial(work.wait, SHORT), partial(work.wait, timeout=SHORT)):
            told.append(error_of(wait))
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(late, group=group, async_op=True)
    told += [work.wait(), late.tolist()]
    told += [
        error_of(partial(dist.all_reduce, whole, dist.ReduceOp.AVG, group=group)),
        whole.tolist(),
    ]
    leaf, stacked = torch.ones(2, requires_grad=True), torch.empty(size, 3)
    told.append(error_of(partial(dist.all_reduce, leaf, dist.ReduceOp.AVG, group=group)))
    told.append(error_of(partial(dist.all_gather_into_tensor, stacked, late, group=group)))
    large = torch.ones(1 << 21)
    work = dist.all_reduce(large, group=group, async_op=True)
    dist.barrier(group)
    told += [work.is_completed(), large[-1].item()]
    doomed, options = dist.new_group(timeout=LONG), dist.AllreduceOptions()
    options.timeout = SHORT
    told.append(is_short(error_of(doomed.allreduce([late], options).wait)) if rank == 0 else True)
    dist.barrier()
    again = dist.new_group(timeout=LONG)
    if rank == 0:
        told.append(
            is_short(error_of(partial(dist.irecv(late, 1, group=again).wait, timeout=SHORT)))
        )
    dist.barrier()
    limited = dist.new_group(timeout=LONG)
    distributed_c10d.set_timeout(SHORT, limited)
    if rank == 0:
        told.append(is_short(error_of(partial(dist.all_reduce, late, group=limited))))
    dist.barrier()
    return told


def is_short(error: str) -> bool:
    """Whether this timeout is that of 50 milliseconds, in gloo's words or ours."""
    return "Timed out" in error and ("50ms" in error or "0.05 s" in error)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_limits_and_barriers_are_those_of_gloo(world: Callable[..., World]) -> None:
    """Timeouts of a wait, a call and a message; gloo refuses an average of integers when it has
    added, and goes on."""
    told = [
        world(2, backend=backend, fresh=True, timeout=60).run(limits) for backend in ("gloo", "shm")
    ]
    assert told[0] == told[1]
    assert told[1][0][:4] == ["Operation timed out!", "Operation timed out!", True, [4.0] * 3]
    assert "can't be cast" in told[1][0][4]
    assert "a leaf Variable that requires grad" in told[1][0][6]
    assert "invalid tensor size" in told[1][0][7]
    assert told[1][0][8:] == [True, 2.0, True, True, True]


ODDITIES = (
    "none", "inference mode", "inference tensors", "input requires grad", "output requires grad",
    "gaps", "expanded",
)  # fmt: skip
"""What one rank's tensors, or modes, have that the other's have not."""


NOT_COMPARED = {
    "gather": ("expanded", "input requires grad", "output requires grad"), "reduce": ("gaps",
    "expanded"),
}  # fmt: skip
"""What gloo refuses, where it races with autograd, or where it takes what lies between the
elements."""


def odd_tensor(oddity: str, is_output: bool, count: int, value: float) -> torch.Tensor:
    with torch.inference_mode(oddity == "inference tensors"):
        tensor = torch.full((count, 2), value)
    if oddity == "expanded" and is_output:
        return torch.full((count, 1), value).expand(count, 2)
    if oddity == "gaps" and is_output:
        return torch.full((count, 4), value)[:, ::2]
    return (
        tensor.requires_grad_()
        if oddity == f"{'output' if is_output else 'input'} requires grad"
        else tensor
    )


def call_oddly(rank: int, size: int) -> list[list[str]]:
    """Rank 0 differs from the others in what only it can see: what each group says, gloo's and that
    of shm."""
    told: list[list[str]] = []
    average, add = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    for backend in ("gloo", "shm"):
        group, lines = dist.new_group(backend=backend, timeout=LONG), list[str]()
        for oddity, asynchronous, name in itertools.product(
            ODDITIES, (False, True), ("reduce", "gather", "scatter")
        ):
            if oddity in NOT_COMPARED.get(name, ()):
                continue
            mine = oddity if rank == 0 else "none"
            output = odd_tensor(mine, True, size if name == "gather" else 1, 0.0)
            whole = odd_tensor(mine, False, 1 if name == "gather" else size, rank + 1.0)
            if name == "reduce":
                output = odd_tensor(mine, True, 1, rank + 1.0)
            call: Callable[..., Any] = {
                "reduce": partial(dist.all_reduce, output, average),
                "gather": partial(dist.all_gather_into_tensor, output, whole),
                "scatter": partial(dist.reduce_scatter_tensor, output, whole, add),
            }[name]

            with torch.inference_mode(mine == "inference mode"):
                error = error_of(partial(make_and_wait, call, group, asynchronous))
            lines.append(
                f"{oddity} {asynchronous} {name}: {error[:60]}, {output.tolist()}, "
                f"{describe(output)}"
            )
        dist.all_reduce(last := torch.ones(1), group=group)
        told.append([*lines, str(last)])
    return told


def make_and_wait(call: Callable[..., Any], group: Any, asynchronous: bool) -> None:
    work = call(group=group, async_op=asynchronous)
    if asynchronous:
        work.wait()


def test_what_one_rank_alone_has_leads_no_rank_elsewhere(world: Callable[..., World]) -> None:
    """Else one would wait in gloo and the other in shared memory, for ever."""
    for theirs, ours in world(2, timeout=60).run(call_oddly):
        assert theirs == ours


SPLITS = ([[0, 1], [2, 3]], [[3, 0, 2]], [[1]])


def split_and_split_again(rank: int, size: int) -> list[Any]:
    """Groups by `dist.split_group`: two at once, one of some ranks in another order, and one of a
    part of it."""
    told: list[Any] = []
    for ranks in SPLITS:
        group = dist.split_group(split_ranks=ranks, timeout=LONG)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            told.append(None)
            continue
        for tensor in (torch.tensor([10.0**rank]), torch.full((200_000,), 10.0**rank)):
            dist.all_reduce(tensor, group=group)
            whole = torch.empty(dist.get_world_size(group))
            dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), group=group)
            told += [tensor[-1].item(), whole.tolist(), dist.get_process_group_ranks(group)]
        if len(told[-1]) > 1:
            half = dist.split_group(group, [[0]])
            if half is not dist.GroupMember.NON_GROUP_MEMBER:
                told.append(dist.get_process_group_ranks(half))
                dist.destroy_process_group(half)  # torch names a group by how many this rank has
        work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
        told.append(work.wait(LONG))
        distributed_c10d.set_timeout(SHORT, group)
        if dist.get_world_size(group) == 2 and dist.get_rank(group) == 0:
            told.append(is_short(error_of(partial(dist.all_reduce, torch.ones(3), group=group))))
        if dist.get_world_size(group) == 2:
            dist.barrier()
        dist.destroy_process_group(group)
    dist.barrier()
    return told


def told_of_splits(rank: int) -> list[Any]:
    """What a rank must tell: sums and ranks of each of its groups for a small tensor and a large
    one, the first half of a group, a wait that ends, and a time limit of groups of two."""
    told: list[Any] = []
    for groups in SPLITS:
        members = next((each for each in groups if rank in each), None)
        if members is None:
            told.append(None)
            continue
        total = sum(10.0**member for member in members)
        told += [total, [*map(float, members)], members] * 2
        if len(members) > 1 and rank == members[0]:
            told.append([rank])
        told.append(True)
        if len(members) == 2 and rank == members[0]:
            told.append(True)
    return told


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.stress)])
def test_groups_are_split_as_those_of_gloo_are(backend: str, world: Callable[..., World]) -> None:
    told = world(4, backend=backend, fresh=True, timeout=60).run(split_and_split_again)
    assert told == [told_of_splits(rank) for rank in range(4)]


def broadcast_from_nobody(rank: int, size: int) -> list[Any]:
    """By a root that the group does not have; and what the group can do afterwards."""
    group, tensor = dist.new_group(timeout=LONG), torch.tensor([float(rank)])
    told: list[Any] = [
        error_of(partial(group.broadcast, tensor, root)).split("\n")[0] for root in (size, -1)
    ]
    dist.all_reduce(tensor, group=group)
    return [*told, tensor.item()]


def test_a_root_outside_the_group_is_refused_and_the_group_stays_usable(
    world: Callable[..., World],
) -> None:
    told = [
        world(2, backend=backend, timeout=60).run(broadcast_from_nobody)
        for backend in ("gloo", "shm")
    ]
    assert told[0] == told[1]
    assert "invalid root rank" in told[1][0][0]
    assert told[1][0][2] == 1.0
