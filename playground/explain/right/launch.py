"""`playground.launch`: what a function does on ranks is checked for silent mistakes, as a script's
training is. Does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playground.explain.right import CERTAIN
from playground.explain.right.checked import NEEDED, Checked
from playground.explain.right.run import enter_folder, told
from playground.world.launcher import fork_client
from playground.world.launcher.launch import LaunchConfig, launch as launch_unchecked
from playground.world.rank.assignment import require_importable

USUAL = LaunchConfig()


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    args: tuple[Any, ...] = (),
    config: LaunchConfig = USUAL,
    check: bool = True,
    **options: Any,
) -> list[Any]:
    """Run `fn(rank, size, *args)` on `size` ranks of one new world; return what each returned, in
    rank order.

    `options` are fields of `LaunchConfig`: `launch(fn, 4, timeout=20, restarts=2)`. How the ranks
    are started, watched and ended, and what is raised, is said of
    `playground.world.launcher.launch.launch`, which this calls.

    `check`: whether silent mistakes in training are told on stderr, as `run --check certain` tells
    them: what is certain as soon as it is, and what is probable when the ranks have ended. The
    ranks call nothing for it, and what this returns or raises stays the same.
    """
    __tracebackhide__ = True  # as in what it calls
    with contextlib.ExitStack() as stack:
        if check:
            replace(config, **options).check(size)
            require_importable(fn)
            if folder := enter_folder(stack):
                fork_client.preload(*NEEDED)
                stack.enter_context(told(folder, size, CERTAIN, []))
                fn = Checked(fn, folder)
        return launch_unchecked(fn, size, args=args, config=config, **options)
