"""Watch the other ranks of a world that somebody else started, and agree on who was lost first, and of what.

Whoever starts the ranks sees only those of one host, so they watch each other: `PeerEnds` notices what happens to some
of them. The first loss to be noticed goes into the store, where every rank looks for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from playground.runtime import signals
from playground.runtime.black_box.diagnosis import Diagnosis
from playground.runtime.black_box.exchange import Exchange
from playground.runtime.forks import close_in_children
from playground.runtime.host import namespace_id
from playground.runtime.meeting.connections import (
    SILENCE,
    address_towards,
    detect_silence_of,
    keep_alive,
    shut_down_connections,
)
from playground.runtime.meeting.process_end import describe_end
from playground.runtime.meeting.store import connect_as_client

if TYPE_CHECKING:
    import torch.distributed as dist

    from playground.runtime.meeting.environment import RankEnv


LINK_TIMEOUT = 2.0
"""Seconds that connecting to a rank of another host may take."""


@dataclass(frozen=True)
class Peer:
    """The process of a rank, as the others know it."""

    rank: int
    host: str
    machine: str
    """The same for processes that see each other's process numbers."""
    pid: int
    address: str
    port: int


@dataclass(frozen=True)
class Loss:
    """The ranks that were lost first, and how."""

    ranks: list[int]
    reason: str
    deadlock: Any = None
    """The fields of its `Diagnosis`, if ranks wait for each other and none is lost."""

    def __str__(self) -> str:
        return f"lost rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} ({self.reason})"


class PeerEnds:
    """Where the ends of other ranks are to be read, from now on until it is closed."""

    def __init__(self, own: Peer, peers: Sequence[Peer]) -> None:
        """`own` is this rank among the `peers`, which are all ranks of the world, in order."""
        self.peers = peers
        self.ended_before: list[Peer] = []
        """Peers whose processes were gone already."""
        self.selector = selectors.DefaultSelector()
        self.bell, ear = socket.socketpair()
        self.selector.register(ear, selectors.EVENT_READ)
        neighbours = {(own.rank + step) % len(peers) for step in (1, -1)}
        for peer in peers:
            if peer.machine == own.machine and peer.rank != own.rank and hasattr(os, "pidfd_open"):
                self.observe_process(peer)
            elif peer.rank in neighbours:
                self.observe_host(peer)

    def observe_process(self, peer: Peer) -> None:
        """From now on, hear of the end of this process."""
        try:
            self.selector.register(os.pidfd_open(peer.pid), selectors.EVENT_READ, peer)
        except ProcessLookupError:  # already
            self.ended_before.append(peer)

    def observe_host(self, peer: Peer) -> None:
        """From now on, hear of the end of this process or of the network to it, if there is a way to it."""
        with contextlib.suppress(OSError):
            link = socket.create_connection((peer.address, peer.port), LINK_TIMEOUT)
            keep_alive(link)
            self.selector.register(link, selectors.EVENT_READ, peer)

    def wait(self, seconds: float) -> list[tuple[Peer, Loss | None]]:
        """Whose processes have ended, and how; None where the rank's own host knows better.

        Returns when there is something to tell, when somebody wakes it, or after `seconds`.
        """
        before, self.ended_before = self.ended_before, []
        keys = [key for key, _ in self.selector.select(0 if before else seconds)]
        return [*((peer, None) for peer in before), *(self.read(key) for key in keys if key.data)]

    def wake(self) -> None:
        """Have the thread that waits return."""
        self.bell.close()

    def read(self, key: selectors.SelectorKey) -> tuple[Peer, Loss | None]:
        """Whose end is to be read at `key`, and how it came."""
        peer: Peer = key.data
        loss = None
        if not isinstance(key.fileobj, socket.socket):
            loss = Loss([peer.rank], f"{describe_end(key.fd, peer.pid)} on {peer.host}")
        elif is_silent(key.fileobj):
            ranks = [each.rank for each in self.peers if each.machine == peer.machine]
            loss = Loss(ranks, f"{peer.host} has been silent for {SILENCE} s")
        self.forget(key)
        return peer, loss

    def forget(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fileobj)
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)

    def close(self) -> None:
        """Let go of all that is left."""
        for key in list(self.selector.get_map().values()):
            self.forget(key)
        self.selector.close()


