"""In a rank: run a solution on the cases of its judge, and report to the parent what it does.

What the solution calls of torch.distributed is recorded, and made as unforgiving as the
documentation: a tensor that is being received holds `POISON` until `wait()`, and one that is being
sent may not change before. Each thread of the solution is recorded for itself; what torch calls
within a call is not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from playground.base.errors import LOST_PEER
from playground.exercises.cases import ANYTHING, Case, flatten
from playground.exercises.exercise import COLLECTIVES, ERROR, FAIL, MESSAGES, RETURNED
from playground.exercises.observation import POISON, RESULT, Leaf, Observation
from playground.exercises.transcript import (
    FUNCTIONAL,
    TICK,
    WRITING,
    Meter,
    Request,
    Transcript,
    end_check,
    stop,
)
from playground.exercises.verdict import (
    BREAKPOINT,
    DEADLINE,
    ENDLESS,
    NOT_WRITTEN,
    Solution,
)
from playground.tap import observing
from playground.tap.replacement import Wrap, replaced
from playground.world.rank.reports import QUIT, is_reporting, report

MAX_PRINTED = 2**16
"""Bytes printed in one case."""
ASLEEP = 20.0
"""Seconds for which a solution may do nothing, outside all operations."""
IMPORTING = 20
"""How many times the deadline an import may take."""
LEFT_RUNNING = "a thread left running"
LAST_WORDS = 2.0
"""Seconds that threads may go on after the solution has returned."""


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """The message for a tensor: gloo refuses one without elements where the receiver names no
    source."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def world_rank(group: Any, peer: int | None, group_peer: int | None) -> int | None:
    """The rank in the world of `peer`, or of `group_peer` in the group. None: anyone."""
    return (
        peer if group_peer is None else dist.get_global_rank(group or dist.group.WORLD, group_peer)
    )


def send(
    record: Transcript,
    real: Any,
    tensor: Any,
    dst: Any = None,
    group: Any = None,
    tag: int = 0,
    group_dst: Any = None,
) -> Any:
    """`send`, and `isend`, which sends a copy."""
    peer, is_async = world_rank(group, dst, group_dst), real.__name__ == "isend"
    with record.within(real.__name__, peer, blocks=not is_async) as line:
        copy = fill(tensor.detach().clone() if is_async and tensor.is_contiguous() else tensor)
        held = tensor.detach().clone() if is_async else tensor
        work = real(copy, dst, group, tag, group_dst)
    record.actions.sent.append((peer or 0, tensor.numel()))
    record.add_moved([tensor])
    return Request(record, work, "isend", peer, line, tensor, copy, held) if is_async else work


def recv(
    record: Transcript,
    real: Any,
    tensor: Any,
    src: Any = None,
    group: Any = None,
    tag: int = 0,
    group_src: Any = None,
) -> Any:
    """`recv`, and `irecv`, which receives a copy."""
    peer, is_async = world_rank(group, src, group_src), real.__name__ == "irecv"
    with record.within(real.__name__, peer, blocks=not is_async) as line:
        copy = fill(torch.empty_like(tensor) if is_async and tensor.is_contiguous() else tensor)
        result = real(copy, src, group, tag, group_src)
    if is_async:
        held = tensor.data.copy_(torch.tensor(POISON)).clone()
        return Request(record, result, "irecv", peer, line, tensor, copy, held)
    record.actions.received.append(result if peer is None else peer)
    return result


