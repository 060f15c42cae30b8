"""Remote calls by send and recv: what torch.distributed.rpc does, small enough for a blackboard.

    with Agent() as agent:                       # on every rank
        if rank == 0:
            total = agent.call(1, torch.add, one, other)

Every request has a number. The function runs on the other rank, in a thread that has listened for requests; the reply
travels with the number in its tag, so that the caller receives it itself, and nobody has to hand it over. An exception
comes back as an exception, with its traceback. All this happens on a process group of its own: nothing else that the
program sends can be taken for a request.

A rank that dies breaks its own connections and no others. Whoever listens to it or waits for its reply gets an error at
once; calls among the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from playground.remote.messages import ENVELOPE, Decoder, Encoder, Envelope
from playground.remote.references import References, RemoteReference
from playground.runtime.errors import UsageError

REQUEST = 0
"""The tag of the envelopes that threads listen for. What else a request has travels with its number as a tag."""
REPLY = 2**30
"""The tag of a reply is this plus the number: the other rank may be sending a request of its own with that number."""
NUMBERS = range(1, REPLY)
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
                *_, self.reply = self.agent.receive(self.rank, REPLY + self.number)
                self.kept = None
        succeeded, value = self.reply
        if succeeded:
            return value
        error, where = value
        raise error from RemoteTraceback(where)


class Agent:
    """This rank's end of all remote calls. Every rank makes one, at the same point, and leaves it when all do.

    At any time one thread listens to each rank. As many requests are answered at the same time as there are ranks, and
    `SPARE_THREADS` more, for functions that make calls of their own.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
        self.numbers = itertools.cycle(NUMBERS)
        self.references = References(self)
        self.outstanding: set[Future] = set()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.unattended: SimpleQueue[int | None] = SimpleQueue()
        """Ranks that the next free thread is to listen to; None: there is nobody left, it may end."""
        self.changed = threading.Condition()
        self.stopped: list[int] = []
        """Ranks that make no more requests: they have said so, or they are lost."""
        self.lost: list[int] = []
        """Ranks to which the connection broke."""
        self.arrived: Counter[int] = Counter()
        """On rank 0: how often each rank has come to the barrier."""
        self.report_loss: Callable[[int], None] = lambda rank: None
        self.threads = [
            threading.Thread(target=self.answer_requests, name=f"remote calls {number}", daemon=True)
            for number in range(2 * self.size + SPARE_THREADS if self.others else 0)
        ]

    def __enter__(self) -> Agent:
        agents.append(self)
        for rank in self.others:
            self.unattended.put(rank)
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
            with contextlib.suppress(RuntimeError):  # it is lost
                for work, _ in self.send(rank, REQUEST, STOP, None):
                    work.wait()
        for thread in self.threads:
            thread.join()

    def answer_requests(self) -> None:
        """What each thread does: listen to a rank that nobody listens to. When a request has come, have another thread
        listen there, and answer it."""
        while (rank := self.unattended.get()) is not None:
            try:
                _, number, *request = self.receive(rank, REQUEST)
                if number == STOP:
                    self.stop_listening(rank)
                    continue
                self.unattended.put(rank)
            except RuntimeError:  # what gloo raises when a connection breaks
                self.stop_listening(rank, lost=True)
                continue
            with contextlib.suppress(RuntimeError):  # the caller is lost, as whoever listens to it hears
                self.answer(rank, number, request)

    def stop_listening(self, rank: int, lost: bool = False) -> None:
        """There will be no more requests from this rank. After the last one, no thread is needed any more."""
        with self.changed:
            self.stopped.append(rank)
            if lost:
                self.lost.append(rank)
            self.changed.notify_all()
            if len(self.stopped) == len(self.others):
                for _ in self.threads:
                    self.unattended.put(None)
        if lost:
            self.report_loss(rank)

    def answer(self, caller: int, number: int, request: list[Any]) -> None:
        """Run the function, and send the reply. By then the request is gone, and its references are given back: after
        the last reply nobody calls."""
        reply, tag = run(*request.pop()), REPLY + number
        self.references.give_back()
        try:
            sent = self.send(caller, tag, number, reply)
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # what it returned cannot be pickled
            sent = self.send(caller, tag, number, run(refuse, (TypeError(f"no reply can be sent: {error}"),)))
        for work, _ in sent:
            work.wait()

    def send(self, rank: int, tag: int, number: int, obj: Any) -> list[tuple[Any, torch.Tensor]]:
        """Start sending an object, its envelope with this tag and the rest, where that is `REQUEST`, with the number.
        Returns each message's work, with the memory that must last as long.

        These are `dist.isend` and `dist.irecv`, called on the group itself, which takes less time.
        """
        envelope, *parts = Encoder(lambda part: self.references.lend(part, rank)).encode(self.rank, number, obj)
        works = [(self.group.send([envelope], rank, tag), envelope)]
        return works + [(self.group.send([part], rank, tag or number), part) for part in parts]

    def receive(self, rank: int, tag: int) -> tuple[int, int, Any]:
        """(who sent it, its number, the object)."""
        memory = torch.empty(ENVELOPE, dtype=torch.uint8)
        self.group.recv([memory], rank, tag).wait()
        envelope = Envelope(memory)
        if envelope.rest is not None:
            self.group.recv([envelope.rest], envelope.sender, tag or envelope.number).wait()
        decoder = Decoder(envelope.pickled, self.references.borrow)
        try:
            obj = decoder.load()
        except Exception as error:
            if tag != REQUEST:
                raise
            return envelope.sender, envelope.number, (refuse, (error,))
        for work in [self.group.recv([part], envelope.sender, tag or envelope.number) for part in decoder.tensors]:
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
