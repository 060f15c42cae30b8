"""Rules on single calls (A, G, L0, P1). Does not import torch.

G1: gloo gets dense tensors. Certain: all_reduce, broadcast or reduce of a group of several
ranks, which gloo itself carries, takes a tensor with gaps between its elements. Unknown: other
operations (gloo copies or refuses), other backends (NCCL refuses). Source: a measurement on
torch 2.14, which a test repeats.

A1: nobody writes a tensor in flight. Certain: the version of a tensor that is all of its
storage has changed between an asynchronous all_reduce, broadcast or recv on gloo and its wait.
A hint: the bits of a message that is sent have changed (the receiver may have told, in a way that
is not seen, that it has the message). Unknown: views; the work was asked whether it is done, or for
its future; the rank has waited for another call meanwhile (by which others may have told it that
they are done). Source: the documentation of asynchronous collective operations in
torch.distributed.

A3: what is started is waited for. A hint: the work of an asynchronous call was dropped.
Unknown: it was asked whether it is done, or for its future; it was kept until the program
ended. Source: as A1.

L0: the result of a call is used. Certain: the program gives all_reduce or reduce
`x.contiguous()` of its variable x, and x is not contiguous. A hint: it gives another copy of a
variable, as `x.half()` (a test of the connection may). Source: the documentation of
`torch.distributed.all_reduce`, which works in place.

G2: one call has one layout in memory on all ranks. Certain: all ranks give all_reduce,
broadcast or reduce tensors of one shape, gloo carries them, and the order of their elements in
memory differs between ranks. Unknown: a rank has not told this call (later calls with the same
layout on the same line are not told); shapes differ, as of a flat view; tensors with gaps (G1).
Source: a measurement on torch 2.14, which a test repeats.

A4: ranks call for groups that they are in. Probable: torch has warned that a rank calls a
function for a group that it is not in. (A program may rely on it that the call does nothing.)
Source: `_warn_not_in_group` in torch.distributed.distributed_c10d (torch 2.15).

P1: calls meet at one line. A hint: between two steps all ranks make the same calls of the whole
world, of the same sizes and at the same lines, equally often, and in another order. Unknown: calls
without a tensor, in a backward pass, or at lines that some ranks do not come to. Where counts or
sizes differ, the launcher tells of the deadlock or of the first difference. Source: the
documentation of `torch.distributed`, "Collective functions": all ranks call them in one order.

G3: gradients flow through a call where they are meant to. A hint: while gradients are recorded,
all_gather or all_to_all takes a tensor of several elements that is in the graph. Unknown: the
program puts the tensor itself into its place of the result. Source: the documentation of
`torch.distributed.nn.functional`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from playground.explain.right.facts import (
    CALLED,
    COPY,
    CUT,
    GAPS,
    LOST,
    OUTSIDE,
    UNWAITED,
    WRITTEN,
    Layout,
    Look,
    RankFacts,
)
from playground.explain.right.finding import HINT, PROBABLE, SURE, Finding
from playground.explain.right.replicas import find_teams

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
TOLD[OUTSIDE] = (
    "A4-outside",
    "{operation} is called for a group that the rank is not in",
    "there the call does nothing: a tensor that it is given stays as it was",
    "call it on the members of the group alone, or pass each rank the group that it is in",
)
RULES_OF_CALLS = {rule for rule, *_ in TOLD.values()} | {"G2-strides"}
"""Those that need a call, and nothing of what came before it."""
LEVELS = {GAPS: SURE, LOST: SURE, WRITTEN: PROBABLE, OUTSIDE: PROBABLE}
"""How sure it is, by the kind of misuse; of others, a hint. What `set_` gives another memory counts
as written, too."""


def find_misuses(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """G1-noncontig, G3-graph, A1-write, A3-nowait, A4-outside and L0-lost, of what ranks saw."""
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for rank in facts:
        for each in rank.misuses:
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


def find_other_layouts(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """G2-strides, above."""
    by_call: dict[tuple[object, ...], dict[int, Layout]] = {}
    for rank in facts:
        for each in rank.layouts:
            key = each.group, each.clock, each.operation, tuple(each.shape), tuple(each.ranks)
            by_call.setdefault(key, {})[rank.rank] = each
    told: set[str] = set()
    for (_, _, operation, _, ranks), seen in by_call.items():
        assert isinstance(ranks, tuple)
        if {*seen} != {*ranks} or len({tuple(each.strides) for each in seen.values()}) == 1:
            continue
        first = facts[min(ranks)]
        where = first.where(seen[first.rank].line)
        if where in told:
            continue
        told.add(where)
        forms = ", ".join(f"rank {rank}: {tuple(seen[rank].strides)}" for rank in sorted(seen))
        yield Finding(
            rule="G2-strides",
            level=SURE,
            what=f"the ranks give {operation} tensors whose elements are in another order in "
            "memory",
            ranks=tuple(sorted(seen)),
            since=min(each.step for each in seen.values()),
            where=where,
            why=f"gloo goes through the memory, whatever the strides ({forms}): elements of "
            "different places are combined",
            fix="give the call tensor.contiguous() on all ranks, and copy the result back",
        )


def find_shifted(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """P1-shift, above."""
    for team in find_teams(facts):
        if len(team.ranks) < len(facts) or team.has_threads:
            continue
        by_rank = {each.rank: each for each in team.facts}
        for looks in team.looks:
            lines = {rank: lines_of(by_rank[rank], look) for rank, look in looks.items()}
            apart = find_first_apart(lines) if are_alike(looks, lines) else None
            if apart is None:
                continue
            places = ", ".join(f"rank {rank}: {each[apart]}" for rank, each in lines.items())
            yield Finding(
                rule="P1-shift",
                level=HINT,
                what="calls at different lines of the program meet each other",
                ranks=team.ranks,
                since=min(look.step for look in looks.values()),
                where=lines[team.ranks[0]][apart],
                why="the ranks make the same calls in another order, and one call takes its "
                f"tensors from several lines ({places})",
                fix="make the calls in one order on all ranks",
            )
            return


def lines_of(rank: RankFacts, look: Look) -> list[str]:
    """The lines of the calls of the whole world since the last step, but for those in backward."""
    return [
        rank.where(each.line)
        for each in look.events
        if each.kind == CALLED and not each.flag and each.size and each.ranks > 1
    ]


def are_alike(looks: Mapping[int, Look], lines: Mapping[int, list[str]]) -> bool:
    """Whether the ranks have made the same calls, of the same sizes, at the same lines."""
    forms = {
        tuple(
            (each.subject, each.size)
            for each in look.events
            if each.kind == CALLED and not each.flag and each.size and each.ranks > 1
        )
        for look in looks.values()
    }
    calls = [each for look in looks.values() for each in look.events if each.kind == CALLED]
    return (
        all(look.is_whole for look in looks.values())
        and len(forms) == 1
        and all(each.ranks in (1, len(looks)) for each in calls)
        and len({frozenset(Counter(each).items()) for each in lines.values()}) == 1
        and not any("" in each for each in lines.values())
    )


def find_first_apart(lines: Mapping[int, list[str]]) -> int | None:
    """The number of the first call that ranks make at different lines."""
    for number, places in enumerate(zip(*lines.values(), strict=True)):
        if len({*places}) > 1:
            return number
    return None
