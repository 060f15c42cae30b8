"""Rules on the data that ranks train on (E, S). Does not import torch.

Source of all: the documentation of `torch.utils.data.distributed.DistributedSampler`, which gives
each rank a part of one order of the samples, if the ranks have one seed and one epoch, and another
order in each epoch, if `set_epoch` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from playground.explain.right.facts import BUCKET, FORWARD, Draw, Look, RankFacts
from playground.explain.right.finding import HINT, PROBABLE, Finding
from playground.explain.right.log import ENDED, FIRST_STEPS, LEAST_LOOKS, Prints
from playground.explain.right.replicas import find_teams

OWN_SEED = (
    "give each rank a seed of its own after the model is made: torch.manual_seed(seed + rank), and "
    "the same for numpy and random"
)


def find_equal_batches(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """E1-batches: the ranks of a wrapped model are fed different batches.

    Probable: in each step that was looked at, and in three at least, the inputs of the forward
    passes are equal on all ranks, and so are the gradients before they are averaged; the inputs of
    the steps differ; and data loaders have returned batches on all ranks, and the program has ended
    on all of them, or as many steps were looked at as at first. (Ranks may train redundantly, to
    find a machine that computes wrongly.) A hint: fewer steps were looked at, and no data loader
    was seen (a test may compare the ranks), or the program was ended sooner (it may begin so).
    Unknown: all steps have one batch (a test whether the model can learn); gradients differ (other
    nodes of one graph, or noise of their own); the optimizer has parameters that are not averaged
    (tensor parallelism); older versions of torch do not tell of the gradients.
    """
    for team in find_teams(facts):
        whole = [looks for looks in team.looks if all(each.is_whole for each in looks.values())]
        for model in team.facts[0].models:
            names = team.first.optimizer.parameters
            if not all(name.startswith(f"{model.key}/") for name in names):
                continue
            inputs = [inputs_of(looks, model.key) for looks in whole]
            if len(inputs) < LEAST_LOOKS or None in inputs or len({*inputs}) < 2:
                continue
            last = whole[-1][team.ranks[0]]
            lines = [each.line for each in last.events if each.kind == FORWARD]
            yield Finding(
                rule="E1-batches",
                level=PROBABLE
                if len(inputs) >= FIRST_STEPS
                or (team.have_ended and all(each.has_loader for each in team.facts))
                else HINT,
                what="all ranks train on the same batches a model that DistributedDataParallel "
                f"wraps in {team.facts[0].where(model.line) or 'a package'}",
                ranks=team.ranks,
                since=min(look.step for look in whole[0].values()),
                where=team.facts[0].where(lines[-1]) if lines else "",
                why="inputs and gradients are equal on all ranks in each step that was looked at: "
                "the ranks do the work of one",
                fix=find_cure(team.facts),
            )


def find_cure(facts: Sequence[RankFacts]) -> str:
    """How ranks get different batches: where their samplers cut the data, or there is no data
    loader, equal seeds are the cause of equal batches."""
    trained = [{each.sampler for each in rank.batches if each.trains} for rank in facts]
    parts = {
        each.rank
        for rank, samplers in zip(facts, trained, strict=True)
        for each in rank.draws
        if each.sampler in samplers
    }
    if len(parts) == len(facts):
        return f"the data set draws the same numbers on all ranks: {OWN_SEED}"
    if not any(each.has_loader for each in facts):
        return f"give each rank its own part of the data; where batches are drawn, {OWN_SEED}"
    return (
        "give the DataLoader a DistributedSampler, whose rank is that of the process; let an "
        "IterableDataset yield the part of its rank"
    )


def inputs_of(looks: Mapping[int, Look], model: str) -> tuple[int | None, ...] | None:
    """Fingerprints of the inputs of a step, if they and the gradients are equal on all ranks; None
    if they are not, or not known."""
    found = []
    for look in looks.values():
        inputs = [
            each
            for event in look.events
            if event.kind == FORWARD and event.subject == model
            for each in event.prints
        ]
        buckets = [each for event in look.events if event.kind == BUCKET for each in event.prints]
        if look.has_closure or not inputs or not buckets or None in (*inputs, *buckets):
            return None
        found.append((tuple(inputs), tuple(buckets)))
    return found[0][0] if len({*found}) == 1 else None


def find_other_draws(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S2-seed, S3-epoch and S8-split: the samplers of the ranks cut one order of the samples.

    Probable: each rank of the world draws one part of as many parts from a data set of one length;
    shuffling is on; seeds differ, or epochs do at one clock, or the samples of their `Subset`; and
    all ranks train one model that DistributedDataParallel wraps, on these samples. (Each rank may
    have samples of its own.) A hint: they do not (then they may train models apart). Unknown: the
    ranks draw different numbers of times; there are fewer or more parts than ranks (a data set for
    each node).
    """
    world = [each.rank for each in facts]
    train_one = any(model.ranks == world for each in facts[:1] for model in each.models)
    for draws in common_draws(facts):
        for rule, name, fix in (
            ("S2-seed", "seed", "give DistributedSampler the same seed on all ranks"),
            ("S3-epoch", "epoch", "call set_epoch on all ranks with the same number"),
            ("S8-split", "chosen", "split the data set with the same seed on all ranks"),
        ):
            values = [getattr(each, name) for each in draws]
            if len({*values}) < 2:
                continue
            told = [f"rank {rank}: {value}" for rank, value in enumerate(values)]
            why = f"their DistributedSamplers differ in the {name} ({', '.join(told)})"
            if name == "chosen":
                why = "their data sets are a Subset of each rank's own choice"
            yield Finding(
                rule=rule,
                level=PROBABLE if train_one and all(map(trains_wrapped, facts, draws)) else HINT,
                what="ranks draw their parts of the data from different orders, so that samples "
                "come twice or not at all",
                ranks=tuple(each.rank for each in facts),
                since=max(draws[0].steps.values(), default=0),
                where=facts[0].where(draws[0].line),
                why=why,
                fix=fix,
            )
            return


