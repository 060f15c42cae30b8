"""Own world or joined: the same call runs a function on the ranks, whoever starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playground.base import host
from playground.base.errors import UsageError
from playground.base.remote import Remote
from playground.world import backends
from playground.world.launcher import fork_client
from playground.world.launcher.launch import LaunchConfig, launch
from playground.world.launcher.receiving import ignore_report
from playground.world.rendezvous.environment import rank_env_from

Around = Callable[
    ["CommandWorld", Callable[..., Any]], contextlib.AbstractContextManager[Callable[..., Any]]
]
"""Is called with a world and the function that its ranks are to run; what they run instead, for the
time of the run."""


def run_as_it_is(
    world: CommandWorld, fn: Callable[..., Any]
) -> contextlib.AbstractContextManager[Callable[..., Any]]:
    return contextlib.nullcontext(fn)


class CommandWorld:
    """The ranks a program runs on: new ones on this host, or, if the environment says that it is
    itself a rank of a world somebody started, the ranks of that world.

    `size` None stands for `default_size`; a world that is joined brings its own. `options` are
    fields of `LaunchConfig`. Raises `UsageError` if there can be no such world; nothing is started
    before `run`.
    """

    def __init__(
        self,
        size: int | None,
        *,
        default_size: int = 2,
        min_size: int = 1,
        **options: Any,
    ) -> None:
        self.around: Around = run_as_it_is
        """What every `run` happens in."""
        self.config = LaunchConfig(**options)
        self.backend = self.config.backend
        self.rank_env = rank_env_from()
        if self.rank_env and (restarts := self.config.restarts):
            raise UsageError(
                f"{restarts} restarts of a world that was started elsewhere: whoever starts the "
                f"ranks restarts them, with torchrun: --max-restarts {restarts}"
            )
        self.size = self.rank_env.size if self.rank_env else size or default_size
        if size not in (None, self.size):
            raise UsageError(
                f"-n {size} in a world of {self.size} ranks: leave -n out, whoever set WORLD_SIZE "
                "decides"
            )
        if self.size < min_size:
            raise UsageError(
                f"a world of {self.size} is too small: this needs at least {min_size} ranks"
            )
        self.local_size = self.rank_env.local_size if self.rank_env else self.size
        used = backends.get_backend(self.backend)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", used.log_level)  # before torch is imported
        self.notice = used.check(self.local_size, joined=self.rank_env is not None)
        self.device = used.device_type

    def warm_up(self, *needed: Remote | str | Callable[..., Any]) -> None:
        """Have the ranks' common imports begin, with the modules that are `needed`, if they are
        ours to start. (The module of a plain function is the caller's, and comes with the
        function.)"""
        if self.rank_env is None:
            names = (each.module if isinstance(each, Remote) else each for each in needed)
            fork_client.preload(*(name for name in names if isinstance(name, str)))
            fork_client.warm_up()

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that shows results: the parent of the ranks, or rank
        0."""
        return self.rank_env is None or self.rank_env.rank == 0

    def __str__(self) -> str:
        threads = host.threads_per_rank(self.local_size)
        several_ranks = "s" if self.size > 1 else ""
        several_threads = "s" if threads > 1 else ""
        ranks = f"{self.size} rank{several_ranks} x {threads} thread{several_threads}"
        return ", ".join(filter(None, [f"{self.backend} on {self.device}", ranks, self.notice]))

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The return value of `fn(rank, size, *args)` on each rank, in rank order. `options` are
        fields of `LaunchConfig`, for this run.

        Raises what `launch` raises. A world that is joined has no restarts of ours: whoever started
        the ranks ends all of them when one dies.
        """
        config = replace(self.config, **options)
        with self.around(self, fn) as wrapped:
            if self.rank_env is None:
                return launch(wrapped, self.size, args=args, config=config)
            from playground.world.join import join

            if not self.is_main:
                config = replace(config, on_report=ignore_report)
            return join(self.rank_env, wrapped, args, config)
