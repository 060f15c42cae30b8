"""A process as a member of a world. The only place that creates and destroys a process group."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from playground.base import host
from playground.base.errors import RankFailed
from playground.base.strangers import StrangerConnected, let_ranks_connect, shut_out_strangers
from playground.base.threads import OurThread
from playground.base.upstream import list_groups
from playground.explain.hang.box import open_box
from playground.explain.hang.hooks import hooks
from playground.world import backends
from playground.world.rank.default_device import set_default_device
from playground.world.rendezvous.environment import SERVED_BY_TORCHRUN, RankEnv
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT, Rendezvous, is_this_host
from playground.world.rendezvous.store import (
    await_everyone,
    choose_interface,
    connect,
    connect_as_client,
    leave_together,
)
from playground.world.rendezvous.store_server import close_store

RENAMED = r"`torch\.distributed\.\w+_tensor` is deprecated"
"""What torch 2.14 alone warns of at each call: releases before it lack the new names, and 2.15
keeps the old ones."""
torch_init_process_group = dist.init_process_group
torch_destroy_process_group = dist.destroy_process_group


class FormingWorld(threading.local):
    """The world that a thread is forming."""

    forming: contextlib.ExitStack | None = None
    """Contexts that are left when it has been formed, or cannot be; None if there is none."""
    formed: Callable[[], object] | None = None
    """To be called when it has been formed."""


forming_world = FormingWorld()


class Member:
    """This process as a member of a world: it comes to the store once, and forms one process group
    after the other."""

    def __init__(
        self,
        env: RankEnv,
        backend: str,
        listener: socket.socket | None,
        *,
        timeout: float,
        joined: bool = False,
        meets: bool = True,
    ) -> None:
        """Wait for the others, `timeout` seconds at most, if it `meets` them here and not where its
        program forms a world. Raises `RendezvousTimeout`."""
        self.env = env
        self.backend = backends.get_backend(backend)
        self.joined = joined
        self.box = open_box(env.rank, env.size, env.rendezvous.place)
        self.groups_formed = 0
        self.group_name = ""
        """Key of the latest group in the store, where its ranks are counted."""
        self.is_store_closed = False
        """Whether the store hears only this user's processes by now."""
        self.group: dist.ProcessGroup | None = None
        self.is_left_to_program = False
        self.offered: dict[str, object] = {}
        """What the program's `init_process_group` is called with, whatever it names: the backend of
        a lesson, the timeout where a rank is debugged."""
        self.forming, self.lock = 0, threading.Lock()
        """How many groups are being formed, each by a thread of its own."""
        warnings.filterwarnings("ignore", RENAMED, FutureWarning)
        torch.set_num_threads(host.threads_per_rank(env.local_size))
        host.use_batch_scheduling()
        host.keep_freed_memory()
        self.device = self.backend.claim_device(env.local_rank, env.local_size, joined)
        self.store: dist.Store | None = None
        if meets:
            self.meet(listener, timeout)

    def meet(self, listener: socket.socket | None, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self.store = connect(self.env, listener, limit)
        await_everyone(self.store, self.env, limit)

    def meet_again(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Drop all groups and the store, and wait for the others at another one. Raises
        `RendezvousTimeout`."""
        self.drop_groups()
        gc.collect()  # what an operation has raised holds its group, and its sockets, in a cycle
        self.env = replace(self.env, rendezvous=rendezvous)
        self.groups_formed = 0
        self.is_store_closed = False
        if self.box:
            self.box.world = rendezvous.place
        self.meet(None, timeout)

    def form_group(self, timeout: float) -> None:
        """A process group of all ranks, each of whose operations may take `timeout` seconds."""
        env = self.env
        self.say_where()
        assert self.store
        self.store.set_timeout(timedelta(seconds=timeout))  # whatever the function before has set
        hook = sys.excepthook
        try:
            torch_init_process_group(
                self.backend.name, store=self.open_store(), rank=env.rank, world_size=env.size,
                timeout=timedelta(seconds=timeout), device_id=self.device,
            )  # fmt: skip
            self.close_store()
        except RuntimeError as error:  # dist.DistError is one; ProcessGroupNCCL2 raises no other
            words = self.backend.explain_init_failure(error)
            raise RankFailed(env.rank, env.size, f"could not enter the world: {words}") from error
        if hook.__module__ == dist.distributed_c10d.__name__:
            sys.excepthook = hook  # torch has put the rank before each line once more
        self.group = dist.group.WORLD
        self.store.add(self.group_name, 1)
        if self.box:
            hooks.begin_program(self.box, timedelta(seconds=timeout))

    def is_at(self, host: str, port: int) -> bool:
        """Whether the store of this world is there: the program may call this host by another of
        its names."""
        here = self.env.rendezvous
        return port == here.port and (host == here.host or (here.local and is_this_host(host)))

    def open_programs_store(self, rank: int, size: int, timeout: timedelta) -> dist.Store:
        """The store for rank `rank` of `size`, as the program numbers them, when it looks for its
        world where the environment says: torch's own, but for a part that no world before has
        used."""
        store = connect_as_client(self.env, timeout)
        if not (forming := forming_world.forming):
            return store
        self.store = self.store or store
        # Of each rank, those that were formed: it may try again.
        count = f"worlds of {size} formed by rank {rank} in program {self.groups_formed}"
        self.group_name = f"program {self.groups_formed}, world {store.add(count, 0)} of {size}"
        forming_world.formed = lambda: store.add(count, 1)
        is_launched = (rank, size) == (self.env.rank, self.env.size)
        place = "" if is_launched else ":".join(self.address.values())
        forming.enter_context(hooks.forming_world(size, timeout, place))
        return dist.PrefixStore(self.group_name, store)

    def leave_group_to_program(self, timeout: float) -> None:
        """Instead of `form_group`, for a program that forms its own. Whatever may take longer than
        `timeout` seconds, or than ours do, counts as taking for ever."""
        self.is_left_to_program = True
        self.say_where()
        if self.box:
            limit = min(timeout, DEFAULT_TIMEOUT)
            hooks.begin_program(self.box, timedelta(seconds=limit))

    def choose_device(self) -> None:
        """Have the program create its tensors on the device of this world's backend, and its
        process group be of that backend, whatever it names: it names the one without GPUs."""
        self.offered["backend"] = self.backend.name
        if self.device:
            self.offered["device_id"] = self.device
            set_default_device(self.device)

    def say_where(self) -> None:
        """Put into the environment where this rank is, and where the store."""
        env = self.env
        choose_interface(env.rendezvous)
        # For torch and others. Source:
        # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        place = {"LOCAL_RANK": env.local_rank, "LOCAL_WORLD_SIZE": env.local_size}
        if not self.joined:
            place |= {"RANK": env.rank, "WORLD_SIZE": env.size, SERVED_BY_TORCHRUN: True}
        os.environ.update({name: str(value) for name, value in place.items()} | self.address)
        members[:] = [self]

    @property
    def can_shut_out(self) -> bool:
        """Whether strangers can be kept out: if we have launched this world, and its ranks have all
        connected once a process group is formed."""
        return not self.joined and not self.backend.connects_later()

    @contextlib.contextmanager
    def strangers_shut_out(self) -> Iterator[None]:
        """While gloo forms a group: its sockets take connections, and none after that. Raises
        `RankFailed` if another user has connected."""
        if not self.can_shut_out:
            yield
            return
        with self.lock:
            self.forming += 1
            let_ranks_connect()
        try:
            yield
        finally:
            with self.lock:
                self.forming -= 1
                if not self.forming:
                    self.shut_out_strangers()

    def close_store(self) -> None:
        """As all ranks of a first world have come: from now on the store hears only processes of
        this user."""
        if self.can_shut_out and self.store and not self.is_store_closed:
            self.is_store_closed = True
            if dist.get_rank() == 0:
                with self.alone():
                    close_store(self.store)

    def shut_out_strangers(self) -> None:
        with self.alone():
            shut_out_strangers()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A block that finds strangers. Raises `RankFailed` for them."""
        try:
            yield
        except StrangerConnected as error:
            words = (
                f"is not alone with the ranks of its world: {error}. Run it again: if it comes "
                "back, another user of this machine looks for open ports"
            )
            raise RankFailed(self.env.rank, self.env.size, words) from None

    @property
    def address(self) -> dict[str, str]:
        """Address of the store."""
        where = self.env.rendezvous
        return {"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)}

    def make_way(self) -> None:
        """Before a group that the function forms itself: destroy ours, if it still stands."""
        if self.group is not None and dist.group.WORLD is self.group:
            self.await_group()
            self.drop_groups()

    def adopt_group(self) -> bool:
        """Take the group that the program has formed for ours: the next one that it forms is in its
        place. Returns whether there is one."""
        if not dist.is_initialized():
            return False
        if dist.group.WORLD is not self.group:
            self.group = dist.group.WORLD
            assert self.store
            with contextlib.suppress(RuntimeError):  # the store has been let go, and all groups
                self.store.add(self.group_name, 1)
        return True

    def open_store(self) -> dist.Store:
        """A part of the store that no process group has used yet."""
        self.groups_formed += 1
        self.group_name = f"group {self.groups_formed}"
        return dist.PrefixStore(self.group_name, self.store)

    def await_group(self) -> None:
        """Wait until our group stands on every rank: to close its sockets would break off
        connecting elsewhere."""
        assert self.store
        while self.store.add(self.group_name, 0) < self.env.size:
            time.sleep(0.001)

    def drop_groups(self) -> None:
        """Destroy all process groups, ours or not. A thread closes gloo's sockets, which takes 20
        ms for each."""
        self.backend.synchronize()
        groups = [self.group, *list_groups()]
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()
        OurThread(target=groups.clear, name="close the process group").start()

    def leave(self) -> None:
        """Leave the world, with all others: one of them may serve the store."""
        self.backend.synchronize()
        if dist.is_initialized():  # the function may have destroyed it
            dist.destroy_process_group()
        if self.joined and self.store:
            leave_together(self.store, self.env.rank, self.env.size)


members: list[Member] = []
"""The world that this process is a member of, if any."""


def choose_device() -> None:
    """See `Member.choose_device`."""
    for member in members:
        member.choose_device()
