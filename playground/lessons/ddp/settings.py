"""The lab: its hooks and parts by name, its settings, and the results of its parts. Does not import torch.

A new hook is a function `register(model)` and a row in `HOOKS`: the choices of --comm-hook, its help and the lab derive
from that table. A new part is a function `part(rank, size, settings)` in lab.py, a text for its result in page.py, and
a row in `PARTS`: the choices of --only, the options of each part, and the order of the lab derive from that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_choice, check_flags, flag
from playground.runtime.remote import Remote, remote
from playground.training.models import MODELS
from playground.training.settings import TrainingSettings

WARM_UP = 2
"""Backward passes that precede every comparison. In the first, DDP has not arranged its buckets yet; a hook that keeps
something per bucket begins after them."""


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
    """An experiment that every rank runs, the function of its name in lab.py. Its text is the function of its name and
    "_texts" in page.py."""

    name: str
    shown: str
    """Its conclusion, in the last line of the lab's output."""
    options: tuple[str, ...] = ()
    """Options of the command that change something in it but not in every part, by parameter name."""

    @property
    def code(self) -> Remote:
        """Called as `part(rank, size, settings)`. Its docstring says what the part is about."""
        return remote(f"playground.lessons.ddp.lab:{self.name}")


EVERY = ("model", "batch_size", "limit", "bucket_caps")
"""Options for every part that trains."""
BUCKETS, STEPS = ("static_graph", "gradient_as_bucket_view", "steps"), ("steps", "lr", "momentum")
PARTS = {
    part.name: part
    for part in (
        LabPart("buckets", "the buckets that DDP built", (*EVERY, *BUCKETS)),
        LabPart("hooks", "what communication hooks save and what they cost", (*EVERY, "comm_hooks", *STEPS)),
        LabPart("accumulation", "the messages that no_sync saves", (*EVERY, "accumulate")),
        LabPart("uneven_inputs", "how Join lets ranks finish at different times", EVERY),
        LabPart("checkpoint", "a checkpoint that one rank writes and all read", (*EVERY, *STEPS)),
        LabPart("sampler", "who gets which sample"),
    )
}
MAX_ACCUMULATED = 256
"""Batches: all of them are held in memory, and once more as a single one."""
ABOUT_STEPS = (
    "Number of steps: timed in the part buckets, trained with each hook in the part hooks, before and after the part "
    "checkpoint."
)


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Raises `UsageError` for what no lab can be made of."""

    training: TrainingSettings
    """Data, batch size, learning rate, seed; `accumulate` is the number of batches in the part of that name."""
    parts: tuple[str, ...] = tuple(PARTS)
    """Names of `PARTS` to run."""
    model: str = flag("net", "Model of the lab.", choices=tuple(MODELS))
    caps: tuple[float, ...] = ()
    """Bucket caps in MiB; none for those that go with the model."""
    static_graph: bool = flag(False, "In the part buckets: tell DDP that the graph never changes.")
    gradient_as_bucket_view: bool = flag(False, "In the part buckets: let gradients be views.")
    hooks: tuple[str, ...] = tuple(HOOKS)
    """Names of `HOOKS` to compare, that of the baseline first."""
    required: tuple[str, ...] = ()
    """Those of them that must not be refused."""
    steps: int = flag(5, ABOUT_STEPS, least=1)

    def __post_init__(self) -> None:
        check_flags(self)
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
        return self.caps or MODELS[self.model].bucket_caps_mb

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        names = ("model", "static_graph", "gradient_as_bucket_view", "hooks", "required", "steps")
        return {"caps": self.bucket_caps, **{name: getattr(self, name) for name in names}}

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: everything but the folder, which is each host's own."""
        return {**self.training.on_all_ranks(), **self.document, "parts": self.parts}


