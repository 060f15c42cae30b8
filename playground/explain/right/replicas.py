"""What the ranks' facts say of replicas: parameters that are to be equal on several ranks, when
they were, and when they began to differ. Does not import torch.

Two looks of different ranks are compared if they have one moment: they were made between the same
collectives of the group. Ranks that make other numbers of steps there have other moments from then
on, and are compared again where they have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from playground.explain.right.facts import CALLED, Event, Look, RankFacts
from playground.explain.right.log import ENDED

MADE, BEFORE, AFTER, END = "made", "before", "after", "end"
"""When a parameter is looked at: when its model was wrapped, before a step and after it, and when
the program had ended."""
ROUNDING = 1e-5
"""Elements that differ by less than this part of their size differ by rounding."""


@dataclass(frozen=True)
class Sight:
    """A parameter on all ranks at one moment."""

    when: str
    are_equal: bool
    looks: Mapping[int, Look]
    """By rank; empty when the model was wrapped and when the program had ended."""

    @property
    def step(self) -> int:
        """The number of the step, on the rank that has made the fewest."""
        return min((look.step for look in self.looks.values()), default=0)


@dataclass(frozen=True)
class Replica:
    """A parameter of one optimizer on all its ranks."""

    name: str
    """As optimizers have it."""
    place: int
    """Its number among the optimizer's parameters."""
    sights: list[Sight]
    """In the order of time."""

    @cached_property
    def drift(self) -> int | None:
        """The number of the sight from which on it differs; None if it never does, is equal later,
        or is seen to differ only when the program has ended."""
        differing = [number for number, sight in enumerate(self.sights) if not sight.are_equal]
        if not differing or differing != [*range(differing[0], len(self.sights))]:
            return None
        return differing[0] if self.sights[differing[0]].when != END else None

    @property
    def equal_at(self) -> int:
        """The step at which it was last seen equal, if steps lie between that and the drift that
        nobody has looked at; else -1."""
        if not self.drift:
            return -1
        before, first = self.sights[self.drift - 1], self.sights[self.drift]
        return before.step if before.looks and before.step < first.step - 1 else -1

    @property
    def looks(self) -> Iterator[Mapping[int, Look]]:
        """The steps that all ranks have looked at."""
        return (sight.looks for sight in self.sights if sight.when == BEFORE)

    def have_equal_gradients(self, looks: Mapping[int, Look]) -> bool | None:
        """Whether the gradients of a step are equal; None if one is unknown."""
        prints = {look.gradients[self.place] for look in looks.values()}
        return None if None in prints else len(prints) == 1

    def differ_by_rounding(self, looks: Mapping[int, Look]) -> bool:
        """Whether the elements that are known differ by rounding alone."""
        values = [
            look.values[self.place] for look in looks.values() if self.place < len(look.values)
        ]
        if len(values) < len(looks) or not all(values):
            return False
        columns = [*zip(*values, strict=True)]
        if all(len({*column}) == 1 for column in columns):
            return False  # others differ
        return all(max(each) - min(each) <= ROUNDING * max(map(abs, each)) for each in columns)


