"""Remote calls by send and recv: what torch.distributed.rpc does, small enough for a blackboard.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

Every request has a number. The function runs on the other rank, in a thread that listens for requests; the reply has
the number in its tag, so that the caller receives it itself. An exception is returned as an exception, with its
traceback, and so is a failure to send or receive arguments or a result: every request gets a reply. Agents have a
process group of their own, so that no other message of the program can be taken for a request.

A rank that dies breaks its own connections and no others. Threads that listen to it or wait for its reply get an error
at once; calls among the others continue.

Objects that must not move stay with their owner, and others refer to them: see `RemoteReference`.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from playground.remote.messages import Envelope, Messages, decode, encode
from playground.runtime.errors import UsageError

REQUEST = 0
"""Tag of the envelopes that threads listen for. The rest of a request has its number as the tag."""
REPLY = 2**30
"""Added to the number in the tag of a reply: the other rank may send a request of its own with this number."""
NUMBERS = range(1, REPLY)
STOP = 0
"""Number of a request that is the last one. The reply is the number of threads that still listen."""
MAX_SENDING = 16
"""Maximum number of threads that wait until a reply has left. Further replies wait in a queue."""
END_TIMEOUT = 5.0
"""Seconds for a thread to end. One whose caller had no memory for the reply continues to wait."""
NO_LIMIT = timedelta(days=1000)
"""Timeout of receives: one of gloo's that times out breaks the connection permanently. The launcher ends hung ranks."""
Reply = tuple[bool, Any]
"""(True, what the function returned), or (False, (the exception, its traceback))."""
Works = list[tuple[Any, torch.Tensor]]
"""Works of messages, with their memory."""
agents: list[Agent] = []
"""The open agents of this process."""


class RemoteTraceback(Exception):
    """The traceback of a remote exception: the `__cause__` of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Future:
    """The reply to a request to `rank`."""

    def __init__(self, agent: Agent, rank: int, number: int) -> None:
        self.agent, self.rank, self.number = agent, rank, number
        self.lock = threading.Lock()
        self.kept: Any = None
        """Objects kept in memory until the reply is there: the arguments, and the works that send them."""
        self.outcome: tuple[bool, Any] | None = None
        """(True, what the function returned), or (False, what `wait` raises)."""

    def wait(self) -> Any:
        """Wait for the function's result. Raises its exception, or `DistNetworkError` if the rank is lost."""
        with self.lock:
            if self.outcome is None:
                self.agent.outstanding.discard(self)
                self.outcome = self.agent.receive_reply(self.rank, self.number)
                self.kept = None
        succeeded, value = self.outcome
        if succeeded:
            return value
        raise value


