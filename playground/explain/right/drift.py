"""Rules on replicas that DistributedDataParallel is to keep equal (D). Does not import torch.

A parameter drifts if it was equal on all ranks when the model was wrapped, is seen to differ later,
and is never seen equal again. Looks are: when the model is wrapped, before and after each sampled
step, and when the program has ended, unless a load has come after the last step. The rules tell the
cause, from the step at which the first difference is seen.

Unknown for all rules: a rank of the group has left no log, or its log says so; no two ranks have
looked at one moment; DistributedDataParallel was told to ignore the parameter; it has no gradient
(each rank may have other constants); the wrapper is gone by then; the forward pass is in `Join`; a
hook of local SGD is registered; the step calls a closure. An average of parameters that is made by
hand is looked at when it is made, so that they are seen equal again.

Source of all: the documentation of `torch.nn.parallel.DistributedDataParallel`, of its `no_sync`
and of `register_comm_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from playground.base.ranks import name_ranks
from playground.explain.right.facts import (
    BACKWARD,
    CALLED,
    FORWARD,
    JOINS,
    LOADED,
    Event,
    Look,
    Model,
    RankFacts,
    Rates,
)
from playground.explain.right.finding import HINT, PROBABLE, SURE, Finding, Level
from playground.explain.right.log import NO_GRADIENT
from playground.explain.right.replicas import (
    AFTER,
    BEFORE,
    MADE,
    Replica,
    Sight,
    Team,
    calls_of,
    find_teams,
)


@dataclass(frozen=True)
class Drift:
    """A parameter of a wrapped model that drifts, and the facts at its first difference."""

    team: Team
    model: Model
    replica: Replica
    is_late: bool
    """Whether it was not there when the model was wrapped."""

    @property
    def name(self) -> str:
        return self.replica.name.rpartition("/")[2]

    @property
    def sight(self) -> Sight:
        """The first difference."""
        assert self.replica.drift is not None
        return self.replica.sights[self.replica.drift]

    @property
    def previous(self) -> Sight | None:
        """The sight before."""
        drift = self.replica.drift
        return self.replica.sights[drift - 1] if drift else None

    @property
    def looks(self) -> list[Look]:
        """Those of all ranks at the first difference."""
        return [*self.sight.looks.values()]

    @property
    def have_other_gradients(self) -> bool:
        """Whether the gradients of the step are known and differ."""
        return self.replica.have_equal_gradients(self.sight.looks) is False

    @property
    def are_known(self) -> bool:
        """Whether all that happened since the last step is known, on all ranks."""
        return all(look.is_whole and not look.has_closure for look in self.looks)

    @property
    def is_of_model(self) -> bool:
        """Whether it is trained, and its wrapper is still there."""
        place = self.replica.place
        return all(
            self.model.key in look.wrapped and look.gradients[place] != NO_GRADIENT
            for look in self.looks
        )

    def forwards(self, look: Look) -> list[Event]:
        return [
            each for each in look.events if each.kind == FORWARD and each.subject == self.model.key
        ]

    @property
    def train_together(self) -> bool:
        """Whether, on all ranks, the step has a forward pass of the model after which gradients are
        averaged. Else they may train apart for a while, or from then on."""
        return all(any(each.flag for each in self.forwards(look)) for look in self.looks)

    @property
    def notes(self) -> str:
        """The notes of all forward passes of the model that were seen."""
        return " ".join(each.note for look in self.team.all_looks for each in self.forwards(look))

    @property
    def exchanges(self) -> bool:
        """Whether a call was seen that is as large as a parameter of the model, and that may thus
        average it, or may have been made unseen, in another thread."""
        largest = max(self.team.first.optimizer.sizes)
        return self.team.has_threads or any(
            event.size >= largest
            for look in self.team.all_looks
            for event in look.events
            if event.kind == CALLED
        )

    @property
    def is_made_by_step(self) -> bool:
        """Whether it was equal before the step and differs after it."""
        return self.sight.when == AFTER

    def where(self, line: int) -> str:
        """A line of the first rank's program."""
        return self.team.facts[0].where(line)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why parameters drift."""

    rule: str
    why: str
    fix: str
    where: str = ""
    level: Level = SURE


FindCause = Callable[[Drift], "Cause | None"]
"""Tells a cause, if it is this one."""


def last_line(drift: Drift, kind: str) -> str:
    """The line of the last event of this kind in the cycle of the first rank."""
    found = [each.line for each in drift.looks[0].events if each.kind == kind]
    return drift.where(found[-1]) if found else ""


def find_late(drift: Drift) -> Cause | None:
    """D3-late: all parameters exist when the model is wrapped.

    Probable: a forward pass finds a parameter in the module that was not there, and its gradients
    differ. Each rank may have a part of its own, as an adapter. Unknown: it does not drift.
    """
    if not drift.is_late or not drift.have_other_gradients:
        return None
    lines = [
        each.line for each in drift.team.facts[0].late
        if (each.model, each.name) == (drift.model.key, drift.name)
    ]  # fmt: skip
    return Cause(
        rule="D3-late",
        why="the model got them after it was wrapped, and DistributedDataParallel averages the "
        "gradients of the parameters that it finds when it is made",
        fix="add them before DistributedDataParallel wraps the model, or wrap it again",
        where=drift.where(lines[0]) if lines else "",
        level=PROBABLE,
    )


def find_unfrozen(drift: Drift) -> Cause | None:
    """D3-unfrozen: all trained parameters require a gradient when the model is wrapped.

    Probable: it did not on any rank, it is trained, and its gradients differ. Each rank may have a
    part of its own, as a head. Unknown: it does not drift, or the model was wrapped again, and has
    other names since.
    """
    if drift.is_late or not drift.have_other_gradients:
        return None
    trained = [
        trained
        for facts in drift.team.facts
        for model in facts.models
        if model.key == drift.model.key
        for name, trained in zip(model.names, model.trained, strict=True)
        if name == drift.name
    ]
    if any(trained) or not trained:
        return None
    return Cause(
        rule="D3-unfrozen",
        why="they did not require a gradient when the model was wrapped, so that "
        "DistributedDataParallel does not average theirs",
        fix="set requires_grad before DistributedDataParallel wraps the model, or wrap it again",
        where=drift.where(drift.model.line),
        level=PROBABLE,
    )


def find_skip(drift: Drift) -> Cause | None:
    """D5-skip: all ranks make a step between the same two collectives, or none does.

    The clocks of all steps are kept, so that a step that was not looked at is seen, too. Certain:
    the numbers differ at a clock before the first difference and not before the last equal look,
    and the ranks train together. Unknown: more steps were made than are kept, or the optimizer has
    another number on some ranks.
    """
    found = drift.team.find_skip()
    if found is None or not drift.sight.looks:
        return None
    clock, made = found
    last = max(
        (look.clock for look in (drift.previous.looks if drift.previous else {}).values()),
        default=-1,
    )
    if not last <= clock <= drift.looks[0].clock:
        return None
    fewest, most = min(made.values()), max(made.values())
    skipping = [rank for rank, count in made.items() if count == fewest]
    others = [rank for rank, count in made.items() if count == most]
    return Cause(
        rule="D5-skip",
        why=f"{name_ranks(skipping)} made {fewest} steps of the optimizer between two collectives "
        f"where {name_ranks(others)} made {most}",
        fix="let all ranks decide alike whether to make a step: all_reduce what the decision "
        "depends on",
        where=drift.where(drift.looks[0].line),
        level=SURE if drift.train_together else HINT,
    )


def find_write(drift: Drift) -> Cause | None:
    """D6-load and D6-write: nothing but the optimizer changes the parameters of some ranks.

    Certain: they were equal when the model was wrapped, or after a step, and differ before the next
    step, which was looked at, too, and in which the ranks train together. `load_state_dict` of some
    ranks between the two is told as the cause. Unknown: the two looks do not follow each other; a
    call took the parameters.
    """
    previous = drift.previous
    if drift.sight.when != BEFORE or previous is None or not drift.are_known:
        return None
    if previous.when == MADE:
        follow = all(look.step == 0 for look in drift.looks)
    else:
        follow = previous.when == AFTER and all(
            look.step == previous.looks[rank].step + 1 for rank, look in drift.sight.looks.items()
        )
    place = drift.replica.place
    if not follow or any(place in call.parameters for call in calls_of(drift.sight.looks)):
        return None
    loads = {
        rank: [each for each in look.events if each.kind == LOADED and place in each.parameters]
        for rank, look in drift.sight.looks.items()
    }
    loading = [rank for rank, found in loads.items() if found]
    if loading and len(loading) < len(loads):
        facts = next(each for each in drift.team.facts if each.rank == loading[0])
        return Cause(
            rule="D6-load",
            why=f"only {name_ranks(loading)} called load_state_dict",
            fix="load on all ranks, or before DistributedDataParallel wraps the model: it sends "
            "what rank 0 has",
            where=facts.where(loads[loading[0]][-1].line),
            level=SURE if drift.train_together else HINT,
        )
    if loading:
        return None
    return Cause(
        rule="D6-write",
        why="the optimizer has not changed them: something else has written them on some ranks",
        fix="change the parameters of all ranks alike, or before DistributedDataParallel wraps "
        "the model",
        where=drift.where(drift.model.line if previous.when == MADE else drift.looks[0].line),
        level=SURE if drift.train_together else HINT,
    )


def find_step_in_backward(drift: Drift) -> Cause | None:
    """D7-inback: a step comes after backward, which averages the gradients when it has all.

    Certain: the step runs in backward on all ranks, and the gradients differ.
    """
    if not drift.have_other_gradients or not all(look.in_backward for look in drift.looks):
        return None
    return Cause(
        rule="D7-inback",
        why="the optimizer steps within backward(), before the gradients are averaged",
        fix="step after backward(), or average the gradient in the same hook",
        where=drift.where(drift.looks[0].line),
    )


def find_hook(drift: Drift) -> Cause | None:
    """D8-hook: a communication hook returns the same on all ranks.

    A hint: methods that gossip do not, on purpose. Unknown: the hook is torch's own.
    """
    names = {note for each in drift.looks for event in drift.forwards(each) if (note := event.note)}
    if not names or not drift.have_other_gradients:
        return None
    return Cause(
        rule="D8-hook",
        why=f"the communication hook {' and '.join(sorted(names))} returns gradients that differ "
        "between ranks",
        fix="return what was reduced",
        where=last_line(drift, BACKWARD),
        level=HINT,
    )


def find_bypass(drift: Drift) -> Cause | None:
    """D1-bypass: a backward belongs to a forward pass through the wrapped model.

    Probable: no forward pass of the model that trains was ever seen on any rank, gradients differ,
    no call was seen that may average parameters, and the program has ended on all ranks. (The
    wrapper may serve to send the parameters of rank 0 to models that are trained apart.) A hint: it
    was called with the wrapped model earlier (then ranks may train apart on purpose).
    """
    if not drift.have_other_gradients or not drift.are_known:
        return None
    if any(drift.forwards(look) for look in drift.looks):
        return None
    ever = any(drift.forwards(look) for look in drift.team.all_looks)
    return Cause(
        rule="D1-bypass",
        why="no forward pass went through the wrapped model, so that nothing averaged the "
        "gradients",
        fix="call the wrapped model, not its .module or the model inside",
        where=last_line(drift, BACKWARD),
        level=PROBABLE if not ever and not drift.exchanges and drift.team.have_ended else HINT,
    )


def find_nosync(drift: Drift) -> Cause | None:
    """D2-nosync-all and D2-nosync-last: the last forward pass before a step is outside of
    `no_sync`.

    Certain: gradients differ, and the last forward pass was inside, after one outside. Probable:
    all that were ever seen were inside, no call was seen that may average parameters, and the
    program has ended on all ranks. (Files may bring the models together.) A hint: all of this step
    were inside, and not all others.
    """
    if not drift.have_other_gradients or not drift.are_known:
        return None
    passes = [[each.flag for each in drift.forwards(look)] for look in drift.looks]
    if not all(passes) or any(flags[-1] for flags in passes):
        return None
    where = drift.where(drift.forwards(drift.looks[0])[-1].line)
    if all(any(flags) for flags in passes):
        return Cause(
            rule="D2-nosync-last",
            why="the last forward pass before the step is in no_sync, and one before it is not: "
            "what the last one adds is not averaged",
            fix="leave no_sync for the last micro-batch: no_sync if it is not the last, not if it "
            "is",
            where=where,
        )
    ever = any(each.flag for look in drift.team.all_looks for each in drift.forwards(look))
    return Cause(
        rule="D2-nosync-all",
        why="all forward passes before the step are in no_sync, or require_backward_grad_sync is "
        "off: nothing averaged the gradients",
        fix="run the forward pass of the last micro-batch outside of no_sync: the forward pass "
        "decides",
        where=where,
        level=PROBABLE if not ever and not drift.exchanges and drift.team.have_ended else HINT,
    )


def find_later_backward(drift: Drift) -> Cause | None:
    """D4-later: no backward comes after the one that averages.

    Certain: gradients differ; of the backward passes before the step, one called collectives, and
    the last one did not, on all ranks.
    """
    if not drift.have_other_gradients or not drift.are_known:
        return None
    passes = [[each.flag for each in look.events if each.kind == BACKWARD] for look in drift.looks]
    if not all(any(flags) and not flags[-1] for flags in passes):
        return None
    return Cause(
        rule="D4-later",
        why="another backward(), not through the wrapped model, adds to the gradients after they "
        "were averaged",
        fix="add the losses, and call backward() once",
        where=last_line(drift, BACKWARD),
    )


def find_settings(drift: Drift) -> Cause | None:
    """D9-hyper: hyperparameters are equal on all ranks.

    Certain: gradients are equal, a hyperparameter differs at the first difference, or a learning
    rate did for some steps since the last equal look, and the ranks train together. Those that
    change nothing but the implementation are left out.
    """
    if drift.replica.have_equal_gradients(drift.sight.looks) is not True:
        return None
    differ = describe_settings(drift) or describe_rates(drift)
    if not differ:
        return None
    return Cause(
        rule="D9-hyper",
        why=f"the gradients are equal, and {differ}",
        fix="step schedulers, and set hyperparameters, on all ranks alike: average over the ranks "
        "what ReduceLROnPlateau is given",
        where=drift.where(drift.looks[0].line),
        level=SURE if drift.train_together else HINT,
    )


def describe_settings(drift: Drift) -> str:
    """Which hyperparameters differ at the first difference; empty for none."""
    settings = [look.settings for look in drift.looks]
    if all(each == settings[0] for each in settings):
        return ""
    named = {
        setting.partition("=")[0]: None
        for groups in zip(*settings, strict=False)
        for setting in sorted(set().union(*groups) - set.intersection(*map(set, groups)))
    }
    told = [
        f"rank {rank}: "
        + ", ".join(
            each for group in look.settings for each in group if each.partition("=")[0] in named
        )
        for rank, look in drift.sight.looks.items()
    ]
    return f"hyperparameters of the optimizer differ ({'; '.join(told)})"


def describe_rates(drift: Drift) -> str:
    """In which step between the last equal look and the first difference the learning rates were
    not equal; empty if that was in none, or earlier."""
    changes = {
        rank: {
            each.step: each for facts in drift.team.facts if facts.rank == rank
            for each in facts.rates
            if each.optimizer == look.optimizer.number and each.step <= look.step
        }
        for rank, look in drift.sight.looks.items()
    }  # fmt: skip
    steps = sorted(set[int]().union(*changes.values()))
    first = next((step for step in steps if not are_changed_alike(changes, step)), -1)
    if first < 0 or (drift.previous and drift.previous.step > first):
        return ""
    before = next(each[first].before for each in changes.values() if first in each)
    told = [
        f"rank {rank}: lr={', '.join(map(str, each[first].now if first in each else before))}"
        for rank, each in changes.items()
    ]
    return f"learning rates of the optimizer differed from step {first} on ({'; '.join(told)})"


def are_changed_alike(changes: Mapping[int, Mapping[int, Rates]], step: int) -> bool:
    """Whether the learning rates of all ranks have become the same in this step."""
    found = [each.get(step) for each in changes.values()]
    return all(each is not None and found[0] and each.now == found[0].now for each in found)


def find_state(drift: Drift) -> Cause | None:
    """D10-state: the optimizer makes the same of the same gradients.

    Certain: parameters, gradients and hyperparameters are equal before a step, and the parameters
    differ after it, and the ranks train together. A hint: they differ by rounding; the optimizer is
    not one of torch.optim (it may draw numbers of its own), or has hooks after its step. Unknown:
    the step was not looked at.
    """
    equal = drift.replica.have_equal_gradients(drift.sight.looks)
    if not drift.is_made_by_step or not equal or not drift.are_known:
        return None
    settings = [look.settings for look in drift.looks]
    if any(each != settings[0] for each in settings):
        return None
    return Cause(
        rule="D10-state",
        why="parameters, gradients and hyperparameters are equal before the step, and the "
        "parameters differ after it: the state of the optimizer differs",
        fix="load the state of the optimizer on all ranks",
        where=drift.where(drift.looks[0].line),
        level=SURE
        if drift.train_together
        and all(
            look.optimizer.kind.startswith("torch.optim.") and not look.has_hooks
            for look in drift.looks
        )
        else HINT,
    )


def find_changed_gradient(drift: Drift) -> Cause | None:
    """D12-gradient: gradients that were averaged stay equal until the step.

    Probable: from the first difference on, the gradient is equal on all ranks at the end of the
    last backward pass and differs before the step, in each step in which that is known, and in two
    at least; and the ranks train together. (A program may search from several places at once.)
    Unknown: gradients at the end of backward, as in an optimizer's first step; the step is within
    backward.
    """
    if not drift.have_other_gradients or not drift.are_known:
        return None
    if any(look.in_backward for look in drift.looks):
        return None
    place, first = drift.replica.place, drift.sight.step
    known = [
        looks
        for looks in drift.replica.looks
        if min(each.step for each in looks.values()) >= first
        and all(place < len(each.raw) for each in looks.values())
    ]
    raw = [{each.raw[place] for each in looks.values()} for looks in known]
    if len(known) < 2 or any(len(each) > 1 or each & {None, NO_GRADIENT} for each in raw):
        return None
    if any(drift.replica.have_equal_gradients(looks) is not False for looks in known):
        return None
    return Cause(
        rule="D12-gradient",
        why="the gradients are equal when backward() has ended, and differ before the step: each "
        "rank has changed them in a way of its own, as by random numbers",
        fix="change averaged gradients alike on all ranks, or before they are averaged",
        where=drift.where(drift.looks[0].line),
        level=PROBABLE if drift.train_together else HINT,
    )


CAUSES: Sequence[FindCause] = (
    find_late,
    find_unfrozen,
    find_skip,
    find_write,
    find_settings,
    find_state,
    find_step_in_backward,
    find_hook,
    find_bypass,
    find_nosync,
    find_later_backward,
    find_changed_gradient,
)
"""In this order: the first that tells a cause is right."""


def leave_unexplained(drift: Drift) -> Cause:
    """D-drift: replicas stay equal.

    Probable: at the first difference all ranks train together, and their gradients are equal; no
    call was seen that may average parameters, and the program has ended on all ranks. A hint:
    anything else.
    """
    equal = drift.replica.have_equal_gradients(drift.sight.looks)
    together = bool(equal) and drift.train_together
    is_probable = together and not drift.exchanges and drift.team.have_ended
    return Cause(
        rule="D-drift",
        why="the cause lies between two steps that were looked at",
        fix="find what changes parameters or gradients on some ranks between these steps: a "
        "condition on the rank, a random number, a value that each rank has measured",
        level=PROBABLE if is_probable else HINT,
    )


def find_drifts(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """The models whose replicas drift, a finding for each cause."""
    causes: dict[tuple[str, Cause], list[Drift]] = {}
    for team in find_teams(facts):
        models = {model.key: model for model in team.facts[0].models}
        late = {f"{each.model}/{each.name}" for each in team.facts[0].late}
        for name in team.first.optimizer.parameters:
            model = models.get(name.rpartition("/")[0])
            replica = team.replica(name)
            if model is None or not begins_equal(replica, name in late):
                continue
            drift = Drift(team, model, replica, name in late)
            if JOINS in drift.notes or "localSGD" in drift.notes:
                continue
            if any(look.has_closure for look in drift.looks) or not drift.is_of_model:
                continue
            causes_of_it = (found for find_cause in CAUSES if (found := find_cause(drift)))
            cause = next(causes_of_it, None) or leave_unexplained(drift)
            causes.setdefault((model.key, cause), []).append(drift)
    yield from (describe(cause, drifts) for (_, cause), drifts in causes.items())
    yield from find_other_orders(facts)


def begins_equal(replica: Replica, is_late: bool) -> bool:
    """Whether a parameter drifts. One that came late was not seen when the model was wrapped, and
    may differ from the start."""
    drift = replica.drift
    if drift is None or not replica.sights[drift].looks:
        return False
    return is_late or drift > 0


def describe(cause: Cause, drifts: Sequence[Drift]) -> Finding:
    first = min(drifts, key=lambda each: each.sight.step)
    names = [each.name for each in drifts]
    rounds = all(each.replica.differ_by_rounding(each.sight.looks) for each in drifts)
    return Finding(
        rule=cause.rule,
        level=HINT if rounds else cause.level,
        what=f"the replicas of a model drift apart: {list_names(names)} of the model that "
        f"DistributedDataParallel wraps in {first.where(first.model.line) or 'a package'}",
        ranks=first.team.ranks,
        since=first.sight.step,
        where=cause.where,
        why=cause.why,
        fix=cause.fix,
        equal_at=first.replica.equal_at,
    )


def list_names(names: Sequence[str]) -> str:
    """weight, bias and 3 more"""
    shown, more = names[:3], len(names) - 3
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def find_other_orders(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """D11-order: the parameters of a model are in the same order on all ranks.

    DistributedDataParallel averages by position. Certain: ranks have the same names in another
    order. Unknown: the names differ, so that it is another model. Source: "Internal Design" in
    torch's notes on DistributedDataParallel.
    """
    for model in facts[0].models if facts else []:
        same = {
            each.rank: found for each in facts for found in each.models if found.key == model.key
        }
        orders = {tuple(found.names) for found in same.values()}
        if {*same} != {*model.ranks} or len(orders) < 2 or len({*map(frozenset, orders)}) > 1:
            continue
        others = tuple(rank for rank, found in same.items() if found.names != model.names)
        yield Finding(
            rule="D11-order",
            level=SURE,
            what="the parameters of a model have another order on some ranks, and "
            "DistributedDataParallel averages them by their position",
            ranks=others,
            since=0,
            where=facts[0].where(model.line),
            why="the model is built in another order there",
            fix="build the model of all ranks in the same order: sort what it is built from",
        )