def is_silent(link: socket.socket) -> bool:
    """Whether it broke because no answer came; otherwise the process at its other end has ended."""
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ETIMEDOUT, errno.EHOSTUNREACH)


def machine() -> str:
    """This machine, or this container, if it has process numbers of its own."""
    return namespace_id("pid")


POLL = 0.2
"""Seconds between two looks into the store."""
WITNESS_TIME = 1.5
"""Seconds in which, when a process of another host has ended, another rank there may say why, who knows better."""
INTRODUCTION_TIMEOUT = 10.0
"""Seconds for which a rank waits until all have told where they are: they have met before."""
HEARD_TIMEOUT = 0.7
"""Seconds for which a rank that leaves waits for the others to hear of the loss. torchrun grants little more."""
KILLED = re.compile(r"killed by SIG(?!TERM|INT|HUP)")
"""How no process ends that was asked to end."""
SILENT = re.compile(r"timed out|No route to host|unreachable")
"""Errors of a connection whose other end has not answered."""


class PeerWatch:
    """This rank's watch over the others, kept by a thread from `start` to `close`, or until the first `loss`."""

    def __init__(self, env: RankEnv, timeout: float, stuck_limit: float, abandon: Callable[[], None]) -> None:
        """`abandon` is called after a loss if the main thread does not take care of it within `stuck_limit` seconds."""
        self.env, self.stuck_limit, self.abandon = env, stuck_limit, abandon
        self.timeout = timedelta(seconds=min(timeout, INTRODUCTION_TIMEOUT))
        self.loss: Loss | None = None
        self.known = threading.Event()
        """Set when there is a loss."""
        self.one_at_a_time = threading.Lock()
        self.store: dist.Store | None = None
        self.peers: list[Peer] = []
        self.exchange: Exchange | None = None
        self.suspects: dict[int, float] = {}
        """When the connection to a rank of another host broke."""
        self.noticed: Loss | None = None
        """The loss that this rank has noticed itself, and not told the others yet."""
        self.closing = threading.Event()
        self.takes_leave = False
        self.attended = threading.Event()
        """Set by the main thread when it takes care of a failure."""
        self.thread = threading.Thread(target=self.run, name="watch the peers", daemon=True)

    def start(self) -> None:
        """Begin, in a world whose store can be connected to. All ranks must call this."""
        import torch.distributed as dist

        from playground.runtime.black_box.hooks import hooks

        if self.env.size == 1 or self.env.rendezvous.path:
            return
        # without a way to the others, what gloo says of them has to do
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError, OSError):
            self.store = connect_as_client(self.env.rendezvous, self.env.size, self.timeout)
            detect_silence_of(self.env.rendezvous.port)
            self.introduce()
            if hooks.box:
                self.exchange = Exchange(self.store, self.env.rank, self.env.size, hooks.box, self.env.rendezvous.port)
            self.thread.start()

    def close(self) -> None:
        """Take leave of the others: from now on this rank is not missed."""
        self.takes_leave = True
        self.closing.set()
        self.attended.set()
        if self.thread.ident:
            self.ends.wake()
            self.thread.join()
            self.listener.close()

    def run(self) -> None:
        """The body of the thread."""
        self.watch()
        if self.known.is_set() and not self.attended.wait(self.stuck_limit):
            self.abandon()

    def watch(self) -> None:
        """Watch until the end, orderly or not."""
        import torch.distributed as dist

        assert self.store
        try:
            while not self.closing.is_set() and not self.known.is_set():
                self.look()
            if self.takes_leave and not self.known.is_set():
                self.store.set(f"rank {self.env.rank} left", "yes")
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            if not (self.closing.is_set() or signals.stopping.is_set()):
                self.learn(self.noticed or self.blame_store(str(error)))
            elif self.noticed and not self.takes_leave:
                self.learn(self.noticed)
        finally:
            self.ends.close()

    def look_once_more(self) -> None:
        """After a signal that ends this process: wait until the thread has seen whether it was sent because of a
        loss."""
        if signals.stopping.is_set() and self.thread.ident:
            self.thread.join(2 * POLL)

    def introduce(self) -> None:
        """Tell the others where this process is, learn where theirs are, and begin to observe them."""
        assert self.store
        where = address_towards(self.env.rendezvous.host)
        self.listener = socket.create_server((where, 0), family=socket.AF_INET6 if ":" in where else socket.AF_INET)
        close_in_children(self.listener)  # a child may outlive the rank
        port = self.listener.getsockname()[1]
        self_ = Peer(self.env.rank, socket.gethostname(), machine(), os.getpid(), where, port)
        self.store.set(f"rank {self.env.rank}", json.dumps(asdict(self_)))
        told = self.store.multi_get([f"rank {rank}" for rank in range(self.env.size)])
        self.peers = [Peer(**json.loads(each)) for each in told]
        self.ends = PeerEnds(self_, self.peers)

    def look(self) -> None:
        """Take in what has happened to the peers, and what others say of it."""
        assert self.store
        ends = self.ends.wait(POLL)
        if signals.stopping.is_set():  # whoever started the ranks ends them, one after the other: after a loss, maybe
            self.closing.set()
            ends = [(peer, loss) for peer, loss in ends if loss and KILLED.match(loss.reason)]
        self.noticed = next((loss for _, loss in ends if loss), None)
        if self.store.check(["loss"]):
            self.learn(Loss(**json.loads(self.store.get("loss"))))
        else:
            self.judge(ends)
            if self.exchange and (deadlock := self.exchange.look()):
                self.report(Loss([], deadlock.sentence, asdict(deadlock)))

    def judge(self, ends: list[tuple[Peer, Loss | None]]) -> None:
        """Report the peers that have ended without taking leave."""
        assert self.store
        for peer, loss in ends:
            if self.store.check([f"rank {peer.rank} left"]):
                continue
            if loss:
                self.report(loss)
            else:
                self.suspects[peer.rank] = time.monotonic()
        for rank, since in self.suspects.items():
            suspect = self.peers[rank]
            has_witness = any(peer.machine == suspect.machine and peer.rank not in self.suspects for peer in self.peers)
            if time.monotonic() - since > WITNESS_TIME * has_witness:
                self.report(Loss([rank], f"its process on {suspect.host} has ended"))

    def report(self, loss: Loss) -> None:
        """Tell all of a loss, unless they know of an earlier one."""
        import torch.distributed as dist

        if self.store is None:  # the watch has not begun
            return
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):  # all alone: what we know has to do
            loss = Loss(**json.loads(self.store.compare_set("loss", "", json.dumps(asdict(loss)))))
        self.learn(loss)

    def learn(self, loss: Loss) -> None:
        """There is a loss. Whoever waits for a peer, anywhere in this process, gets an error."""
        import torch.distributed as dist

        from playground.runtime.shared_memory import give_up_all

        with self.one_at_a_time:
            if self.known.is_set():
                return
            self.loss = loss
            self.known.set()
        shut_down_connections(self.env.rendezvous.port)
        give_up_all()
        if self.store and self.env.rank not in loss.ranks:
            with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
                self.store.add("heard", 1)

    def explain(self) -> Diagnosis | None:
        """What the black boxes tell of an operation of this rank that has failed."""
        import torch.distributed as dist

        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            return self.exchange.explain() if self.exchange else None
        return None

    def await_heard(self) -> None:
        """Wait until all but the lost have heard of the loss: whoever leaves may take the store along."""
        import torch.distributed as dist

        end = time.monotonic() + HEARD_TIMEOUT
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            while self.store and self.loss and time.monotonic() < end:
                if self.store.add("heard", 0) >= self.env.size - len(self.loss.ranks):
                    return
                time.sleep(0.02)

    def lost_siblings(self) -> list[int]:
        """The numbers of the lost ranks' processes, of those on this machine."""
        lost = self.loss.ranks if self.loss and self.peers else []
        return [peer.pid for rank in lost if (peer := self.peers[rank]).machine == machine() and rank != self.env.rank]

    def blame_store(self, error: str) -> Loss:
        """Who is lost, when the store is."""
        place = self.env.rendezvous.place
        others = [peer for peer in self.peers if peer.machine != machine()]
        if SILENT.search(error) and others:
            hosts = {peer.host for peer in others}
            silent = hosts.pop() if len(hosts) == 1 else f"the store at {place}"
            return Loss([peer.rank for peer in others], f"{silent} has been silent for {SILENCE} s")
        return Loss([0], f"the store at {place}, which it or its torchrun served, is gone")
