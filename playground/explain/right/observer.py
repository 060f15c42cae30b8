"""In a rank: sees what its optimizers, models and calls do, and writes it into the rank's log.

Nothing of the program is changed, and nothing is called that other ranks would hear of. Where this
fails, it stops, and the program goes on: the rank is unknown then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DistributedSampler

from playground.explain.lines import Lines
from playground.explain.right import (
    BACKWARD,
    BATCH,
    BUCKET,
    CALLED,
    DRAW,
    ENDED,
    FAILED,
    FINAL,
    FORMAT,
    FORWARD,
    FULL,
    GAPS,
    JOINS,
    LATE,
    LINE,
    LOADED,
    LOOK,
    MISUSE,
    MODEL,
    NO_GRADIENT,
    OPTIMIZER,
    STATE,
    STEP,
    THREADS,
    UNKNOWN,
    WRITTEN,
    Prints,
    file_name,
    is_looked_at,
)
from playground.explain.right.fingerprint import find_fingerprint, has_gaps, read_values
from playground.runtime.event_log import NONE, EventLog, Table, map_file
from playground.runtime.tap import Call, Observer, observing, ranks_of
from playground.runtime.upstream import (
    count_collectives,
    has_step_hooks,
    hide_from_compiler,
    hooks_of,
    is_carried_by_gloo,
    is_joining,
    sampler_of,
)

MOST_EVENTS = 256
"""How many events are remembered. Of an optimizer that steps more rarely, the events are not known
whole."""
MOST_REBUILT = 64
"""How often, between two steps, the tensors of calls are looked for among gradients that have come
meanwhile."""
MOST_DRAWS = 32
"""How many iterations over a sampler are told."""
FIRST_BATCHES = 2
"""How many batches of such an iteration are looked at."""
MOST_TENSORS = 8
"""How many tensors of a batch are looked at."""
IN_PLACE = {"allreduce", "broadcast", "send", "recv"}
"""Methods that work on one tensor, where it is: gloo writes it without its version being
counted."""
IN_MEMORY = {"allreduce", "broadcast", "reduce"}
"""Methods by which gloo goes through the memory of a tensor, whatever its strides."""
MOST_SENT, MOST_IN_FLIGHT, MOST_MISUSES = 64, 1024, 32
"""How many messages are looked at, tensors are remembered, and misuses are told."""
MOST_VALUES = 64
"""How many parameters there are whose elements are told."""
INTERNAL = {"foreach", "fused", "initial_lr", "params", "differentiable", "capturable"}
"""Settings of an optimizer that change nothing, or its result by rounding alone."""


class FactsLog(EventLog):
    """The log of a rank. Where it cannot be written, the program runs without."""

    def __init__(self, file: Path) -> None:
        super().__init__(FORMAT, map_file(file, FORMAT.size))
        self.lines = Table(self, LINE)
        self.optimizers = Table(self, OPTIMIZER)

    def write_to(self, memory: Any) -> None:
        super().write_to(memory)
        self.state = self.octets[FORMAT.words_at : FORMAT.text_at].cast("q")

    def tell(self, subject: str, *thing: object) -> None:
        if not self.write(subject, thing):
            self.state[FULL] = 1

    def add_step(self, optimizer: int, clock: int) -> None:
        number = self.take_number()
        STEP.pack_into(self.octets, FORMAT.place_of(number), optimizer, clock, number + 1)


@dataclass(eq=False, slots=True)
class Seen:
    """An event, as `Event` has it."""

    kind: str
    subject: str
    flag: bool = False
    note: str = ""
    gradients: frozenset[str] = frozenset()
    """The names of parameters whose gradients a call took."""
    parameters: frozenset[str] = frozenset()
    """Those of parameters that it took, or that were loaded."""
    size: int = 0
    ranks: int = 0
    line: int = NONE
    prints: Prints = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Pending:
    """A look whose step is under way."""

    before: Prints
    gradients: Prints
    values: list[list[float]]
    settings: list[list[str]]
    events: list[tuple[object, ...]]
    is_whole: bool
    line: int


@dataclass(eq=False, slots=True)
class Stepping:
    """What is known of an optimizer."""

    number: int
    group: ReferenceType[Any] | None
    """The group whose clock its steps have: its first wrapped model's, or the world."""
    is_wrapped: bool
    models: int
    """How many models had been wrapped by then."""
    count: int = 0
    """How many steps it has made."""
    clock: int = -1
    nth: int = 0
    since: int = 0
    """The number of the first event after its last step."""
    is_forced: bool = False
    """Whether its next step is looked at, whatever its number."""
    is_nesting: bool = False
    """Whether another optimizer steps within its step, or backward runs there."""
    values: list[float] = field(default_factory=list)
    """Two elements of its first parameter after its last step."""
    written: int = 0
    """How often they were others before the next step."""
    raw: Prints = field(default_factory=list)
    pending: Pending | None = None
    depth: int = 0
    """How many backward passes its step is in."""

    @property
    def is_next_looked_at(self) -> bool:
        return self.is_forced or is_looked_at(self.count)


