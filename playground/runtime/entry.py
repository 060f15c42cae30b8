"""Own world or joined: the same call runs a function on the ranks, whoever starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from playground.runtime import backends, host, rendezvous, server
from playground.runtime.environment import place_from_environment
from playground.runtime.errors import Impossible
from playground.runtime.launch import launch
from playground.runtime.rank import Progress


class World:
    """The ranks a program runs on: new ones on this host, or, if the environment says that it is itself a rank of a
    world somebody started, the ranks of that world.

    `size` None stands for `usual_size`; a world that is joined brings its own. Raises `Impossible` if there can be no
    such world; nothing is started before `run`.
    """

    def __init__(
        self,
        size: int | None,
        *,
        usual_size: int = 2,
        least: int = 1,
        backend: str = "gloo",
        timeout: float = rendezvous.DEFAULT_TIMEOUT,
        init_method: str | None = None,
    ) -> None:
        self.backend, self.timeout, self.init_method = backend, timeout, init_method
        self.place = place_from_environment(init_method=init_method)
        self.size = self.place.size if self.place else size or usual_size
        if size not in (None, self.size):
            raise Impossible(f"-n {size} in a world of {self.size} ranks: leave -n out, whoever set WORLD_SIZE decides")
        if self.size < least:
            raise Impossible(f"a world of {self.size} is too small: this needs at least {least} ranks")
        self.local_size = self.place.local_size if self.place else self.size
        if self.place is None:
            rendezvous.check_method(init_method)
        its = backends.named(backend)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", its.log_level)  # read when torch is imported, here or in the ranks
        self.notice = its.check(self.local_size, joined=self.place is not None)
        self.device = its.device_type

    def warm_up(self) -> None:
        """Have the ranks' common imports begin, if they are ours to start."""
        if self.place is None:
            server.warm_up()

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows results: the parent of the ranks, or rank 0."""
        return self.place is None or self.place.rank == 0

    def __str__(self) -> str:
        threads = host.threads_per_rank(self.local_size)
        ranks = f"{self.size} rank{'s' * (self.size > 1)} x {threads} thread{'s' * (threads > 1)}"
        return ", ".join(filter(None, [f"{self.backend} on {self.device}", ranks, self.notice]))

    def run(self, fn: Callable[..., Any], *args: Any, on_report: Progress | None = None) -> list[Any]:
        """What `fn(rank, size, *args)` returned on each rank, in rank order. Raises what `launch` raises."""
        if self.place is None:
            return launch(
                fn, self.size, backend=self.backend, args=args, timeout=self.timeout,
                init_method=self.init_method, on_report=on_report,
            )  # fmt: skip
        from playground.runtime.join import join  # imports torch, which a launcher leaves to the fork server

        return join(
            self.place, fn, backend=self.backend, args=args, timeout=self.timeout,
            on_report=on_report if self.speaks else None,
        )  # fmt: skip
