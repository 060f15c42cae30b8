"""In a rank: sees what its models and optimizers do, and the calls between their steps."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Sequence, Set
from operator import attrgetter
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from playground.base.event_log import NONE
from playground.base.upstream import (
    count_collectives,
    elements_of_mean,
    has_step_hooks,
    hooks_of,
    is_joining,
    local_of,
)
from playground.explain.right.facts import (
    BACKWARD,
    BUCKET,
    CALLED,
    EVENT_FIELDS,
    FORWARD,
    IN_GRAPH,
    JOINS,
    LOADED,
)
from playground.explain.right.fingerprint import (
    MOST_VALUES,
    find_fingerprint,
    print_of_generator,
    print_of_gradient,
    read_values,
    values_of_gradients,
)
from playground.explain.right.log import (
    ENDED,
    FINAL,
    LEAST_LOOKS,
    LOOK,
    OVERWRITTEN,
    RATES,
    RESTORED,
    UNOWNED,
)
from playground.explain.right.models_seen import WrappedModels
from playground.explain.right.parameter_names import ParameterNames, parameters_of
from playground.explain.right.training_records import Events, Pending, Seen, Stepping
from playground.explain.right.watcher import (
    Notes,
    SeesCalls,
    Watcher,
    address_of,
    describe_shard,
    guarded,
    tensors_in,
)
from playground.tap import Call, Observer, observing, ranks_of

INTERNAL = {"foreach", "fused", "initial_lr", "params", "differentiable", "capturable"}
"""Settings of an optimizer that change nothing, or its result by rounding alone."""
MOST_CHANGES = 64
"""How many changes of an optimizer's learning rates are told."""
fields_of = attrgetter(*EVENT_FIELDS)
GRADIENTS_AT, PARAMETERS_AT = map(EVENT_FIELDS.index, ("gradients", "parameters"))


