"""N processes become one world. The only place that creates and destroys a process group."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import backends, host
from playground.runtime.black_box.box import open_box
from playground.runtime.black_box.hooks import hooks
from playground.runtime.errors import RankFailed
from playground.runtime.meeting.connections import socket_inodes
from playground.runtime.meeting.rendezvous import Rendezvous
from playground.runtime.meeting.store import await_everyone, choose_interface, connect, leave_together
from playground.runtime.meeting.strangers import StrangerConnected, shut_out_strangers
from playground.runtime.tap.replacement import Replacement
from playground.runtime.temporary_folder import remove_empty_cache

Arguments = dict[str, Any]
"""Those of a call, by name."""


class Member:
    """This process as a member of a world: it comes to the store once, and forms one process group after the other."""

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        *,
        rendezvous: Rendezvous,
        listener: socket.socket | None,
        local_rank: int | None = None,
        local_size: int | None = None,
        joined: bool = False,
        timeout: float,
    ) -> None:
        """Wait for the others, `timeout` seconds at most. Raises `RendezvousTimeout`."""
        self.rank, self.size, self.backend = rank, size, backends.get_backend(backend)
        self.local_rank = rank if local_rank is None else local_rank
        self.local_size = size if local_size is None else local_size
        self.rendezvous, self.joined = rendezvous, joined
        self.box = open_box(rank, size, rendezvous.place)
        self.groups_formed = 0
        self.group: dist.ProcessGroup | None = None
        self.look_at_sockets()
        if listener:  # is the store's
            self.sockets.discard(os.fstat(listener.fileno()).st_ino)
        torch.set_num_threads(host.threads_per_rank(self.local_size))
        host.use_batch_scheduling()
        host.keep_freed_memory()
        self.device = self.backend.claim_device(self.local_rank, self.local_size, joined)
        limit = timedelta(seconds=timeout)
        self.store = connect(rendezvous, listener, rank, size, limit)
        await_everyone(self.store, rendezvous, rank, size, limit)

    def form_group(self, timeout: float) -> None:
        """A process group of all ranks, each of whose operations may take `timeout` seconds."""
        choose_interface(self.rendezvous)
        os.environ.update(self.environment())
        try:
            with self.strangers_shut_out():
                torch_init_process_group(
                    self.backend.name, store=self.open_store(), rank=self.rank, world_size=self.size,
                    timeout=timedelta(seconds=timeout), device_id=self.device,
                )  # fmt: skip
        except RuntimeError as error:  # dist.DistError is one; ProcessGroupNCCL2 raises no other
            words = self.backend.explain_init_failure(error)
            raise RankFailed(self.rank, self.size, f"could not enter the world: {words}") from error
        self.group = dist.group.WORLD
        self.store.add(self.group_name, 1)
        members[:] = [self]
        if self.box:
            hooks.begin_program(self.box, timedelta(seconds=timeout))

    def look_at_sockets(self) -> None:
        """To be called before a group is formed: the sockets that this process has now are not the group's."""
        self.sockets = socket_inodes()

    @contextlib.contextmanager
    def strangers_shut_out(self) -> Iterator[None]:
        """While a process group is formed. In a world that we have launched, its sockets take no connection after that,
        and with the first group the store takes none either. Raises `RankFailed` if another user has connected."""
        yield
        if not self.joined and not self.backend.connects_later():
            try:
                shut_out_strangers(self.sockets)
            except StrangerConnected as error:
                raise RankFailed(self.rank, self.size, f"is not alone with the ranks of its world: {error}") from None

    def environment(self) -> dict[str, str]:
        """This rank's place, where torch and others look for it, whoever started this process.

        Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        place = {"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_size)} | self.address
        return place if self.joined else place | {"RANK": str(self.rank), "WORLD_SIZE": str(self.size)}

    @property
    def address(self) -> dict[str, str]:
        """Address of the store, if it has one."""
        where = self.rendezvous
        return {} if where.path else {"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)}

    def make_way(self, call: Arguments) -> Arguments:
        """Before a group that the function forms itself: destroy ours, if it still stands.

        `call` is what the function passes to `init_process_group`. If it looks for the others where the environment
        says, that is at our store, which is served already: returned is the call that uses it.
        """
        if self.group is not None and dist.group.WORLD is self.group:
            self.await_group()
            self.destroy_groups()
        moved = any(os.environ.get(name) != value for name, value in self.address.items())
        if moved or call.get("store") is not None or call.get("init_method") not in (None, "env://"):
            return call
        store = self.open_store()
        return {"rank": self.rank, "world_size": self.size} | call | {"init_method": None, "store": store}

    def open_store(self) -> dist.Store:
        """A part of the store that no process group has used yet."""
        self.groups_formed += 1
        return dist.PrefixStore(self.group_name, self.store)

    @property
    def group_name(self) -> str:
        """Key of the latest group in the store, where its ranks are counted."""
        return f"group {self.groups_formed}"

    def await_group(self) -> None:
        """Wait until our group stands on every rank: to close its sockets would break off connecting elsewhere."""
        while self.store.add(self.group_name, 0) < self.size:
            time.sleep(0.001)

    def drop_groups(self) -> None:
        """Leave all process groups, ours or not."""
        self.backend.synchronize()
        self.destroy_groups()

    def destroy_groups(self) -> None:
        """Destroy all process groups. A thread closes gloo's sockets, which takes 20 ms."""
        group = [self.group]
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()
        threading.Thread(target=group.clear, name="close the process group").start()

    def leave(self) -> None:
        """Leave the world, with all others."""
        self.backend.synchronize()
        if dist.is_initialized():  # the function may have destroyed it
            dist.destroy_process_group()
        leave_together(self.store, self.rank, self.size)
        remove_empty_cache()


members: list[Member] = []
"""The world that this process is a member of, if any."""
torch_init_process_group, torch_new_group = dist.init_process_group, dist.new_group
torch_destroy_process_group = dist.destroy_process_group


@functools.wraps(torch_init_process_group)
def init_process_group(*args: Any, **kwargs: Any) -> None:
    """torch's own; a rank of a world that we have launched may call it although its process group stands already."""
    call = inspect.signature(torch_init_process_group).bind(*args, **kwargs).arguments
    with contextlib.ExitStack() as formed:
        for member in members:
            if not member.joined and (ours := member.make_way(call)) is not call:
                call = ours  # otherwise it may have a store of its own, to which others are still to connect
                member.look_at_sockets()
                formed.enter_context(member.strangers_shut_out())
        torch_init_process_group(**call)
    hooks.begin_world(call.get("timeout"))


@functools.wraps(torch_destroy_process_group)
def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """torch's own: whoever waits for this rank in our group gets an error, as its sockets are closed."""
    for member in members:
        if member.group is not None and member.group is dist.group.WORLD and group in (None, member.group):
            if not member.joined:
                member.await_group()
            member.group = None
    torch_destroy_process_group(group)


@functools.wraps(torch_new_group)
def new_group(*args: Any, **kwargs: Any) -> Any:
    """torch's own; in a world that we have launched, only ranks are in the group."""
    with contextlib.ExitStack() as formed:
        for member in members:
            member.look_at_sockets()
            formed.enter_context(member.strangers_shut_out())
        return torch_new_group(*args, **kwargs)


# Modules imported from here on find these: the user's too, because the fork server imports ours first.
for _module in (dist, dist.distributed_c10d):
    Replacement(_module, "init_process_group", lambda _: init_process_group).install()
    Replacement(_module, "new_group", lambda _: new_group).install()
    Replacement(_module, "destroy_process_group", lambda _: destroy_process_group).install()