def trains_wrapped(rank: RankFacts, draw: Draw) -> bool:
    """Whether an optimizer of a wrapped model has stepped between this draw and the next one."""
    keys = {model.key for model in rank.models}
    numbers = {
        look.optimizer.number
        for look in rank.looks
        if any(name.rpartition("/")[0] in keys for name in look.optimizer.parameters)
    }
    place = rank.draws.index(draw)
    end = {number: len(clocks) for number, clocks in rank.steps.items()}
    later = rank.draws[place + 1].steps if place + 1 < len(rank.draws) else end
    return any(later.get(number, 0) > draw.steps.get(number, 0) for number in numbers)


def common_draws(facts: Sequence[RankFacts]) -> Iterator[list[Draw]]:
    """The draws of all ranks that cut one data set."""
    if any(rank.unknown for rank in facts):
        return
    by_place = [{(each.sampler, each.number): each for each in rank.draws} for rank in facts]
    for place, first in by_place[0].items() if len(facts) > 1 else ():
        counts = {sum(each.sampler == first.sampler for each in rank.draws) for rank in facts}
        if len(counts) > 1 or any(place not in each for each in by_place):
            continue
        draws = [each[place] for each in by_place]
        is_cut = {each.rank for each in draws} == {*range(len(facts))}
        forms = {(each.parts, each.shuffles, each.length, each.clock) for each in draws}
        if is_cut and first.shuffles and first.parts == len(facts) and len(forms) == 1:
            yield draws