@dataclass(eq=False, slots=True)
class InFlight:
    """A tensor that an asynchronous call reads or writes."""

    tensor: Any
    version: int
    form: tuple[object, ...]
    """Its shape and strides."""
    print: int | None
    """Its fingerprint, where the call only reads."""
    line: int
    waits: int
    """How many calls this rank had waited for when it was made."""


@dataclass(eq=False, slots=True)
class Wrapped:
    """What is known of a model that DistributedDataParallel has wrapped."""

    model: ReferenceType[Any]
    key: str
    group: ReferenceType[Any]
    ignored: set[str]


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method that sees what the main thread of the rank does, and never raises. What others do
    is not seen."""

    @wraps(method)
    def watch(self: Checker, *args: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_watching:
            return
        try:
            if threading.get_ident() == self.thread:
                method(self, *args)
            elif not self.has_threads:
                self.has_threads = True
                self.log.tell(THREADS)
        except Exception as error:  # whatever a program makes of torch's objects
            self.give_up(f"{type(error).__name__} in the check: {error}")

    return hide_from_compiler(watch, with_calls=True)


class Checker(Observer):
    """Sees what the tap and torch's hooks of optimizers tell."""

    looks_at_training = True

    def __init__(self, log: FactsLog) -> None:
        self.log = log
        self.thread = threading.get_ident()
        self.is_watching = True
        self.has_threads = False
        """Whether another thread has done what is seen of the main one."""
        self.lines = Lines()
        self.known_lines: list[Any] = []
        self.models: dict[int, Wrapped] = {}
        """By id, as long as they are alive."""
        self.made: dict[str, int] = {}
        """How many models were wrapped, by the name of their group."""
        self.names: dict[int, tuple[ReferenceType[Any], str]] = {}
        """The parameters of wrapped models and their names, by id."""
        self.largest = 0
        """The number of elements of the largest parameter that was seen."""
        self.optimizers: WeakKeyDictionary[Any, Stepping] = WeakKeyDictionary()
        self.stepped = 0
        """How many optimizers have made a step."""
        self.looking: set[int] = set()
        """The numbers of optimizers whose next step is looked at."""
        self.events: deque[Seen] = deque(maxlen=MOST_EVENTS)
        self.count = 0
        """How many events there were."""
        self.blind = 0
        """The number of the event after the last one that was not looked at."""
        self.places: dict[int, tuple[Any, bool, str]] | None = None
        """The parameters of optimizers, by the address of their gradients' storage, for which the
        flag is true, and of their own: as it was when the last backward pass or step ended."""
        self.rebuilt = 0
        """How often that was found anew since the last step."""
        self.stack: list[Any] = []
        """The optimizers that are stepping, the innermost last."""
        self.inside, self.is_inside = contextlib.ExitStack(), False
        """While wrapped models are watched: an observer that looks inside."""
        self.samplers: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The numbers of samplers, and of their last draws."""
        self.loaded: dict[int, int] = {}
        """How many batches came of the last draw, by the sampler's number."""
        self.has_loader = False
        self.in_flight: dict[int, InFlight] = {}
        """By the number of the call."""
        self.waits = 0
        """How many calls this rank has waited for: others may have told it by them that they are
        done."""
        self.sent = 0
        """How many messages were looked at."""
        self.misuses: set[tuple[str, str, int]] = set()
        self.clocks: list[dict[str, int | None]] = []
        """Those of wrapped models' groups at the begin of each backward pass under way."""
        self.large: dict[tuple[str, int, int], int] = {}
        """How often a call as large as the largest parameter, or a load, was made, by operation,
        size and line."""
        self.handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    @property
    def is_looking(self) -> bool:
        return bool(self.looking) or not self.optimizers

    def give_up(self, why: str) -> None:
        """Nothing is known of this rank from now on."""
        self.is_watching = False
        self.log.tell(UNKNOWN, why)

    def find_line(self) -> int:
        """The line of the program that has caused this; `NONE` in a step that nobody looks at."""
        return self.write_line() if self.is_looking else NONE

    def write_line(self) -> int:
        return self.line_of(self.lines.find_cause())

    def line_of(self, number: int) -> int:
        """A line as the log has it, by its number in this rank."""
        if number == NONE:
            return NONE
        if number >= len(self.known_lines):
            self.known_lines = [*self.lines.lines]
        return self.log.lines[self.known_lines[number]]

    def note(self, event: Seen) -> None:
        event.line = self.find_line()
        self.events.append(event)
        self.count += 1
        if not self.is_looking:
            self.blind = self.count

    def find_tensors(self, tensors: Sequence[Any]) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the parameters whose gradients, and of those which, are among these."""
        addresses = {address_of(each) for each in tensors} - {0}
        found = self.look_up(addresses)
        if len(found) < len(addresses) and self.rebuilt < MOST_REBUILT:
            self.places = None
            self.rebuilt += 1
            found = self.look_up(addresses)
        gradients = frozenset(name for is_gradient, name in found if is_gradient)
        return gradients, frozenset(name for is_gradient, name in found if not is_gradient)

    def look_up(self, addresses: set[int]) -> list[tuple[bool, str]]:
        if self.places is None:
            self.places = {}
            for optimizer, known in self.optimizers.items():
                for place, param in enumerate(parameters_of(optimizer)):
                    name = self.name_of(param) or f"{known.number}/{place}"
                    self.places[address_of(param)] = param, False, name
                    if param.grad is not None:
                        self.places[address_of(param.grad)] = param, True, name
        found = []
        for address in addresses & self.places.keys():
            param, is_gradient, name = self.places[address]
            held = param.grad if is_gradient else param
            if held is not None and address_of(held) == address:
                found.append((is_gradient, name))
        return found

    # Models

    @guarded
    def model_wrapped(self, model: Any) -> None:
        self.drop_dead()
        group = model.process_group
        name: str = group.group_name
        number = self.made[name] = self.made.get(name, 0) + 1
        key = f"{name}#{number}"
        ignored = {*model.parameters_to_ignore}
        wrapped = Wrapped(ref(model), key, ref(group), ignored)
        self.models[id(model)] = wrapped
        found = [each for each in model.module.named_parameters() if each[0] not in ignored]
        for each, param in found:
            self.names[id(param)] = ref(param), f"{key}/{each}"
        self.log.tell(
            MODEL, key, list(ranks_of(group)), [each for each, _ in found],
            [param.requires_grad for _, param in found],
            [find_fingerprint(param) for _, param in found], self.find_line(),
        )  # fmt: skip
        self.look_inside()

    @guarded
    def model_called(self, model: Any, args: Sequence[Any]) -> None:
        wrapped = self.models.get(id(model))
        if wrapped is None or wrapped.model() != model or not torch.is_grad_enabled():
            return
        notes = [*hooks_of(model), *[JOINS] * is_joining(model)]
        sync = bool(model.require_backward_grad_sync)
        prints = [find_fingerprint(each) for each in tensors_in(args)] if self.is_looking else []
        self.note(Seen(FORWARD, wrapped.key, sync, ", ".join(notes), prints=prints))
        if self.is_looking:
            self.find_late(model.module, wrapped)

    def drop_dead(self) -> None:
        self.models = {key: each for key, each in self.models.items() if each.model() is not None}
        self.names = {key: each for key, each in self.names.items() if each[0]() is not None}

    def find_late(self, module: nn.Module, wrapped: Wrapped) -> None:
        """Name the parameters that the module did not have when it was wrapped."""
        for name, param in module.named_parameters():
            if self.name_of(param) is None and name not in wrapped.ignored:
                self.names[id(param)] = ref(param), f"{wrapped.key}/{name}"
                self.log.tell(LATE, wrapped.key, name, self.find_line())

    def name_of(self, param: Any) -> str | None:
        known, name = self.names.get(id(param), (None, None))
        return name if known is not None and known() is param else None

    @guarded
    def model_loaded(self, module: nn.Module) -> None:
        params = [*module.parameters()]
        names = {name for param in params if (name := self.name_of(param))}
        names |= self.find_tensors(params)[1]
        if names:
            self.look_at_next(LOADED, 0)
        self.note(Seen(LOADED, type(module).__name__, parameters=frozenset(names)))

    # Backward passes and calls

    @guarded
    def backward_begun(self) -> None:
        self.clocks.append(self.read_clocks() if self.is_looking else {})

    @guarded
    def backward_ended(self) -> None:
        if not self.clocks:
            return
        before, self.places = self.clocks.pop(), None
        advanced = False
        if self.is_looking:
            advanced = any(before.get(key) != now for key, now in self.read_clocks().items())
        self.note(Seen(BACKWARD, "", advanced))
        if self.stack:
            self.optimizers[self.stack[0]].is_nesting = True
        if not self.clocks and self.looking:
            for optimizer, known in self.optimizers.items():
                if known.number in self.looking and not known.is_wrapped:
                    known.raw = [print_of_gradient(param) for param in parameters_of(optimizer)]

    def read_clocks(self) -> dict[str, int | None]:
        """The clocks of the groups of models, by the models' keys."""
        groups = {each.key: each.group() for each in self.models.values()}
        return {key: count_collectives(group) for key, group in groups.items() if group}

    @guarded
    def returned(self, call: Call) -> None:
        """An asynchronous call is under way: its tensor is not to be written until it has been
        waited for."""
        if call.blocks or call.method not in IN_PLACE or len(call.ranks) == 1:
            self.waits += 1
            return
        tensor = (call.inputs or call.outputs)[0]
        if not is_whole(tensor) or not is_carried_by_gloo(call.group, tensor.device):
            return
        reads = call.method == "send"
        if reads and self.sent >= MOST_SENT:
            return
        self.sent += reads
        if len(self.in_flight) < MOST_IN_FLIGHT:
            self.in_flight[call.number] = InFlight(
                tensor, tensor._version, (tensor.shape, tensor.stride()),
                find_fingerprint(tensor) if reads else None, self.lines.find_cause(), self.waits,
            )  # fmt: skip

    @guarded
    def waiting(self, calls: Sequence[Call]) -> None:
        for call in calls:
            flight = self.in_flight.pop(call.number, None)
            if flight is None or call.has_future or call.is_polled or flight.waits != self.waits:
                continue
            tensor = flight.tensor
            if tensor._version == flight.version or flight.form != (tensor.shape, tensor.stride()):
                continue
            if flight.print is None or flight.print != find_fingerprint(tensor):
                self.tell_misuse(WRITTEN, call.name, flight.line)
        self.waits += 1

    @guarded
    def dropped(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.in_flight.pop(call.number, None)

    @guarded
    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        for call in calls:
            self.in_flight.pop(call.number, None)

    def look_at_next(self, operation: str, size: int) -> None:
        """This may make models equal: look at the next step, at the first time on a line, the
        second, the fourth, and so on."""
        key = operation, size, self.lines.find_cause()
        self.large[key] = count = self.large.get(key, 0) + 1
        if count & (count - 1) == 0:
            for known in self.optimizers.values():
                known.is_forced = True
                self.looking.add(known.number)

    def tell_misuse(self, kind: str, operation: str, number: int) -> None:
        if (kind, operation, number) in self.misuses or len(self.misuses) >= MOST_MISUSES:
            return
        self.misuses.add((kind, operation, number))
        step = max((each.count for each in self.optimizers.values()), default=0)
        self.log.tell(MISUSE, kind, operation, self.line_of(number), step)

    @guarded
    def begun(self, call: Call) -> None:
        tensors = [*call.inputs, *call.outputs]
        if (
            call.method in IN_MEMORY
            and any(map(has_gaps, tensors))
            and len(call.ranks) > 1
            and is_carried_by_gloo(call.group, tensors[0].device)
        ):
            self.tell_misuse(GAPS, call.name, self.lines.find_cause())
        size = max((each.numel() for each in tensors), default=0)
        if self.largest and size >= self.largest and not self.stack:
            self.look_at_next(call.name, size)
        seen = Seen(CALLED, call.name, bool(self.clocks), size=size, ranks=len(call.ranks))
        if self.is_looking:
            seen.gradients, seen.parameters = self.find_tensors(tensors)
        self.note(seen)

    # What DistributedDataParallel averages

    def look_inside(self) -> None:
        """Begin to watch the buckets of wrapped models, or end it, as steps are looked at or
        not."""
        if self.is_looking and self.models and not self.is_inside:
            self.inside.enter_context(observing(Inside(self)))
            self.is_inside = True
        elif self.is_inside and not self.is_looking:
            self.is_inside = False
            self.inside.close()

    @guarded
    def bucket_begun(self, call: Call) -> None:
        if self.clocks and call.method == "allreduce":
            self.note(Seen(BUCKET, "", prints=[find_fingerprint(each) for each in call.inputs]))

    # Data

    @guarded
    def samples_drawn(self, sampler: Any) -> None:
        number, draw = self.samplers.get(sampler, (len(self.samplers), -1))
        self.samplers[sampler] = number, draw + 1
        self.loaded[number] = 0
        if draw + 1 < MOST_DRAWS:
            counted = count_collectives(dist.group.WORLD) if dist.is_initialized() else None
            self.log.tell(
                DRAW, number, draw + 1, sampler.rank, sampler.num_replicas, sampler.seed,
                sampler.epoch, bool(sampler.shuffle), len(sampler.dataset),
                -1 if counted is None else counted,
                [(each.number, each.count) for each in self.optimizers.values()],
                self.write_line(),
            )  # fmt: skip

    @guarded
    def batch_loaded(self, iterator: Any, batch: Any) -> None:
        if not self.has_loader:
            self.has_loader = True
            self.log.tell(BATCH)
        sampler = sampler_of(iterator)
        if not isinstance(sampler, DistributedSampler) or sampler not in self.samplers:
            return
        number, draw = self.samplers[sampler]
        self.loaded[number] += 1
        if self.loaded[number] <= FIRST_BATCHES and draw < MOST_DRAWS:
            prints = [find_fingerprint(each) for each in tensors_in(batch)]
            self.log.tell(BATCH, number, draw, self.loaded[number] - 1, prints)

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
        if known is None or known.models != self.count_models():
            known = self.add_optimizer(optimizer, known)
        group = known.group() if known.group else None
        counted = None if group is None else count_collectives(group)
        clock = -1 if counted is None else counted
        known.nth = known.nth + 1 if clock == known.clock else 0
        known.clock, known.depth, known.is_nesting = clock, len(self.clocks), False
        self.log.add_step(known.number, clock)
        self.stack.append(optimizer)
        known.pending = None
        params = parameters_of(optimizer)
        if known.is_next_looked_at or self.was_written(known, params):
            names = self.names_of(known, params)
            known.pending = Pending(
                [find_fingerprint(param) for param in params],
                [print_of_gradient(param) for param in params],
                [read_values(param) for param in params[:MOST_VALUES]],
                [settings_of(group) for group in optimizer.param_groups],
                [self.describe(event, names) for event in self.events_since(known.since)],
                self.count - known.since <= MOST_EVENTS and self.blind <= known.since,
                self.find_line(),
            )

    def count_models(self) -> int:
        return sum(self.made.values())

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
        keys = [name.rpartition("/")[0] for param in params if (name := self.name_of(param))]
        groups = [each.group for each in self.models.values() if each.key in keys[:1]]
        world = ref(dist.group.WORLD) if dist.is_initialized() else None
        group, models = groups[0] if groups else world, self.count_models()
        if known is None:
            known = Stepping(self.stepped, group, bool(keys), models)
            self.stepped += 1
            self.optimizers[optimizer] = known
            self.looking.add(known.number)
        known.group, known.is_wrapped, known.models = group, bool(keys), models
        self.largest = max([self.largest, *(param.numel() for param in params)])
        return known

    def events_since(self, number: int) -> list[Seen]:
        kept = self.count - len(self.events)
        return [*self.events][max(0, number - kept) :]

    def describe(self, event: Seen, names: Sequence[str]) -> tuple[object, ...]:
        """An event as it is written."""
        gradients = [place for place, name in enumerate(names) if name in event.gradients]
        parameters = [place for place, name in enumerate(names) if name in event.parameters]
        return (
            event.kind, event.subject, event.flag, event.note, gradients, parameters, event.size,
            event.ranks, event.line, event.prints,
        )  # fmt: skip

    def names_of(self, known: Stepping, params: Sequence[Any]) -> list[str]:
        return [
            self.name_of(param) or f"{known.number}/{place}" for place, param in enumerate(params)
        ]

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
        self.places, self.rebuilt = None, 0
        known.since, known.pending, known.raw, known.is_forced = self.count, None, [], False
        if known.is_next_looked_at:
            self.looking.add(known.number)
        else:
            self.looking.discard(known.number)
        self.look_inside()

    def tell_look(self, optimizer: Any, known: Stepping, look: Pending) -> None:
        params = parameters_of(optimizer)
        if len(params) != len(look.before):
            return
        names = self.names_of(known, params)
        group = known.group() if known.group else None
        version = self.log.optimizers[
            known.number, f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            tuple(names),
            tuple(param.numel() for param in params),
            ranks_of(group) if group else (),
        ]  # fmt: skip
        self.log.tell(
            LOOK, version, known.count, known.clock, known.nth, look.before, look.gradients,
            [find_fingerprint(param) for param in params], known.raw, look.values, look.settings,
            look.events, look.is_whole, known.depth > 0, known.is_nesting,
            has_step_hooks(optimizer),
            [each.key for each in self.models.values() if each.model() is not None], look.line,
        )  # fmt: skip

    # The end

    @guarded
    def tell_end(self) -> None:
        """The program has ended: tell the last values of its parameters."""
        found: dict[str, int | None] = {}
        for param, name in self.names.values():
            if (alive := param()) is not None:
                found[name] = find_fingerprint(alive)
        for optimizer, known in self.optimizers.items():
            for place, each in enumerate(parameters_of(optimizer)):
                if self.name_of(each) is None:
                    found[f"{known.number}/{place}"] = find_fingerprint(each)
        self.log.tell(FINAL, *found.items())

    def finish(self, state: int) -> None:
        for handle in self.handles:
            handle.remove()
        self.inside.close()
        if state == ENDED:
            self.tell_end()
        self.is_watching = False
        self.log.state[STATE] = state


class Inside(Observer):
    """Tells a checker of the buckets that DistributedDataParallel averages in C++."""

    looks_inside = True

    def __init__(self, checker: Checker) -> None:
        self.checker = checker

    def begun(self, call: Call) -> None:
        # on a GPU it is a thread of autograd's that calls
        if call.in_cpp and threading.get_ident() == self.checker.thread:
            self.checker.bucket_begun(call)


def tensors_in(value: Any) -> list[Tensor]:
    """The first tensors of a batch: of tuples, lists and dictionaries within each other."""
    found: list[Tensor] = []
    waiting = [value]
    while waiting and len(found) < MOST_TENSORS:
        each = waiting.pop(0)
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting[:0] = each[:MOST_TENSORS]
        elif isinstance(each, dict):
            waiting[:0] = [*each.values()][:MOST_TENSORS]
    return found


def parameters_of(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def print_of_gradient(param: Any) -> int | None:
    return NO_GRADIENT if param.grad is None else find_fingerprint(param.grad)


def is_whole(tensor: Any) -> bool:
    """Whether its version counts the writes to it alone: it is plain, and all of its storage."""
    return (
        address_of(tensor) != 0
        and not tensor.is_inference()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def address_of(tensor: Any) -> int:
    """That of its storage; 0 if it has none of its own."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


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


_checkers: list[Checker] = []
"""That of this process, if any."""


@contextlib.contextmanager
def checked(folder: Path, rank: int) -> Iterator[None]:
    """In this block, see what this rank does, and write it into a log in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    checker = Checker(FactsLog(folder / file_name(rank)))
    _checkers[:] = [checker]
    state = FAILED
    try:
        with observing(checker):
            yield
        state = ENDED
    except SystemExit as error:
        state = FAILED if error.code else ENDED
        raise
    finally:
        _checkers.clear()
        checker.finish(state)


def forget() -> None:
    """Stop in a process that was forked from a rank, such as a worker of a DataLoader."""
    while _checkers:
        checker = _checkers.pop()
        checker.is_watching = False
        checker.log.let_go()


os.register_at_fork(after_in_child=forget)
