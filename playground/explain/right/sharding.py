"""Rules on parameters that are DTensors (X, F3). Does not import torch.

Source of all: the documentation of `torch.distributed.tensor`, whose placements say which ranks
hold the same, and of `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.explain.right.facts import CALLED, Look, RankFacts
from playground.explain.right.finding import HINT, PROBABLE, Finding
from playground.explain.right.log import ENDED, LEAST_COMPARED
from playground.explain.right.replicas import find_teams


def find_replicas_apart(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """X1-replicate: ranks that hold the same part of a DTensor hold the same values.

    Probable: at each step that all of them have looked at, from their first step on and two at
    least, the parts differ and their gradients are equal: they are averaged. Steps are compared by
    their number. Unknown: partial sums, a rank without a log, tensors that cannot be read.
    """
    known = {each.rank: each for each in facts if not each.unknown}
    found: dict[str, tuple[set[int], set[int]]] = {}
    for rank in known.values():
        for optimizer in {look.optimizer.number: look.optimizer for look in rank.looks}.values():
            for place, shard in enumerate(optimizer.shards):
                _, holders = shard or (False, [])
                if len(holders) < 2 or not {*holders} <= known.keys():
                    continue
                if differ_always([looks_of(known[it], optimizer.number) for it in holders], place):
                    places, ranks = found.setdefault(optimizer.kind, (set(), set()))
                    places.add(place)
                    ranks |= {*holders}
    for kind, (places, ranks) in found.items():
        first = known[min(ranks)]
        look = next(look for look in first.looks if look.optimizer.kind == kind)
        yield Finding(
            rule="X1-replicate",
            level=PROBABLE,
            what=f"replicas differ from the start: parts of {len(places)} parameters of "
            f"{kind.rpartition('.')[2]}",
            ranks=tuple(sorted(ranks)),
            since=0,
            where=first.where(look.line),
            why="the mesh says that ranks hold the same part, their gradients are averaged, and "
            "the values were never equal: each rank began with others",
            fix="seed all ranks alike before the model is made, or broadcast its parameters "
            "before it is sharded",
        )


def looks_of(rank: RankFacts, optimizer: int) -> dict[int, Look]:
    """The looks at an optimizer, by the step's number."""
    return {look.step: look for look in rank.looks if look.optimizer.number == optimizer}


def differ_always(ranks: Sequence[dict[int, Look]], place: int) -> bool:
    """Whether the ranks' parts of a parameter differ at each common step, and its gradients never
    do."""
    steps = sorted(set.intersection(*({*each} for each in ranks)))
    if len(steps) < LEAST_COMPARED or steps[0]:
        return False
    for step in steps:
        looks = [each[step] for each in ranks]
        if any(len(look.shards) <= place for look in looks):
            return False
        values = {look.shards[place] for look in looks}
        gradients = {look.gradients_of_shards[place] for look in looks}
        if None in values or None in gradients or len(values) == 1 or len(gradients) > 1:
            return False
    return True


def find_plain(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """X2-plain: all parameters of an optimizer are divided among ranks, or none.

    A hint: beside parameters that are divided there are plain ones, which were equal, and drift;
    their gradients differ at each look, and no call takes them. Unknown: parameters of wrapped
    models. Tensor parallelism has plain parameters with equal gradients, and with part sums that a
    call takes.
    """
    for team in find_teams(facts):
        optimizer = team.first.optimizer
        is_sharded = any(is_part for is_part, _ in filter(None, optimizer.shards))
        if not is_sharded or team.wrapped:
            continue
        taken = {
            place
            for look in team.all_looks
            for event in look.events
            if event.kind == CALLED
            for place in (*event.gradients, *event.parameters)
        }
        drifting = []
        for place, (name, shard) in enumerate(
            zip(optimizer.parameters, optimizer.shards, strict=True)
        ):
            replica = team.replica(name)
            gradients = [replica.have_equal_gradients(looks) for looks in replica.looks]
            if shard is None and place not in taken and replica.drift and not any(gradients):
                drifting.append(place)
        if drifting:
            told = ", ".join(f"{place} ({optimizer.sizes[place]} elements)" for place in drifting)
            yield Finding(
                rule="X2-plain",
                level=HINT,
                what=f"replicas drift apart: parameters {told} of "
                f"{optimizer.kind.rpartition('.')[2]}",
                ranks=team.ranks,
                since=team.since,
                where=team.facts[0].where(team.first.line),
                why="they are in no part of the model that is sharded, and nothing averages their "
                "gradients",
                fix="call fully_shard on the whole model, too, after its blocks",
            )


def find_saved_part(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """F3-shard: a file has all of the model.

    A hint: when the program has ended, one rank alone has saved parts of DTensors. Unknown: not all
    ranks have ended (others may save their parts).
    """
    saved = [(each, use) for each in facts for use in each.files if use.is_part and not use.is_read]
    ranks = {each.rank for each, _ in saved}
    if len(ranks) != 1 or len(facts) == 1:
        return
    if any(each.unknown or each.state != ENDED for each in facts):
        return
    rank, use = saved[0]
    yield Finding(
        rule="F3-shard",
        level=HINT,
        what=f"{use.path} has a part of the model",
        ranks=(rank.rank,),
        since=use.step,
        where=rank.where(use.line),
        why="its tensors are divided among ranks, and this rank alone has saved what it holds",
        fix="save with torch.distributed.checkpoint on all ranks, or gather the whole state first: "
        "get_model_state_dict with full_state_dict=True",
    )