class Agent:
    """This rank's end of all remote calls. Every rank creates one at the same point, and closes it when all do.

    At any time one thread listens to each rank. Each request is answered in a thread of its own, so a function may make
    calls of its own, also to the rank that called it.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
        self.requests = itertools.count()
        self.references = References(self.rank, self.size, self.call)
        self.outstanding: set[Future] = set()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.threads: list[threading.Thread] = []
        self.listening: Counter[int] = Counter()
        """Number of threads that listen to each rank."""
        self.sending: deque[tuple[int, Works]] = deque()
        """(caller, works) of replies that may not have left yet, and that no thread waits for."""
        self.senders = threading.Semaphore(MAX_SENDING)
        self.changed = threading.Condition()
        self.stopped: set[int] = set()
        """Ranks that make no more requests: they have closed their agent, or are lost."""
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
        """Like `call`, but returns a future, whose `wait()` returns the result. Tensors and arrays of more than 1 KiB
        are read when they are sent, arguments and result alike: do not change them until the reply is there."""
        if not 0 <= rank < self.size:
            raise UsageError(f"a remote call to rank {rank}: there are ranks 0 to {self.size - 1}")
        self.references.give_back()
        future = Future(self, rank, 1 + next(self.requests) % NUMBERS[-1])
        messages = self.pack(rank, future.number, (function, args), "the arguments")
        if rank == self.rank:
            try:
                returned = run(*decode(messages))
                future.outcome = True, decode(self.pack(rank, REPLY, returned, "the result"))
            except Exception as error:
                future.outcome = False, error
        else:
            future.kept = args, self.send(rank, REQUEST, future.number, messages)
            self.outstanding.add(future)
        return future

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, and keep the result there. Returns a reference to it."""
        return self.references.create(rank, function, *args)

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
            thread.join(END_TIMEOUT)

    def stop_thread(self, rank: int) -> int:
        """End a thread of that rank that listens to this one. Returns the number of those left."""
        works = self.send(rank, REQUEST, STOP, self.pack(rank, STOP, None, "the end"))
        listeners = Future(self, rank, STOP).wait()
        wait_for(rank, works)
        return listeners

    def start_thread(self, rank: int) -> None:
        """Start a thread that listens to that rank. Raises `RuntimeError` if none can be started."""
        name = f"remote calls {len(self.threads)}"
        thread = threading.Thread(target=self.answer_requests, args=(rank,), name=name, daemon=True)
        thread.start()
        self.threads.append(thread)

    def answer_requests(self, rank: int) -> None:
        """The body of each thread: listen to a rank, and answer its requests.

        While it answers, another thread listens, which is started if there is none. Then this one listens again: so
        there are two, and the next request finds one that already waits for it.
        """
        while self.begin_listening(rank):
            try:
                envelope = Envelope(partial(self.receive, rank, REQUEST))
            except dist.DistNetworkError:
                return self.lose(rank)
            listeners = self.end_listening(rank, envelope.number)
            if envelope.number == STOP:
                self.reply(rank, STOP, (True, listeners))
                self.finish_sending()
            elif envelope.number not in NUMBERS:
                self.lose(rank)
                raise ValueError(f"rank {rank} sent what is no request: it counts as lost")
            else:
                try:
                    if not listeners:
                        self.start_thread(rank)
                except RuntimeError as error:  # too many threads: this one has to listen
                    self.reply(rank, envelope.number, failure(error))
                else:
                    self.answer(rank, envelope)

    def begin_listening(self, rank: int) -> bool:
        """Count this thread as listening. Returns False if there will be no more requests."""
        with self.changed:
            if rank in self.stopped:
                return False
            self.listening[rank] += 1
            return True

    def end_listening(self, rank: int, number: int) -> int:
        """An envelope with this number has come: this thread listens no more. Returns the number of those that do."""
        with self.changed:
            self.listening[rank] -= 1
            if number == STOP:
                self.stopped.add(rank)
            return self.listening[rank]

    def lose(self, rank: int) -> None:
        """Record that a rank is lost, as each thread that listened to it finds out."""
        with self.changed:
            if rank in self.lost:
                return
            self.stopped.add(rank)
            self.lost.append(rank)
            self.changed.notify_all()
        self.report_loss(rank)

    def answer(self, caller: int, envelope: Envelope) -> None:
        """Receive the rest of the request, run the function, and send the reply. The request's references are given
        back before the reply: after the last reply there are no calls."""
        try:
            reply = True, run(*envelope.receive_rest(partial(self.receive, caller, envelope.number)))
        except BaseException as error:  # SystemExit included: the caller must get it
            reply = failure(error)
        self.references.give_back()
        self.reply(caller, envelope.number, reply)
        del reply
        self.finish_sending()

    def finish_sending(self) -> None:
        """Wait until all replies have left, unless `MAX_SENDING` threads do so already."""
        while self.sending and self.senders.acquire(blocking=False):
            with contextlib.suppress(IndexError, dist.DistNetworkError):  # taken by another thread; or it is lost
                wait_for(*self.sending.popleft())
            self.senders.release()

    def reply(self, caller: int, number: int, reply: Reply) -> None:
        """Start sending a reply, or the error if it cannot be sent."""
        try:
            messages = self.pack(caller, number, reply, "the result")
        except BaseException as error:  # pickling may run anything
            messages = self.pack(caller, number, failure(error), "the error")
        with contextlib.suppress(dist.DistNetworkError):  # the caller is lost, as its listener finds out
            self.sending.append((caller, self.send(caller, REPLY + number, number, messages)))

    def receive_reply(self, rank: int, number: int) -> tuple[bool, Any]:
        """(True, the result), or (False, the exception for `wait` to raise)."""
        receive = partial(self.receive, rank, REPLY + number)
        try:
            envelope = Envelope(receive)
            if envelope.number == number:
                match envelope.receive_rest(receive):
                    case (True, value):
                        return True, value
                    case (False, (Exception() as error, str(where))):
                        error.__cause__ = RemoteTraceback(where)
                        return False, error
            raise ValueError(f"rank {rank} sent what is no reply to request {number}")
        except BaseException as error:  # whatever it is, the reply comes only once
            return False, error

    def pack(self, rank: int, number: int, obj: Any, what: str) -> Messages:
        """The messages with `obj` for that rank. Raises `TypeError` if it cannot be sent, `UsageError` if it has a
        tensor on an accelerator."""
        lent: list[tuple[int, int]] = []
        try:
            return encode(number, obj, lambda part: self.references.lend(part, rank, lent))
        except BaseException as error:
            for reference in lent:
                self.references.drop(*reference)
            if not isinstance(error, Exception) or isinstance(error, (UsageError, dist.DistNetworkError)):
                raise
            raise TypeError(f"{what} cannot be sent: {type(error).__name__}: {error}") from error

    def send(self, rank: int, tag: int, number: int, messages: Messages) -> Works:
        """Start sending the envelope with this tag and the rest with it or, after a `REQUEST`, with the number. Returns
        the works with their memory, which must last as long. Raises `DistNetworkError` if the rank is lost.

        This is `dist.isend`, called on the group itself, which takes less time.
        """
        envelope, *rest = messages
        try:
            works = [(self.group.send([envelope], rank, tag), envelope)]
            return works + [(self.group.send([message], rank, tag or number), message) for message in rest]
        except RuntimeError as error:
            raise loss(rank, error) from error

    def receive(self, rank: int, tag: int, messages: Messages) -> None:
        """Fill memory with messages. Raises `DistNetworkError` if the rank is lost."""
        try:
            works = [(self.group.recv([message], rank, tag), message) for message in messages]
        except RuntimeError as error:
            raise loss(rank, error) from error
        wait_for(rank, works)