ROUNDING = 1e-12
"""How far apart two sums of the same float64 numbers may be, relative to their norm."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of an element of two vectors, and the norm of all relative to that of the second."""

    max: float
    relative: float

    @property
    def is_rounding(self) -> bool:
        """Whether two float64 vectors differ by rounding only. False if the difference is not a number."""
        return self.relative <= ROUNDING


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that a rank passed to all_reduce; the type is that of its elements, as torch calls it."""

    type: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """A bucket of gradients, as it left."""

    bucket: int
    bytes: int
    ready: int
    """Gradients of the model that were ready by then."""
    parameters: list[str]
    """Names of the parameters whose gradients are in it."""


@dataclass(frozen=True, kw_only=True)
class CapBuckets:
    """The buckets that DDP built for one bucket cap, in the order in which they left."""

    bucket_cap_mb: float
    first: list[SentBucket]
    """Those of the first backward."""
    rebuilt: list[SentBucket]
    """Those of all later ones."""
    rebuilt_before: int
    """The backward that first had them, counted from 1."""
    seconds: float
    """Median time of a step, on its slowest rank."""


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Bytes of gradients after a backward."""

    gradient_as_bucket_view: bool
    gradients: int
    outside: int
    """Bytes of those that are held beside the buckets, not in them."""


@dataclass(frozen=True, kw_only=True)
class BucketsResult:
    order: list[str]
    """The names of the parameters, as their gradients got ready."""
    caps: list[CapBuckets]
    memory: list[GradientMemory]


@dataclass(frozen=True, kw_only=True)
class HookResult:
    """The messages of a communication hook in a step, and its gradients and parameters."""

    hook: str
    types: list[str]
    messages: int
    bytes: int
    gradient: Difference
    """Between the first gradient and its exact mean over all ranks."""
    loss: float
    """The mean loss of the last step."""
    parameters: Difference
    """Between the parameters in the end and those without a hook."""


@dataclass(frozen=True, kw_only=True)
class RefusedHook:
    """A hook that torch or the backend cannot do, and their words."""

    hook: str
    refused: str


@dataclass(frozen=True, kw_only=True)
class AccumulationResult:
    """Gradients of several batches, added up in one way."""

    way: str
    batches: int
    messages: int
    difference: Difference
    """Between its gradients and those of one batch of all samples."""

    def check(self) -> None:
        """Raise `PlaygroundError` if its gradients differ by more than rounding."""
        if not self.difference.is_rounding:
            found = self.difference.relative
            raise PlaygroundError(f"{self.way}: gradients differ by {found}, more than rounding does")


@dataclass(frozen=True, kw_only=True)
class EarlyTermination:
    """Steps of this rank where Join raises as soon as one rank is done, and its error; None if no rank had to wait."""

    steps: int
    says: str | None


@dataclass(frozen=True, kw_only=True)
class UnevenResult:
    """Training under Join on a rank that has batches of its own number."""

    batches: int
    steps: int
    messages: int
    """All-reduces of gradients that it took part in."""
    difference: float
    """The largest difference of any parameter or buffer to that on rank 0, in the end."""
    without_joining: EarlyTermination


@dataclass(frozen=True, kw_only=True)
class SamplerResult:
    """The positions of samples in one way of sharing them out."""

    way: str
    mine: list[int]
    """Those of this rank, in order."""
    doubled: list[int]
    """Those that are used twice or more, on any ranks."""
    left_out: list[int]
    """Those that no rank gets."""


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """Training that resumed from the parts of a checkpoint that it names."""

    loaded: str
    difference: Difference
    """Between its parameters in the end and those of a run that was never interrupted."""


@dataclass(frozen=True, kw_only=True)
class CheckpointResult:
    """A checkpoint after some steps, in bytes, as one rank wrote (0 on all ranks but one) and read it onto a device."""

    steps: int
    written: int
    read: int
    device: str
    resumed: list[ResumedRun]
    """As many steps more, with the state of the model alone, and with all."""

    def check(self) -> None:
        """Raise `PlaygroundError` unless the run that took everything from the file ends bit-identical."""
        if (found := self.resumed[-1].difference.max) != 0:
            raise PlaygroundError(
                f"resumed from the checkpoint, parameters differ by up to {found:.2g} from those of an uninterrupted "
                f"run: they must not at all"
            )


def check_replicas(difference: float, when: str) -> None:
    """Raise `PlaygroundError` if replicas that must be bit-identical differ."""
    if difference != 0:
        raise PlaygroundError(f"{when} replicas differ by up to {difference:.2g}: they must not at all")


def check_buckets(recorded: list[object]) -> None:
    """Raise `PlaygroundError` unless every rank, in rank order, recorded the same buckets."""
    if any(theirs != recorded[0] for theirs in recorded):
        raise PlaygroundError("the ranks' buckets differ, though all must send the same ones in the same order")
