"""In a rank: the names of a program's parameters, by which a log tells what was seen of tensors.

A parameter of a model that DistributedDataParallel has wrapped has the model's key in its name. Any
other has the number of its optimizer, and its place there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from playground.explain.right.training_records import Stepping
from playground.explain.right.watcher import address_of

MOST_REBUILT = 64
"""How often, between two steps, the tensors of calls are looked for among gradients that have come
meanwhile."""


class Place(NamedTuple):
    """What a storage held when the last backward pass or step ended."""

    param: Any
    is_gradient: bool
    """Whether it held the parameter's gradient, or the parameter itself."""
    name: str


class ParameterNames:
    """Names of parameters, of wrapped models and of these optimizers."""

    def __init__(self, optimizers: Mapping[Any, Stepping]) -> None:
        self.optimizers = optimizers
        self.wrapped: dict[int, tuple[ReferenceType[Any], str]] = {}
        """The parameters of wrapped models and their names, by id."""
        self.places: dict[int, Place] | None = None
        """By the address of a storage; None: to be found anew."""
        self.rebuilt = 0
        """How often that was found anew since the last step."""

    def add(self, param: Any, name: str) -> None:
        self.wrapped[id(param)] = ref(param), name

    def drop_dead(self) -> None:
        self.wrapped = {
            key: (param, name) for key, (param, name) in self.wrapped.items() if param() is not None
        }

    def find(self, param: Any) -> str | None:
        """The name of a wrapped model's parameter; None of another."""
        known, name = self.wrapped.get(id(param), (None, None))
        return name if known is not None and known() is param else None

    def list_all(self, known: Stepping, params: Sequence[Any]) -> list[str]:
        """The names of an optimizer's parameters."""
        return [self.find(param) or f"{known.number}/{at}" for at, param in enumerate(params)]

    def list_alive(self) -> Iterator[tuple[Any, str]]:
        """The parameters of wrapped models, with their names."""
        for param, name in self.wrapped.values():
            if (alive := param()) is not None:
                yield alive, name

    def begin_step(self) -> None:
        """A step has ended: what follows belongs to the next."""
        self.forget_places()
        self.rebuilt = 0

    def forget_places(self) -> None:
        """Gradients may be elsewhere from now on."""
        self.places = None

    def find_tensors(self, tensors: Sequence[Any]) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the parameters whose gradients, and of those which, are among these."""
        addresses = {address_of(each) for each in tensors} - {0}
        found = self.look_up(addresses)
        if len(found) < len(addresses) and self.rebuilt < MOST_REBUILT:
            self.forget_places()
            self.rebuilt += 1
            found = self.look_up(addresses)
        gradients = frozenset(each.name for each in found if each.is_gradient)
        return gradients, frozenset(each.name for each in found if not each.is_gradient)

    def look_up(self, addresses: set[int]) -> list[Place]:
        """What these storages held, and still hold."""
        if self.places is None:
            self.places = {}
            for optimizer, known in self.optimizers.items():
                params = parameters_of(optimizer)
                for param, name in zip(params, self.list_all(known, params), strict=True):
                    self.places[address_of(param)] = Place(param, False, name)
                    if param.grad is not None:
                        self.places[address_of(param.grad)] = Place(param, True, name)
        found = []
        for address in addresses & self.places.keys():
            place = self.places[address]
            held = place.param.grad if place.is_gradient else place.param
            if held is not None and address_of(held) == address:
                found.append(place)
        return found


def parameters_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
