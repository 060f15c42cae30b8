"""Where a program forms a world, or groups: torch's functions for it are replaced, so that a rank
of a world that stands already may call them. Importing this module replaces them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from playground.base.upstream import STORE_MAKER
from playground.explain.hang.hooks import hooks
from playground.tap.replacement import Replacement, calling
from playground.world.rank.member import (
    forming_world,
    members,
    torch_destroy_process_group,
    torch_init_process_group,
)
from playground.world.rank.reports import JOINED, report
from playground.world.rendezvous.environment import SERVED_BY_TORCHRUN


@functools.wraps(torch_init_process_group)
def init_process_group(*args: Any, **kwargs: Any) -> None:
    """torch's own; a rank of a world that we have launched may call it although its process group
    stands already."""
    given = inspect.signature(torch_init_process_group).bind(*args, **kwargs).arguments
    for member in members:
        if not member.joined or member.is_left_to_program:
            member.make_way()
        given |= member.offered
    with contextlib.ExitStack() as forming:
        forming_world.forming = forming
        forming_world.formed = None
        url, size = given.get("init_method"), given.get("world_size")
        if isinstance(url, str) and url.startswith("file:") and isinstance(size, int):
            forming.enter_context(hooks.forming_world(size, given.get("timeout"), url))
        try:
            torch_init_process_group(**given)
            if forming_world.formed:
                forming_world.formed()
        finally:
            forming_world.forming = None
    for member in members:
        member.close_store()
        if member.is_left_to_program:
            report(**{JOINED: True})
    hooks.begin_world()


def create_store(
    create: Callable[..., dist.Store],
    host: str,
    port: int,
    rank: int,
    size: int,
    timeout: timedelta,
    *args: Any,
    **kwargs: Any,
) -> dist.Store:
    """torch's own; where the store of this world is meant, that is used. Elsewhere nothing is
    served yet, although torchrun would say so: its first rank serves it."""
    for member in members:
        if member.is_at(host, port):
            return member.open_programs_store(rank, size, timeout)
    is_served = os.environ.pop(SERVED_BY_TORCHRUN, None) if members else None
    if forming_world.forming:
        place = hooks.forming_world(size, timeout, f"{host}:{port}")
        forming_world.forming.enter_context(place)
    try:
        return create(host, port, rank, size, timeout, *args, **kwargs)
    finally:
        if is_served is not None:
            os.environ[SERVED_BY_TORCHRUN] = is_served


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
Replacement(
    sys.modules["torch.distributed.rendezvous"], STORE_MAKER, calling(create_store)
).install()
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
