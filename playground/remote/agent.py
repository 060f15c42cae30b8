"""Remote calls by send and recv: what torch.distributed.rpc does, small enough for a blackboard.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

A message is an envelope of fixed size, so that a rank that knows nothing of it can receive it: a number, the length of
a pickle, and the pickle; what does not fit follows. The function runs on the other rank, in a thread that listens for
requests. The reply has the request's number in its tag, so that the caller receives it itself; an exception is returned
as an exception, with its traceback. Agents have a process group of their own, so that no other message of the program
can be taken for a request.

A rank that dies breaks its own connections and no others. Threads that listen to it or wait for its reply get an error
at once; calls among the others continue. Objects that must not move stay with their owner, and others refer to them:
see `RemoteReference`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import struct
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime.errors import UsageError

ENVELOPE = 4096
"""Size in bytes; one of 64 would take gloo as long."""
HEADER = struct.Struct("<qQ")
"""Number of the call, and bytes of the pickle."""
REQUEST = 0
"""Tag of the envelopes that threads listen for. The rest of a request has its number as the tag."""
REPLY = 2**30
"""Added to the number in the tag of a reply: the other rank may send a request of its own with this number."""
STOP = 0
"""Number of a request that ends the thread which receives it. The reply is the number of those that still listen."""
NO_LIMIT = timedelta(days=1000)
"""Timeout of receives: one of gloo's that times out breaks the connection permanently. The launcher ends hung ranks."""
Works = list[tuple[Any, torch.Tensor]]
"""Works of messages, with their memory."""
agents: list[Agent] = []
"""The open agents of this process."""


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """How to rebuild a plain CPU tensor from its elements, without its graph. All others are left to torch's
    `__reduce_ex__`, which is slower, and reduces parameters to plain ones. Raises `UsageError` on accelerators."""
    if not tensor.is_cpu:
        raise UsageError(f"a tensor on {tensor.device} in a remote call: these carry CPU tensors, use .cpu()")
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return NotImplemented
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory = elements.as_strided((elements.numel(),), (1,)).view(torch.uint8).numpy()  # strides of 0 or 1 vary
    leaf = tensor.requires_grad and tensor.is_leaf
    return rebuild_tensor, (pickle.PickleBuffer(memory), str(tensor.dtype)[6:], tuple(tensor.shape), leaf)


