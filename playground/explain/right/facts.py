"""What the log of a rank says of its optimizers, models, data and calls. Does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from playground.explain.hang.sources import Line
from playground.explain.right.log import Prints


@dataclass(frozen=True)
class Model:
    """A model that was wrapped by DistributedDataParallel."""

    key: str
    """Its group, by name, and its number among those of the group: the same on all ranks."""
    ranks: list[int]
    """Those of its group."""
    names: list[str]
    """The names of its parameters, without those that DistributedDataParallel is told to
    ignore."""
    trained: list[bool]
    """Whether each requires a gradient."""
    prints: Prints
    line: int


@dataclass(frozen=True)
class Late:
    """A parameter that a forward pass finds in a model, and that was not there when the model was
    wrapped."""

    model: str
    name: str
    line: int


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its parameters."""

    number: int
    """By its first step among those of its rank."""
    kind: str
    """Its class, with the module."""
    parameters: list[str]
    """`MODEL/NAME` of a wrapped model's, else the optimizer's number and the parameter's."""
    sizes: list[int]
    """Numbers of their elements."""
    ranks: list[int]
    """Those of the group whose clock its looks have."""
    shards: list[tuple[bool, list[int]] | None] = field(default_factory=list)
    """Whether a parameter that is a DTensor is divided among ranks, and which ranks hold the same
    part as this one; None for another parameter."""


JOINS = "joins"
"""The note of a forward pass in the context of `Join`."""
IN_GRAPH = "in graph"
"""The note of a call that took a tensor of one element that has a gradient."""
FORWARD, BACKWARD, LOADED, CALLED, BUCKET = "forward", "backward", "loaded", "called", "bucket"


@dataclass(frozen=True)
class Event:
    """What happened between two steps of an optimizer."""

    kind: str
    """FORWARD of a wrapped model in training, BACKWARD, LOADED, CALLED, or BUCKET: gradients that
    DistributedDataParallel is about to average."""
    subject: str
    """The model's key; of a call, the operation's name."""
    flag: bool
    """FORWARD: whether the backward pass is to average the gradients. BACKWARD: whether the clock
    of a wrapped model advanced in it. CALLED: whether it was in a backward pass."""
    note: str
    """FORWARD: the communication hook, if there is one that is not torch's or that does not average
    at each step, and `JOINS`. CALLED: `IN_GRAPH`."""
    gradients: list[int]
    """CALLED: the numbers of the optimizer's parameters whose gradients the call took."""
    parameters: list[int]
    """CALLED: those of the parameters that it took. LOADED: those that were loaded."""
    size: int
    """CALLED: the number of elements. BACKWARD: the number of elements of which its root, the
    output of a loss function, is the mean; 0 if it is none, or that is not known."""
    ranks: int
    """CALLED: the size of the group."""
    line: int
    prints: Prints
    """FORWARD: fingerprints of the inputs. BUCKET: that of the gradients, before the average. Empty
    if nobody has looked."""
    generator: int = 0
    """FORWARD: the fingerprint of the random generator's state, if the model has dropout at work;
    else 0."""
    values: list[float] = field(default_factory=list)
    """CALLED: two elements of the gradient that the call took, before it, if it took one and
    nothing else."""


EVENT_FIELDS = tuple(each.name for each in fields(Event))
"""In the order in which the log has them."""


@dataclass(frozen=True)
class Look:
    """A step of an optimizer that was looked at."""

    optimizer: Optimizer
    step: int
    """Its number among the optimizer's, from 0 on."""
    clock: int
    """How many collectives the group has started before it; -1 if the group does not tell."""
    nth: int
    """Its number among the optimizer's steps at this clock."""
    before: Prints
    gradients: Prints
    """Just before the step."""
    after: Prints
    raw: Prints
    """The gradients at the end of the last backward pass; empty if they were not looked at."""
    values: list[list[float]]
    """Two elements of each of the first parameters, before the step."""
    settings: list[list[str]]
    """The hyperparameters of each group of parameters, as `name=value`."""
    events: list[Event]
    """Those since the optimizer's last step; empty if there were too many."""
    is_whole: bool
    """Whether `events` has all of them."""
    in_backward: bool
    has_closure: bool
    """Whether the step calls a closure, or steps another optimizer."""
    has_hooks: bool
    """Whether hooks of the optimizer itself are called after the step."""
    wrapped: list[str]
    """The keys of the wrapped models that are alive."""
    line: int
    trains: bool = True
    """Whether a parameter of the optimizer requires a gradient."""
    raw_values: list[list[float]] = field(default_factory=list)
    """Two elements of each of the first gradients at the end of the last backward pass."""
    gradient_values: list[list[float]] = field(default_factory=list)
    """The same elements just before the step."""
    statistics: list[tuple[int, int | None]] = field(default_factory=list)
    """BatchNorm layers, but for those in wrapped models that broadcast their buffers: the number of
    the layer's weight among the optimizer's parameters, and the fingerprint of the running mean."""

    shards: Prints = field(default_factory=list)
    """The parts of DTensors that this rank holds, before the step; None of other parameters."""
    gradients_of_shards: Prints = field(default_factory=list)
    """The parts of their gradients."""

    @property
    def moment(self) -> tuple[int, int]:
        """Looks of several ranks with one moment were made between the same collectives."""
        return self.clock, self.nth


