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

from playground.explain.right.facts import BACKWARD, CALLED, Event, Look, RankFacts
from playground.explain.right.finding import HINT, PROBABLE, SURE, Finding, Level
from playground.explain.right.log import FIRST_STEPS, NO_GRADIENT
from playground.explain.right.replicas import ROUNDING, Replica, Team, find_teams

EXCHANGES = {"send", "recv", "isend", "irecv", "all_to_all", "all_to_all_single"}
"""Operations by which ranks exchange activations: then parameters may be shards or stages."""
SHARING = {"all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather"}
"""Operations by which ranks share what they measure."""


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
        self,
        rule: str,
        replicas: Sequence[Replica],
        *,
        what: str,
        where: str,
        why: str,
        fix: str,
        level: Level = SURE,
    ) -> Finding:
        """A finding on these replicas: it names the first of them, and since when they differ."""
        told = [self.names[each.name] for each in replicas]
        kind = self.team.first.optimizer.kind.rpartition(".")[2]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        since = min((each.sights[each.drift or 0].step for each in replicas), default=0)
        return Finding(
            rule=rule,
            level=level,
            what=f"{what}: parameters {', '.join(told[:3])}{more} of {kind}",
            ranks=self.team.ranks,
            since=since,
            where=where,
            why=why,
            fix=fix,
        )


def is_apart(replica: Replica) -> bool:
    """Whether the replicas differ whenever they are looked at, to the end."""
    return bool(replica.sights) and not any(sight.are_equal for sight in replica.sights)


def is_drifting(replica: Replica) -> bool:
    """Whether they were equal at the first look, differ later, and are never equal again."""
    return bool(replica.drift)


def find_start(seen: Averaging) -> Finding | None:
    """M1-start: replicas whose gradients are averaged start equal.

    Probable: gradients are equal on all ranks before each step, and were seen to be averaged; the
    parameters differ from the first look to the end. (Each rank may add noise of its own to one
    model.) Unknown: another parameter of the optimizer has gradients of its own on each rank, as in
    tensor parallelism; nothing was seen to average them; another call may average parameters, which
    brings replicas closer that are never equal.
    """
    apart = [
        each for each in seen.replicas
        if is_apart(each) and seen.are_averaged(each) and seen.is_witnessed(each)
    ]  # fmt: skip
    if not apart or may_average_parameters(seen):
        return None
    if any(not all(seen.gradients(each)) for each in seen.replicas):
        return None
    calls = [call for call in seen.calls if call.gradients]
    return seen.finding(
        "M1-start",
        apart,
        what="the replicas of a model differ from the start",
        where=seen.where(calls[0]) if calls else seen.team.facts[0].where(seen.team.first.line),
        why="the parameters were never equal, as each rank made its model with others, and their "
        "gradients are averaged",
        fix="broadcast the parameters of rank 0 before the first step, or seed all ranks alike "
        "before the model is made",
        level=PROBABLE,
    )


def may_average_parameters(seen: Averaging) -> bool:
    """Whether, after the first step, a call takes no gradient and is as large as a parameter. If no
    call takes a gradient itself, one between backward and step may take them in a buffer."""
    largest = max(seen.team.first.optimizer.sizes)
    takes_gradients = any(call.gradients for call in seen.calls)
    return any(
        event.kind == CALLED and not event.gradients and event.size >= largest
        for look in seen.team.all_looks
        if look.step
        for event in (look.events if takes_gradients else events_before_backward(look))
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
        for event in events_before_backward(look)
        for place in event.gradients
    }
    between = {
        place
        for look in seen.team.all_looks
        for event in look.events[len(events_before_backward(look)) :]
        for place in event.gradients
    }
    found = [
        each for each in seen.replicas
        if each.place in late - between and is_drifting(each) and seen.are_own(each)
    ]  # fmt: skip
    if not found:
        return None
    [first, *_] = (
        event for look in seen.team.all_looks for event in events_before_backward(look)
        if event.gradients
    )  # fmt: skip
    return seen.finding(
        "M2-after",
        found,
        what="the replicas of a model drift apart",
        where=seen.where(first),
        why="the gradients are reduced after the step that uses them",
        fix="reduce them between backward() and step()",
        level=HINT,
    )


