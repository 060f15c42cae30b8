"""Rules on optimizers: whether they have the parameters that get gradients, and whether averages of
DistributedDataParallel are summed again (O1, M11). Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from playground.explain.right.facts import BACKWARD, CALLED, Look, RankFacts
from playground.explain.right.finding import HINT, PROBABLE, Finding
from playground.explain.right.log import ENDED, LEAST_LOOKS, NO_GRADIENT
from playground.explain.right.replicas import ROUNDING, find_teams


def find_untrained(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """O1-nograd: the optimizer has the parameters that get gradients.

    Probable: in all steps that were looked at, no parameter of an optimizer of torch's has a
    gradient, although one requires it, and backward passes came before three steps at least, and
    before each of those whose events are known whole; the first step at which one has is looked at,
    whatever its number. (Their loss may come later than the last step.) A hint: the program has not
    ended. Unknown: they have gradients on another rank; a step calls a closure; the optimizer is
    not torch's (it may find gradients elsewhere). Source: the documentation of
    `torch.optim.Optimizer`, which steps with the gradients of the parameters that it was given.
    """
    found: dict[tuple[str, str], list[tuple[RankFacts, Look]]] = {}
    trained = {
        (look.optimizer.kind, rank.where(look.line))
        for rank in facts
        for look in rank.looks
        if any(each != NO_GRADIENT for each in look.gradients)
    }
    for rank in facts:
        for looks in looks_by_optimizer(rank).values():
            whole = [look for look in looks if look.is_whole]
            if len(whole) < LEAST_LOOKS or not all(map(follows_backward, whole)):
                continue
            if not all(map(is_without_gradients, looks)):
                continue
            key = looks[0].optimizer.kind, rank.where(looks[0].line)
            if key not in trained:
                found.setdefault(key, []).append((rank, looks[0]))
    for (kind, where), seen in found.items():
        name = kind.rpartition(".")[2]
        yield Finding(
            rule="O1-nograd",
            level=PROBABLE if all(rank.state == ENDED for rank, _ in seen) else HINT,
            what=f"{name} steps, and none of its parameters has a gradient at any step",
            ranks=tuple(rank.rank for rank, _ in seen),
            since=min(look.step for _, look in seen),
            where=where,
            why="backward passes give gradients to other parameters than the optimizer was made "
            "of: those of another model, or those that a wrapper has replaced since",
            fix="make the optimizer of the parameters of the model that is trained, after it was "
            "copied, moved or sharded",
        )


def looks_by_optimizer(rank: RankFacts) -> Mapping[int, list[Look]]:
    found: dict[int, list[Look]] = {}
    for look in rank.looks:
        found.setdefault(look.optimizer.number, []).append(look)
    return found


def is_without_gradients(look: Look) -> bool:
    return (
        look.optimizer.kind.startswith("torch.optim.")
        and look.trains
        and not look.has_closure
        and not look.in_backward
        and all(each == NO_GRADIENT for each in look.gradients)
        and look.before == look.after
    )


def follows_backward(look: Look) -> bool:
    return any(each.kind == BACKWARD for each in look.events)


def find_twice(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """M11-twice: the averages of DistributedDataParallel are not summed again.

    Probable: in two steps the gradients of a wrapped model are equal on all ranks at the end of
    backward, a call takes them then, and the step uses their sum, as two of their elements tell.
    (A loss that is divided by a number of all ranks needs the sum.) Unknown: the sum is divided
    again, which is a call for nothing. Source: the documentation of
    `torch.nn.parallel.DistributedDataParallel`: backward leaves the average.
    """
    for team in find_teams(facts):
        found = [
            place
            for place in team.wrapped
            if sum(is_summed_again(looks, place) for looks in team.looks) >= 2
        ]
        if not found:
            continue
        calls = [
            each for look in team.all_looks for each in look.events
            if each.kind == CALLED and found[0] in each.gradients
        ]  # fmt: skip
        yield Finding(
            rule="M11-twice",
            level=PROBABLE,
            what=f"gradients that DistributedDataParallel has averaged are summed over the "
            f"{len(team.ranks)} ranks again",
            ranks=team.ranks,
            since=team.since,
            where=team.facts[0].where(calls[0].line),
            why="the step uses the sum of averages that are equal on all ranks: as if the learning "
            f"rate were {len(team.ranks)} times as large",
            fix="leave this call out: backward() leaves the average in param.grad",
        )


def is_summed_again(looks: Mapping[int, Look], place: int) -> bool:
    """Whether a step of all ranks uses the sum of their gradients, which are equal."""
    if any(len(look.raw) <= place or len(look.raw_values) <= place for look in looks.values()):
        return False
    are_equal = len({look.raw[place] for look in looks.values()}) == 1
    are_taken = all(
        any(each.kind == CALLED and place in each.gradients for each in look.events)
        for look in looks.values()
    )
    return (
        are_equal
        and are_taken
        and all(
            any(look.raw_values[place])
            and all(
                abs(used - len(looks) * raw) <= ROUNDING * abs(used)
                for used, raw in zip(
                    look.gradient_values[place], look.raw_values[place], strict=True
                )
            )
            for look in looks.values()
        )
    )


def find_unowned(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """O2-unowned: the parameters that get gradients have an optimizer.

    A hint: when the program has ended on all ranks, parameters of a wrapped model had gradients at
    the end of all backward passes that were looked at, and of three at least, stayed what they
    were, and no optimizer that has made a step has them on any rank, while one of torch's has
    others of the model. (An optimizer of theirs may step later.) Unknown: no optimizer has a
    parameter of the model. Source: as for O1-nograd.
    """
    if any(each.unknown or each.state != ENDED for each in facts):
        return
    owned = {
        name: look
        for rank in facts
        for look in rank.looks
        if look.optimizer.kind.startswith("torch.optim.")
        for name in look.optimizer.parameters
    }
    others = {name for rank in facts for look in rank.looks for name in look.optimizer.parameters}
    for model in facts[0].models if facts else []:
        names = {f"{model.key}/{name}": name for name in model.names}
        found = [
            short for name, short in names.items()
            if name not in others
            and all(name in facts[rank].unowned for rank in model.ranks if rank < len(facts))
        ]  # fmt: skip
        if not found or not any(name in owned for name in names):
            continue
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield Finding(
            rule="O2-unowned",
            level=HINT,
            what=f"{', '.join(found[:3])}{more} of the model that DistributedDataParallel wraps "
            "get gradients, and no optimizer has them",
            ranks=tuple(model.ranks),
            since=0,
            where=facts[0].where(next(owned[name] for name in names if name in owned).line),
            why="the optimizer was made of other parameters of the model: these gradients are "
            "computed and averaged for nothing",
            fix="give these parameters to the optimizer, too, or set their requires_grad to False "
            "before the model is wrapped",
        )