class TrainingWatcher(Watcher):
    """Sees models, backward passes, calls and, by torch's hooks of optimizers, steps."""

    looks_at_training = True

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        notes.count_steps_by(self.count_steps)
        self.largest = 0
        """The number of elements of the largest parameter that was seen."""
        self.optimizers: WeakKeyDictionary[Any, Stepping] = WeakKeyDictionary()
        self.stepped = 0
        """How many optimizers have made a step."""
        self.looking: set[int] = set()
        """The numbers of optimizers whose next step is looked at."""
        self.names = ParameterNames(self.optimizers)
        self.models = WrappedModels(notes.log, self.names, self.find_line)
        self.events = Events()
        self.stack: list[Any] = []
        """The optimizers that are stepping, the innermost last."""
        self.inside = contextlib.ExitStack()
        self.is_inside = False
        """While wrapped models are watched: an observer that looks inside."""
        self.averaged = 0
        """The number of elements of which the root of the latest backward pass is the mean."""
        self.clocks: list[dict[str, int | None]] = []
        """Those of wrapped models' groups at the begin of each backward pass under way."""
        self.has_restored = False
        """Whether `load_state_dict` of a module was called."""
        self.brought = set[str]()
        """The parameters that it has written since the last step, by their names."""
        self.restored: dict[int, ReferenceType[Any]] = {}
        """The parameters that it has written before the first step, by the address of their
        storage."""
        self.large: dict[tuple[str, int, int], int] = {}
        """How often a call as large as the largest parameter, or a load, was made, by operation,
        size and line."""
        self.unowned: dict[str, list[int | None]] = {}
        """Fingerprints of the parameters of wrapped models that no optimizer has, by name: one for
        each backward pass that left a gradient, of those that were looked at."""
        self.handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    @property
    def is_looking(self) -> bool:
        return bool(self.looking) or not self.optimizers

    def find_line(self) -> int:
        """The line of the program that has caused this; `NONE` in a step that nobody looks at."""
        return self.notes.write_line() if self.is_looking else NONE

    def note(self, event: Seen) -> None:
        event.line = self.find_line()
        self.events.add(event, is_seen=self.is_looking)

    def count_steps(self) -> dict[int, int]:
        """How many steps each optimizer has made that is alive, by its number."""
        return {each.number: each.count for each in self.optimizers.values()}

    # Models

    @guarded
    def model_wrapped(self, model: Any) -> None:
        self.models.add(model)
        self.look_inside()

    @guarded
    def model_called(self, model: Any, args: Sequence[Any]) -> None:
        wrapped = self.models.find(model)
        if wrapped is None or not torch.is_grad_enabled():
            return
        notes = [*hooks_of(model)]
        if is_joining(model):
            notes.append(JOINS)
        sync = bool(model.require_backward_grad_sync)
        seen = Seen(FORWARD, wrapped.key, sync, ", ".join(notes))
        if self.is_looking:
            seen.prints = [find_fingerprint(each) for each in tensors_in(args)]
            seen.generator = print_of_generator(model) if drops_out(model) else 0
            self.models.find_late(model.module, wrapped)
        self.note(seen)

    @guarded
    def model_loaded(self, module: nn.Module) -> None:
        params = [*module.parameters()]
        if not self.has_restored:
            self.has_restored = True
            self.notes.log.tell(RESTORED)
        if not self.stepped:
            self.restored |= {address_of(each): ref(each) for each in params}
        names = {name for param in params if (name := self.names.find(param))}
        _, taken = self.names.find_tensors(params)
        names |= taken
        if names:
            self.look_at_next(LOADED, 0)
        self.brought |= names
        self.note(Seen(LOADED, type(module).__name__, parameters=frozenset(names)))

    # Backward passes and calls

    @guarded
    def backward_begun(self, root: Any) -> None:
        self.clocks.append(self.models.read_clocks() if self.is_looking else {})
        self.averaged = elements_of_mean(root) if self.is_looking else 0

    @guarded
    def backward_ended(self) -> None:
        if not self.clocks:
            return
        before = self.clocks.pop()
        self.names.forget_places()
        advanced = False
        if self.is_looking:
            advanced = any(before.get(key) != now for key, now in self.models.read_clocks().items())
        self.note(Seen(BACKWARD, "", advanced, size=self.averaged))
        if self.stack:
            self.optimizers[self.stack[0]].is_nesting = True
        if not self.clocks and self.looking:
            for optimizer, known in self.optimizers.items():
                if known.number in self.looking:
                    params = parameters_of(optimizer)
                    known.raw = [print_of_gradient(param) for param in params]
                    known.raw_values = values_of_gradients(params)
            if self.optimizers:
                self.look_at_unowned()

    def look_at_unowned(self) -> None:
        """Which parameters of wrapped models have a gradient and no optimizer: before the program
        clears it, and while the model is alive."""
        owned = {id(each) for optimizer in self.optimizers for each in parameters_of(optimizer)}
        for param, name in self.names.list_alive():
            if id(param) in owned:
                self.unowned.pop(name, None)
            elif param.grad is not None:
                self.unowned.setdefault(name, []).append(find_fingerprint(param))

    def look_at_next(self, operation: str, size: int) -> None:
        """This may make models equal: look at the next step, at the first time on a line, the
        second, the fourth, and so on."""
        key = operation, size, self.notes.lines.find_cause()
        self.large[key] = count = self.large.get(key, 0) + 1
        if count & (count - 1) == 0:
            for known in self.optimizers.values():
                known.is_forced = True
                self.looking.add(known.number)

    def call_begun(self, call: Call) -> None:
        tensors = [*call.inputs, *call.outputs]
        size = max((each.numel() for each in tensors), default=0)
        if self.largest and size >= self.largest and not self.stack:
            self.look_at_next(call.name, size)
        seen = Seen(CALLED, call.name, bool(self.clocks), size=size, ranks=len(call.ranks))
        if self.restored and call.method == "broadcast":
            self.find_overwritten(call)
        if self.is_looking:
            if size == 1 and any(each.grad_fn is not None for each in call.inputs):
                seen.note = IN_GRAPH
            seen.gradients, seen.parameters = self.names.find_tensors(tensors)
            if len(seen.gradients) == len(call.inputs) == 1:
                seen.values = read_values(call.inputs[0])
        self.note(seen)

    def find_overwritten(self, call: Call) -> None:
        """Tell of a broadcast that overwrites, on this rank, what a checkpoint has brought."""
        if self.stepped or call.peer in (None, dist.get_rank()):
            return
        for each in (*call.inputs, *call.outputs):
            known = self.restored.get(address_of(each))
            held = known() if known else None
            if held is not None and address_of(held) == address_of(each) != 0:
                self.notes.log.tell(OVERWRITTEN, call.peer, self.notes.write_line())
                self.restored.clear()
                return

    # What DistributedDataParallel averages

    def look_inside(self) -> None:
        """Begin to watch the buckets of wrapped models, or end it, as steps are looked at or
        not."""
        if self.is_looking and self.models.known and not self.is_inside:
            self.inside.enter_context(observing(Inside(self)))
            self.is_inside = True
        elif self.is_inside and not self.is_looking:
            self.is_inside = False
            self.inside.close()

    @guarded
    def bucket_begun(self, call: Call) -> None:
        if self.clocks and call.method == "allreduce":
            self.note(Seen(BUCKET, "", prints=[find_fingerprint(each) for each in call.inputs]))

    # Steps

    @guarded
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in self.stack:  # its last step has raised
            self.stack.clear()
        if self.stack:
            self.optimizers[self.stack[0]].is_nesting = True
            self.stack.append(optimizer)
            return
        known = self.optimizers.get(optimizer)
        if known is None or known.models != self.models.count_made():
            known = self.add_optimizer(optimizer, known)
        group = known.group() if known.group else None
        counted = None if group is None else count_collectives(group)
        clock = -1 if counted is None else counted
        known.nth = known.nth + 1 if clock == known.clock else 0
        known.clock = clock
        known.depth = len(self.clocks)
        known.is_nesting = False
        self.notes.log.add_step(known.number, clock)
        self.stack.append(optimizer)
        known.pending = None
        rates = [each["lr"] for each in optimizer.param_groups if type(each.get("lr")) is float]
        if rates != known.rates:
            self.tell_rates(known, rates)
        params = parameters_of(optimizer)
        begins = begins_to_train(known, params)
        if known.is_next_looked_at or begins or self.was_written(known, params):
            known.pending = self.read_look(optimizer, known, params)

    def tell_rates(self, known: Stepping, rates: list[float]) -> None:
        """Tell of other learning rates than those of the last step, unless that had others, too, as
        under a scheduler of steps."""
        if known.count and known.changed != known.count - 1 and known.changes < MOST_CHANGES:
            known.changes += 1
            self.notes.log.tell(RATES, known.number, known.count, known.rates, rates)
        known.changed = known.count
        known.rates = rates

    def read_look(self, optimizer: Any, known: Stepping, params: Sequence[Any]) -> Pending:
        """What a look at a step reads before it."""
        names = self.names.list_all(known, params)
        return Pending(
            before=[find_fingerprint(param) for param in params],
            gradients=[print_of_gradient(param) for param in params],
            values=[read_values(param) for param in params[:MOST_VALUES]],
            settings=[settings_of(group) for group in optimizer.param_groups],
            events=[describe(event, names) for event in self.events.list_since(known.since)],
            is_whole=self.events.are_whole_since(known.since),
            line=self.find_line(),
            trains=any(param.requires_grad for param in params),
            gradient_values=values_of_gradients(params),
            shards=[find_fingerprint(local_of(param)) for param in params],
            gradients_of_shards=[find_fingerprint(local_of(param.grad)) for param in params],
        )

    def was_written(self, known: Stepping, params: Sequence[Any]) -> bool:
        """Whether something else than the optimizer has written its first parameter since its last
        step, for the first time, the second, the fourth, and so on: it may have made models
        equal."""
        if not known.values or read_values(params[0]) == known.values:
            return False
        known.written += 1
        return known.written & (known.written - 1) == 0

    def add_optimizer(self, optimizer: Any, known: Stepping | None) -> Stepping:
        """Know a new optimizer, or one whose parameters may have been wrapped since."""
        params = parameters_of(optimizer)
        keys = [name.rpartition("/")[0] for param in params if (name := self.names.find(param))]
        world = ref(dist.group.WORLD) if dist.is_initialized() else None
        group, models = self.models.find_group(keys) or world, self.models.count_made()
        if known is None:
            known = Stepping(self.stepped, group, models)
            self.stepped += 1
            self.optimizers[optimizer] = known
            self.restored.clear()
            self.looking.add(known.number)
        known.group = group
        known.models = models
        self.largest = max([self.largest, *(param.numel() for param in params)])
        return known

    @guarded
    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.stack or self.stack[-1] is not optimizer:
            return
        self.stack.pop()
        if self.stack:
            return
        known = self.optimizers[optimizer]
        if known.pending:
            self.tell_look(optimizer, known, known.pending)
            self.looking &= {each.number for each in self.optimizers.values()}
        known.values = [
            value for param in parameters_of(optimizer)[:1] for value in read_values(param)
        ]
        known.count += 1
        self.brought.clear()
        self.names.begin_step()
        known.since = self.events.count
        known.pending = None
        known.is_forced = False
        known.raw = []
        known.raw_values = []
        if known.is_next_looked_at:
            self.looking.add(known.number)
        else:
            self.looking.discard(known.number)
        self.look_inside()
        for tell in self.notes.on_step:
            tell(self.is_looking)

    def tell_look(self, optimizer: Any, known: Stepping, look: Pending) -> None:
        """Write a look at a step that has been made: what was read before it, and what is there
        now."""
        params = parameters_of(optimizer)
        if len(params) != len(look.before):
            return
        names = self.names.list_all(known, params)
        group = known.group() if known.group else None
        version = self.notes.log.optimizers[
            known.number, f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            tuple(names),
            tuple(param.numel() for param in params),
            ranks_of(group) if group else (),
            tuple(map(describe_shard, params)),
        ]  # fmt: skip
        wrapped = [each.key for _, each in self.models.list_alive()]
        norms = [(at, norm) for at, each in known.norms if (norm := each()) is not None]
        told = {  # the fields of a `Look`, but for its optimizer
            "step": known.count,
            "clock": known.clock,
            "nth": known.nth,
            "before": look.before,
            "gradients": look.gradients,
            "after": [find_fingerprint(param) for param in params],
            "raw": known.raw,
            "values": look.values,
            "settings": look.settings,
            "events": look.events,
            "is_whole": look.is_whole,
            "in_backward": known.depth > 0,
            "has_closure": known.is_nesting,
            "has_hooks": has_step_hooks(optimizer),
            "wrapped": wrapped,
            "line": look.line,
            "trains": look.trains,
            "raw_values": known.raw_values,
            "gradient_values": look.gradient_values,
            "statistics": [(at, find_fingerprint(norm.running_mean)) for at, norm in norms],
            "shards": look.shards,
            "gradients_of_shards": look.gradients_of_shards,
        }
        self.notes.log.tell(LOOK, version, told)
        if known.count == 0:
            known.norms = self.find_norms(params)

    def find_norms(self, params: Sequence[Any]) -> list[tuple[int, ReferenceType[Any]]]:
        """The BatchNorm layers whose weights are among these parameters, but for those in wrapped
        models that broadcast their buffers. It goes through all objects of Python, once for each
        optimizer."""
        places = {id(param): place for place, param in enumerate(params)}
        broadcast = {
            id(module)
            for model, _ in self.models.list_alive()
            if model.broadcast_buffers
            for module in model.modules()
        }
        return [
            (places[id(each.weight)], ref(each))
            for each in gc.get_objects()
            if issubclass(type(each), _BatchNorm)
            and id(each) not in broadcast
            and id(each.weight) in places
            and each.running_mean is not None
        ]

    # The end

    @guarded
    def tell_end(self) -> None:
        """The program has ended: tell the last values of its parameters. What a load has brought
        since the last step says nothing of the training, and is unknown."""
        found: dict[str, int | None] = {}
        for param, name in self.names.list_alive():
            found[name] = None if name in self.brought else find_fingerprint(param)
        for optimizer, known in self.optimizers.items():
            for place, each in enumerate(parameters_of(optimizer)):
                if self.names.find(each) is None:
                    found[f"{known.number}/{place}"] = find_fingerprint(each)
        self.notes.log.tell(FINAL, *found.items())
        for name, prints in self.unowned.items():
            if len(prints) >= LEAST_LOOKS and len({*prints}) == 1:  # else something writes it
                self.notes.log.tell(UNOWNED, name)

    def finish(self, state: int) -> None:
        for handle in self.handles:
            handle.remove()
        self.inside.close()
        if state == ENDED:
            self.tell_end()


