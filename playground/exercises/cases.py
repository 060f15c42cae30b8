"""The inputs that a judge gives a solution, and the results that it expects."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from playground.algorithms.traffic import Traffic
from playground.exercises.observation import Leaf, Message, Problem
from playground.tap import observing
from playground.ui.units import plural

ANYTHING = object()
PLAIN: dict[type, Callable[[Any], object]] = {
    bool: bool,
    Integral: int,
    Real: float,
    str: str.__str__,
}
"""Plain types, as which numpy's numbers count, too."""
KINDS: dict[type, str] = {Integral: "int", Real: "float"}
MAX_VALUES = 2**16
"""Number of values of a tensor that are looked at: the first ones of a larger tensor."""
UNEVEN = {
    "3 samples each": (3,) * 5,
    "1 sample on rank 0, 3 on rank 1, …": (1, 3, 2, 5, 4),
    "none on rank 1": (2, 0, 3, 1, 2),
}
"""Numbers of samples, by rank."""


@dataclass
class Actions:
    """The actions of the solution on this rank in one case, noted as it acts."""

    calls: int = 0
    """Number of calls of torch.distributed."""
    sent: list[Message] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    """Sender of each message."""
    moved: float = 0.0
    """Elements that have left the rank: see `Meter`."""
    reduced: list[int] = field(default_factory=list)
    """Elements of each all_reduce, in order."""
    widths: list[int] = field(default_factory=list)
    """Bytes of one element of each tensor that collectives have sent."""
    waited: list[int] = field(default_factory=list)
    """Thread of each call that waits, in order."""
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One call of the solution, `function(rank, size, *args)`, on one rank. What is compared is
    plain data and tensors, in lists, tuples and dictionaries."""

    about: str
    """Its size and dtype, for example."""
    args: tuple[Any, ...]
    returns: object = ANYTHING
    """The expected return value."""
    names: Sequence[str] = ()
    """What its items are called."""
    held: object = ()
    """Further values to look at after the call: an argument, say, or a function that returns it."""
    combine: Callable[[list[Any]], object] | None = None
    """Makes one value of what all ranks hold, by rank: it takes the place of `held`."""
    expected: object = ()
    """The expected value of `held`."""
    is_coded: bool = True
    """Whether each digit of a number says how often that rank's share is in it."""
    most: int | Mapping[int, float] | None = None
    """Elements that this rank may send in messages, in all or to each receiver."""
    most_moved: float | None = None
    """Elements that may leave this rank in all, by whatever it calls: see `Meter`. As many as
    `most`, where that is given and this is not."""
    counts: Callable[[torch.Tensor], int | torch.Tensor] = torch.Tensor.numel
    """The number of elements of a tensor that count."""
    returns_a_copy: bool = False
    """Whether what it returns must not be the memory of an argument."""
    run: Callable[[Callable[..., Any]], object] | None = None
    """Is called instead of the function, and given it: what it returns is looked at."""
    gives_rank: bool = True
    """Whether `rank` and `size` are given."""
    delay: float = 0.0
    """Seconds that this rank comes late."""
    culprit: int | None = None
    """The rank at fault in the program that the solution repairs."""
    notes: list[str] = field(default_factory=list)
    """Lines that are shown with the verdict, noted by `run`."""
    actions: Actions = field(default_factory=Actions)
    """Filled in while the solution runs."""


Cases = Iterator[Case]
Shapes = Sequence[tuple[int, ...]]
"""Those of some gradients."""