def wait_for(rank: int, works: Works) -> None:
    """Wait until messages to or from that rank have been sent or received. Raises `DistNetworkError` if it is lost."""
    try:
        for work, _ in works:
            work.wait()
    except RuntimeError as error:  # what gloo raises when a connection breaks
        raise loss(rank, error) from error


def loss(rank: int, error: RuntimeError) -> dist.DistNetworkError:
    """The exception for an error of gloo's."""
    return dist.DistNetworkError(f"rank {rank} is lost: {error}")


def run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a request."""
    return function(*args)


def failure(error: BaseException) -> Reply:
    """The reply with this error for the caller to raise, and its traceback without our own frames."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return False, (portable(error), "".join(traceback.format_exception(type(error), error, trace)).rstrip())


def portable(error: BaseException) -> Exception:
    """The exception; a `RuntimeError` with the same text if it does not survive pickling or is not an `Exception`."""
    if isinstance(error, Exception):
        with contextlib.suppress(BaseException):  # pickling may run anything
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error):
                return copy
    words = "".join(traceback.format_exception_only(error)).strip()  # also of one whose `__str__` raises
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
        return self.references.call(self.owner, read, self)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object on the owner's rank. Returns its result."""
        return self.references.call(self.owner, call_method, self, method, args)

    def local_value(self) -> Any:
        """The object itself, on the owner."""
        return self.references.objects[self.number]


class References:
    """The objects that this rank owns, their reference counts, and the references that were dropped here."""

    def __init__(self, rank: int, size: int, call: Callable[..., Any]) -> None:
        """`call(rank, function, *args)` runs the function on that rank."""
        self.rank, self.size, self.call = rank, size, call
        self.numbers, self.lock = itertools.count(), threading.RLock()
        self.objects: dict[int, Any] = {}
        self.counts: dict[int, int] = {}
        self.dropped: deque[tuple[int, int]] = deque()
        """(owner, number) of dropped references that the owner has not been told of yet."""

    def create(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """A reference to the function's result on that rank."""
        return RemoteReference(self, rank, self.call(rank, keep, function, args))

    def keep(self, value: Any) -> int:
        """Keep an object with one reference. Returns its number."""
        number = next(self.numbers)
        self.objects[number] = value
        self.count(number, 1)
        return number

    def count(self, number: int, change: int) -> None:
        """Adjust the reference count of an object, which is dropped at zero."""
        with self.lock:
            self.counts[number] = self.counts.get(number, 0) + change
            if self.counts[number] > 0:
                return
            del self.counts[number]
            self.objects.pop(number, None)

    def lend(self, obj: Any, rank: int, lent: list[tuple[int, int]]) -> Any:
        """Count a reference for `rank`, and add it to `lent`. Returns how to rebuild it there, as `__reduce__` does;
        `NotImplemented` for other objects.

        It is not counted for its owner: the caller's own reference lives until the reply has come.
        """
        if not isinstance(obj, RemoteReference):
            return NotImplemented
        if rank != obj.owner:
            if obj.owner == self.rank:
                self.count(obj.number, 1)
            else:
                self.call(obj.owner, count, obj.number, 1)
            lent.append((obj.owner, obj.number))
        return borrow, (obj.owner, obj.number)

    def drop(self, owner: int, number: int) -> None:
        """Drop a reference. This may happen in the middle of anything, so another owner is told later."""
        if owner == self.rank:
            self.count(number, -1)
        else:
            self.dropped.append((owner, number))

    def give_back(self) -> None:
        """Tell the owners which references were dropped here."""
        while self.dropped:
            try:
                owner, number = self.dropped.popleft()
            except IndexError:  # taken by another thread
                return
            with contextlib.suppress(dist.DistNetworkError):  # the owner is lost, and the object with it
                self.call(owner, count, number, -1)


def keep(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """On the owner: run the function, and keep its result. Returns its number."""
    return current_agent().references.keep(function(*args))


def count(number: int, change: int) -> None:
    """On the owner: adjust a reference count."""
    current_agent().references.count(number, change)


def read(reference: RemoteReference) -> Any:
    """On the owner: the object."""
    return reference.local_value()


def call_method(reference: RemoteReference, method: str, args: tuple[Any, ...]) -> Any:
    """On the owner: call a method of the object."""
    return getattr(reference.local_value(), method)(*args)


def borrow(owner: int, number: int) -> RemoteReference:
    """On any rank: rebuild a reference that has arrived."""
    references = current_agent().references
    if owner not in range(references.size):
        raise ValueError(f"a reference to an object on rank {owner}: there are ranks 0 to {references.size - 1}")
    if owner == references.rank:
        references.count(number, 1)
    return RemoteReference(references, owner, number)
