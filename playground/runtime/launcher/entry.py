"""Own world or joined: the same call runs a function on the ranks, whoever starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from playground.runtime import backends, host
from playground.runtime.errors import UsageError
from playground.runtime.launcher import server
from playground.runtime.launcher.launch import launch
from playground.runtime.launcher.restarts import OnRestart, check_restarts, log_restart
from playground.runtime.launcher.watch import OnLoss, log_loss
from playground.runtime.meeting.environment import rank_env_from
from playground.runtime.meeting.rendezvous import DEFAULT_TIMEOUT, check_method
from playground.runtime.rank.rank import Progress
from playground.runtime.remote import Remote

Around = Callable[["World", Callable[..., Any]], contextlib.AbstractContextManager[Callable[..., Any]]]
"""Is called with a world and the function that its ranks are to run; what they run instead, for the time of the run."""


@contextlib.contextmanager
def run_as_it_is(world: World, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    yield fn


class World:
    """The ranks a program runs on: new ones on this host, or, if the environment says that it is itself a rank of a
    world somebody started, the ranks of that world.

    `size` None stands for `default_size`; a world that is joined brings its own. `restarts` is how often new ranks take
    the place of a world that failed, in each `run`; whoever started a world that is joined decides that, too. `around`
    is what every `run` happens in. Raises `UsageError` if there can be no such world; nothing is started before `run`.
    """

    def __init__(
        self,
        size: int | None,
        *,
        default_size: int = 2,
        min_size: int = 1,
        backend: str = "gloo",
        timeout: float = DEFAULT_TIMEOUT,
        init_method: str | None = None,
        restarts: int = 0,
        around: Around = run_as_it_is,
    ) -> None:
        self.around = around
        self.backend, self.timeout, self.init_method, self.restarts = backend, timeout, init_method, restarts
        self.rank_env = rank_env_from(init_method=init_method)
        check_restarts(restarts, joined=self.rank_env is not None)
        self.size = self.rank_env.size if self.rank_env else size or default_size
        if size not in (None, self.size):
            raise UsageError(f"-n {size} in a world of {self.size} ranks: leave -n out, whoever set WORLD_SIZE decides")
        if self.size < min_size:
            raise UsageError(f"a world of {self.size} is too small: this needs at least {min_size} ranks")
        self.local_size = self.rank_env.local_size if self.rank_env else self.size
        if self.rank_env is None:
            check_method(init_method)
        used = backends.get_backend(backend)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", used.log_level)  # before torch is imported
        self.notice = used.check(self.local_size, joined=self.rank_env is not None)
        self.device = used.device_type

    def warm_up(self, *needed: Remote | str | Callable[..., Any]) -> None:
        """Have the ranks' common imports begin, with the modules that are `needed`, if they are ours to start. (The
        module of a plain function is the caller's, and comes with the function.)"""
        if self.rank_env is None:
            names = (each.module if isinstance(each, Remote) else each for each in needed)
            server.preload(*(name for name in names if isinstance(name, str)))
            server.warm_up()

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that shows results: the parent of the ranks, or rank 0."""
        return self.rank_env is None or self.rank_env.rank == 0

    def __str__(self) -> str:
        threads = host.threads_per_rank(self.local_size)
        ranks = f"{self.size} rank{'s' * (self.size > 1)} x {threads} thread{'s' * (threads > 1)}"
        return ", ".join(filter(None, [f"{self.backend} on {self.device}", ranks, self.notice]))

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        on_report: Progress | None = None,
        on_restart: OnRestart = log_restart,
        grace: float | None = None,
        expendable: Collection[int] = (),
        on_loss: OnLoss = log_loss,
    ) -> list[Any]:
        """What `fn(rank, size, *args)` returned on each rank, in rank order.

        Raises what `launch` raises. The other arguments are those of `launch`, too; a world that is joined has no
        restarts of ours, and no expendable ranks: whoever started the ranks ends all of them when one dies.
        """
        with self.around(self, fn) as fn:
            if self.rank_env is None:
                return launch(
                    fn, self.size, backend=self.backend, args=args, timeout=self.timeout,
                    init_method=self.init_method, on_report=on_report, restarts=self.restarts, on_restart=on_restart,
                    grace=grace, expendable=expendable, on_loss=on_loss,
                )  # fmt: skip
            from playground.runtime.meeting.join import join

            return join(
                self.rank_env, fn, backend=self.backend, args=args, timeout=self.timeout,
                on_report=on_report if self.is_main else None, grace=grace,
            )  # fmt: skip