def digits(rank: int, elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """10^r in every element of rank r; int64 by default."""
    return torch.full((elements,), 10**rank, dtype=dtype or torch.int64)


def coded(rank: int, elements: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(1 + i % 5) * 10^r in element i of rank r: a digit for each rank, and neighbours that differ.
    As float64 they are larger than float32 can hold."""
    values = ((torch.arange(elements) % 5 + 1) * 10**rank).to(dtype or torch.int64)
    return values * 1e50 if dtype == torch.float64 else values


def inputs(*sizes: int) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Descriptions of inputs, and what makes that of a rank: of several dtypes, and of these
    numbers of elements. In the first all elements are the same, which is the easiest to read."""
    types = (torch.int64, torch.float32, torch.float64, torch.int32)
    for place, elements in enumerate(sizes or (6, 6, 1, 7, 1000, 0)):
        dtype = types[place % len(types)]
        about = f"{plural(elements, 'element')}, {str(dtype).removeprefix('torch.')}"
        yield about, partial(coded if place else digits, elements=elements, dtype=dtype)


def give_gradients(
    rank: int, size: int, shapes: Shapes, unused: int | None = None
) -> list[torch.Tensor]:
    """N (1 + (i + k) % 5) 10^r in element i of gradient k of rank r: each digit of the mean is a
    rank's. `unused`: a gradient that is zero on odd ranks."""
    gradients = []
    for k, shape in enumerate(shapes):
        row = (torch.arange(torch.Size(shape).numel()) + k) % 5 + 1.0
        gradients.append((row * (0 if k == unused and rank % 2 else size * 10**rank)).view(shape))
    return gradients


def average_gradients(size: int, shapes: Shapes, unused: int | None = None) -> list[torch.Tensor]:
    """The mean of all ranks' gradients."""
    everyones = [give_gradients(rank, size, shapes, unused) for rank in range(size)]
    return [sum(each[1:], each[0]) / size for each in zip(*everyones, strict=True)]


def predict(
    about: str, parameters: tuple[Any, ...], counted: Mapping[str, int | float | list[int]]
) -> Case:
    """A prediction, from the parameters of a run, of what has been counted in it. The notes show
    the parameters, to compute it again, and the counts beside the prediction."""
    notes: list[str] = []

    def run(function: Callable[..., Any]) -> object:
        predicted = function(*parameters)
        if isinstance(predicted, dict):
            predicted = {
                name: as_number(each, counted.get(name)) for name, each in predicted.items()
            }
            rows = [(name, predicted.get(name, ""), each) for name, each in counted.items()]
            width = max(map(len, (about, *counted)))
            given = inspect.signature(function).bind(*parameters).arguments
            notes[:] = [
                ", ".join(f"{name} = {each}" for name, each in given.items()),
                f"{about:<{width}}  {'predicted':>16}  {'counted':>16}",
            ]
            notes.extend(
                f"{name:<{width}}  {show_count(mine):>16}  {show_count(due):>16}"
                for name, mine, due in rows
            )
        return predicted

    return Case(
        about,
        (),
        dict(counted),
        is_coded=False,
        most_moved=0,
        run=run,
        gives_rank=False,
        notes=notes,
    )


ENOUGH = 1.05
"""How many times as much as the best setting an accepted one may cost."""


def choose_setting(
    about: str,
    settings: Sequence[Mapping[str, str | int]],
    cost: Callable[..., float],
    unit: str,
) -> Case:
    """A choice among settings, of which that of the least `cost(**setting)` is the best. The notes
    show its cost beside that of the best."""
    notes: list[str] = []
    best = min(settings, key=lambda setting: cost(**setting))
    right = {"setting": "one of the task's", "cost": "within 5 % of the best"}

    def run(function: Callable[[], Any]) -> object:
        answer = function()
        if not isinstance(answer, dict) or {*answer} != {*best}:
            return right | {"setting": describe_keys(best)}
        for name, value in answer.items():
            allowed = [*dict.fromkeys(setting[name] for setting in settings)]
            if value not in allowed:
                return right | {"setting": f"{name} is none of {', '.join(map(str, allowed))}"}
        mine, least = cost(**settings[settings.index(dict(answer))]), cost(**best)
        notes[:] = [f"{unit}: {mine:.4g} chosen, {least:.4g} the least"]
        if mine > ENOUGH * least:
            return right | {"cost": f"{mine:.4g} {unit}, {mine / least:.2f} times the best"}
        return right

    return Case(about, (), right, is_coded=False, run=run, gives_rank=False, notes=notes)


def describe_keys(names: Iterable[str]) -> str:
    """What an answer is to be that has not these keys, and these alone."""
    return f"to be returned is a dictionary with the keys {', '.join(names)}"


def as_number(value: Any, counted: object) -> Any:
    """The prediction of a number as one of its kind: 2 / 3 * 12 predicts 8."""
    if isinstance(counted, list) and isinstance(value, (list, tuple)):
        return [as_number(each, counted[0]) for each in value]
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    number = float(value)
    is_whole = isinstance(counted, int) and abs(number - round(number)) < 1e-6
    return round(number) if is_whole else number


def show_count(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show_count, value))
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)[:16]


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this rank calls and sends."""
    counter = Traffic()
    with observing(counter):
        yield counter


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]


def held_gradients(model: nn.Module) -> dict[str, object]:
    """What is to be looked at in the end where a task is about gradients."""
    return {"grad": gradients(model)}


def held_parameters(model: nn.Module) -> dict[str, object]:
    """The same where a task is about parameters."""
    return {"parameter": [*model.parameters()]}


def flatten(value: Any, where: str = "") -> Iterator[Leaf]:
    """The leaves of a value, in order."""
    if isinstance(value, torch.Tensor):
        # a class of the solution's own is looked at as a tensor
        with torch._C.DisableTorchFunctionSubclass():
            tensor = torch.Tensor.as_subclass(torch.Tensor.detach(value), torch.Tensor)
        kind = str(tensor.dtype).removeprefix("torch.")
        yield Leaf(where, kind, tuple(tensor.shape), tuple(tensor.flatten()[:MAX_VALUES].tolist()))
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from flatten(value[name], f"{where}.{name}".removeprefix("."))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from flatten(item, f"{where}[{place}]")
    else:
        name, as_plain = next(
            (each for each in PLAIN.items() if isinstance(value, each[0])), (type(value), None)
        )
        kind = KINDS.get(name, name.__name__)
        text = str.__str__(repr(value))[:80]  # and a text of its own as a text
        yield Leaf(where, str.__str__(kind), (), (as_plain(value) if as_plain else text,))