@dataclass(frozen=True)
class Draw:
    """An iteration over a `DistributedSampler`."""

    sampler: int
    """By its first draw among those of its rank."""
    number: int
    """Among the draws of its sampler, from 0 on."""
    rank: int
    parts: int
    """The sampler's `num_replicas`."""
    seed: int
    epoch: int
    shuffles: bool
    length: int
    """The number of samples in the data set."""
    total: int
    """The number of samples of all parts together."""
    chosen: int
    """The fingerprint of the samples, if the data set is a `Subset`; else 0."""
    clock: int
    """The world's, -1 if it is not known."""
    steps: dict[int, int]
    """How many steps each optimizer had made."""
    line: int


@dataclass(frozen=True)
class Batch:
    """One of the first batches of an iteration of a data loader over a `DistributedSampler`."""

    sampler: int
    draw: int
    number: int
    prints: Prints
    trains: bool
    """Whether gradients were recorded."""


@dataclass(frozen=True)
class Shares:
    """The first batches of a data loader over an `IterableDataset` with several workers."""

    workers: int
    prints: list[Prints]
    """Those of two batches of each worker, in the order in which they came."""
    line: int


@dataclass(frozen=True)
class Samples:
    """The first samples of a pass of training over a data loader, but for one over a
    `DistributedSampler`."""

    number: int
    """Among the passes that the rank has told."""
    prints: list[int]
    """Fingerprints of the first tensor of each sample."""
    is_whole: bool
    """Whether these are all samples of the pass."""
    line: int


GAPS, WRITTEN, UNWAITED, CUT, LOST, COPY, OUTSIDE = (
    "gaps", "written", "unwaited", "cut", "lost", "copy", "outside",
)  # fmt: skip


@dataclass(frozen=True)
class Misuse:
    """A tensor that a call cannot take so."""

    kind: str
    """GAPS: it has gaps in memory, and gloo goes through the memory as if it had none. WRITTEN: the
    program has written it before it waited for the call. UNWAITED: the program has let go of the
    call without waiting for it. CUT: it has a gradient, which does not pass through the call. LOST:
    it is a dense copy of a variable, which nobody else has. COPY: it is another copy of one.
    OUTSIDE: its rank is not in the group."""
    operation: str
    line: int
    """That of the call."""
    step: int
    """How many steps the optimizer with the most had made."""


@dataclass(frozen=True)
class Layout:
    """A tensor of several dimensions, in whose memory gloo works: how it lies there."""

    operation: str
    group: str
    """The name of the group."""
    ranks: list[int]
    """Those of the group."""
    clock: int
    """How many collectives the group had started before this one."""
    shape: list[int]
    strides: list[int]
    """Of dimensions of one element, 0."""
    line: int
    step: int
    """How many steps the optimizer with the most had made."""


@dataclass(frozen=True)
class Overwritten:
    """A broadcast, before the first step, of what `load_state_dict` has written on this rank."""

    source: int
    """The rank that has sent it."""
    line: int


@dataclass(frozen=True)
class Rates:
    """A change of an optimizer's learning rates. Of changes in successive steps, the first."""

    optimizer: int
    """Its number."""
    step: int
    """The number of the first step with the new ones."""
    before: list[float]
    """One for each group of parameters."""
    now: list[float]


@dataclass(frozen=True)
class FileUse:
    """A file that `torch.save` has written, or `torch.load` has read."""

    is_read: bool
    path: str
    identity: list[str | int]
    """The host, the device, the inode and the path without links."""
    clocks: list[tuple[str, list[int], int]]
    """The name of each group of the rank, its ranks, and how many collectives it had started."""
    step: int
    """How many steps the optimizer with the most had made."""
    line: int
    is_part: bool = False
    """Whether parts of DTensors were written that are divided among ranks."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank has seen."""

    rank: int
    state: int
    """RUNNING if it was killed."""
    unknown: str = ""
    """Why nothing can be said of this rank; empty if that is not so."""
    lines: list[Line] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    final: dict[str, int | None] = field(default_factory=dict)
    """Fingerprints of parameters when the program had ended, by their names in optimizers."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    """The clocks of all steps of an optimizer, by its number."""
    draws: list[Draw] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    misuses: list[Misuse] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)
    files: list[FileUse] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    overwritten: list[Overwritten] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)
    """Parameters of wrapped models that had a gradient and no optimizer, at three looks at least,
    and that were the same at all of them. Written when the program has ended."""
    has_restored: bool = False
    """Whether `load_state_dict` of a module was called."""
    has_loader: bool = False
    """Whether a data loader has returned batches."""
    is_full: bool = False
    """Whether its log has no more room: what came later is not known."""
    has_all_steps: bool = True
    """Whether `steps` has all of them."""
    has_messages: bool = False
    """Whether it has sent or received: then ranks may agree otherwise than by collectives."""
    has_calls: bool = False
    """Whether it has called collectives, or sent or received."""
    races: int = 0
    """How many waits were missing on simulated GPUs: each was told when it was found."""
    has_threads: bool = False
    """Whether other threads than the main one communicate, step or run backward passes."""

    @property
    def has_events(self) -> bool:
        """Whether it tells of anything that a rule looks at, besides how it ended."""
        seen = (
            self.models, self.late, self.looks, self.final, self.steps, self.draws, self.batches,
            self.misuses, self.shares, self.files, self.samples, self.layouts, self.overwritten,
            self.rates, self.unowned,
        )  # fmt: skip
        return any(seen) or self.has_restored or self.has_loader

    def where(self, line: int) -> str:
        """A line as it is told; empty if it is not known."""
        if not 0 <= line < len(self.lines):
            return ""
        file, number, _, _ = self.lines[line]
        return f"{os.path.basename(file)}:{number}"
