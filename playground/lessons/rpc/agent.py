"""The agent of the lesson rpc with what a board has no room for: asynchronous calls, references
that can be sent on, exceptions of any type, large tensors without copies, and lost ranks.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

A message is an envelope of fixed size: its header and a pickle. What does not fit follows, and the
memory of larger tensors and arrays, each from where it lies. Threads that have answered listen
again, so that most calls start none.

A rank that dies breaks its own connections and no others: calls among the others continue.
Pickles with memory beside them: https://peps.python.org/pep-0574/
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import struct
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import playground.lessons.rpc.lesson as board
from playground.lessons.rpc.lesson import REPLY, REQUEST, STOP, agents, start_thread
from playground.runtime.errors import UsageError

ENVELOPE = 4096
"""Size in bytes; one of 64 would take gloo as long."""
HEADER = struct.Struct("<qQQ")
"""Number of the call, number of buffers that follow, bytes of the pickle and of the buffers' sizes
behind it."""
SMALL = 1024
"""Bytes up to which the memory of a tensor is in the pickle."""
ROOM = ENVELOPE - HEADER.size
STUCK = 1.0
"""Seconds that a thread has to end. One whose caller had no memory for the reply is sending
still."""
Messages = list[torch.Tensor]


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """How to rebuild a dense CPU tensor from its elements, without its graph. Raises `UsageError`
    on accelerators."""
    if not tensor.is_cpu:
        raise UsageError(
            f"a tensor on {tensor.device} in a remote call: these carry CPU tensors, use .cpu()"
        )
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # strides of 0 or 1 vary
    memory = elements.as_strided((elements.numel(),), (1,)).view(torch.uint8).numpy()
    return rebuild_tensor, (pickle.PickleBuffer(memory), str(tensor.dtype)[6:], tuple(tensor.shape))


def rebuild_tensor(memory: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not len(memory):
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(memory, dtype=kind).view(shape)


REDUCE = {**copyreg.dispatch_table, torch.Tensor: reduce_tensor}


def travels_inside(buffer: pickle.PickleBuffer, buffers: Messages) -> bool:
    """Whether a buffer is pickled; otherwise append it to `buffers`. (torch accepts no read-only
    memory.)"""
    memory = buffer.raw()
    if memory.nbytes <= SMALL or memory.readonly:
        return True
    buffers.append(torch.frombuffer(memory, dtype=torch.uint8))
    return False


def unpack(envelope: torch.Tensor, receive: Callable[[int], torch.Tensor]) -> Any:
    """The object in an envelope and the messages that follow it: `receive` gets the next, of that
    number of bytes."""
    _, count, length = HEADER.unpack_from(envelope.numpy())
    body = envelope.numpy().data[HEADER.size :] if length <= ROOM else receive(length).numpy().data
    sizes = struct.unpack_from(f"<{count}Q", body, length - 8 * count) if count else ()
    return pickle.loads(body, buffers=[receive(size).numpy() for size in sizes])


def copy(messages: Messages) -> Any:
    """The object in messages that this rank sends to itself."""
    coming = iter(messages)
    return unpack(next(coming), lambda nbytes: next(coming).clone())


class Future:
    """The reply to a request to `rank`. Its envelope is being received already, so that the other
    rank need not wait until it is asked for."""

    def __init__(self, agent: Agent, rank: int, number: int, request: Messages) -> None:
        self.outcome: tuple[bool, Any] | None = None
        """(True, what the function returned), or (False, what `wait` raises)."""
        if rank == agent.rank:
            self.receive: Callable[[], Any] = partial(
                copy, agent.run_request(rank, number, partial(copy, request))
            )
            return
        sent = agent.start_sending(rank, REQUEST, number, request)
        envelope = torch.empty(ENVELOPE, dtype=torch.uint8, device="cpu")
        work = or_lost(rank, agent.group.recv, [envelope], rank, REPLY + number)

        def receive(sent: object = sent) -> Any:  # the request must last until then
            or_lost(rank, work.wait)
            return unpack(envelope, partial(agent.receive_bytes, rank, REPLY + number))

        self.receive = receive

    def wait(self) -> Any:
        """Wait for the function's result. Raises its exception, or `DistNetworkError` if the rank
        is lost."""
        if self.outcome is None:
            try:
                succeeded, value = self.receive()
                if not succeeded:
                    value, where = value
                    value.__cause__ = RuntimeError(f"\n{where}")
                self.outcome = succeeded, value
            except BaseException as error:  # whatever it is, the reply comes only once
                self.outcome = False, error
            del self.receive
        succeeded, value = self.outcome
        if succeeded:
            return value
        raise value


class Agent(board.Agent):
    """This rank's end of all remote calls. Every rank creates one at the same point, and closes it
    when all do.

    A thread listens to each rank. While it answers a request, another one listens: so functions may
    make calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size = dist.get_world_size()
        self.counts, self.counting = Counter[int](), threading.Lock()
        """How many references there are to each object that this rank owns, by number."""
        self.gone: deque[tuple[int, int]] = deque()
        """(owner, number) of references dropped here that the owner has not been told of yet."""
        self.listening: Counter[int] = Counter()
        """Number of threads that listen to each rank."""
        self.stopped: set[int] = set()
        """Ranks that make no more requests: they have closed their agent, or are lost."""
        self.lost: set[int] = set()
        """Ranks to which the connection broke."""
        self.arrived: Counter[int] = Counter()
        """On rank 0: the number of times that each rank has come to the barrier."""
        self.changed = threading.Condition()

    def __exit__(self, failure: object, *_: object) -> None:
        """Wait until no rank makes calls any more, and stop answering. All ranks that are not lost
        must come here, and have waited for their futures."""
        if not failure:
            self.give_back()
            self.barrier()
            for rank in self.others:
                with contextlib.suppress(dist.DistNetworkError):  # it is lost
                    while Future(self, rank, STOP, self.pack(rank, STOP, None)).wait():
                        pass
            for thread in self.threads:
                thread.join(STUCK)
        agents.remove(self)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on that rank. Returns its result, or raises its exception.

        Arguments and result are copied as pickle copies, also where `rank` is this one. Tensors are
        dense CPU tensors; they arrive contiguous and without their autograd graph. Raises what
        pickle raises for what cannot be sent. An exception that is not an `Exception`, as
        `SystemExit`, or does not survive pickling, arrives as a `RuntimeError` with the same text.
        """
        return self.call_async(rank, function, *args).wait()

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Future:
        """Like `call`, but returns a future. Tensors and arrays of more than 1 KiB are read when
        they are sent: do not change them until the reply is there."""
        if not 0 <= rank < self.size:
            raise UsageError(f"a remote call to rank {rank}: there are ranks 0 to {self.size - 1}")
        self.give_back()
        return self.request(rank, function, *args)

    def request(self, rank: int, function: Callable[..., Any], *args: Any) -> Future:
        number = next(self.numbers)
        return Future(self, rank, number, self.pack(rank, number, (function, args)))

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, and keep the result there. Returns a reference to
        it."""
        return RemoteReference(self, rank, self.call(rank, call_agent, "keep", function, args))

    def barrier(self) -> None:
        """Wait until every rank that is not lost has called this as often as this one. All must
        call it."""
        self.call(0, call_agent, "arrive", self.rank)

    def arrive(self, rank: int) -> None:
        """On rank 0: wait until all ranks that are not lost have come to the barrier as often as
        `rank`."""
        with self.changed:
            self.arrived[rank] += 1
            often = self.arrived[rank]
            self.changed.notify_all()
            everyone = {*range(self.size)}
            self.changed.wait_for(
                lambda: all(self.arrived[each] >= often for each in everyone - self.lost)
            )

    def start_thread(self, rank: int) -> None:
        self.threads.append(start_thread(self.serve, rank))

    def serve(self, rank: int) -> None:
        """The body of each thread: receive a request, see to it that another thread listens,
        answer, and listen again. So there are two, and the next request finds one that already
        waits for it."""
        while True:
            with self.changed:
                if rank in self.stopped:
                    return
                self.listening[rank] += 1
            try:
                envelope = self.receive_bytes(rank, REQUEST, ENVELOPE)
            except dist.DistNetworkError:
                return self.lose(rank)
            number, *_ = HEADER.unpack_from(envelope.numpy())
            obtain = partial(unpack, envelope, partial(self.receive_bytes, rank, number))
            with self.changed:
                self.listening[rank] -= 1
                left = self.listening[rank]
                if number == STOP:
                    self.stopped.add(rank)
                elif not left:
                    try:
                        self.start_thread(rank)
                    except RuntimeError as error:
                        # the system has no more: what the function calls might not be heard
                        obtain = partial(raise_again, error)
            reply = (
                self.run_request(rank, number, obtain)
                if number != STOP
                else self.pack(rank, STOP, (True, left))
            )
            # the caller is lost, as its listener finds out
            with contextlib.suppress(dist.DistNetworkError):
                for work in self.start_sending(rank, REPLY + number, number, reply):
                    or_lost(rank, work.wait)

    def lose(self, rank: int) -> None:
        """Record that a rank is lost, as each thread that listened to it finds out."""
        with self.changed:
            self.stopped.add(rank)
            self.lost.add(rank)
            self.changed.notify_all()

    def run_request(self, caller: int, number: int, obtain: Callable[[], Any]) -> Messages:
        """Run the request that `obtain` returns. Returns the messages of the reply: (True, the
        function's result), or (False, (its exception, its traceback)). References are given back
        before: after the last reply are no calls."""
        try:
            request = obtain()
            reply = self.pack(caller, number, (True, request[0](*request[1])))
        except BaseException as error:  # SystemExit included: the caller must get it
            trace = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            words = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
            reply = self.pack(caller, number, (False, (portable(error), words)))
        request = None
        self.give_back()
        return reply

    def pack(self, rank: int, number: int, obj: Any) -> Messages:
        """The messages with `obj` for that rank: an envelope, the pickle if it does not fit, larger
        buffers."""
        buffers: Messages = []
        file = io.BytesIO(bytes(ENVELOPE))
        file.seek(HEADER.size)
        pickler = pickle.Pickler(
            file, -1, buffer_callback=lambda buffer: travels_inside(buffer, buffers)
        )
        lent: list[tuple[int, int]] = []
        pickler.dispatch_table = {**REDUCE, RemoteReference: partial(self.lend, rank, lent)}
        try:
            pickler.dump(obj)
        except BaseException:
            self.gone += lent  # no rank will rebuild them
            raise
        if buffers:
            file.write(struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers)))
        length, inside = file.tell() - HEADER.size, file.getbuffer()
        HEADER.pack_into(inside, 0, number, len(buffers), length)
        message = torch.frombuffer(inside, dtype=torch.uint8)
        return (
            [message, *buffers]
            if length <= ROOM
            else [message[:ENVELOPE], message[HEADER.size :], *buffers]
        )

    def start_sending(self, rank: int, tag: int, number: int, messages: Messages) -> list[Any]:
        """Start sending the envelope with this tag and the rest with it or, after a `REQUEST`, with
        the number, as `dist.isend` does, but on the group itself, which takes less time. Returns
        the works, which hold the messages. Raises `DistNetworkError` if the rank is lost."""
        tags = [tag, *[tag or number] * (len(messages) - 1)]
        return [
            or_lost(rank, self.group.send, [each], rank, to)
            for each, to in zip(messages, tags, strict=True)
        ]

    def receive_bytes(self, rank: int, tag: int, nbytes: int) -> torch.Tensor:
        """Receive a message. Raises `DistNetworkError` if the rank is lost."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        or_lost(rank, lambda: self.group.recv([memory], rank, tag).wait())
        return memory

    def keep(self, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
        """Keep the function's result, with one reference. Returns its number."""
        number = board.keep(function, args)
        self.count(number, 1)
        return number

    def count(self, number: int, change: int) -> None:
        """Adjust the reference count of an object of this rank, which is dropped at zero."""
        with self.counting:
            self.counts[number] += change
            if not self.counts[number]:
                del self.counts[number], self.objects[number]

    def lend(self, rank: int, lent: list[tuple[int, int]], reference: RemoteReference) -> Any:
        """Count a reference for `rank`, unless that is its owner, and note it in `lent`. Returns
        how to rebuild it there."""
        which = (reference.owner, reference.number)
        if rank != reference.owner:
            self.call(reference.owner, call_agent, "count", reference.number, 1)
            lent.append(which)
        return borrow, which

    def give_back(self) -> None:
        """Tell the owners which references were dropped here."""
        while self.gone:
            # taken by another thread; the owner is lost
            with contextlib.suppress(IndexError, dist.DistNetworkError):
                owner, number = self.gone.popleft()
                self.request(owner, call_agent, "count", number, -1).wait()


