"""N processes become one world. The only place that creates and destroys a process group."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import backends, host
from playground.runtime.errors import RankFailed
from playground.runtime.flight_recorder.box import open_box
from playground.runtime.flight_recorder.hooks import hooks
from playground.runtime.rank.process import has_children
from playground.runtime.rank.rank import JOINED, report
from playground.runtime.rendezvous.connections import (
    StrangerConnected,
    admit_to_store,
    let_ranks_connect,
    shut_out_strangers,
)
from playground.runtime.rendezvous.environment import SERVED_BY_TORCHRUN, RankEnv
from playground.runtime.rendezvous.rendezvous import DEFAULT_TIMEOUT, Rendezvous
from playground.runtime.rendezvous.store import (
    await_everyone,
    choose_interface,
    connect,
    leave_together,
)
from playground.runtime.tap.replacement import Replacement, calling
from playground.runtime.threads import OurThread
from playground.runtime.upstream import list_groups

Arguments = dict[str, Any]
RENAMED = r"`torch\.distributed\.\w+_tensor` is deprecated"
"""What torch 2.14 alone warns of at each call: releases before it lack the new names, and 2.15
keeps the old ones."""
SUBNORMAL = 1e-40
"""A float32 that is 0 where such numbers are flushed to zero."""


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
    ) -> None:
        """Wait for the others, `timeout` seconds at most. Raises `RendezvousTimeout`."""
        self.env, self.backend, self.joined = env, backends.get_backend(backend), joined
        self.box = open_box(env.rank, env.size, env.rendezvous.place)
        self.groups_formed = 0
        self.group: dist.ProcessGroup | None = None
        self.is_left_to_program = False
        self.forming, self.lock = 0, threading.Lock()
        """How many groups are being formed, each by a thread of its own."""
        warnings.filterwarnings("ignore", RENAMED, FutureWarning)
        torch.set_num_threads(host.threads_per_rank(env.local_size))
        host.use_batch_scheduling()
        host.keep_freed_memory()
        self.device = self.backend.claim_device(env.local_rank, env.local_size, joined)
        limit = timedelta(seconds=timeout)
        self.store = connect(env, listener, limit)
        await_everyone(self.store, env, limit)

    def meet_again(
        self, rendezvous: Rendezvous, listener: socket.socket | None, timeout: float
    ) -> None:
        """Drop all groups and the store, and wait for the others at another one. Raises
        `RendezvousTimeout`."""
        self.drop_groups()
        gc.collect()  # what an operation has raised holds its group, and its sockets, in a cycle
        self.env = replace(self.env, rendezvous=rendezvous)
        self.groups_formed = 0
        if self.box:
            self.box.world = rendezvous.place
        limit = timedelta(seconds=timeout)
        self.store = connect(self.env, listener, limit)
        await_everyone(self.store, self.env, limit)

    def form_group(self, timeout: float) -> None:
        """A process group of all ranks, each of whose operations may take `timeout` seconds."""
        env = self.env
        self.say_where()
        self.store.set_timeout(timedelta(seconds=timeout))  # whatever the function before has set
        hook = sys.excepthook
        try:
            torch_init_process_group(
                self.backend.name, store=self.open_store(), rank=env.rank, world_size=env.size,
                timeout=timedelta(seconds=timeout), device_id=self.device,
            )  # fmt: skip
            if self.groups_formed == 1:
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

    def leave_group_to_program(self, timeout: float) -> None:
        """Instead of `form_group`, for a program that forms its own. Whatever may take longer than
        `timeout` seconds, or than ours do, counts as taking for ever."""
        self.is_left_to_program = True
        self.say_where()
        os.environ[SERVED_BY_TORCHRUN] = "True"
        if self.box:
            limit = min(timeout, DEFAULT_TIMEOUT)
            hooks.begin_program(self.box, timedelta(seconds=limit))

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
        """From now on, as all ranks have come, the store hears only processes of this user."""
        if self.can_shut_out:
            port = self.env.rendezvous.port
            self.shut_out_strangers(port)
            if self.env.rank == 0:
                args = port, lambda: self.env.rendezvous.port != port  # until the store is closed
                OurThread(
                    target=admit_to_store, args=args, name="admit to the store", daemon=True
                ).start()

    def shut_out_strangers(self, store_port: int = 0) -> None:
        try:
            shut_out_strangers(store_port)
        except StrangerConnected as error:
            words = f"is not alone with the ranks of its world: {error}"
            raise RankFailed(self.env.rank, self.env.size, words) from None

    @property
    def address(self) -> dict[str, str]:
        """Address of the store."""
        where = self.env.rendezvous
        return {"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)}

    def make_way(self, call: Arguments) -> Arguments:
        """Before a group that the function forms itself: destroy ours, if it still stands.

        `call` is what the function passes to `init_process_group`. If it looks for the others where
        the environment says, that is at our store, which is served already: returned is the call
        that uses it.
        """
        if self.group is not None and dist.group.WORLD is self.group:
            self.await_group()
            self.drop_groups()
        moved = any(os.environ.get(name) != value for name, value in self.address.items())
        if moved:
            os.environ.pop(SERVED_BY_TORCHRUN, None)
        looks_here = call.get("init_method") in (None, "env://") and call.get("store") is None
        if moved or not looks_here:
            return call
        place = {"rank": self.env.rank, "world_size": self.env.size}
        return place | call | {"init_method": None, "store": self.open_store()}

    def adopt_group(self) -> bool:
        """Take the group that the program has formed for ours: the next one that it forms is in its
        place. Returns whether there is one."""
        if not dist.is_initialized():
            return False
        if dist.group.WORLD is not self.group:
            self.group = dist.group.WORLD
            with contextlib.suppress(RuntimeError):  # the store has been let go, and all groups
                self.store.add(self.group_name, 1)
        return True

    def open_store(self) -> dist.Store:
        """A part of the store that no process group has used yet."""
        self.groups_formed += 1
        return dist.PrefixStore(self.group_name, self.store)

    @property
    def group_name(self) -> str:
        """Key of the latest group in the store, where its ranks are counted."""
        return f"group {self.groups_formed}"

    def await_group(self) -> None:
        """Wait until our group stands on every rank: to close its sockets would break off
        connecting elsewhere."""
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

    def leave(self, present: int | None = None) -> None:
        """Leave the world, with all others: the ranks that are still there, if some have ended by
        themselves."""
        self.backend.synchronize()
        if dist.is_initialized():  # the function may have destroyed it
            dist.destroy_process_group()
        leave_together(self.store, self.env.rank, present or self.env.size)


class ProcessState:
    """The state of this process when it was new.

    Nearly every function draws random numbers, and a rank that trains keeps to one core: `begin`
    puts torch's generator and the cores back. (Python's and numpy's generators are seeded afresh in
    every process.) Other changes stay, and `is_unchanged` says whether there are any: threads,
    child processes, environment, handlers, torch's switches. Neither sees what is written into
    modules.
    """

    def __init__(self) -> None:
        self.random_state = torch.get_rng_state()
        self.cores = os.sched_getaffinity(0)

    def begin(self) -> None:
        """To be called before each function."""
        torch.set_rng_state(self.random_state)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self.cores)
        self.threads = set(threading.enumerate())
        self.settings = read_settings()

    def is_unchanged(self) -> bool:
        """To be called after each function."""
        return (
            read_settings() == self.settings
            and self.threads.issuperset(threading.enumerate())
            and not has_children(os.P_ALL)
        )


def read_settings() -> list[Any]:
    """The settings of a process that the next function to run there would notice."""
    streams = sys.stdin, sys.stdout, sys.stderr
    return [
        dict(os.environ), os.getcwd(), list(sys.path), read_umask(), socket.getdefaulttimeout(),
        [signal.getsignal(number) for number in signal.valid_signals()],
        [(stream, getattr(stream, "closed", False)) for stream in streams],
        sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile(),
        sys.getrecursionlimit(), list(warnings.filters),
        gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks),
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
        torch.tensor(SUBNORMAL, device="cpu").mul(1.0).item(),
    ]  # fmt: skip


def read_umask() -> str:
    """The permissions that new files of this process do not get. (To read it otherwise is to set
    it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("Umask"))