def events_before_backward(look: Look) -> list[Event]:
    """Those between the last step and the first backward pass after it; none if no pass was seen,
    as nothing is known to come before it then."""
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
    if not found:
        return None
    first = next(call for call in seen.calls if found[0].place in call.parameters)
    return seen.finding(
        "M3-parameter",
        found,
        what="parameters are reduced where their gradients are meant",
        where=seen.where(first),
        why="all_reduce within backward() takes the parameter: a hook of "
        "register_post_accumulate_grad_hook is given the parameter, not its gradient",
        fix="reduce param.grad in the hook",
        level=HINT,
    )


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
    if not found:
        return None
    first = next(call for call in seen.calls if found[0].place in call.gradients)
    return seen.finding(
        "M6-reduce",
        found,
        what="the replicas of a model drift apart",
        where=seen.where(first),
        why="reduce gives the sum of the gradients to one rank, and all ranks step",
        fix="use all_reduce",
    )


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
    if not own or not averaged:
        return None
    calls = [call for call in seen.calls if call.gradients]
    return seen.finding(
        "M4-partial",
        own,
        what="the replicas of a part of a model drift apart",
        where=seen.where(calls[-1]) if calls else "",
        why="gradients of other parameters of the optimizer are averaged, and theirs are not",
        fix="average the gradients of all parameters, unless each rank is to have a part of its "
        "own",
        level=HINT,
    )


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
    if not found:
        return None
    fewest = [rank for rank, count in made.items() if count == min(made.values())]
    return seen.finding(
        "M5-skip",
        found,
        what="the replicas of a model drift apart",
        where=seen.team.facts[0].where(seen.team.first.line),
        why=f"rank {fewest[0]} left out a step of the optimizer that others made",
        fix="let all ranks decide alike whether to make a step: all_reduce what the decision "
        "depends on",
    )