def all_reduce(
    record: Transcript,
    real: Any,
    tensor: Any,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    record.actions.reduced.append(tensor.numel())
    with record.within("all_reduce", blocks=not async_op) as line:
        if not async_op:
            return real(tensor, op, group)
        copy, held = tensor.detach().clone(), tensor.detach().clone()
        work = real(copy, op, group, True)
    return Request(record, work, "all_reduce", None, line, tensor, copy, held) if work else None


def new_group(record: Transcript, real: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    ranks = None if ranks is None else sorted(ranks)
    if not kwargs.get("use_local_synchronization"):
        report(group=tuple(ranks or range(record.size)))
    with record.within("new_group"):
        return real(ranks, *args, **kwargs)


def call(record: Transcript, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective that only counts."""
    with record.within(real.__name__, blocks=not kwargs.get("async_op")):
        return real(*args, **kwargs)


OWN_WAYS: dict[str, Callable[..., Any]] = {
    "send": send,
    "isend": send,
    "recv": recv,
    "irecv": recv,
}
OWN_WAYS |= {"all_reduce": all_reduce, "new_group": new_group}
"""How a function of torch.distributed is called for a solution, where not by `call`."""


@contextlib.contextmanager
def judged(record: Transcript) -> Iterator[None]:
    """Record what the solution does, and keep it from ending the world."""

    def keep_world(real: Callable[..., None]) -> Callable[..., None]:
        def change(group: Any = None, *args: Any, **kwargs: Any) -> None:
            if group in (None, dist.group.WORLD) or real.__name__ == "init_process_group":
                stop(
                    f"{real.__name__}(): the ranks have their world, and still need it: take it "
                    "out",
                    record.line(),
                )
            real(group)

        return change

    def wrap_wait(real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(future: Any) -> Any:
            with record.waiting():
                return real(future)

        return wait

    @functools.cache  # the same function in both modules, as P2POp compares them
    def wrap_function(real: Any) -> Callable[..., Any]:
        way: Callable[..., Any] = OWN_WAYS.get(real.__name__, call)

        @functools.wraps(real)
        def function(*args: Any, **kwargs: Any) -> Any:
            return (
                way(record, real, *args, **kwargs) if record.is_theirs() else real(*args, **kwargs)
            )

        return function

    wraps: dict[tuple[Any, str], Wrap] = {
        (dist, "init_process_group"): keep_world,
        (dist, "destroy_process_group"): keep_world,
        (torch._C.Future, "wait"): wrap_wait,
    }
    meter = Meter(record)
    wraps |= {(dist.Store, name): meter.wrap_store for name in WRITING if name in vars(dist.Store)}
    functional = [
        name
        for name in vars(_functional_collectives)
        if name.removesuffix("_autograd") in FUNCTIONAL
    ]
    wraps |= {(_functional_collectives, name): meter.wrap_functional for name in functional}
    wraps |= {
        (module, name): wrap_function
        for module in (dist, distributed_c10d)
        for name in (*MESSAGES, *COLLECTIVES)
    }
    with contextlib.ExitStack() as stack:
        for place, wrap in wraps.items():
            stack.enter_context(replaced(*place, wrap))
        stack.enter_context(observing(meter))
        yield


@contextlib.contextmanager
def solving(record: Transcript) -> Iterator[None]:
    """The solution runs. What it raises ends the check, and so does the deadline: seconds that this
    process has computed, not those for which it has waited, for other ranks or for a busy
    machine."""
    seconds, before = 0.0, time.process_time()
    asleep = 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seconds, before, asleep
        if is_reporting():  # the next look counts what this one does not
            return
        now = time.process_time()
        computed, before = now - before, now
        asleep = asleep + TICK if computed <= TICK / 100 else 0.0
        if computed > TICK / 100:  # a busy machine may not give it more
            report()  # a sign of life
        if record.is_debugged:
            return
        stack = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)]
        seconds += computed / (
            IMPORTING if any(each.startswith("<frozen importlib") for each in stack) else 1
        )
        if os.fstat(record.printed).st_size > MAX_PRINTED:
            words = f"{ENDLESS}: it prints more than {MAX_PRINTED:,} characters"
            stop(words, record.line(frame), record.read_written())
        if seconds > DEADLINE:
            words = f"{ENDLESS}: no result after {DEADLINE:g} s of computing"
            stop(words, record.line(frame), record.read_written())
        if asleep > ASLEEP:
            words = f"{ENDLESS}: it has slept for {ASLEEP:g} s"
            stop(words, record.line(frame), record.read_written())

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    record.running = True
    try:
        yield
    except BaseException as error:
        record.running = False
        if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)):
            raise  # another rank is to be told of: the launcher sees how it ended
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == record.file
        ]
        words = re.sub(
            r" at 0x\w+", "", traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        )
        if isinstance(error, BdbQuit):
            words = QUIT if record.is_debugged else BREAKPOINT
        is_stub = isinstance(error, NotImplementedError)
        about = (
            {"status": FAIL, "words": NOT_WRITTEN} if is_stub else {"status": ERROR, "words": words}
        )
        end_check(**about, line=(lines or [0])[-1] or 0, printed=record.read_printed())
    finally:
        record.running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def import_solution(solution: Solution) -> ModuleType:
    """The module that it is, under its name."""
    module = ModuleType(solution.exercise.function)
    module.__file__ = file = solution.file
    sys.modules[module.__name__] = module
    linecache.cache[file] = (
        len(solution.text),
        None,
        solution.text.splitlines(keepends=True),
        file,
    )
    exec(compile(solution.text, file, "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Find the modules in this folder too, after all others, and write nothing beside them."""
    path, writes_nothing = list(sys.path), sys.dont_write_bytecode
    sys.path.append(folder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = writes_nothing


def judge(
    rank: int, size: int, solutions: tuple[Solution, ...], seed: int, is_debugged: bool = False
) -> int:
    """Run the last of `solutions` on the cases of its exercise, for as long as ranks and messages
    come out even. Those before it are what it may import. What comes of it is reported:
    `Observation`s, one a case. Returns the number of cases."""
    solution, exercise = solutions[-1], solutions[-1].exercise
    record = Transcript(solution.file, size, exercise.forbidden, is_debugged)
    cases = getattr(importlib.import_module(exercise.module), exercise.function)
    with (
        importing_from(os.path.dirname(os.path.abspath(solution.file))),
        record.catching_output(),
        judged(record),
    ):
        record.group = dist.new_group()
        with solving(record):
            functions = [import_solution(each) for each in solutions][-1]
        function = getattr(functions, exercise.function)
        seed_generator(seed)  # so that a mistake to compare with is given the same first case
        number = 0
        for number, case in enumerate(cases(rank, size, seed), 1):
            observation = run_case(rank, seed, number - 1, case, function, record)
            report(case=number - 1, observed=observation)
            check_balance(rank, observation, record)
    return number


def seed_generator(seed: int) -> None:
    """Seed the CPU's generator. (torch.manual_seed formats the stack for each kind of device.)"""
    torch.default_generator.manual_seed(seed)


def run_case(
    rank: int, seed: int, place: int, case: Case, function: Callable[..., Any], record: Transcript
) -> Observation:
    """Run one case, and say what was observed."""
    record.begin(case.actions)
    record.counts = case.counts
    size, threads = record.size, threading.enumerate()
    given = tuple(
        leaf for each in case.args if isinstance(each, torch.Tensor) for leaf in flatten(each)
    )
    seed_generator(seed + place)
    report(number=place, about=case.about)
    time.sleep(case.delay)
    with solving(record):
        returned = (
            case.run(function)
            if case.run
            else function(*((rank, size) if case.gives_rank else ()), *case.args)
        )
        left = [each for each in threading.enumerate() if each not in threads and not each.daemon]
        for thread in left:
            thread.join(LAST_WORDS)
    report(at=RETURNED)
    if left := [each for each in left if each.is_alive()]:
        record.actions.problems.append((LEFT_RUNNING, f"{left[0].name} goes on after the end", 0))
    record.actions.problems += [
        ("no wait", f"nobody waits for this {each.kind}", each.line) for each in record.pending
    ]
    if case.returns_a_copy and shares_argument(returned, case.args):
        words = "returned the tensor that it was given, not a copy"
        record.actions.problems.append(("returns no copy", words, 0))
    left_behind = case.held() if callable(case.held) else case.held
    if case.combine:
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, left_behind, group=record.group)
        left_behind = case.combine(everyones)
    held, expected = [*flatten(left_behind)], [*flatten(case.expected)]
    if case.returns is not ANYTHING:
        root = "" if isinstance(case.returns, dict) else RESULT
        held = [*put_in_order(flatten(returned, root), case.returns), *held]
        expected = [*put_in_order(flatten(case.returns, root), case.returns), *expected]
    return Observation(
        about=case.about,
        held=tuple(held),
        expected=tuple(expected),
        is_coded=case.is_coded,
        sent=tuple(record.actions.sent),
        received=tuple(record.actions.received.count(sender) for sender in range(size)),
        most=case.most,
        moved=record.actions.moved,
        most_moved=limit_of(case.most) if case.most_moved is None else case.most_moved,
        problems=tuple(dict.fromkeys(record.actions.problems)),
        printed=record.read_printed(),
        given=given,
        is_shared=shares_memory(returned, case.args),
        culprit=case.culprit,
        notes=tuple(case.notes),
    )


def put_in_order(leaves: Iterable[Leaf], due: object) -> list[Leaf]:
    """The leaves of a dictionary in the order of the one that is due, as the notes show them."""
    names = [str(name) for name in due] if isinstance(due, dict) else []

    def find_place(leaf: Leaf) -> int:
        name = re.split(r"[.[]", leaf.where)[0]
        return names.index(name) if name in names else len(names)

    return sorted(leaves, key=find_place)


def check_balance(rank: int, observation: Observation, record: Transcript) -> None:
    """Raises `RuntimeError` where nothing else can run after a case."""
    balance = torch.zeros(record.size, record.size, dtype=torch.int64)
    balance[rank] += torch.tensor(
        [sum(to == receiver for to, _ in record.actions.sent) for receiver in range(record.size)]
    )
    balance[:, rank] -= torch.tensor(observation.received)
    dist.all_reduce(balance, group=record.group)
    if (
        balance.any()
        or record.pending
        or any(name == LEFT_RUNNING for name, _, _ in record.actions.problems)
    ):
        raise RuntimeError("messages or threads are left over: this world cannot run anything else")


def limit_of(most: int | Mapping[int, float] | None) -> float | None:
    """The elements that may leave a rank in all, where there is a limit to its messages: a
    collective is no way round it."""
    return sum(most.values()) if isinstance(most, Mapping) else most


def shares_memory(returned: object, args: Sequence[object]) -> bool:
    """Whether tensors of a list, or of its lists, are the same memory, which is none of an
    argument's."""
    places = [each.data_ptr() for each in tensors_in(returned) if each.numel()]
    given = {each.data_ptr() for each in tensors_in(args)}
    own = [each for each in places if each not in given]
    return len({*own}) < len(own)


def shares_argument(returned: object, args: Sequence[object]) -> bool:
    """Whether the tensor that was returned is the memory of an argument."""
    result = returned.get(RESULT) if isinstance(returned, dict) else returned
    if not (isinstance(result, torch.Tensor) and result.numel()):
        return False
    place = result.untyped_storage().data_ptr()
    return any(each.untyped_storage().data_ptr() == place for each in tensors_in(args))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if type(value) is torch.Tensor:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
