"""Watch the other ranks of a world that somebody else started, and agree on who was lost first, and
of what.

Whoever starts the ranks sees only those of one host, so they watch each other: `PeerEnds` notices
what happens to some of them. The first loss to be noticed goes into the store, where every rank
looks for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from playground.base import signals
from playground.base.connections import shut_down_connections
from playground.base.forks import close_in_children
from playground.base.host import namespace_id
from playground.base.lost_ranks import end_waits
from playground.base.threads import OurThread
from playground.base.untrusted import unpickle
from playground.explain.hang import Doing, Kind
from playground.explain.hang.box import View, find_boxes
from playground.explain.hang.box_format import CAPACITY
from playground.explain.hang.diagnosis import explain_failure
from playground.explain.hang.exchange import Exchange
from playground.explain.hang.neighbours import Neighbours
from playground.explain.hang.wording import Diagnosis
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.keys import ACKNOWLEDGED, LOSS, address, left
from playground.world.rendezvous.peer_ends import Loss, Peer, PeerEnds
from playground.world.rendezvous.rendezvous import Server, address_towards
from playground.world.rendezvous.store import connect_as_client

REPORTED = Loss, Diagnosis, Kind
"""The classes in a report of a loss. The store has no key: a stranger may have written what a rank
reads there."""
POLL_INTERVAL = 0.2
LOCAL_REPORT_TIMEOUT = 1.5
"""Seconds for which, when a process of another host has ended, a rank there may report how, or it
may leave."""
ADDRESS_TIMEOUT = 10.0
"""Seconds for which a rank waits for the addresses of all: they have met before."""
ACKNOWLEDGE_TIMEOUT = 0.7
"""Seconds for which a rank that leaves waits until the others know of the loss. torchrun grants
little more."""
KILLED = re.compile(r"killed by SIG(?!TERM|INT|HUP)")
"""How no process ends that was asked to end."""


rank_0_has_left = threading.Event()
"""Set in a rank that has heard that rank 0, which serves the store, has left: the store may be gone
at any moment."""


def tell(text: str) -> None:
    """Write to stderr. (The program may have set loggers to its own purpose.)"""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class PeerWatch:
    """This rank's watch over the others, kept by a thread from `start` to `close`, or until the
    first `loss`."""

    def __init__(
        self, env: RankEnv, timeout: float, stuck_limit: float, exit_stuck: Callable[[], None]
    ) -> None:
        """`exit_stuck` is called after a loss that the main thread does not handle within
        `stuck_limit` seconds."""
        self.env = env
        self.stuck_limit = stuck_limit
        self.exit_stuck = exit_stuck
        self.timeout = timedelta(seconds=min(timeout, ADDRESS_TIMEOUT))
        self.loss: Loss | None = None
        self.known = threading.Event()
        self.lock = threading.Lock()
        self.store: dist.Store | None = None
        self.peers: list[Peer] = []
        self.exchange: Exchange | None = None
        self.neighbours: Neighbours | None = None
        """On rank 0, if it can read the flight recorders of all."""
        self.listener: socket.socket
        """Where the others connect to, so that they notice the end of this process. It and `ends`
        are there once addresses have been exchanged, before the thread starts."""
        self.ends: PeerEnds
        self.boxes: dict[int, View] = {}
        """The flight recorders of the ranks of this host, which outlive them."""
        self.noticed: Loss | None = None
        """The loss that this rank has noticed itself, and not reported yet."""
        self.closing = threading.Event()
        self.leaving = False
        self.handled = threading.Event()
        """Set by the main thread when it handles a failure."""
        self.thread = OurThread(target=self.run, name="watch the peers", daemon=True)

    def start(self) -> None:
        """Begin, in a world whose store can be connected to. All ranks must call this."""
        from playground.explain.hang.hooks import hooks

        if self.env.size == 1:
            return
        # where the store cannot be reached, only what gloo says of a lost peer is known
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError, OSError):
            self.store = connect_as_client(self.env, self.timeout)
            self.exchange_addresses()
            if hooks.box:
                self.exchange = Exchange(
                    self.store, self.env.rank, self.env.size, hooks.box, self.env.rendezvous.port
                )
                if self.env.rank == 0 and len(self.boxes) == self.env.size:
                    self.neighbours = Neighbours(self.boxes, self.exchange, tell)
            self.thread.start()

    def exchange_addresses(self) -> None:
        """Tell the others where this process is, receive where theirs are, and begin to observe
        them."""
        assert self.store
        where = address_towards(self.env.rendezvous.host)
        self.listener = socket.create_server(
            (where, 0), family=socket.AF_INET6 if ":" in where else socket.AF_INET
        )
        close_in_children(self.listener)  # a child may outlive the rank
        port = self.listener.getsockname()[1]
        own = Peer(
            self.env.rank, socket.gethostname(), namespace_id("pid"), os.getpid(), where, port
        )
        self.store.set(address(self.env.rank), pickle.dumps(own))
        addresses = self.store.multi_get([address(rank) for rank in range(self.env.size)])
        self.peers = [unpickle(each, Peer) for each in addresses]
        self.ends = PeerEnds(own, self.peers)
        self.boxes = {
            peer.rank: box
            for peer in self.peers
            if peer.machine == own.machine
            for box in find_boxes([peer.pid])
        }

    def close(self) -> None:
        """Leave the others: from now on this rank is not missed."""
        self.leaving = True
        self.closing.set()
        self.handled.set()
        if self.thread.ident:
            self.ends.wakeup.close()
            self.thread.join()
            self.listener.close()

    def run(self) -> None:
        """The body of the thread: watch until the end, orderly or not."""
        assert self.store
        try:
            while not self.closing.is_set() and not self.known.is_set():
                self.poll()
            if self.leaving and not self.known.is_set():
                self.store.set(left(self.env.rank), "yes")
        except (dist.DistStoreError, dist.DistNetworkError):
            if not (self.closing.is_set() or signals.stopping.is_set()):
                place = f"the store at {self.env.rendezvous.place}, which it or its torchrun served"
                self.accept(self.noticed or Loss([0], f"{place}, is gone"))
            elif self.noticed and not self.leaving:
                self.accept(self.noticed)
        finally:
            self.ends.close()
        if self.known.is_set() and not self.handled.wait(self.stuck_limit):
            self.exit_stuck()

    def poll(self) -> None:
        """Take in what has happened to the peers, and what others report of it."""
        assert self.store
        ends = self.ends.wait(POLL_INTERVAL)
        # whoever started the ranks ends them, one after the other: after a loss, maybe
        if signals.stopping.is_set():
            self.closing.set()
            ends = [(peer, loss) for peer, loss in ends if loss and KILLED.match(loss.reason)]
        self.noticed = next((loss for _, loss in ends if loss), None)
        if self.env.rendezvous.server == Server.RANK_0 and self.store.check([left(0)]):
            # the store goes with it, and all that ranks hear of each other: none is missed then
            self.store.set(left(self.env.rank), "yes")
            rank_0_has_left.set()
            self.closing.set()
        elif self.store.check([LOSS]):
            self.accept(unpickle(self.store.get(LOSS), *REPORTED))
        else:
            self.report_ends(ends)
            if self.exchange and (deadlock := self.exchange.look()):
                self.report(Loss([], deadlock.sentence, deadlock))
            elif self.neighbours:
                self.neighbours.look()

    def report_ends(self, ends: list[tuple[Peer, Loss | None]]) -> None:
        """Report the peers that have ended without leaving in order, those first of which it is
        known how."""
        assert self.store
        for peer, loss in sorted(ends, key=lambda end: end[1] is None):
            if self.store.check([left(peer.rank)]):
                continue
            if loss is None and not self.closing.wait(LOCAL_REPORT_TIMEOUT):
                loss = Loss([peer.rank], f"its process on {peer.host} has ended")
            if loss:
                self.report(loss)

    def report(self, loss: Loss) -> None:
        """Tell all of a loss, unless they know of an earlier one."""
        if self.store is None:  # the watch has not begun
            return
        # where the store is gone, too, this rank goes by what it has seen itself
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            loss = unpickle(self.store.compare_set(LOSS, "", pickle.dumps(loss)), *REPORTED)
        self.accept(loss)

    def accept(self, loss: Loss) -> None:
        """There is a loss. Whoever waits for a peer, anywhere in this process, gets an error."""
        with self.lock:
            if self.known.is_set():
                return
            self.loss = loss
            self.known.set()
        shut_down_connections(self.env.rendezvous.port)
        end_waits()
        if self.store and self.env.rank not in loss.ranks:
            with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
                self.store.add(ACKNOWLEDGED, 1)

    def explain(self) -> Diagnosis | None:
        """The flight recorders' diagnosis of an operation of this rank that has failed."""
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            return self.exchange.explain() if self.exchange else None
        return None

    def explain_loss(self) -> Diagnosis | None:
        """Why ranks of this host were lost, and operations of this rank have failed, by the flight
        recorders of the host's ranks. None if these do not tell."""
        lost = self.loss.ranks if self.loss else []
        states = []
        for rank, box in sorted(self.boxes.items()):
            state = box.read(CAPACITY)
            if rank in lost and self.loss:
                state = replace(state, doing=Doing.DEAD, end=f"was {self.loss.reason}")
            elif rank == self.env.rank and not state.waits_for:
                last = (one for one in reversed(state.operations) if not one.raised)
                state = replace(state, doing=Doing.DEAD, waits_for=next(last, None))
            states.append(state)
        return explain_failure(states)

    def await_others(self) -> None:
        """On rank 0, which serves the store and has left: wait until the others know, whose watch
        ends with that."""
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            if self.store and not self.loss:
                self.store.wait([left(peer.rank) for peer in self.peers], self.timeout)

    def await_acknowledged(self) -> None:
        """Wait until all but the lost know of the loss: whoever leaves may take the store along."""
        end = time.monotonic() + ACKNOWLEDGE_TIMEOUT
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            while self.store and self.loss and time.monotonic() < end:
                if self.store.add(ACKNOWLEDGED, 0) >= self.env.size - len(self.loss.ranks):
                    return
                time.sleep(0.02)