def or_lost(rank: int, call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`. Raises `DistNetworkError` for what gloo raises when the connection to that
    rank breaks."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise dist.DistNetworkError(f"rank {rank} is lost: {error}") from error


def raise_again(error: Exception) -> Any:
    raise error


def portable(error: BaseException) -> Exception:
    """The exception; a `RuntimeError` with the same text if it does not survive pickling or is not
    an `Exception`."""
    with contextlib.suppress(Exception):
        if isinstance(error, Exception) and type(kept := pickle.loads(pickle.dumps(error))) is type(
            error
        ):
            return kept
    return RuntimeError(f"{type(error).__name__}: {error}")


def current_agent() -> Agent:
    """The agent of this process, with which a function that was called remotely makes calls of its
    own."""
    return agents[-1]


class RemoteReference(board.RemoteReference):
    """A reference to an object on rank `owner`, by a number that the owner gave it. It may be sent
    on; on its owner it arrives as the object. The owner counts references: one is counted for a
    rank before it is sent there, so that no count reaches zero while it is under way. A rank that
    drops one tells the owner with its next call or answer."""

    agent: Agent

    def __del__(self) -> None:
        self.agent.gone.append((self.owner, self.number))


def call_agent(method: str, *args: Any) -> Any:
    """On any rank: call a method of its agent."""
    return getattr(current_agent(), method)(*args)


def borrow(owner: int, number: int) -> Any:
    """On any rank: rebuild a reference that has arrived; on its owner, the object."""
    agent = current_agent()
    return agent.objects[number] if owner == agent.rank else RemoteReference(agent, owner, number)
