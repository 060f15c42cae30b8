"""Rules on single calls (A, G, L0). Does not import torch.

G1: gloo gets dense tensors. Certain: all_reduce, broadcast or reduce of a group of several
ranks, which gloo itself carries, takes a tensor with gaps between its elements. Unknown: other
operations (gloo copies or refuses), other backends (NCCL refuses). Source: a measurement on
torch 2.14, which a test repeats.

A1: nobody writes a tensor in flight. Certain: the version of a tensor that is all of its
storage has changed between an asynchronous all_reduce, broadcast or recv on gloo and its wait.
A hint: the bits of a message that is sent have changed (the receiver may have told, in a way
that is not seen, that it has the message). Unknown: views; the work was asked
whether it is done, or for its future; the rank has waited for another call meanwhile (by which
others may have told it that they are done). Source: the documentation of asynchronous
collective operations in torch.distributed.

A3: what is started is waited for. A hint: the work of an asynchronous call was dropped.
Unknown: it was asked whether it is done, or for its future; it was kept until the program
ended. Source: as A1.

L0: the result of a call is used. Certain: the program gives all_reduce or reduce
`x.contiguous()` of its variable x, and x is not contiguous. A hint: it gives another copy of a
variable, as `x.half()` (a test of the connection may). Source: the documentation of
`torch.distributed.all_reduce`, which works in place.

G3: gradients flow through a call where they are meant to. A hint: while gradients are recorded,
all_gather or all_to_all takes a tensor of several elements that is in the graph. Unknown: the
program puts the tensor itself into its place of the result. Source: the
documentation of `torch.distributed.nn.functional`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.explain.right import (
    CERTAIN,
    COPY,
    CUT,
    GAPS,
    HINT,
    LOST,
    PROBABLE,
    UNWAITED,
    WRITTEN,
    Finding,
    RankFacts,
)

TOLD = {
    GAPS: (
        "G1-noncontig",
        "a tensor with gaps in memory is given to {operation}",
        "gloo goes through the memory as if there were no gaps, so that other elements are sent "
        "and written",
        "give it tensor.contiguous(), and copy the result back",
    ),
    WRITTEN: (
        "A1-write",
        "a tensor is written while {operation} is under way",
        "it was written after the call and before wait(): what is sent or received is a mixture",
        "write it after wait(), or give the call a copy",
    ),
    UNWAITED: (
        "A3-nowait",
        "nobody waits for {operation}",
        "the call was started with async_op=True, and its work was dropped: what it receives may "
        "come later than it is read",
        "keep the work, and call wait() before the tensor is used",
    ),
    CUT: (
        "G3-graph",
        "gradients do not flow back through {operation}",
        "the tensor is the output of layers that are trained, and the call takes its value only",
        "use torch.distributed.nn.functional, or put this rank's own tensor, which has a gradient, "
        "back into its place; call detach() if no gradient is to flow",
    ),
}
"""By the kind of misuse: the rule, what, why, and what to do."""


TOLD[LOST] = TOLD[COPY] = (
    "L0-lost",
    "the result of {operation} is lost",
    "the call is given a copy of a tensor, which nobody else has: the tensor stays as it was",
    "keep the copy in a variable, give that to the call, and use it afterwards",
)
RULES_OF_CALLS = {rule for rule, *_ in TOLD.values()}
LEVELS = {GAPS: CERTAIN, LOST: CERTAIN, WRITTEN: PROBABLE}
"""How sure it is, by the kind of misuse; of others, a hint. What `set_` gives another memory counts
as written, too."""


def find_misuses(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """G1-noncontig, G3-graph, A1-write, A3-nowait and L0-lost, of what ranks have seen."""
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for rank in facts:
        for each in rank.misuses if not rank.unknown else ():
            key = each.kind, each.operation, rank.where(each.line)
            found.setdefault(key, []).append((rank.rank, each.step))
    for (kind, operation, where), seen in found.items():
        rule, what, why, fix = TOLD[kind]
        yield Finding(
            rule=rule,
            level=LEVELS.get(kind, HINT) if operation != "isend" else HINT,
            what=what.format(operation=operation),
            ranks=tuple(sorted({rank for rank, _ in seen})),
            since=min(step for _, step in seen),
            where=where,
            why=why,
            fix=fix,
        )
