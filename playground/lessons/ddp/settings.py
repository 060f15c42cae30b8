"""The lab: its hooks and parts by name, and its settings. Does not import torch.

A new hook is a function `register(model)` and a row in `HOOKS`: the choices of --comm-hook, its help and the lab derive
from that table. A new part is a function `part(rank, size, settings)` in lab.py that returns rows, a column in page.py
for each new key of theirs, and a row in `PARTS`: the choices of --lab, the options of each part, and the order of the
lab derive from that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from playground.runtime.errors import UsageError
from playground.runtime.flags import check_choice
from playground.runtime.remote import Remote, remote
from playground.training.settings import TrainingSettings

Row = dict[str, object]
"""A row of a part's table: values by the names of its columns."""
WARM_UP = 2
"""Backward passes that precede every comparison. In the first, DDP has not arranged its buckets yet; a hook that keeps
something per bucket begins after them."""
STEPS = 5
"""Steps with each hook in the part hooks, before and after the part checkpoint."""


@dataclass(frozen=True)
class CommHookSpec:
    """A way to average a bucket of gradients in place of DDP's own all-reduce."""

    name: str
    dtype: str
    """The type of what it sends, as torch calls it: where the backend cannot add that up, the hook is refused."""
    summary: str
    """Its messages, in one line."""
    code: Remote
    """Called as `register(model)`: registers the hook, with a new state, with a DistributedDataParallel."""


HOOKS = {
    name: CommHookSpec(name, dtype, summary, remote(f"playground.lessons.ddp.{code}"))
    for name, dtype, summary, code in (
        ("none", "float32", "the gradients as they are, as DDP sends them without a hook", "lab:register_none"),
        ("fp16", "float16", "the gradients cast to float16", "lab:register_fp16"),
        ("bf16", "bfloat16", "the gradients cast to bfloat16", "lab:register_bf16"),
        ("powersgd", "float32", "each matrix as the product of two thin ones", "lab:register_power_sgd"),
    )
}
BASELINE = "none"
"""The hook that the others are compared with."""


@dataclass(frozen=True)
class LabPart:
    """An experiment that every rank runs: the function of its name in lab.py."""

    name: str
    shown: str
    """Its conclusion, in the last line of the lab's output."""
    about: str
    """How to read its table, in one line."""
    options: tuple[str, ...] = ()
    """Options of the command that change something in it but not in every part, by parameter name."""

    @property
    def code(self) -> Remote:
        """Called as `part(rank, size, settings)`. Its docstring says what the part is about."""
        return remote(f"playground.lessons.ddp.lab:{self.name}")


EVERY = ("batch_size", "limit", "bucket_caps")
"""Options for every part that trains."""
PARTS = {
    part.name: part
    for part in (
        LabPart("buckets", "the buckets that DDP built", "gradients ready: of 8, when the bucket is sent", EVERY),
        LabPart(
            "hooks",
            "what communication hooks save and what they cost",
            "messages, sent: what a rank passes to all_reduce in a step; rel. error: norm of the error / norm",
            (*EVERY, "comm_hooks", "lr", "momentum"),
        ),
        LabPart(
            "accumulation",
            "the messages that no_sync saves",
            "errors: of the gradients, compared with those of one large batch",
            (*EVERY, "accumulate"),
        ),
        LabPart(
            "uneven_inputs",
            "how Join lets ranks finish at different times",
            "difference: the largest of any parameter from rank 0, at the end; early end: the steps that a rank takes "
            "with throw_on_early_termination=True",
            EVERY,
        ),
        LabPart(
            "checkpoint",
            "a checkpoint that one rank writes and all read",
            f"errors: of the parameters, after {STEPS} steps, the checkpoint, and {STEPS} steps more, compared with "
            f"{2 * STEPS} steps on end",
            (*EVERY, "lr", "momentum"),
        ),
        LabPart("sampler", "who gets which sample", "the positions of each rank's samples, in order"),
    )
}
CAPS = (0.001, 0.02, 25.0)
"""MiB with which `Net` has several buckets, few, and as many as with DistributedDataParallel's default."""
MAX_ACCUMULATED = 256
"""Batches: all of them are held in memory, and once more as a single one."""


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Raises `UsageError` for what no lab can be made of."""

    training: TrainingSettings
    """Data, batch size, learning rate, seed; `accumulate` is the number of batches in the part of that name."""
    parts: tuple[str, ...] = tuple(PARTS)
    """Names of `PARTS` to run."""
    caps: tuple[float, ...] = ()
    """Bucket caps in MiB; none for `CAPS`."""
    hooks: tuple[str, ...] = tuple(HOOKS)
    """Names of `HOOKS` to compare, that of the baseline first."""
    required: tuple[str, ...] = ()
    """Those of them that must not be refused."""

    def __post_init__(self) -> None:
        for part in self.parts:
            check_choice("part", part, PARTS)
        for hook in self.hooks:
            check_choice("hook", hook, HOOKS)
        for hook in self.required:
            check_choice("required hook", hook, self.hooks)
        if self.hooks[:1] != (BASELINE,):
            raise UsageError(f"hooks {', '.join(self.hooks)}: {BASELINE} must come first, for comparison")
        for cap in self.caps:
            if not 0 < cap < math.inf:
                raise UsageError(f"bucket cap {cap}: it must be a finite number of MiB above 0")
        if self.training.accumulate > MAX_ACCUMULATED:
            raise UsageError(f"--accumulate {self.training.accumulate}: the lab adds up {MAX_ACCUMULATED} at most")

    @property
    def bucket_caps(self) -> tuple[float, ...]:
        """MiB after which a bucket is full: all are compared in the part buckets, the last holds for the others."""
        return self.caps or CAPS

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"caps": self.bucket_caps, "hooks": self.hooks, "required": self.required}

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: everything but the folder, which is each host's own."""
        return {**self.training.on_all_ranks(), **self.document, "parts": self.parts}
