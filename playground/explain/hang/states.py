"""What is known of ranks at one moment: their operations and states, and the kinds of diagnosis.
Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

COLLECTIVE, SEND, RECEIVE = "collective", "send", "receive"
HOST = "host"
"""The kind of a wait of the host for its GPU: no operation of a group, and met by none."""
FORM_WORLD = "init_process_group"
NEW_GROUP, SPLIT_GROUP = "new_group", "split_group"
MAKE_DDP = "DDP's __init__"
BUFFERS = "DDP's forward"
BUCKETS = "DDP's forward (agrees on buckets)"
BACKWARD = "DDP's backward"
OF_DDP = MAKE_DDP, BUFFERS, BUCKETS, BACKWARD
BY_ITSELF = FORM_WORLD, NEW_GROUP, SPLIT_GROUP, *OF_DDP
"""Collectives that call no method of the process group: all ranks of the world meet in the first
two, the members in the third, and in the others DistributedDataParallel compares parameters,
broadcasts buffers, agrees on buckets before its second forward, and averages gradients. Each is
counted by itself."""
FORWARDS, UNUSED = "forward passes", "forward passes without a backward pass"
"""Kinds of channels by which no operation is counted: how many forward passes DDP has begun whose
gradients are to be averaged, and after how many of them it began the next one first."""
DESTROY = "destroy_process_group"
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""The names of reductions by the numbers that torch has for them."""
ISSUED, AWAITED, DONE = "issued", "awaited", "done"
"""Where an operation is: it has been called; the main thread is in the call, or waits for its
`Work`; it is over."""
STRANGERS = 2**20
"""What is added to the peer of a message that is no rank of its group: see `Operation.peer`."""
UNASKED = "what its other threads and callbacks do"
"""The unknown of a rank that is only seen from outside."""


class Channel(NamedTuple):
    """What a rank counts operations by: those of two ranks that meet have the same index in it."""

    kind: str
    """Of a message its kind, of a collective "collective", or the name of one that is counted by
    itself."""
    group: tuple[int, ...]
    """The group's ranks."""
    peer: int | None
    """Of a message."""
    tag: int
    """Of a message; else 0."""
    number: int
    """The group's."""


class Doing(StrEnum):
    """The states of a rank."""

    IN_OPERATION = "in an operation"
    """Its main thread is in an operation, or waits for one."""
    IN_PROGRAM = "in the program"
    FINISHED = "finished"
    """The program has returned."""
    STOPPED = "stopped"
    """By SIGSTOP."""
    DEAD = "dead"
    """Its process is gone."""
    NOT_SEEN = "not seen"
    """No state of it is given, as of one on another host."""


