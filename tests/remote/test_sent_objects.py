"""What can be sent: objects of every kind, there and back, are equal, or raise an error at the caller."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st

from playground.remote.agent import Agent
from playground.remote.messages import ENVELOPE, SMALL, Envelope, decode, encode
from playground.testing import World

Worlds = Callable[..., World]
Recipe = tuple[Any, ...]
"""How to build an object, as plain data: (its kind, what it is made of)."""

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "int8", "int16", "int32", "int64",
    "uint8", "bool",
]  # fmt: skip
OTHER_DTYPES = sorted(
    str(dtype).removeprefix("torch.")
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    if not str(dtype).startswith("torch.q") and str(dtype).removeprefix("torch.") not in DTYPES
)
"""Those of which torch can only copy what is contiguous, or pickle what is plain."""
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "strided": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: torch._neg_view(tensor) if tensor.is_floating_point() else tensor,
    "leaf": lambda tensor: tensor.requires_grad_() if can_have_gradient(tensor) else tensor,
    "computed": lambda tensor: tensor.requires_grad_() * 1 if can_have_gradient(tensor) else tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, can_have_gradient(tensor)),
    "frozen": lambda tensor: torch.nn.Parameter(tensor, False),
    "meta": lambda tensor: tensor.to("meta"),
    "with a note": lambda tensor: annotate(tensor),
    "subclass": lambda tensor: tensor.as_subclass(Tagged),
}  # fmt: skip
SPECIAL: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(40).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
    "csr": lambda: torch.eye(40, dtype=torch.float64).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3000.0), 0.1, 10, torch.qint8),
    "module": lambda: torch.nn.BatchNorm1d(1000),
    "float16 array": lambda: np.arange(3000, dtype=np.float16).reshape(30, 100),
    "transposed array": lambda: np.arange(3000).reshape(30, 100).T,
    "strided array": lambda: np.arange(3000)[::3],
    "read-only array": lambda: np.broadcast_to(np.arange(1000), (2, 1000)),
    "array of objects": lambda: np.array([1, "two", None], dtype=object),
    "records": lambda: np.zeros(300, dtype=[("name", "S5"), ("value", "f8")]),
    "dates": lambda: np.arange("2024-01", "2026-01", dtype="datetime64[D]"),
    "array of no dimension": lambda: np.array(3.5),
    "scalar": lambda: np.float64(2.5),
    "error": lambda: ValueError("a result", 3),
    "nested": lambda: nest(50),
}  # fmt: skip
REFUSED: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "lambda": lambda: lambda: None,
    "generator": lambda: (number for number in range(3)),
    "nested too deeply": lambda: nest(20_000),
    "not to be pickled": lambda: Hostile("pickle", ValueError),
    "exits when pickled": lambda: Hostile("pickle", SystemExit),
    "interrupts when pickled": lambda: Hostile("pickle", KeyboardInterrupt),
    "not to be unpickled": lambda: Hostile("unpickle", LookupError),
    "a lost peer when unpickled": lambda: Hostile("unpickle", RuntimeError),
    "exits when unpickled": lambda: Hostile("unpickle", SystemExit),
    "error of two words": lambda: TwoWords("one", "two"),
}  # fmt: skip
ERRORS: dict[str, Callable[[], BaseException]] = {
    "LookupError": lambda: LookupError("not here", 3),
    "RuntimeError": lambda: RuntimeError("Connection closed by peer"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "TwoWords": lambda: TwoWords("one", "two"),
    "Speechless": lambda: Speechless(),
    "LocalError": lambda: type("LocalError", (Exception,), {})("of a class that has no name"),
    "OSError": lambda: OSError(threading.Lock()),
}  # fmt: skip


@dataclass
class Pair:
    left: Any
    right: Any


class Tagged(torch.Tensor):
    """A subclass."""


class Total:
    """Is rebuilt from what is computed on its tensors, when they are unpickled."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.total = tensors, sum(tensor.double().sum().item() for tensor in tensors)

    def __reduce__(self) -> Any:
        return Total, (self.tensors,)


class Hostile:
    """Raises when it is pickled, or unpickled."""

    def __init__(self, when: str, error: type[BaseException]) -> None:
        self.when, self.error = when, error

    def __reduce__(self) -> Any:
        if self.when == "pickle":
            raise self.error("when pickled")
        return raise_error, (self.error, "when unpickled")