def find_order(seen: Averaging) -> Finding | None:
    """K1-order: one collective reduces the same parameter on all ranks.

    Certain: in two steps the calls that take one gradient each are as many on all ranks, of the
    same operations and sizes, and a call takes another parameter's gradient on some rank; and these
    parameters were equal on all ranks at first. A hint: they were not. Unknown: the gradients lie
    in flat buffers.
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
    if len(wrong) < 2:
        return None
    return seen.finding(
        "K1-order",
        [seen.replicas[place] for place in sorted(exchanged)],
        what="ranks give the gradients of different parameters to the same call",
        where=seen.where(wrong[0]),
        why="calls meet in the order in which they are made, and the ranks go through the "
        "parameters in another order",
        fix="go through the parameters in the same order on all ranks: a set has none",
        level=SURE
        if all(
            bool(sights := seen.replicas[place].sights) and sights[0].are_equal
            for place in exchanged
        )
        else HINT,
    )


def find_sum(seen: Averaging) -> Finding | None:
    """M9-sum: the sum of the ranks' gradients is divided.

    A hint: in two steps all backward passes begin at a mean that a loss function of torch's has
    returned, a call takes the gradient afterwards, and the step uses the sum of the ranks'
    gradients, as two of their elements tell. A program may divide the learning rate. Unknown: the
    loss is scaled or composed; a call takes the gradient within backward.
    """
    if any(call.gradients and call.flag for call in seen.calls):
        return None
    found = [each for each in seen.replicas if count_sums(seen, each) >= 2]
    if not found:
        return None
    calls = [call for call in seen.calls if found[0].place in call.gradients]
    return seen.finding(
        "M9-sum",
        found,
        what="the step uses the sum of the ranks' gradients",
        where=seen.where(calls[-1]) if calls else "",
        why="each rank's loss is a mean, and the sum of N means is N times the mean: as if the "
        "learning rate were N times as large",
        fix="divide the gradients by the number of ranks",
        level=HINT,
    )


def count_sums(seen: Averaging, replica: Replica) -> int:
    """In how many steps the gradient is the sum of the gradients after backward."""
    count = 0
    for looks in seen.looks:
        passes = [each for look in looks.values() for each in look.events if each.kind == BACKWARD]
        raw = [look.raw_values[replica.place : replica.place + 1] for look in looks.values()]
        used = [look.gradient_values[replica.place : replica.place + 1] for look in looks.values()]
        if not passes or not all(each.size for each in passes) or not all(map(any, raw + used)):
            continue
        sums = [sum(column) for column in zip(*(values for [values] in raw), strict=True)]
        count += all(is_sum(values, sums) for [values] in used)
    return count


def is_sum(values: Sequence[float], sums: Sequence[float]) -> bool:
    """Whether the values are these sums, but for rounding, and are not 0."""
    pairs = [*zip(values, sums, strict=True)]
    return any(values) and all(abs(one - two) <= ROUNDING * abs(two) for one, two in pairs)


def find_equal_gradients(seen: Averaging) -> Finding | None:
    """E2-equal: the ranks that average do different work.

    A hint: in three steps all gradients are equal on all ranks at the end of backward, and differ
    from step to step; a call takes the gradients then; and data loaders have returned batches, or
    as many steps were looked at as at first. A test with one batch looks the same.
    """
    has_loader = all(each.has_loader for each in seen.team.facts)
    if not has_loader and len(seen.looks) < FIRST_STEPS:
        return None
    looks = [
        looks for looks in seen.looks
        if all(look.raw and None not in look.raw for look in looks.values())
    ]  # fmt: skip
    steps = [{tuple(look.raw) for look in looks.values()} for looks in looks]
    calls = [call for call in seen.calls if call.gradients]
    if len(steps) < 3 or not calls or any(len(each) > 1 for each in steps):
        return None
    if len({min(each) for each in steps}) < len(steps):
        return None
    return seen.finding(
        "E2-equal",
        seen.replicas,
        what="all ranks compute the same gradients",
        where=seen.where(calls[0]),
        why="the gradients are equal on all ranks before they are averaged: the ranks do the work "
        "of one",
        fix="give each rank its own part of the data; where batches are drawn at random, a seed of "
        "its own after the model is made: torch.manual_seed(seed + rank)",
        level=HINT,
    )


def find_alone(seen: Averaging) -> Finding | None:
    """N1-alone: the model is averaged if the data are cut, or if the ranks share what they measure.

    Probable: data loaders have returned batches on all ranks; between steps the ranks share what
    they measure, by an operation outside of backward; all gradients differ; all parameters were
    equal and drift; and no call is as large as the largest parameter. (Folds or an ensemble that
    all start from one seed do so.) A hint: the parameters differ from the start, or the ranks share
    nothing, and each draws one part of as many parts as there are ranks from DistributedSampler.
    Unknown: ranks exchange messages; the samplers have other parts (a model for each part).
    """
    facts = seen.team.facts
    parts = {(each.parts, each.rank) for rank in facts for each in rank.draws}
    is_cut = parts == {(len(facts), rank.rank) for rank in facts}
    have_loaders = is_cut or (not parts and all(each.has_loader for each in facts))
    shares = have_loaders and share_measures(facts)
    if may_join(seen) or not (have_loaders and (shares or is_cut)):
        return None
    begin_equal = all(map(is_drifting, seen.replicas))
    are_apart = begin_equal or (shares and all(map(is_apart, seen.replicas)))
    if not are_apart or not all(map(seen.are_own, seen.replicas)):
        return None
    reason = (
        "DistributedSampler gives each rank a part of the data" if is_cut
        else "the ranks have other batches, and share what they measure"
    )  # fmt: skip
    return seen.finding(
        "N1-alone",
        seen.replicas,
        what="each rank trains a model of its own"
        + (", on its part of the data" if is_cut else ""),
        where=facts[0].where(seen.team.first.line),
        why=f"{reason}, and neither gradients nor parameters are averaged",
        fix="wrap the model by DistributedDataParallel, or average the gradients between "
        "backward() and step()",
        level=PROBABLE if shares and begin_equal else HINT,
    )


def may_join(seen: Averaging) -> bool:
    """Whether a call is as large as the largest parameter, or is made within backward: it may
    average, or the ranks compute one model together."""
    largest = max(seen.team.first.optimizer.sizes)
    return any(each.kind == CALLED and (each.size >= largest or each.flag) for each in seen.events)


def share_measures(facts: Sequence[RankFacts]) -> bool:
    """Whether each rank has taken part in an operation on numbers of all ranks between steps, those
    of whatever optimizer: of models that are trained one after the other, the first may have
    none."""
    return all(
        any(
            each.kind == CALLED and each.subject in SHARING and each.ranks == len(facts)
            for look in rank.looks
            for each in look.events
        )
        for rank in facts
    )


def train_apart(facts: Sequence[RankFacts]) -> bool:
    """Whether ranks train by steps of like optimizers, and no call that was seen may have averaged
    gradients or parameters, or have carried a part of the computation. Unknown, so False, as for
    all rules of this file; if a model is wrapped, or divided among ranks; and if an optimizer was
    not seen on all ranks."""
    teams = find_teams(facts)
    if not teams or any(rank.models or rank.has_messages for rank in facts):
        return False
    known = {(rank, look.optimizer.number) for team in teams for looks in team.looks
             for rank, look in looks.items()}  # fmt: skip
    return all(
        (rank.rank, look.optimizer.number) in known for rank in facts for look in rank.looks
    ) and all(map(is_alone, teams))


def is_alone(team: Team) -> bool:
    """Whether nothing joins what the ranks of a team train."""
    seen = Averaging(team, [])
    return not (
        len(team.looks) < 2
        or team.has_threads
        or seen.exchanges
        or seen.calls
        or may_join(seen)
        or any(team.first.optimizer.shards)
        or any(look.has_closure for look in team.all_looks)
    )


def find_parts(seen: Averaging) -> Finding | None:
    """M13-parts: the groups that average make one world.

    A hint: all calls that take gradients are of groups smaller than the world, and of two ranks at
    least; no call of the world is as large as the largest parameter; the parameters were equal, and
    drift; and the settings of the optimizers are equal. Unknown: a model is wrapped; ranks exchange
    messages.
    """
    team = seen.team
    largest = max(team.first.optimizer.sizes)
    sizes = {call.ranks for call in seen.calls if call.gradients}
    is_joined = any(
        each.kind == CALLED and each.size >= largest and each.ranks == len(team.ranks)
        for each in seen.events
    )
    settings = {str(look.settings) for looks in team.looks[:1] for look in looks.values()}
    if is_joined or len(settings) > 1 or any(each.models for each in team.facts):
        return None
    if not sizes or min(sizes) < 2 or max(sizes) >= len(team.ranks):
        return None
    if not all(map(is_drifting, seen.replicas)):
        return None
    calls = [call for call in seen.calls if call.gradients]
    return seen.finding(
        "M13-parts",
        seen.replicas,
        what="groups of ranks train models apart",
        where=seen.where(calls[0]),
        why=f"gradients are averaged in groups of {max(sizes)} ranks, and nothing joins the groups",
        fix="average over all ranks that train the model",
        level=HINT,
    )


RULES: Sequence[Callable[[Averaging], Finding | None]] = (
    find_start, find_after, find_parameter, find_reduce, find_part, find_skip, find_order,
    find_alone, find_equal_gradients, find_sum,
)  # fmt: skip


def find_averaging(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """What is wrong where a program averages by hand: of each optimizer the first that is found;
    the same of models that are trained one after the other, once."""
    told = set[tuple[str, str, str]]()
    for team in find_teams(facts):
        if len(team.ranks) < len(facts) or len(team.looks) < 2 or team.has_threads:
            continue
        if team.wrapped:
            continue
        seen = Averaging(team, [team.replica(name) for name in team.first.optimizer.parameters])
        if seen.exchanges or any(look.has_closure for look in team.all_looks):
            continue
        in_parts = any(call.ranks < len(team.ranks) for call in seen.calls)
        rules = [find_parts] if in_parts else RULES
        found = next((finding for rule in rules if (finding := rule(seen))), None)
        if found and (known := (found.rule, found.where, found.what)) not in told:
            told.add(known)
            yield found
