"""Rules on single calls (A, G). Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.explain.right import GAPS, WRITTEN, Finding, RankFacts

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
}
"""By the kind of misuse: the rule, what, why, and what to do."""


def find_misuses(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """G1-noncontig and A1-write: what a rank has seen of its own calls.

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
    """
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for rank in facts:
        for each in rank.misuses if not rank.unknown else ():
            key = each.kind, each.operation, rank.where(each.line)
            found.setdefault(key, []).append((rank.rank, each.step))
    for (kind, operation, where), seen in found.items():
        rule, what, why, fix = TOLD[kind]
        yield Finding(
            rule=rule,
            is_certain=operation != "isend",
            what=what.format(operation=operation),
            ranks=tuple(sorted({rank for rank, _ in seen})),
            since=min(step for _, step in seen),
            where=where,
            why=why,
            fix=fix,
        )
