"""Remote calls by send and recv: what torch.distributed.rpc does, small enough for a blackboard.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

Every request has a number. The function runs on the other rank, in a thread that has listened for requests; the reply
travels with the number in its tag, so that the caller receives it itself, and nobody has to hand it over. An exception
comes back as an exception, with its traceback, and so does the failure to send or receive arguments or a result: every
request gets a reply. All this happens on a process group of its own: nothing else that the program sends can be taken
for a request.

A rank that dies breaks its own connections and no others. Whoever listens to it or waits for its reply gets an error at
once; calls among the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from playground.remote.messages import Envelope, Messages, decode, encode
from playground.remote.references import References, RemoteReference, owners
from playground.runtime.errors import UsageError

REQUEST = 0
"""The tag of the envelopes that threads listen for. What else a request has travels with its number as a tag."""
REPLY = 2**30
"""The tag of a reply is this plus the number: the other rank may be sending a request of its own with that number."""
NUMBERS = range(1, REPLY)
STOP = 0
"""In place of a number: there will be no more requests. The reply is how many threads still listen for some."""
MAX_SENDING = 16
"""Threads that wait until a reply has left. The memory of further ones waits in a queue."""
END_TIMEOUT = 5.0
"""Seconds for a thread to end. One whose caller had no memory for the reply waits on."""
NO_LIMIT = timedelta(days=1000)
"""A rank may listen for as long as it takes: a receive of gloo's that times out breaks the connection for good. Whoever
watches over the ranks ends what hangs."""
Reply = tuple[bool, Any]
"""(True, what the function returned), or (False, (the exception, its traceback))."""
Works = list[tuple[Any, torch.Tensor]]
"""Of messages that are sent or received, with their memory."""
agents: list[Agent] = []
"""This process's, while it is open."""