class Kind(StrEnum):
    """Why ranks wait, or what they called differently, in the order of weight: the first that
    explains it is told."""

    cure: str
    """The cure, in one line."""

    def __new__(cls, name: str, cure: str) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.cure = cure
        return kind

    STRANGER = (
        "a rank that does not exist",
        "name a rank of the group: in a ring, the next one is (rank + 1) % size",
    )
    IN_FINALLY = (
        "a collective in `finally`",
        "call collectives after success only: the others do not know that this rank failed",
    )
    WRONG_TAG = (
        "wrong tag",
        "use the same tag for a send and its receive, in the same order on both ranks",
    )
    BESIDE_DDP = (
        "a collective that meets DDP's",
        "give all ranks equal numbers of batches, or `with model.join():`; let them decide alike "
        "to leave a loop",
    )
    ALONE = (
        "a model that some ranks call alone",
        "evaluate model.module, which calls no collective, or call the model on all ranks",
    )
    SKIPPED = (
        "a step that not all ranks take",
        "call forward, backward and no_sync() equally often on all ranks, in the same order",
    )
    MODELS = "different models", "make and call the same models in the same order on all ranks"
    COLLECTIVES = (
        "different collectives",
        "call the same collectives in the same order on all ranks of the group",
    )
    ROOTS = "different roots", "pass the same root on all ranks of the group"
    OPS = "different reductions", "pass the same op on all ranks of the group"
    SHAPES = "different shapes", "pass tensors of the same shape on all ranks of the group"
    DTYPES = "different dtypes", "pass tensors of the same dtype on all ranks"
    SIZES = "different sizes", "receive into a tensor of the size and dtype that is sent"
    GROUPS = "different groups", "pass the same group on all ranks that have to meet"
    WRONG_PEER = (
        "wrong peer",
        "let the receiver name the rank that sends, and the sender the rank that receives",
    )
    PARTIAL_GROUP = (
        "a group not made by all",
        "call new_group on all ranks of the world, in the same order",
    )
    TOO_FEW = (
        "a world of more ranks than there are",
        "pass no world_size and no rank: WORLD_SIZE and RANK are set, and torch reads them",
    )
    STORES = (
        "different stores",
        "give all ranks the same MASTER_ADDR and MASTER_PORT, or the same init_method",
    )
    UNFORMED = "a world not formed by all", "call init_process_group on all ranks"
    SENDS = (
        "send against send",
        "let one of two ranks receive first, or use isend or batch_isend_irecv",
    )
    RECEIVES = (
        "receive against receive",
        "let one of two ranks send first, or use irecv or batch_isend_irecv",
    )
    UNWAITED = (
        "a send that nobody waits for",
        "keep the Work that isend returns, and call its wait(): without it nothing may be sent",
    )
    OPEN = (
        "a batch without an end",
        "end the batch: leave the block of _coalescing_manager, or use batch_isend_irecv",
    )
    UNWAITED_RECEIVE = (
        "a receive that nobody waits for",
        "keep the Work that irecv returns, and call its wait() before the next receive",
    )
    ENDED = (
        "a rank that has finished",
        "make the same number of calls on all ranks: let them decide alike to leave a loop (early "
        "stop); where DDP has unequal batches, `with model.join():` fills the calls in",
    )
    ABSENT = (
        "a rank that does not take part",
        "call collectives on all ranks of their group, and each send with its receive",
    )
    CIRCLE = (
        "circular wait",
        "order the messages so that ranks do not wait for each other in a circle, or use isend",
    )
    LOST = "dead", "find out why that rank ended: the others wait for it in vain"
    SUSPENDED = "stopped", "continue that process (kill -CONT PID), or end the run"
    STRAGGLER = "straggler", "look at what that rank does there: the others wait for it"
    UNSEEN = "a rank that is not seen", "look at the output on the host of that rank"
    ABORTED = (
        "a call that the backend has aborted",
        "make its tensors the same size on all ranks, and for DDP use the same parameters",
    )
    RUNNING = "in progress", "wait, or look at the network: all ranks have called it"