def rebuild_tensor(memory: bytearray, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    kind = getattr(torch, dtype)
    tensor = torch.frombuffer(memory, dtype=kind).view(shape) if len(memory) else torch.empty(shape, dtype=kind)
    return tensor.requires_grad_() if requires_grad else tensor


class Pickler(pickle.Pickler):
    """Pickles tensors, and what `lend` reduces, in their own ways."""

    def __init__(self, file: io.BytesIO, lend: Callable[[Any], Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.lend = lend

    def reducer_override(self, part: Any) -> Any:
        return reduce_tensor(part) if isinstance(part, torch.Tensor) else self.lend(part)


def unpack(envelope: torch.Tensor, receive: Callable[[torch.Tensor], Any]) -> Any:
    """The object in an envelope; `receive` fills memory with what follows."""
    _, length = HEADER.unpack_from(envelope.numpy())
    if HEADER.size + length <= ENVELOPE:
        return pickle.loads(envelope.numpy().data[HEADER.size :])
    rest = torch.empty(length, dtype=torch.uint8)
    receive(rest)
    return pickle.loads(rest.numpy().data)


class RemoteTraceback(Exception):
    """The traceback of a remote exception: the `__cause__` of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Future:
    """The reply to a request to `rank`. Its envelope is being received already, so that the other rank need not wait
    until it is asked for."""

    def __init__(self, agent: Agent, rank: int, number: int) -> None:
        self.agent, self.rank, self.tag = agent, rank, REPLY + number
        self.lock = threading.Lock()
        self.envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
        self.works: Works = [] if rank == agent.rank else agent.start_receiving(rank, self.tag, self.envelope)
        self.kept: object = None
        """The works that send the request, until the reply is there."""
        self.outcome: tuple[bool, Any] | None = None
        """(True, what the function returned), or (False, what `wait` raises)."""

    def wait(self) -> Any:
        """Wait for the function's result. Raises its exception, or `DistNetworkError` if the rank is lost."""
        with self.lock:
            if self.outcome is None:
                self.agent.outstanding.discard(self)
                self.outcome, self.kept = self.receive(), None
        succeeded, value = self.outcome
        if succeeded:
            return value
        raise value

    def receive(self) -> tuple[bool, Any]:
        try:
            wait_for(self.rank, self.works)
            succeeded, value = unpack(self.envelope, partial(self.agent.receive, self.rank, self.tag))
        except BaseException as error:  # whatever it is, the reply comes only once
            return False, error
        if not succeeded:
            value, where = value
            value.__cause__ = RemoteTraceback(where)
        return succeeded, value


class Agent:
    """This rank's end of all remote calls. Every rank creates one at the same point, and closes it when all do.

    At any time one thread listens to each rank. It answers the request that it receives, while another one listens: so
    a function may make calls of its own, also to the rank that called it.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
        self.requests = itertools.count(1)
        self.references = References(self.rank, self.call)
        self.outstanding: set[Future] = set()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.listening: Counter[int] = Counter()
        """Number of threads that listen to each rank."""
        self.stopped: set[int] = set()
        """Ranks that make no more requests: they have closed their agent, or are lost."""
        self.threads: list[threading.Thread] = []
        self.changed = threading.Condition()
        self.lost: list[int] = []
        """Ranks to which the connection broke."""
        self.arrived: Counter[int] = Counter()
        """On rank 0: the number of times that each rank has come to the barrier."""
        self.report_loss: Callable[[int], None] = lambda rank: None

    def __enter__(self) -> Agent:
        agents.append(self)
        for rank in self.others:
            self.start_thread(rank)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        agents.remove(self)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on that rank. Returns its result, or raises its exception.

        Arguments and result are copied as pickle copies, also where `rank` is this one. Tensors are CPU tensors; they
        arrive contiguous and without their autograd graph. Raises `TypeError` for what cannot be sent: arguments
        before anything was sent, a result after the function has run. An exception that is not an `Exception`, as
        `SystemExit`, or does not survive pickling, arrives as a `RuntimeError` with the same text.
        """
        return self.call_async(rank, function, *args).wait()

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Future:
        """Like `call`, but returns a future, whose `wait()` returns the result."""
        if not 0 <= rank < self.size:
            raise UsageError(f"a remote call to rank {rank}: there are ranks 0 to {self.size - 1}")
        self.references.give_back()
        number = next(self.requests) % REPLY or next(self.requests) % REPLY  # never STOP
        messages = self.pack(rank, number, (function, args), "the arguments")
        future = Future(self, rank, number)
        if rank == self.rank:
            future.envelope, *rest = self.answer(rank, number, partial(unpack, messages[0], copy_of(messages)))
            future.outcome = unpack(future.envelope, copy_of([future.envelope, *rest]))
            if not future.outcome[0]:
                future.outcome = False, future.outcome[1][0]
        else:
            future.kept = self.send(rank, REQUEST, number, messages)
            self.outstanding.add(future)
        return future

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, and keep the result there. Returns a reference to it."""
        return RemoteReference(self.references, rank, self.call(rank, keep, function, args))

    def on_loss(self, callback: Callable[[int], None]) -> None:
        """Call `callback(rank)` for each rank that is lost: now for those already lost, later ones in another thread.
        It may be called twice for the same rank."""
        self.report_loss = callback
        for rank in list(self.lost):
            callback(rank)

    def barrier(self) -> None:
        """Wait until every rank that is not lost has called this as often as this one. All must call it."""
        self.call(0, arrive, self.rank)

    def close(self) -> None:
        """Wait until no rank makes calls any more, and stop answering. All ranks that are not lost must call this."""
        for future in list(self.outstanding):
            future.wait()
        self.references.give_back()
        self.barrier()
        for rank in self.others:
            with contextlib.suppress(dist.DistNetworkError):  # it is lost
                while self.stop_thread(rank):
                    pass
        for thread in self.threads:
            thread.join()

    def stop_thread(self, rank: int) -> int:
        """End a thread of that rank that listens to this one. Returns the number of those left."""
        future = Future(self, rank, STOP)
        wait_for(rank, self.send(rank, REQUEST, STOP, self.pack(rank, STOP, None, "the end")))
        left: int = future.wait()
        return left

    def start_thread(self, rank: int) -> None:
        """Start a thread that listens to that rank."""
        thread = threading.Thread(target=self.listen, args=(rank,), name=f"remote calls of rank {rank}", daemon=True)
        thread.start()
        self.threads.append(thread)

    def begin_listening(self, rank: int) -> bool:
        """Count this thread as listening. Returns False if there will be no more requests."""
        with self.changed:
            self.listening[rank] += rank not in self.stopped
            return rank not in self.stopped

    def end_listening(self, rank: int, number: int) -> int:
        """A request with this number has come. Returns the number of threads that still listen."""
        with self.changed:
            self.listening[rank] -= 1
            if number == STOP:
                self.stopped.add(rank)
            return self.listening[rank]

    def listen(self, rank: int) -> None:
        """The body of each thread: receive a request, see to it that another thread listens, answer, and listen again.
        So there are two, and the next request finds one that already waits for it."""
        while self.begin_listening(rank):
            envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
            try:
                self.receive(rank, REQUEST, envelope)
            except dist.DistNetworkError:
                return self.lose(rank)
            number, _ = HEADER.unpack_from(envelope.numpy())
            left = self.end_listening(rank, number)
            obtain = partial(unpack, envelope, partial(self.receive, rank, number))
            if number == STOP:
                obtain = partial(tuple, (int, (left,)))
            elif not left:
                self.start_thread(rank)
            with contextlib.suppress(dist.DistNetworkError):  # the caller is lost, as its listener finds out
                wait_for(rank, self.send(rank, REPLY + number, number, self.answer(rank, number, obtain)))

    def lose(self, rank: int) -> None:
        """Record that a rank is lost, as each thread that listened to it finds out."""
        with self.changed:
            if rank in self.lost:
                return
            self.stopped.add(rank)
            self.lost.append(rank)
            self.changed.notify_all()
        self.report_loss(rank)

    def answer(self, caller: int, number: int, obtain: Callable[[], Any]) -> list[torch.Tensor]:
        """Run the request that `obtain` returns. Returns the messages of the reply: (True, what the function returned),
        or (False, (its exception, its traceback)). The request's references are given back before the reply: after the
        last reply there are no calls."""
        try:
            request = obtain()
            reply = self.pack(caller, number, (True, request[0](*request[1])), "the result")
        except BaseException as error:  # SystemExit included: the caller must get it
            trace = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            words = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
            reply = self.pack(caller, number, (False, (portable(error), words)), "the error")
        request = None
        self.references.give_back()
        return reply

    def pack(self, rank: int, number: int, obj: Any, what: str) -> list[torch.Tensor]:
        """The messages with `obj` for that rank, an envelope and, if it does not fit, the pickle. Raises `TypeError` if
        it cannot be sent, `UsageError` if it has a tensor on an accelerator."""
        file = io.BytesIO(bytes(HEADER.size))
        file.seek(HEADER.size)
        try:
            Pickler(file, partial(self.references.lend, rank=rank)).dump(obj)
        except (UsageError, dist.DistNetworkError):
            raise
        except Exception as error:
            raise TypeError(f"{what} cannot be sent: {type(error).__name__}: {error}") from error
        length = file.tell() - HEADER.size
        file.write(bytes(max(0, ENVELOPE - file.tell())))
        HEADER.pack_into(file.getbuffer(), 0, number, length)
        message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        return [message[:ENVELOPE], *[message[HEADER.size :]] * (HEADER.size + length > ENVELOPE)]

    def send(self, rank: int, tag: int, number: int, messages: list[torch.Tensor]) -> Works:
        """Start sending the envelope with this tag and the rest with it or, after a `REQUEST`, with the number. Returns
        the works with their memory, which must last as long. Raises `DistNetworkError` if the rank is lost.

        This is `dist.isend`, called on the group itself, which takes less time.
        """
        with lost_on_error(rank):
            tags = tag, tag or number
            return [(self.group.send([each], rank, to), each) for each, to in zip(messages, tags, strict=False)]

    def start_receiving(self, rank: int, tag: int, memory: torch.Tensor) -> Works:
        with lost_on_error(rank):
            return [(self.group.recv([memory], rank, tag), memory)]

    def receive(self, rank: int, tag: int, memory: torch.Tensor) -> None:
        """Fill memory with a message. Raises `DistNetworkError` if the rank is lost."""
        wait_for(rank, self.start_receiving(rank, tag, memory))


def wait_for(rank: int, works: Works) -> None:
    """Wait until messages to or from that rank have been sent or received. Raises `DistNetworkError` if it is lost."""
    with lost_on_error(rank):
        for work, _ in works:
            work.wait()


@contextlib.contextmanager
def lost_on_error(rank: int) -> Iterator[None]:
    """Raise `DistNetworkError` for what gloo raises in this block when the connection to that rank breaks."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistNetworkError(f"rank {rank} is lost: {error}") from error


def copy_of(messages: list[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """In place of receiving what follows an envelope."""
    return lambda memory: memory.copy_(messages[1])


def portable(error: BaseException) -> Exception:
    """The exception; a `RuntimeError` with the same text if it does not survive pickling or is not an `Exception`."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            if type(copy := pickle.loads(pickle.dumps(error))) is type(error):
                return copy
    words = "".join(traceback.format_exception_only(error)).strip()
    return RuntimeError(words.removeprefix(f"{type(error).__module__}."))


def arrive(rank: int) -> None:
    """On rank 0: wait until all ranks that are not lost have come to the barrier as often as `rank`."""
    agent = current_agent()
    with agent.changed:
        agent.arrived[rank] += 1
        often = agent.arrived[rank]
        agent.changed.notify_all()
        agent.changed.wait_for(
            lambda: all(agent.arrived[each] >= often or each in agent.lost for each in range(agent.size))
        )


def current_agent() -> Agent:
    """The agent of this process, with which a function that was called remotely makes calls of its own."""
    return agents[-1]


class RemoteReference:
    """A reference to an object on rank `owner`, by a number that the owner gave it.

    The owner counts references. A reference is counted for a rank before it is sent there, so that no count reaches
    zero while it is under way. A rank that drops one tells the owner with its next call or answer.
    """

    def __init__(self, references: References, owner: int, number: int) -> None:
        self.references, self.owner, self.number = references, owner, number
        weakref.finalize(self, references.drop, owner, number).atexit = False

    def to_here(self) -> Any:
        """A copy of the object."""
        return self.references.call(self.owner, RemoteReference.local_value, self)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object on the owner's rank. Returns its result."""
        return self.references.call(self.owner, call_method, self, method, args)

    def local_value(self) -> Any:
        """The object itself, on the owner."""
        return self.references.objects[self.number]


class References:
    """The objects that this rank owns, their reference counts, and the references that were dropped here."""

    def __init__(self, rank: int, call: Callable[..., Any]) -> None:
        """`call(rank, function, *args)` runs the function on that rank."""
        self.rank, self.call = rank, call
        self.numbers, self.lock = itertools.count(), threading.RLock()
        self.objects: dict[int, Any] = {}
        self.counts = Counter[int]()
        self.dropped: deque[tuple[int, int]] = deque()
        """(owner, number) of dropped references that the owner has not been told of yet."""

    def count(self, number: int, change: int) -> None:
        """Adjust the reference count of an object, which is dropped at zero."""
        with self.lock:
            self.counts[number] += change
            if self.counts[number] <= 0:
                del self.counts[number]
                self.objects.pop(number, None)

    def lend(self, obj: Any, rank: int) -> Any:
        """Count a reference for `rank`. Returns how to rebuild it there, as `__reduce__` does; `NotImplemented` for
        other objects.

        It is not counted for its owner: the caller's own reference lives until the reply has come.
        """
        if not isinstance(obj, RemoteReference):
            return NotImplemented
        if rank != obj.owner:
            if obj.owner == self.rank:
                self.count(obj.number, 1)
            else:
                self.call(obj.owner, count, obj.number, 1)
        return borrow, (obj.owner, obj.number)

    def drop(self, owner: int, number: int) -> None:
        """Drop a reference. This may happen in the middle of anything, so another owner is told later."""
        if owner == self.rank:
            self.count(number, -1)
        else:
            self.dropped.append((owner, number))

    def give_back(self) -> None:
        """Tell the owners which references were dropped here."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                owner, number = self.dropped.popleft()
                with contextlib.suppress(dist.DistNetworkError):  # the owner is lost, and the object with it
                    self.call(owner, count, number, -1)


def keep(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """On the owner: run the function, and keep its result with one reference. Returns its number."""
    references = current_agent().references
    number = next(references.numbers)
    references.objects[number] = function(*args)
    references.count(number, 1)
    return number


def count(number: int, change: int) -> None:
    """On the owner: adjust a reference count."""
    current_agent().references.count(number, change)


def call_method(reference: RemoteReference, method: str, args: tuple[Any, ...]) -> Any:
    """On the owner: call a method of the object."""
    return getattr(reference.local_value(), method)(*args)


def borrow(owner: int, number: int) -> RemoteReference:
    """On any rank: rebuild a reference that has arrived."""
    references = current_agent().references
    if owner == references.rank:
        references.count(number, 1)
    return RemoteReference(references, owner, number)
