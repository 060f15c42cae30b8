"""Rules on gradients that a program averages by hand (M, and K on their order). Does not import
torch.

They look at optimizers whose parameters are in no wrapped model and are no DTensors. Source of all:
"Distributed Training" in the tutorial "Writing Distributed Applications with PyTorch", which
averages the gradient of each parameter between backward and step.

Unknown for all rules: the optimizers of the ranks have other parameters (stages, other models); the
world does not step together; fewer than two steps were looked at by all ranks; a step calls a
closure; another thread than the main one communicates; a call takes gradients in a group that is
smaller than the world (they are averaged in parts, mostly on purpose). Which gradient a call takes
is known from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from playground.explain.right import BACKWARD, CALLED, NO_GRADIENT, Event, Finding, Look, RankFacts
from playground.explain.right.replicas import Replica, Team, find_teams

EXCHANGES = {"send", "recv", "isend", "irecv", "all_to_all", "all_to_all_single"}
"""Operations by which ranks exchange activations: then parameters may be shards or stages."""


@dataclass(frozen=True)
class Averaging:
    """What becomes of the parameters and gradients of an optimizer, on all its ranks."""

    team: Team
    replicas: list[Replica]

    @property
    def looks(self) -> Sequence[Mapping[int, Look]]:
        return self.team.looks

    @cached_property
    def events(self) -> list[Event]:
        """Those that all ranks have seen."""
        return [event for look in self.team.all_looks for event in look.events]

    @cached_property
    def calls(self) -> list[Event]:
        """The calls that take gradients or parameters of the optimizer."""
        return [
            each for each in self.events
            if each.kind == CALLED and (each.gradients or each.parameters)
        ]  # fmt: skip

    @property
    def exchanges(self) -> bool:
        return any(each.kind == CALLED and each.subject in EXCHANGES for each in self.events)

    def gradients(self, replica: Replica) -> list[bool | None]:
        """Whether its gradients were equal, at each look; None if that is unknown."""
        return [
            None
            if NO_GRADIENT in (look.gradients[replica.place] for look in looks.values())
            else replica.have_equal_gradients(looks)
            for looks in self.looks
        ]

    def are_averaged(self, replica: Replica) -> bool:
        return all(self.gradients(replica))

    def are_own(self, replica: Replica) -> bool:
        """Whether its gradients differ at each look, by more than rounding for all that is seen."""
        return all(equal is False for equal in self.gradients(replica))

    def is_witnessed(self, replica: Replica) -> bool:
        """Whether it was seen that the ranks have averaged its gradients: a call took them, or they
        differed at the end of backward and were equal before the step."""
        place = replica.place
        if any(place in call.gradients for call in self.calls):
            return True
        return any(
            len({look.raw[place] for look in looks.values()} - {None}) > 1
            for looks in self.looks
            if all(len(look.raw) > place for look in looks.values())
        )

    @property
    def names(self) -> dict[str, str]:
        """How parameters are told."""
        sizes = self.team.first.optimizer.sizes
        return {each.name: f"{each.place} ({sizes[each.place]} elements)" for each in self.replicas}

    def where(self, event: Event) -> str:
        return self.team.facts[0].where(event.line)

    def finding(
        self, rule: str, replicas: Sequence[Replica], what: str, where: str, why: str, fix: str,
        is_certain: bool = True,
    ) -> Finding:  # fmt: skip
        told = [self.names[each.name] for each in replicas]
        kind = self.team.first.optimizer.kind.rpartition(".")[2]
        more = f" and {len(told) - 3} more" * (len(told) > 3)
        since = min((each.sights[each.drift or 0].step for each in replicas), default=0)
        return Finding(
            rule, is_certain, f"{what}: parameters {', '.join(told[:3])}{more} of {kind}",
            self.team.ranks, since, where, why, fix,
        )  # fmt: skip


def is_apart(replica: Replica) -> bool:
    """Whether the replicas differ whenever they are looked at, to the end."""
    return bool(replica.sights) and not any(sight.are_equal for sight in replica.sights)


def is_drifting(replica: Replica) -> bool:
    """Whether they were equal at the first look, differ later, and are never equal again."""
    return bool(replica.drift)


def find_start(seen: Averaging) -> Finding | None:
    """M1-start: replicas whose gradients are averaged start equal.

    Certain: gradients are equal on all ranks before each step, and were seen to be averaged; the
    parameters differ from the first look to the end. Unknown: another parameter of the optimizer
    has gradients of its own on each rank, as in tensor parallelism; nothing was seen to average
    them; another call may average parameters, which brings replicas closer that are never equal.
    """
    apart = [
        each for each in seen.replicas
        if is_apart(each) and seen.are_averaged(each) and seen.is_witnessed(each)
    ]  # fmt: skip
    if not apart or seen.exchanges or may_average_parameters(seen):
        return None
    if any(not all(seen.gradients(each)) for each in seen.replicas):
        return None
    calls = [call for call in seen.calls if call.gradients]
    return seen.finding(
        "M1-start", apart, "the replicas of a model differ from the start",
        seen.where(calls[0]) if calls else seen.team.facts[0].where(seen.team.first.line),
        "the gradients are averaged, and the parameters were never equal: each rank began with "
        "others",
        "broadcast the parameters of rank 0 before the first step, or seed all ranks alike before "
        "the model is made",
    )  # fmt: skip


def may_average_parameters(seen: Averaging) -> bool:
    """Whether, after the first step, a call takes no gradient and is as large as a parameter. If no
    call takes a gradient itself, one between backward and step may take them in a buffer."""
    largest = max(seen.team.first.optimizer.sizes)
    takes_gradients = any(call.gradients for call in seen.calls)
    return any(
        event.kind == CALLED and not event.gradients and event.size >= largest
        for look in seen.team.all_looks
        if look.step
        for event in (look.events if takes_gradients else takewhile_not_backward(look))
    )


def find_after(seen: Averaging) -> Finding | None:
    """M2-after: gradients are averaged between backward and step.

    A hint: gradients differ on the ranks before each step; the calls that take them all come before
    the first backward since the last step; the parameters were equal and drift. An ensemble that
    adds up gradients after the step, to measure them, does so on purpose.
    """
    late = {
        place
        for look in seen.team.all_looks
        for event in takewhile_not_backward(look)
        for place in event.gradients
    }
    between = {
        place
        for look in seen.team.all_looks
        for event in look.events[len(takewhile_not_backward(look)) :]
        for place in event.gradients
    }
    found = [
        each for each in seen.replicas
        if each.place in late - between and is_drifting(each) and seen.are_own(each)
    ]  # fmt: skip
    if not found or seen.exchanges:
        return None
    [first, *_] = (
        event for look in seen.team.all_looks for event in takewhile_not_backward(look)
        if event.gradients
    )  # fmt: skip
    return seen.finding(
        "M2-after", found, "the replicas of a model drift apart", seen.where(first),
        "the gradients are reduced after the step that uses them",
        "reduce them between backward() and step()", is_certain=False,
    )  # fmt: skip


def takewhile_not_backward(look: Look) -> list[Event]:
    """The events between the last step and the first backward pass after it."""
    kinds = [each.kind for each in look.events]
    return look.events[: kinds.index(BACKWARD) if BACKWARD in kinds else 0]


def find_parameter(seen: Averaging) -> Finding | None:
    """M3-parameter: what is reduced in backward is the gradient, not the parameter.

    A hint: in two steps an all_reduce in backward took the parameter and none its gradient, the
    step is not in backward, the gradients differ, and the parameters differ at the end.
    Decentralized SGD does so on purpose. Unknown: the step runs in backward, too; the parameters
    are equal at the end.
    """
    if any(look.in_backward for looks in seen.looks for look in looks.values()):
        return None
    taken = [
        {
            place
            for event in look.events
            if event.kind == CALLED and event.flag and event.subject == "all_reduce"
            for place in event.parameters
        }
        for looks in seen.looks
        for look in looks.values()
    ]
    found = [
        each for each in seen.replicas
        if sum(each.place in places for places in taken) >= 2 * len(seen.team.ranks)
        and not any(each.place in call.gradients for call in seen.calls)
        and each.sights and not each.sights[-1].are_equal
        and any(equal is False for equal in seen.gradients(each))
    ]  # fmt: skip
    if not found or seen.exchanges:
        return None
    first = next(call for call in seen.calls if found[0].place in call.parameters)
    return seen.finding(
        "M3-parameter", found, "parameters are reduced where their gradients are meant",
        seen.where(first),
        "all_reduce within backward() takes the parameter: a hook of "
        "register_post_accumulate_grad_hook is given the parameter, not its gradient",
        "reduce param.grad in the hook",
        is_certain=False,
    )  # fmt: skip


def find_reduce(seen: Averaging) -> Finding | None:
    """M6-reduce: all ranks that step have the reduced gradient.

    Certain: `reduce` takes the gradients, and no other operation does; all ranks step, and the
    parameters were equal and drift. Unknown: only the destination steps, as a parameter server.
    """
    found = [
        each for each in seen.replicas
        if is_drifting(each)
        and {call.subject for call in seen.calls if each.place in call.gradients} == {"reduce"}
        and not any(each.place in call.parameters for call in seen.calls)
        and not any(seen.gradients(each)[1:])
    ]  # fmt: skip
    if not found or seen.exchanges:
        return None
    first = next(call for call in seen.calls if found[0].place in call.gradients)
    return seen.finding(
        "M6-reduce", found, "the replicas of a model drift apart", seen.where(first),
        "reduce gives the sum of the gradients to one rank, and all ranks step",
        "use all_reduce",
    )  # fmt: skip


def find_part(seen: Averaging) -> Finding | None:
    """M4-partial: all parameters of an optimizer are averaged, or none.

    A hint: the gradients of some are averaged by a call that was seen, those of others differ at
    each look, and these were equal and drift. Personal heads look the same. Unknown: ranks exchange
    activations (then they may be shards or experts).
    """
    own = [each for each in seen.replicas if is_drifting(each) and seen.are_own(each)]
    averaged = [
        each for each in seen.replicas if seen.are_averaged(each) and seen.is_witnessed(each)
    ]
    if not own or not averaged or seen.exchanges:
        return None
    calls = [call for call in seen.calls if call.gradients]
    return seen.finding(
        "M4-partial", own, "the replicas of a part of a model drift apart",
        seen.where(calls[-1]) if calls else "",
        "gradients of other parameters of the optimizer are averaged, and theirs are not",
        "average the gradients of all parameters, unless each rank is to have a part of its own",
        is_certain=False,
    )  # fmt: skip


def find_skip(seen: Averaging) -> Finding | None:
    """M5-skip: all ranks make a step between the same two collectives, or none does.

    Certain: the numbers of steps differ, and parameters whose gradients are averaged were equal
    before, and drift from there on.
    """
    skip = seen.team.find_skip()
    if skip is None:
        return None
    clock, made = skip
    found = []
    for each in seen.replicas:
        if is_drifting(each) and seen.are_averaged(each) and seen.is_witnessed(each):
            assert each.drift is not None
            last = each.sights[each.drift - 1].looks.values()
            if max((look.clock for look in last), default=-1) <= clock:
                found.append(each)
    if not found or seen.exchanges:
        return None
    fewest = [rank for rank, count in made.items() if count == min(made.values())]
    return seen.finding(
        "M5-skip", found, "the replicas of a model drift apart",
        seen.team.facts[0].where(seen.team.first.line),
        f"rank {fewest[0]} left out a step of the optimizer that others made",
        "let all ranks decide alike whether to make a step: all_reduce what the decision depends "
        "on",
    )  # fmt: skip


def find_order(seen: Averaging) -> Finding | None:
    """K1-order: one collective reduces the same parameter on all ranks.

    Certain: in two steps the calls that take one gradient each are as many on all ranks, of the
    same operations and sizes, and a call takes another parameter's gradient on some rank.
    Unknown: the gradients lie in flat buffers.
    """
    wrong: list[Event] = []
    exchanged: set[int] = set()
    for looks in seen.looks:
        orders = [
            [each for each in look.events if each.kind == CALLED and len(each.gradients) == 1]
            for look in looks.values()
        ]
        forms = {tuple((each.subject, each.size) for each in order) for order in orders}
        places = {tuple(each.gradients[0] for each in order) for order in orders}
        sets = {frozenset(each) for each in places}
        are_known = all(look.is_whole for look in looks.values())
        if are_known and len(forms) == len(sets) == 1 < len(places):
            wrong.append(orders[0][0])
            calls = zip(*places, strict=True)
            exchanged |= {place for each in calls if len({*each}) > 1 for place in each}
    if len(wrong) < 2 or seen.exchanges:
        return None
    return seen.finding(
        "K1-order", [seen.replicas[place] for place in sorted(exchanged)],
        "ranks give the gradients of different parameters to the same call",
        seen.where(wrong[0]),
        "calls meet in the order in which they are made, and the ranks go through the parameters "
        "in another order",
        "go through the parameters in the same order on all ranks: a set has none",
    )  # fmt: skip


RULES: Sequence[Callable[[Averaging], Finding | None]] = (
    find_start, find_after, find_parameter, find_reduce, find_part, find_skip, find_order,
)  # fmt: skip


def find_averaging(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """What is wrong where a program averages by hand: of each optimizer the first that is found."""
    for team in find_teams(facts):
        wrapped = {model.key for each in team.facts for model in each.models}
        names = team.first.optimizer.parameters
        if len(team.ranks) < len(facts) or len(team.looks) < 2 or team.has_threads:
            continue
        if any(name.rpartition("/")[0] in wrapped for name in names):
            continue
        seen = Averaging(team, [team.replica(name) for name in names])
        if any(look.has_closure for look in team.all_looks):
            continue
        if any(call.ranks < len(team.ranks) for call in seen.calls):
            continue
        found = (finding for rule in RULES if (finding := rule(seen)))
        yield from [finding for finding in [next(found, None)] if finding]