class Between(SeesCalls):
    """Tells a watcher of the calls between steps."""

    in_all_steps = True

    def __init__(self, watcher: TrainingWatcher) -> None:
        super().__init__(watcher.notes)
        self.watcher = watcher

    @guarded
    def begun(self, call: Call) -> None:
        self.watcher.call_begun(call)

    def end(self) -> None:
        super().end()
        self.watcher.events.miss()


class Inside(Observer):
    """Tells a watcher of the buckets that DistributedDataParallel averages in C++."""

    looks_at_calls = False
    looks_inside = True

    def __init__(self, watcher: TrainingWatcher) -> None:
        self.watcher = watcher

    def begun(self, call: Call) -> None:
        # on a GPU it is a thread of autograd's that calls
        if call.in_cpp and threading.get_ident() == self.watcher.notes.thread:
            self.watcher.bucket_begun(call)


def describe(event: Seen, names: Sequence[str]) -> tuple[object, ...]:
    """An event as it is written: with the places of parameters among `names`, an optimizer's."""
    told = [*fields_of(event)]
    told[GRADIENTS_AT] = places_of(event.gradients, names)
    told[PARAMETERS_AT] = places_of(event.parameters, names)
    return tuple(told)


def places_of(some: Set[str], names: Sequence[str]) -> list[int]:
    return [place for place, name in enumerate(names) if name in some] if some else []


def begins_to_train(known: Stepping, params: Sequence[Any]) -> bool:
    """Whether a parameter of an optimizer has a gradient at a step, for the first time. Such a step
    is looked at, so that there was none at any step if no look has one."""
    if known.has_trained:
        return False
    known.has_trained = any(param.grad is not None for param in params)
    return known.has_trained


def drops_out(model: nn.Module) -> bool:
    """Whether a module of it draws what it drops."""
    return any(
        each.training and each.p > 0 for each in model.modules() if isinstance(each, _DropoutNd)
    )


def settings_of(group: Any) -> list[str]:
    """The hyperparameters of a group of an optimizer's parameters, those that are numbers, strings
    or tuples of numbers."""
    found = []
    for name, value in group.items():
        plain = value if isinstance(value, tuple | list) else (value,)
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()
        elif not all(isinstance(each, bool | int | float | str | None) for each in plain):
            continue
        if name not in INTERNAL:
            found.append(f"{name}={value}")
    return sorted(found)