def find_one_order(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S4-setepoch: `set_epoch` changes the order in each epoch.

    Probable: on all ranks, all draws of a sampler that shuffles have one epoch; the first two
    batches of two draws are equal, and differ from each other; and one optimizer has stepped after
    each of both. (Several trials may be to see one order.) Unknown: the batches differ (the data
    set shuffles itself); other optimizers step (several models are to see one order); the epoch
    changes at times (several passes are to be alike).
    """
    if any(rank.unknown for rank in facts):
        return
    found = [find_repeated_draw(rank) for rank in facts]
    first = found[0] if found else None
    if first is None or None in found:
        return
    yield Finding(
        rule="S4-setepoch",
        level=PROBABLE,
        what="the samples come in the same order in each epoch",
        ranks=tuple(each.rank for each in facts),
        since=max(first.steps.values(), default=0),
        where=facts[0].where(first.line),
        why=f"the epoch of the DistributedSampler is always {first.epoch}",
        fix="call sampler.set_epoch(epoch) at the beginning of each epoch",
    )


def find_repeated_draw(rank: RankFacts) -> Draw | None:
    """A draw that repeats the one before it."""
    end = {number: len(clocks) for number, clocks in rank.steps.items()}
    for sampler in {each.sampler: None for each in rank.draws}:
        draws = [each for each in rank.draws if each.sampler == sampler]
        if len({(each.epoch, each.seed, each.length) for each in draws}) > 1:
            continue
        for number, (before, after) in enumerate(pairwise(draws)):
            later = draws[number + 2].steps if number + 2 < len(draws) else end
            batches = first_batches(rank, before)
            if (
                after.shuffles
                and have_stepped(before.steps, after.steps, later)
                and len(batches) > 1
                and batches[0] != batches[1]
                and batches == first_batches(rank, after)
                and not any(None in each for each in batches)
            ):
                return after
    return None


def have_stepped(
    before: Mapping[int, int], after: Mapping[int, int], later: Mapping[int, int]
) -> bool:
    """Whether one optimizer has stepped between the first two moments and the last two."""
    return any(
        before.get(number, 0) < count < later.get(number, 0) for number, count in after.items()
    )


def first_batches(rank: RankFacts, draw: Draw) -> list[Prints]:
    return [
        each.prints
        for each in rank.batches
        if (each.sampler, each.draw) == (draw.sampler, draw.number)
    ]


def find_padding(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S6-pad and S6-part: a metric counts each sample once.

    A hint: batches of a DistributedSampler come while no gradients are recorded. The sampler
    repeats samples so that all ranks have as many, and as many ranks evaluate as there are parts;
    or one rank does, which has one part of several, and all have ended. Unknown: gradients are
    recorded in evaluation; a rank has left no log.
    """
    evaluations = {rank.rank: list_evaluations(rank) for rank in facts}
    have_ended = all(rank.state == ENDED and not rank.unknown for rank in facts)
    for rank in facts:
        for draw in evaluations[rank.rank]:
            form = draw.parts, draw.length
            others = [
                one for one, draws in evaluations.items()
                if form in {(each.parts, each.length) for each in draws}
            ]  # fmt: skip
            if draw.total > draw.length and len(others) == draw.parts:
                yield tell_padding(rank, draw, [each.rank for each in facts])
                return
            if len(others) == 1 < draw.parts == len(facts) and have_ended:
                yield tell_part(rank, draw)
                return


def tell_padding(rank: RankFacts, draw: Draw, ranks: Sequence[int]) -> Finding:
    """S6-pad: an evaluation of all these ranks counts samples twice."""
    return Finding(
        rule="S6-pad",
        level=HINT,
        what=f"an evaluation counts {draw.total - draw.length} of {draw.length} samples twice",
        ranks=tuple(ranks),
        since=max(draw.steps.values(), default=0),
        where=rank.where(draw.line),
        why="DistributedSampler repeats samples, so that all ranks have as many",
        fix="cut the data set without a sampler, into parts whose sizes may differ, and add up "
        "sums and counts over the ranks",
    )


def tell_part(rank: RankFacts, draw: Draw) -> Finding:
    """S6-part: the only rank that evaluates has one part of the samples."""
    part = draw.total // draw.parts
    return Finding(
        rule="S6-part",
        level=HINT,
        what=f"only rank {rank.rank} evaluates, on {part} of {draw.length} samples",
        ranks=(rank.rank,),
        since=max(draw.steps.values(), default=0),
        where=rank.where(draw.line),
        why="its DistributedSampler gives it the part of one rank",
        fix="leave out the sampler of this evaluation, or evaluate on all ranks, and add up sums "
        "and counts over them",
    )


def list_evaluations(rank: RankFacts) -> list[Draw]:
    """The draws whose batches came while no gradients were recorded."""
    trains: dict[tuple[int, int], bool] = {}
    for each in rank.batches:
        trains[each.sampler, each.draw] = trains.get((each.sampler, each.draw), False) | each.trains
    return [draw for draw in rank.draws if trains.get((draw.sampler, draw.number)) is False]


def find_repeated_shares(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S7-workers: the workers of a data loader share the samples of an `IterableDataset`.

    Probable: the first batches of all workers are equal, and so are their second batches, which
    differ from the first. (Workers may begin alike.) Source: the documentation of
    `torch.utils.data.IterableDataset`: each worker has a copy of the data set.
    """
    found: dict[tuple[int, str], list[int]] = {}
    for rank in facts:
        for each in rank.shares:
            first, second = each.prints[: each.workers], each.prints[each.workers :]
            is_known = not any(None in prints or not prints for prints in each.prints)
            are_one = len({*map(tuple, first)}) == len({*map(tuple, second)}) == 1
            if is_known and are_one and first[0] != second[0]:
                found.setdefault((each.workers, rank.where(each.line)), []).append(rank.rank)
    for (workers, where), ranks in found.items():
        yield Finding(
            rule="S7-workers",
            level=PROBABLE,
            what=f"each batch comes {workers} times, from each worker of the data loader",
            ranks=tuple(sorted({*ranks})),
            since=0,
            where=where,
            why="each worker has a copy of the IterableDataset, and yields all of its samples",
            fix="let each worker yield a part, by torch.utils.data.get_worker_info()",
        )


def find_left_out(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S9-replicas: all parts into which the data are cut are drawn.

    A hint: all ranks train a wrapped model on parts that a `DistributedSampler` cuts, and no rank
    draws some of the parts: `num_replicas` is more than the ranks. (A program may want a part of
    the data only.) Unknown: a rank has left no log.
    """
    if any(rank.unknown for rank in facts):
        return
    drawn: dict[tuple[int, int], list[tuple[RankFacts, Draw]]] = {}
    for rank in facts:
        for each in rank.draws:
            if trains_wrapped(rank, each):
                drawn.setdefault((each.parts, each.length), []).append((rank, each))
    for (parts, _), draws in drawn.items():
        ranks = {each.rank for _, each in draws}
        drawing = {rank.rank for rank, _ in draws}
        if parts <= len(facts) or len(ranks) == parts or len(drawing) < len(facts):
            continue
        rank, draw = draws[0]
        yield Finding(
            rule="S9-replicas",
            level=HINT,
            what=f"{parts - len(ranks)} of {parts} parts of the data are drawn by no rank",
            ranks=tuple(each.rank for each in facts),
            since=max(draw.steps.values(), default=0),
            where=rank.where(draw.line),
            why=f"DistributedSampler has num_replicas={parts}, and there are {len(facts)} ranks",
            fix="leave out num_replicas and rank: they are the size of the world and the rank",
        )
