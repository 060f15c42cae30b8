"""In a rank: its models that DistributedDataParallel has wrapped, and the names of their
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from playground.base.upstream import count_collectives
from playground.explain.right.fingerprint import find_fingerprint
from playground.explain.right.log import LATE, MODEL
from playground.explain.right.parameter_names import ParameterNames
from playground.explain.right.training_records import Wrapped
from playground.explain.right.watcher import RankLog
from playground.tap import ranks_of


class WrappedModels:
    """The wrapped models of this rank. `find_line` tells the number of the program's line."""

    def __init__(self, log: RankLog, names: ParameterNames, find_line: Callable[[], int]) -> None:
        self.log = log
        self.names = names
        self.find_line = find_line
        self.known: dict[int, Wrapped] = {}
        """By id; those that are dead are dropped when the next one is wrapped."""
        self.made: dict[str, int] = {}
        """How many models were wrapped, by the name of their group."""

    def add(self, model: Any) -> None:
        """A model has been wrapped: name its parameters, and write down which it has."""
        self.drop_dead()
        group = model.process_group
        name: str = group.group_name
        number = self.made.get(name, 0) + 1
        self.made[name] = number
        key = f"{name}#{number}"
        ignored = {*model.parameters_to_ignore}
        self.known[id(model)] = Wrapped(ref(model), key, ref(group), ignored)
        found = [
            (each, param) for each, param in model.module.named_parameters() if each not in ignored
        ]
        for each, param in found:
            self.names.add(param, f"{key}/{each}")
        self.log.tell(
            MODEL, key, list(ranks_of(group)), [each for each, _ in found],
            [param.requires_grad for _, param in found],
            [find_fingerprint(param) for _, param in found], self.find_line(),
        )  # fmt: skip

    def find(self, model: Any) -> Wrapped | None:
        """What is known of a model; None of one that was wrapped unseen."""
        wrapped = self.known.get(id(model))
        return wrapped if wrapped and wrapped.model() == model else None

    def find_late(self, module: nn.Module, wrapped: Wrapped) -> None:
        """Name the parameters that the module did not have when it was wrapped."""
        for name, param in module.named_parameters():
            if self.names.find(param) is None and name not in wrapped.ignored:
                self.names.add(param, f"{wrapped.key}/{name}")
                self.log.tell(LATE, wrapped.key, name, self.find_line())

    def drop_dead(self) -> None:
        self.known = {key: each for key, each in self.known.items() if each.model() is not None}
        self.names.drop_dead()

    def count_made(self) -> int:
        """How many models were wrapped so far."""
        return sum(self.made.values())

    def list_alive(self) -> Iterator[tuple[Any, Wrapped]]:
        """The models that are alive, and what is known of each."""
        for each in self.known.values():
            if (model := each.model()) is not None:
                yield model, each

    def find_group(self, keys: list[str]) -> ReferenceType[Any] | None:
        """The group of the model with the first of these keys, if there is one."""
        return next((each.group for each in self.known.values() if each.key in keys[:1]), None)

    def read_clocks(self) -> dict[str, int | None]:
        """The clocks of the groups of models, by the models' keys."""
        groups = {each.key: each.group() for each in self.known.values()}
        return {key: count_collectives(group) for key, group in groups.items() if group}