members: list[Member] = []
"""The world that this process is a member of, if any."""
torch_init_process_group = dist.init_process_group
torch_destroy_process_group = dist.destroy_process_group


@functools.wraps(torch_init_process_group)
def init_process_group(*args: Any, **kwargs: Any) -> None:
    """torch's own; a rank of a world that we have launched may call it although its process group
    stands already."""
    call = inspect.signature(torch_init_process_group).bind(*args, **kwargs).arguments
    with contextlib.ExitStack() as waiting:
        for member in members:
            if member.joined and not member.is_left_to_program:
                continue
            asked, call = call, member.make_way(call)
            if call is not asked and call["world_size"] == member.env.size:
                forming = hooks.forming_world(member.env.size, call.get("timeout"))
                waiting.enter_context(forming)
        torch_init_process_group(**call)
    for member in members:
        if member.is_left_to_program:
            report(**{JOINED: True})
        if member.is_left_to_program and member.groups_formed == 1:
            member.close_store()
    hooks.begin_world()


@functools.wraps(torch_destroy_process_group)
def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """torch's own: whoever waits for this rank in our group gets an error, as its sockets are
    closed."""
    for member in members:
        stands = member.group is not None and member.group is dist.group.WORLD
        if stands and group in (None, member.group):
            if not member.joined:
                member.await_group()
            member.group = None
    torch_destroy_process_group(group)


def connect_ranks_only(connect: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's that has gloo connect ranks: only ranks are connected then."""
    with contextlib.ExitStack() as formed:
        for member in members:
            formed.enter_context(member.strangers_shut_out())
        return connect(*args, **kwargs)


# Modules imported from here on find these: the user's too, because the fork server imports ours
# first.
for _module in (dist, dist.distributed_c10d):
    Replacement(_module, "init_process_group", lambda _: init_process_group).install()
    Replacement(_module, "destroy_process_group", lambda _: destroy_process_group).install()
# All that forms groups of gloo comes to these methods of torch's classes, under whatever name it
# was imported.
for _owner, _name in (
    (dist.ProcessGroupGloo, "__init__"),
    (dist.ProcessGroup, "split_group"),
    (dist.ProcessGroup, "merge_remote_group"),
):
    if hasattr(_owner, _name):  # older versions of torch split no groups
        Replacement(_owner, _name, calling(connect_ranks_only)).install()