class TwoWords(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


def annotate(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "words"
    return tensor


def can_have_gradient(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex()


def raise_error(kind: type[BaseException], words: str) -> None:
    raise kind(words)


def nest(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def build(recipe: Recipe) -> Any:
    match recipe:
        case ("tensor", dtype, shape, layout):
            return LAYOUTS[layout if dtype in DTYPES else "contiguous"](fill(shape, getattr(torch, dtype)))
        case ("shared", numel):
            whole = torch.arange(float(numel))
            return [whole, whole[numel // 2 :], whole.view(-1)]
        case ("total", *numels):
            return Total([torch.ones(numel) for numel in numels])
        case ("twice", part):
            return [build(part)] * 2
        case ("list", *parts):
            return [build(part) for part in parts]
        case ("tuple", *parts):
            return tuple(build(part) for part in parts)
        case ("dict", *parts):
            return {number: build(part) for number, part in enumerate(parts)}
        case ("pair", left, right):
            return Pair(build(left), build(right))
        case ("plain", value):
            return value
        case (kind,):
            return {**SPECIAL, **REFUSED}[kind]()
    raise ValueError(recipe)


def fill(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes in a row, as elements of that type."""
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(numel) % 3 == 0).view(shape)
    return (torch.arange(numel * dtype.itemsize) % 251).to(torch.uint8).view(dtype).view(shape)


def is_refused(recipe: Any) -> bool:
    """Whether something in it cannot be sent. (No text that is drawn is a name in REFUSED.)"""
    return isinstance(recipe, tuple) and any(part in REFUSED or is_refused(part) for part in recipe)


def check_equal(one: Any, other: Any) -> None:
    """`other` has been sent: it is `one`, contiguous, and without the graph it was part of."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout, one.device) == (other.dtype, other.shape, other.layout, other.device)
        assert other.requires_grad == (one.requires_grad and one.is_leaf)
        assert other.is_leaf
        assert vars(one) == vars(other)
        if one.layout == torch.sparse_coo:
            assert one.is_coalesced() == other.is_coalesced()
            check_equal([one._indices(), one._values()], [other._indices(), other._values()])
        elif one.layout == torch.sparse_csr:
            check_equal(
                [one.crow_indices(), one.col_indices(), one.values()],
                [other.crow_indices(), other.col_indices(), other.values()],
            )
        elif one.is_quantized:
            assert (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
            check_equal(one.int_repr(), other.int_repr())
        elif not one.is_meta:
            assert bytes_of(one) == bytes_of(other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist()
    elif isinstance(one, torch.nn.Module):
        check_equal(dict(one.state_dict(keep_vars=True)), dict(other.state_dict(keep_vars=True)))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            check_equal(mine, its)
        if one and isinstance(one[0], torch.Tensor):  # the same one twice is one
            assert [part is one[0] for part in one] == [part is other[0] for part in other]
    elif isinstance(one, dict):
        check_equal(list(one.items()), list(other.items()))
    elif isinstance(one, BaseException):
        check_equal(one.args, other.args)
    elif isinstance(one, (Pair, Total)):
        check_equal(vars(one), vars(other))
    else:
        assert one == other


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its elements, in order: not-a-numbers too have bytes that can be compared."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


tensors = st.tuples(
    st.just("tensor"),
    st.sampled_from(DTYPES) | st.sampled_from(OTHER_DTYPES),
    st.lists(st.integers(0, 12), max_size=4).map(tuple),
    st.sampled_from(sorted(LAYOUTS)),
)
plain = st.integers() | st.text() | st.none() | st.binary(max_size=2 * ENVELOPE) | st.floats(allow_nan=False)
leaves = st.one_of(
    tensors,
    tensors,
    st.tuples(st.just("plain"), plain),
    st.tuples(st.just("shared"), st.integers(1, 2 * SMALL)),
    st.lists(st.integers(0, 2 * SMALL), min_size=1, max_size=3).map(lambda numels: ("total", *numels)),
    st.sampled_from(sorted(SPECIAL)).map(lambda kind: (kind,)),
)
contains = st.sampled_from(["list", "tuple", "dict"])


def nested(parts: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    return (
        st.builds(lambda kind, inside: (kind, *inside), contains, st.lists(parts, max_size=4))
        | st.tuples(st.just("pair"), parts, parts)
        | st.tuples(st.just("twice"), parts)
    )


sendable = st.recursive(leaves, nested, max_leaves=8)
anything = sendable | st.recursive(
    st.sampled_from(sorted(REFUSED)).map(lambda kind: (kind,)),
    lambda parts: nested(parts | leaves),
    max_leaves=4,
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of tensors that are sparse, quantized or complex32
@given(recipe=sendable, number=st.integers(-1, 2**31 - 1))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_encoded_is_decoded(recipe: Recipe, number: int) -> None:
    """By the messages alone: what they say of themselves is enough to receive them."""
    obj = build(recipe)
    messages = encode(number, obj, lambda part: NotImplemented)
    assert (Envelope(lambda memories: memories[0].copy_(messages[0])).number, len(messages[0])) == (number, ENVELOPE)
    check_equal(obj, decode(messages))


def echo(obj: Any) -> Any:
    return obj


def fail(kind: str) -> None:
    raise ERRORS[kind]()


def exchange(rank: int, size: int, examples: int, seed: int) -> Counter[str]:
    """Rank 0 sends objects, has rank 1 send them back, has it make them, and has it raise errors. How often each came
    to what."""
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @given(recipe=anything, rank=st.sampled_from([1, 1, 1, 0]))
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def send(recipe: Recipe, rank: int) -> None:
        for function, args in (echo, (build(recipe),)), (build, (recipe,)):
            if is_refused(recipe):
                with pytest.raises(BaseException):  # noqa: B017, PT011 (SystemExit too, where it is unpickled here)
                    agent.call(rank, function, *args)
            else:
                check_equal(build(recipe), agent.call(rank, function, *args))
            outcomes[f"{function.__name__}: {'error' if is_refused(recipe) else 'equal'}"] += 1

    with Agent() as agent:
        if rank == 0:
            send()
            for kind, error in ERRORS.items():
                with pytest.raises(Exception) as caught:  # noqa: PT011 (which, is said below)
                    agent.call(1, fail, kind)
                survives = kind in ("LookupError", "RuntimeError")
                assert type(caught.value) is (type(error()) if survives else RuntimeError)
                assert kind in str(caught.value.__cause__)
                if survives:
                    assert caught.value.args == error().args
                else:
                    assert str(caught.value).startswith(kind)
            assert agent.call(1, threading.active_count) < 10
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    ("examples", "seed"), [(150, 0), *(pytest.param(500, seed, marks=pytest.mark.stress) for seed in range(1, 21))]
)
def test_objects_of_every_kind_there_and_back(examples: int, seed: int, world: Worlds) -> None:
    """Equal, or an error at the caller; and no call that waits for a reply that does not come."""
    [outcomes, _] = world(2, timeout=120).run(exchange, examples, seed)
    assert set(outcomes) == {"echo: equal", "echo: error", "build: equal", "build: error"}
    assert outcomes.total() >= 2 * examples