@dataclass(frozen=True)
class Team:
    """Ranks that step one optimizer."""

    facts: Sequence[RankFacts]
    """What these ranks have seen, in order."""
    looks: Sequence[Mapping[int, Look]]
    """The steps that all of them have looked at, by rank, in the order of time."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.facts)

    @property
    def first(self) -> Look:
        return self.looks[0][self.ranks[0]]

    @property
    def since(self) -> int:
        """The number of the first step that all have looked at, on the rank that made the
        fewest."""
        return min(look.step for look in self.looks[0].values())

    @cached_property
    def wrapped(self) -> list[int]:
        """The numbers of the optimizer's parameters that are in wrapped models."""
        keys = {model.key for each in self.facts for model in each.models}
        names = self.first.optimizer.parameters
        return [place for place, name in enumerate(names) if name.rpartition("/")[0] in keys]

    @property
    def have_ended(self) -> bool:
        """Whether the program has ended on all ranks, and without an error."""
        return all(each.state == ENDED for each in self.facts)

    @property
    def has_threads(self) -> bool:
        return any(each.has_threads for each in self.facts)

    @cached_property
    def all_looks(self) -> list[Look]:
        """Those of all ranks, also those that only some have made."""
        found = []
        for each in self.facts:
            mine = [looks[each.rank].optimizer for looks in self.looks]
            found += [look for look in each.looks if look.optimizer in mine]
        return found

    def replica(self, name: str) -> Replica:
        """A parameter of the optimizer."""
        if name not in self.replicas:
            place = self.first.optimizer.parameters.index(name)
            sights = [*self.see_made(name), *self.see_steps(place), *self.see_end(name)]
            self.replicas[name] = Replica(name, place, sights)
        return self.replicas[name]

    @cached_property
    def replicas(self) -> dict[str, Replica]:
        """Those that were asked for, by their names."""
        return {}

    def see_steps(self, place: int) -> Iterator[Sight]:
        for looks in self.looks:
            before = are_equal(look.before[place] for look in looks.values())
            after = are_equal(look.after[place] for look in looks.values())
            if before is not None:
                yield Sight(BEFORE, before, looks)
            if after is not None:
                yield Sight(AFTER, after, looks)

    def see_end(self, name: str) -> Iterator[Sight]:
        if self.have_ended and all(name in each.final for each in self.facts):
            equal = are_equal(each.final[name] for each in self.facts)
            if equal is not None:
                yield Sight(END, equal, {})

    def see_made(self, name: str) -> Iterator[Sight]:
        model, _, parameter = name.rpartition("/")
        found = [
            each.prints[each.names.index(parameter)]
            for facts in self.facts
            for each in facts.models
            if each.key == model and parameter in each.names
        ]
        if len(found) == len(self.facts) and (equal := are_equal(found)) is not None:
            yield Sight(MADE, equal, {})

    def find_skip(self) -> tuple[int, dict[int, int]] | None:
        """The first clock at which ranks have made different numbers of steps, while all of them
        step later, too; and these numbers. None if there is none, or if it is not known."""
        numbers = {look.optimizer.number for looks in self.looks for look in looks.values()}
        if len(numbers) != 1 or not all(each.has_all_steps for each in self.facts):
            return None
        [number] = numbers
        counts = {each.rank: Counter(each.steps.get(number, [])) for each in self.facts}
        last = min(max(each, default=-1) for each in counts.values())
        for clock in sorted(set().union(*counts.values())):
            made = {rank: each[clock] for rank, each in counts.items()}
            if 0 <= clock < last and len({*made.values()}) > 1:
                return clock, made
        return None


def are_equal(prints: Iterable[int | None]) -> bool | None:
    """None if one is unknown."""
    found = {*prints}
    return None if None in found else len(found) == 1


class AllFacts(list[RankFacts]):
    """The facts of all ranks, in rank order. Their teams are found once."""

    @cached_property
    def teams(self) -> list[Team]:
        return [*compare_optimizers(self)]


def find_teams(facts: Sequence[RankFacts]) -> Sequence[Team]:
    """The optimizers that ranks of one group step together, on all its ranks. An optimizer is the
    same on ranks that give it the same parameters. A team of one rank is left out."""
    return (facts if isinstance(facts, AllFacts) else AllFacts(facts)).teams


def compare_optimizers(facts: Sequence[RankFacts]) -> Iterator[Team]:
    """The teams of these ranks."""
    found: dict[tuple[object, ...], dict[int, dict[tuple[int, int], list[Look]]]] = {}
    for each in facts:
        for look in each.looks:
            given = look.optimizer
            key = tuple(given.parameters), tuple(given.sizes), tuple(given.ranks)
            if look.clock >= 0:
                moments = found.setdefault(key, {}).setdefault(each.rank, {})
                moments.setdefault(look.moment, []).append(look)
    by_rank = {each.rank: each for each in facts}
    for (_, _, ranks), each_rank in found.items():
        assert isinstance(ranks, tuple)
        if len(ranks) < 2 or {*each_rank} != {*ranks}:
            continue
        if any(by_rank[rank].unknown for rank in ranks):
            continue
        common = set.intersection(*({*moments} for moments in each_rank.values()))
        looks = [
            {rank: each_rank[rank][moment][0] for rank in ranks}
            for moment in sorted(common)
            if all(len(each_rank[rank][moment]) == 1 for rank in ranks)
        ]
        if looks:
            yield Team([by_rank[rank] for rank in ranks], looks)


def calls_of(looks: Mapping[int, Look]) -> Iterator[Event]:
    """The calls of all ranks since the last step."""
    return (event for look in looks.values() for event in look.events if event.kind == CALLED)