class Gpu(IntEnum):
    """What carries out the operations of a rank besides its host. A real NCCL may take a message
    before its receiver has come, and calls that do not match may end with wrong values: there no
    deadlock is proved by either. The simulated one waits for ever."""

    NONE, REAL, SIMULATED = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of one rank."""

    kind: str
    name: str
    """As torch.distributed calls it: all_reduce, send, isend is send, recv, …"""
    index: int
    """Its place among the rank's operations of the same channel, from 0 on: operations with the
    same place meet."""
    group: tuple[int, ...]
    """Ranks of the world that take part, in the group's order."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """As torch prints it, without "torch.": float32. Of an init_process_group that does not ask for
    the world that was launched: where it looks for the others."""
    peer: int | None = None
    """Rank in the world: the receiver, the sender (None: anyone), or the root of a collective that
    has one. If the group has no such rank: the number that was passed, and `STRANGERS`."""
    tag: int = 0
    """Of a message. Of what DistributedDataParallel does, which of the group's models it is, from 1
    on; 0 if it is not known. On a GPU, of another collective the number of its reduction."""
    number: int = 0
    """The group's, as torch counts groups: the world's is 0, and groups of the same ranks differ by
    it."""
    members: tuple[int, ...] = ()
    """The ranks of the group that new_group makes, ascending: only they wait in it. Empty: all."""
    line: str = ""
    """Where the program calls it: "train.py:12 in step"."""
    state: str = DONE
    issued: float = 0.0
    done: float = 0.0
    """Seconds on the host's monotonic clock; `done` is 0 while it is not."""
    may_give_up: bool = False
    """Whether it has a time limit of its own, after which the program may go on."""
    raised: str = ""
    """The class of the exception below whose `finally` or `except` it is called."""
    call: int = 0
    """Its place among all operations of the rank."""
    batch: int | None = None
    """Of an operation that a stream of a GPU carries out: the `call` of the first one of its batch,
    which end together, most often its own. The host goes on meanwhile."""
    is_open: bool = False
    """Whether the batch has no end yet, so that none of it has begun."""
    behind: tuple[int, ...] = ()
    """The batches that must end before it begins, or of a wait of the host, before that ends: those
    that are known."""

    @property
    def stranger(self) -> int | None:
        """The number of its peer, if the group has no such rank."""
        is_one = self.kind != COLLECTIVE and self.peer is not None and self.peer > STRANGERS // 2
        return (self.peer or 0) - STRANGERS if is_one else None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it forms another world than was launched: processes may join that from
        elsewhere."""
        return self.name == FORM_WORLD and bool(self.dtype)

    @property
    def channel(self) -> Channel:
        return channel_of(self.kind, self.name, self.group, self.peer, self.tag, self.number)


def channel_of(
    kind: str, name: str, group: tuple[int, ...], peer: int | None, tag: int, number: int
) -> Channel:
    """The channel by which an operation is counted."""
    if kind == COLLECTIVE:
        return Channel(name if name in BY_ITSELF else COLLECTIVE, group, None, 0, number)
    return Channel(kind, group, peer, tag, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank at one moment."""

    rank: int
    doing: Doing
    operations: tuple[Operation, ...] = ()
    """The latest ones, in the order in which they were called."""
    waits_for: Operation | None = None
    """The operation that its main thread is in, with `Doing.IN_OPERATION`."""
    counts: Mapping[Channel, int] = field(default_factory=dict)
    """How many operations it has called so far, by channel. Complete, unlike `operations`."""
    line: str = ""
    """Where the program stands, if known."""
    stack: tuple[str, ...] = ()
    """The program's lines on its stack, the innermost first, if they are known."""
    called: str = ""
    """The function of torch that the program has called there, if that is known:
    "get_model_state_dict"."""
    worker: str = ""
    """Whom it waits for there, if that is a worker of its DataLoader."""
    worker_line: str = ""
    """Where that worker stands, if known."""
    since: float = 0.0
    """Seconds since its last progress: since the operation it is in was called, or the last one was
    over, or since its world began. 0 if that is not known."""
    may_act: str = ""
    """What, besides its main thread, may still call operations, or is not known of it: "what thread
    Thread-1 does"."""
    unnamed: str = ""
    """What it has called that is not among its operations: their counts tell nothing of it then."""
    moves: bool = False
    """Whether data is under way to or from it, or may be."""
    gpu: Gpu = Gpu.NONE
    unlaunched: tuple[Operation, ...] = ()
    """Operations on a GPU in a batch that has no end."""
    worlds: int = 0
    """How many worlds the program has formed itself: operations name ranks by their numbers in the
    latest."""
    is_renumbered: bool = False
    """Whether its number there is not the launcher's."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """How many batches a DataLoader has that the program goes through, by the line of the loop, of
    lines where that is always the same."""
    error: str = ""
    """The exception below whose `finally` or `except` it is in an operation: "ValueError: no
    (train.py:12)"."""
    traceback: str = ""
    """That of the exception, in lines."""
    end: str = ""
    """How it ended, if it is dead: "was killed by SIGKILL"; what it raised, if it has failed."""

    def find_caller(self, one: Operation) -> str:
        """The function of torch in which the program has come to its collective, if it stands
        there, and that function has another name: "get_model_state_dict" of an all_gather."""
        is_there = self.stack[:1] == (one.line,) and self.called != one.name
        return self.called if is_there and one.kind == COLLECTIVE and one.name not in OF_DDP else ""