class RemoteTraceback(Exception):
    """Where a remote exception was raised: the `__cause__` of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Future:
    """The reply that is to come from `rank`."""

    def __init__(self, agent: Agent, rank: int, number: int) -> None:
        self.agent, self.rank, self.number = agent, rank, number
        self.lock = threading.Lock()
        self.kept: Any = None
        """What must stay in memory until the reply is there: the arguments, and the works that send them."""
        self.outcome: tuple[bool, Any] | None = None
        """(True, what the function returned), or (False, what `wait` raises)."""

    def wait(self) -> Any:
        """What the function returned. Raises what it raised, and `DistNetworkError` if the rank is lost."""
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
    """This rank's end of all remote calls. Every rank makes one, at the same point, and leaves it when all do.

    At any time one thread listens to each rank. Each request is answered in a thread of its own, however many there
    are: a function may make calls of its own, also to the rank that called it.
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
        """How many threads listen to each rank."""
        self.sending: deque[tuple[int, Works]] = deque()
        """(caller, works) of replies that have not left yet, as far as anybody knows, and that no thread waits for."""
        self.senders = threading.Semaphore(MAX_SENDING)
        self.changed = threading.Condition()
        self.stopped: set[int] = set()
        """Ranks that make no more requests: they have said so, or they are lost."""
        self.lost: list[int] = []
        """Ranks to which the connection broke."""
        self.arrived: Counter[int] = Counter()
        """On rank 0: how often each rank has come to the barrier."""
        self.report_loss: Callable[[int], None] = lambda rank: None

    def __enter__(self) -> Agent:
        agents.append(self)
        owners.append(self.references)
        for rank in self.others:
            self.start_thread(rank)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        agents.remove(self)
        owners.remove(self.references)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns on that rank. Raises what it raises there.

        Arguments and result are copied as pickle copies, also where `rank` is this one. Tensors are CPU tensors; they
        arrive contiguous, and leave their autograd graph behind. Raises `TypeError` for what cannot be sent:
        arguments before anything was sent, a result after the function has run. What the function raises arrives
        as a `RuntimeError` that says the same if it is no `Exception`, as `SystemExit`, or does not survive pickling.
        """
        return self.call_async(rank, function, *args).wait()

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Future:
        """The same, without waiting for the reply: `wait()` returns it. Tensors and arrays of more than 1 KiB are read
        when they are sent, arguments and result alike: leave them as they are until the reply is there."""
        if not 0 <= rank < self.size:
            raise UsageError(f"a remote call to rank {rank}: there are ranks 0 to {self.size - 1}")
        self.references.give_back()
        future = Future(self, rank, 1 + next(self.requests) % NUMBERS[-1])
        messages = self.pack(rank, future.number, (function, args), "the arguments")
        if rank == self.rank:
            future.outcome = self.run_here(messages)
        else:
            future.kept = args, self.send(rank, REQUEST, future.number, messages)
            self.outstanding.add(future)
        return future

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, leave the result there, and return a reference to it."""
        return self.references.create(rank, function, *args)

    def on_loss(self, callback: Callable[[int], None]) -> None:
        """From now on, have `callback(rank)` called for each rank that is lost, in another thread; here and now for
        those that are lost already. It may be called twice for the same rank."""
        self.report_loss = callback
        for rank in list(self.lost):
            callback(rank)

    def barrier(self) -> None:
        """Wait until every rank that is not lost has come as often as this one. All of them must call this."""
        self.call(0, arrive, self.rank)

    def close(self) -> None:
        """Wait until no rank calls any more, and stop answering. All ranks must call this, but for those lost."""
        for future in list(self.outstanding):
            future.wait()
        self.references.give_back()
        self.barrier()
        for rank in self.others:
            with contextlib.suppress(dist.DistNetworkError):  # it is lost
                while self.stop_thread(rank):
                    """There are more."""
        for thread in self.threads:
            thread.join(END_TIMEOUT)

    def stop_thread(self, rank: int) -> int:
        """Have a thread end that listens to this rank over there. Returns how many are left."""
        works = self.send(rank, REQUEST, STOP, self.pack(rank, STOP, None, "the end"))
        listeners = Future(self, rank, STOP).wait()
        wait_for(rank, works)
        return listeners

    def start_thread(self, rank: int) -> None:
        """Have one more thread listen to that rank. Raises `RuntimeError` if none can be started."""
        name = f"remote calls {len(self.threads)}"
        thread = threading.Thread(target=self.answer_requests, args=(rank,), name=name, daemon=True)
        thread.start()
        self.threads.append(thread)

    def answer_requests(self, rank: int) -> None:
        """What each thread does: listen to a rank, and answer its requests.

        While it answers, another one listens, and is started if there is none. Then this one listens again: so there
        are two, and the next request finds one that waits for it, instead of one that has to be woken up first.
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
                except RuntimeError as error:  # there are too many: this one has to listen
                    self.reply(rank, envelope.number, failure(error))
                else:
                    self.answer(rank, envelope)

    def begin_listening(self, rank: int) -> bool:
        """Whether there may be more requests: if so, this thread counts as one that listens."""
        with self.changed:
            if rank in self.stopped:
                return False
            self.listening[rank] += 1
            return True

    def end_listening(self, rank: int, number: int) -> int:
        """The envelope with this number has come: how many threads listen besides."""
        with self.changed:
            self.listening[rank] -= 1
            if number == STOP:
                self.stopped.add(rank)
            return self.listening[rank]

    def lose(self, rank: int) -> None:
        """This rank is lost. Each thread that listened to it finds that out."""
        with self.changed:
            if rank in self.lost:
                return
            self.stopped.add(rank)
            self.lost.append(rank)
            self.changed.notify_all()
        self.report_loss(rank)

    def answer(self, caller: int, envelope: Envelope) -> None:
        """Receive the rest of the request, run the function, and send the reply. By then the request is gone, and its
        references are given back: after the last reply nobody calls."""
        try:
            reply = True, run(*envelope.receive_rest(partial(self.receive, caller, envelope.number)))
        except BaseException as error:  # SystemExit included: the caller must hear of it
            reply = failure(error)
        self.references.give_back()
        self.reply(caller, envelope.number, reply)
        del reply
        self.finish_sending()

    def finish_sending(self) -> None:
        """Wait until replies have left, unless `MAX_SENDING` threads do so: they wait for all there are."""
        while self.sending and self.senders.acquire(blocking=False):
            with contextlib.suppress(IndexError, dist.DistNetworkError):  # another thread has taken it; or it is lost
                wait_for(*self.sending.popleft())
            self.senders.release()

    def reply(self, caller: int, number: int, reply: Reply) -> None:
        """Start sending a reply, or why it cannot be sent."""
        try:
            messages = self.pack(caller, number, reply, "the result")
        except BaseException as error:  # pickling may run anything
            messages = self.pack(caller, number, failure(error), "the error")
        with contextlib.suppress(dist.DistNetworkError):  # the caller is lost, as whoever listens to it hears
            self.sending.append((caller, self.send(caller, REPLY + number, number, messages)))

    def receive_reply(self, rank: int, number: int) -> tuple[bool, Any]:
        """(True, what the function returned), or (False, what `wait` is to raise)."""
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

    def run_here(self, request: Messages) -> tuple[bool, Any]:
        """The same for a request to this rank itself."""
        try:
            return True, decode(self.pack(self.rank, REPLY, run(*decode(request)), "the result"))
        except Exception as error:
            return False, error

    def pack(self, rank: int, number: int, obj: Any, what: str) -> Messages:
        """The messages that carry `obj` to that rank. Raises `TypeError` if it cannot be sent, `UsageError` if it holds
        a tensor on an accelerator."""
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
        """Start sending the envelope with this tag and the rest, where that is `REQUEST`, with the number. Returns each
        message's work, with the memory that must last as long. Raises `DistNetworkError` if the rank is lost.

        These are `dist.isend` and `dist.irecv`, called on the group itself, which takes less time.
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
    """What to raise when gloo raises this."""
    return dist.DistNetworkError(f"rank {rank} is lost: {error}")


def run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a request asks for."""
    return function(*args)


def failure(error: BaseException) -> Reply:
    """The reply that has the caller raise this error, with its traceback from where our own part in it ends."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return False, (portable(error), "".join(traceback.format_exception(type(error), error, trace)).rstrip())


def portable(error: BaseException) -> Exception:
    """The exception; if it does not survive pickling, or is none that a program is to go on after, a `RuntimeError`
    that says the same."""
    if isinstance(error, Exception):
        with contextlib.suppress(BaseException):  # pickling may run anything
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error):
                return copy
    words = "".join(traceback.format_exception_only(error)).strip()  # also of one whose `__str__` raises
    return RuntimeError(words.removeprefix(f"{type(error).__module__}."))


def arrive(rank: int) -> None:
    """Runs on rank 0: return when all ranks but those lost have come to the barrier as often as `rank`."""
    agent = current_agent()
    with agent.changed:
        agent.arrived[rank] += 1
        often = agent.arrived[rank]
        agent.changed.notify_all()
        agent.changed.wait_for(
            lambda: all(agent.arrived[each] >= often or each in agent.lost for each in range(agent.size))
        )


def current_agent() -> Agent:
    """This process's agent: a function that was called from afar makes calls of its own with it."""
    return agents[-1]
