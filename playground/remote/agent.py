"""Remote calls by send and recv: what torch.distributed.rpc does, small enough for a blackboard.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

Every request has a number. The function runs on the other rank, in a thread that has listened for requests; the reply
travels with the number as its tag, so that the caller receives it itself, and nobody has to hand it over. An exception
comes back as an exception, with its traceback. All this happens on a process group of its own: nothing else that the
program sends can be taken for a request.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from playground.remote.messages import ENVELOPE, Decoder, Encoder, Envelope
from playground.remote.references import References, RemoteReference
from playground.runtime.errors import UsageError

REQUEST = 0
"""The tag of the envelopes that threads listen for. All other messages have the number of their request for a tag."""
NUMBERS = range(1, 2**31)
STOP = -1
"""In place of a number: there will be no more requests."""
SPARE_THREADS = 16
NO_LIMIT = timedelta(days=1000)
"""A rank may listen for as long as it takes: a receive of gloo's that times out breaks the connection for good. Whoever
watches over the ranks ends what hangs."""
Reply = tuple[bool, Any]
"""(True, what the function returned), or (False, (the exception, its traceback))."""
agents: list[Agent] = []
"""This process's, while it is open."""


class RemoteTraceback(Exception):
    """Where a remote exception was raised: the `__cause__` of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Future:
    """The reply that is to come from `rank`. `kept`: what must stay in memory until then."""

    def __init__(self, agent: Agent, rank: int, number: int, kept: Any) -> None:
        self.agent, self.rank, self.number, self.kept = agent, rank, number, kept
        self.lock = threading.Lock()
        self.reply: Reply | None = None

    def wait(self) -> Any:
        """What the function returned. Raises what it raised."""
        with self.lock:
            if self.reply is None:
                self.agent.outstanding.discard(self)
                *_, self.reply = self.agent.receive(self.rank, self.number)
                self.kept = None
        succeeded, value = self.reply
        if succeeded:
            return value
        error, where = value
        raise error from RemoteTraceback(where)


class Agent:
    """This rank's end of all remote calls. Every rank makes one, at the same point, and leaves it when all do.

    As many requests are answered at the same time as there are threads: one for each rank, and `SPARE_THREADS` more for
    functions that make calls of their own.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
        self.numbers = itertools.cycle(NUMBERS)
        self.references = References(self)
        self.outstanding: set[Future] = set()
        self.listening, self.stopped = threading.Lock(), self.size == 1
        self.failure: RuntimeError | None = None
        self.threads = [
            threading.Thread(target=self.answer_requests, name=f"remote calls {number}", daemon=True)
            for number in range(self.size + SPARE_THREADS)
        ]

    def __enter__(self) -> Agent:
        agents.append(self)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        agents.remove(self)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns on that rank. Raises what it raises there.

        Arguments and result are copied. Tensors are CPU tensors, and leave their autograd graph behind.
        """
        return self.call_async(rank, function, *args).wait()

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Future:
        """The same, without waiting for the reply. Whoever answers is busy until it is waited for."""
        if not 0 <= rank < self.size:
            raise UsageError(f"a remote call to rank {rank}: there are ranks 0 to {self.size - 1}")
        self.references.give_back()
        future = Future(self, rank, next(self.numbers), args)
        if rank == self.rank:
            future.reply = run(function, args)
        else:
            future.kept = args, self.send(rank, REQUEST, future.number, (function, args))
            self.outstanding.add(future)
        return future

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """Run `function(*args)` on that rank, leave the result there, and return a reference to it."""
        return self.references.create(rank, function, *args)

    def close(self) -> None:
        """Wait until no rank calls any more, and stop answering. All ranks must call this."""
        for future in list(self.outstanding):
            future.wait()
        self.references.give_back()
        dist.barrier(self.group)
        sent = self.send((self.rank + 1) % self.size, REQUEST, STOP, None) if self.size > 1 else []
        for thread in self.threads:
            thread.join()
        for work, _ in sent:
            work.wait()
        if self.failure:
            raise self.failure

    def answer_requests(self) -> None:
        """One thread listens at a time. When a request has come, another one listens, and this one answers."""
        try:
            while True:
                with self.listening:
                    if self.stopped:
                        return
                    caller, number, *request = self.receive(None, REQUEST)
                    self.stopped = number == STOP
                if not self.stopped:
                    self.answer(caller, number, request)
        except RuntimeError as error:  # a connection broke: whoever waits for its other end hears of that, too
            self.stopped, self.failure = True, error

    def answer(self, caller: int, number: int, request: list[Any]) -> None:
        """Run the function, and send the reply. By then the request is gone, and its references are given back: after
        the last reply nobody calls."""
        reply = run(*request.pop())
        self.references.give_back()
        try:
            sent = self.send(caller, number, number, reply)
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # what it returned cannot be pickled
            sent = self.send(caller, number, number, run(refuse, (TypeError(f"no reply can be sent: {error}"),)))
        for work, _ in sent:
            work.wait()

    def send(self, rank: int, tag: int, number: int, obj: Any) -> list[tuple[Any, torch.Tensor]]:
        """Start sending an object. Returns each message's work, with the memory that must last as long.

        These are `dist.isend` and `dist.irecv`, called on the group itself, which takes less time.
        """
        envelope, *parts = Encoder(lambda part: self.references.lend(part, rank)).encode(self.rank, number, obj)
        works = [(self.group.send([envelope], rank, tag), envelope)]
        return works + [(self.group.send([part], rank, number), part) for part in parts]

    def receive(self, rank: int | None, tag: int) -> tuple[int, int, Any]:
        """(who sent it, its number, the object). `rank` None takes what comes first, from anyone."""
        memory = torch.empty(ENVELOPE, dtype=torch.uint8)
        receiving = self.group.recv_anysource([memory], tag) if rank is None else self.group.recv([memory], rank, tag)
        receiving.wait()
        envelope = Envelope(memory)
        if envelope.rest is not None:
            self.group.recv([envelope.rest], envelope.sender, envelope.number).wait()
        decoder = Decoder(envelope.pickled, self.references.borrow)
        try:
            obj = decoder.load()
        except Exception as error:
            if tag != REQUEST:
                raise
            return envelope.sender, envelope.number, (refuse, (error,))
        for work in [self.group.recv([part], envelope.sender, envelope.number) for part in decoder.tensors]:
            work.wait()
        return envelope.sender, envelope.number, obj


def run(function: Callable[..., Any], args: tuple[Any, ...]) -> Reply:
    """The reply to a request."""
    try:
        return True, function(*args)
    except Exception as error:
        trace = error.__traceback__
        where = traceback.format_exception(type(error), error, trace and trace.tb_next)
        return False, (portable(error), "".join(where).rstrip())


def portable(error: Exception) -> Exception:
    """The exception, or, if it does not survive pickling, a `RuntimeError` that says the same."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def refuse(error: Exception) -> None:
    """What runs in place of a function that cannot be found, or whose arguments or result cannot be sent."""
    raise error


def current_agent() -> Agent:
    """This process's agent: a function that was called from afar makes calls of its own with it."""
    return agents[-1]
