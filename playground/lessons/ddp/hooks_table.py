"""Communication hooks, by name. Importing this does not import torch.

A new hook is a function `register(model)` in a file of its own, and an entry here: the choices of --comm-hook, its help
and the lab derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, remote

WARM_UP = 2
"""Backward passes that precede every comparison. In the first, DDP has not arranged its buckets yet; a hook that keeps
something per bucket begins after them."""


@dataclass(frozen=True, kw_only=True)
class CommHookSpec:
    """A way to average a bucket of gradients in place of DDP's own all-reduce."""

    name: str
    summary: str
    """What it sends, in one line."""
    dtype: str
    """The type of what it sends, as torch calls it: where the backend cannot add that up, the hook is refused."""
    code: Remote
    """Called as `register(model)`: registers the hook, with a new state, with a DistributedDataParallel."""


HOOKS = {
    spec.name: spec
    for spec in (
        CommHookSpec(
            name="none",
            summary="the gradients as they are, as DDP sends them without a hook",
            dtype="float32",
            code=remote("playground.lessons.ddp.casting_hooks:register_none"),
        ),
        CommHookSpec(
            name="fp16",
            summary="the gradients cast to float16",
            dtype="float16",
            code=remote("playground.lessons.ddp.casting_hooks:register_fp16"),
        ),
        CommHookSpec(
            name="bf16",
            summary="the gradients cast to bfloat16",
            dtype="bfloat16",
            code=remote("playground.lessons.ddp.casting_hooks:register_bf16"),
        ),
        CommHookSpec(
            name="powersgd",
            summary="each matrix as the product of two thin ones",
            dtype="float32",
            code=remote("playground.lessons.ddp.power_sgd:register"),
        ),
    )
}

BASELINE = "none"
"""The hook that the others are compared with."""
