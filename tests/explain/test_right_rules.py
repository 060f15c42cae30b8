"""The rules on silent mistakes, on facts that are made by hand: what they need, and what makes them
silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from playground.base.event_log import LogReader
from playground.explain.right.averaging import train_apart
from playground.explain.right.facts import (
    BACKWARD,
    BUCKET,
    CALLED,
    FORWARD,
    GAPS,
    IN_GRAPH,
    JOINS,
    LOADED,
    Batch,
    Draw,
    Event,
    FileUse,
    Layout,
    Look,
    Misuse,
    Model,
    Optimizer,
    Overwritten,
    RankFacts,
    Rates,
)
from playground.explain.right.finding import HINT, PROBABLE, SURE, Finding
from playground.explain.right.log import (
    ENDED,
    FAILED,
    FIRST_STEPS,
    FORMAT,
    NO_GRADIENT,
    RUNNING,
    STATE,
    THREADS,
    UNKNOWN,
    file_name,
    is_looked_at,
)
from playground.explain.right.reading import read_ranks
from playground.explain.right.report import NEVER_SEEN, tell, tell_all
from playground.explain.right.rules import find_mistakes
from playground.explain.right.watcher import RankLog

RANKS = (0, 1)
LINES = [("train.py", 10, "train", "/train.py"), ("train.py", 20, "train", "/train.py")]
MODEL = Model("0#1", [0, 1], ["weight"], [True], [7], 0)
WRAPPED = Optimizer(0, "torch.optim.sgd.SGD", ["0#1/weight"], [8], [0, 1])
BY_HAND = Optimizer(0, "torch.optim.sgd.SGD", ["0/0"], [8], [0, 1])
AVERAGED = Event(FORWARD, "0#1", True, "", [], [], 0, 0, 1, [])
INSIDE = replace(AVERAGED, flag=False)
REDUCED = Event(BACKWARD, "", True, "", [], [], 0, 0, 1, [])
LOCAL = replace(REDUCED, flag=False)
STEPS = 4


def look(
    step: int, before: int | None, gradient: int | None, after: int | None, *events: Event,
    optimizer: Optimizer = WRAPPED, clock: int | None = None,
) -> Look:  # fmt: skip
    return Look(
        optimizer, step, step if clock is None else clock, 0, [before], [gradient], [after], [],
        [], [["lr=0.1"]], list(events), True, False, False, False, ["0#1"], 1,
    )  # fmt: skip


def drifting(rank: int, *events: Event, first: int = 0, gradient: int = 100) -> list[Look]:
    """Steps of a rank whose parameter is that of others until the step `first`."""
    apart = 1000 * (rank + 1)
    return [
        look(
            step,
            7 + step if step <= first else apart + step,
            50 if step < first else gradient + rank,
            8 + step if step < first else apart + step + 1,
            *events,
        )
        for step in range(STEPS)
    ]


def facts_of(looks: Sequence[Sequence[Look]], **changes: object) -> list[RankFacts]:
    """What ranks have seen, the final values after their last steps."""
    return [
        replace(
            RankFacts(
                rank, ENDED, "", LINES, [MODEL], [], list(mine),
                {mine[-1].optimizer.parameters[0]: mine[-1].after[0]},
                {0: [each.clock for each in mine]},
            ),
            **changes,  # type: ignore[arg-type]
        )
        for rank, mine in enumerate(looks)
    ]  # fmt: skip


def rules_of(facts: Sequence[RankFacts]) -> list[tuple[str, bool]]:
    """The rules that find something, and whether that is certain or probable."""
    return [(each.rule, each.level is not HINT) for each in find_mistakes(facts)]


BYPASS = [drifting(rank, LOCAL) for rank in RANKS]


def test_gradients_that_are_changed_after_the_average_are_told_if_both_are_known() -> None:
    looks = [
        [replace(each, raw=[60]) for each in drifting(rank, AVERAGED, REDUCED, first=2)]
        for rank in RANKS
    ]
    [found] = find_mistakes(facts_of(looks))
    assert (found.rule, found.level) == ("D12-gradient", PROBABLE)
    not_known: list[list[int | None]] = [[], [None], [NO_GRADIENT]]
    for raw in not_known:
        unknown = [[replace(each, raw=raw) for each in mine] for mine in looks]
        assert rules_of(facts_of(unknown)) == [("D-drift", False)]
    other = [[replace(each, raw=[60 + rank]) for each in looks[rank]] for rank in RANKS]
    assert rules_of(facts_of(other)) == [("D-drift", False)]


def test_the_first_steps_are_looked_at_and_then_pairs_ever_more_rarely() -> None:
    looked_at = [step for step in range(10**6) if is_looked_at(step)]
    assert looked_at[:12] == [*range(12)]
    assert looked_at[12:16] == [16, 17, 32, 33]
    assert len([step for step in looked_at if step < 10_000]) == 56
    assert len(looked_at) < 200
    assert all(after - step <= max(512, step / 8) for step, after in pairwise(looked_at))
    pairs = {step for step in looked_at if step + 1 in looked_at or step - 1 in looked_at}
    assert pairs == {*looked_at}


def test_a_finding_names_ranks_step_line_reason_and_remedy() -> None:
    [found] = find_mistakes(facts_of([drifting(rank, LOCAL, first=2) for rank in RANKS]))
    assert (found.rule, found.ranks, found.since, found.where) == (
        "D1-bypass", (0, 1), 2, "train.py:20",
    )  # fmt: skip
    said = " ".join(tell(found).split())
    words = "wrong [D1-bypass]: the replicas of a model drift apart"
    assert said.startswith(f"playground: probably {words}")
    certain = replace(found, level=SURE)
    assert " ".join(tell(certain).split()).startswith(f"playground: {words}")
    unsure = replace(found, level=HINT)
    assert " ".join(tell(unsure).split()).startswith(f"playground: perhaps {words}")
    assert "weight of the model that DistributedDataParallel wraps in train.py:10" in said
    assert "(ranks 0-1, since step 2). Why: no forward pass" in said
    assert "(train.py:20). To fix it: call the wrapped model" in said
    assert max(map(len, tell(found).splitlines())) <= 80


def test_steps_between_which_nobody_has_looked_are_said() -> None:
    steps = {32: (7, 8), 33: (8, 9), 64: (1000, 2000), 65: (2000, 3000)}

    def value(rank: int, step: int, at: int) -> int:
        return steps[step][at] * (rank + 1 if step > 33 else 1)

    looks = [
        [look(step, value(rank, step, 0), 50, value(rank, step, 1), LOCAL) for step in steps]
        for rank in RANKS
    ]
    [found] = find_mistakes(facts_of(looks))
    assert (found.rule[0], found.since, found.equal_at) == ("D", 64, 33)
    said = " ".join(tell(found).split())
    assert "(ranks 0-1, first seen at step 64, equal at step 33). Why:" in said


NOT_KNOWN = {
    "a rank's log says so": [
        replace(each, unknown="x" * each.rank) for each in facts_of(BYPASS)
    ],
    "a rank has left no log": facts_of(BYPASS)[:1],
    "no moment is common": facts_of(
        [[replace(each, clock=each.clock + 100 * rank) for each in mine]
         for rank, mine in enumerate(BYPASS)]
    ),
    "the group has no clock": facts_of(
        [[replace(each, clock=-1) for each in mine] for mine in BYPASS]
    ),
    "parameters cannot be read": facts_of(
        [[replace(each, before=[None], after=[None]) for each in mine] for mine in BYPASS],
        final={"0#1/weight": None},
    ),
    "a step calls a closure": facts_of(
        [[replace(each, has_closure=True) for each in mine] for mine in BYPASS]
    ),
    "a rank has no batches left": facts_of(
        [drifting(rank, replace(INSIDE, note=JOINS), LOCAL) for rank in RANKS]
    ),
    "a hook of local SGD": facts_of(
        [drifting(rank, replace(AVERAGED, note="post_localSGD_hook"), REDUCED) for rank in RANKS]
    ),
    "nobody trains them": facts_of(
        [[replace(each, gradients=[NO_GRADIENT]) for each in mine] for mine in BYPASS]
    ),
    "the wrapper is gone": facts_of(
        [[replace(each, wrapped=[]) for each in mine] for mine in BYPASS]
    ),
    "they are equal in the end": facts_of(BYPASS, final={"0#1/weight": 1}),
    "they are equal at a later step": facts_of(
        [[*mine[:2], replace(mine[2], before=[5]), mine[3]] for mine in BYPASS]
    ),
}  # fmt: skip


@pytest.mark.parametrize("facts", NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_what_is_unknown_is_no_finding(facts: list[RankFacts]) -> None:
    assert rules_of(facts) == []


def test_ranks_that_are_alike_are_not_accused() -> None:
    same = drifting(0, AVERAGED, REDUCED)
    assert rules_of(facts_of([same, same])) == []


def test_replicas_that_differ_only_at_the_end_are_not_accused() -> None:
    same = drifting(0, AVERAGED, REDUCED)
    facts = facts_of([same, same])
    facts[1] = replace(facts[1], final={"0#1/weight": 1})
    assert rules_of(facts) == []


@pytest.mark.parametrize(
    ("events", "rule", "is_certain"),
    [
        ([LOCAL], "D1-bypass", False),
        ([INSIDE, LOCAL], "D2-nosync-all", False),
        ([AVERAGED, REDUCED, INSIDE, LOCAL], "D2-nosync-last", True),
        ([AVERAGED, REDUCED, LOCAL], "D4-later", True),
    ],
)
def test_the_cause_is_read_from_what_came_before_the_step(
    events: list[Event], rule: str, is_certain: bool
) -> None:
    [found] = find_mistakes(facts_of([drifting(rank, *events) for rank in RANKS]))
    assert (found.rule, found.level) == (rule, SURE if is_certain else PROBABLE)


def test_what_came_before_the_step_is_a_hint_at_most_if_it_is_not_known_whole() -> None:
    looks = [[replace(each, is_whole=False) for each in mine] for mine in BYPASS]
    assert rules_of(facts_of(looks)) == [("D-drift", False)]


@pytest.mark.parametrize("events", [[LOCAL], [INSIDE, LOCAL]])
def test_training_apart_is_a_hint_if_it_may_be_meant(events: list[Event]) -> None:
    """An average may come later, or was made unseen; or there was another phase before."""
    looks = [drifting(rank, *events) for rank in RANKS]
    large = Event(CALLED, "all_reduce", False, "", [], [], 8, 2, 1, [])
    before = [[look(0, 7, 50, 7, AVERAGED, REDUCED), *mine[1:]] for mine in
              [drifting(rank, *events, first=1) for rank in RANKS]]  # fmt: skip
    unsure = [
        facts_of(looks, state=FAILED),
        facts_of(looks, state=RUNNING),
        facts_of(looks, has_threads=True),
        facts_of([drifting(rank, *events, large) for rank in RANKS]),
        facts_of([[replace(each, after=[8]) if each.step == 0 else each for each in mine]
                  for mine in before]),
    ]  # fmt: skip
    assert [[certain for _, certain in rules_of(facts)] for facts in unsure] == [[False]] * 5


def test_a_step_that_was_left_out_long_ago_is_found_by_the_clocks() -> None:
    looks = [
        [
            look(0, 7, 50, 8, AVERAGED, REDUCED),
            look(16 - rank, 100 + rank, 50, 200 + rank, AVERAGED, REDUCED, clock=16),
        ]
        for rank in RANKS
    ]
    facts = facts_of(looks)
    steps = [{0: [*range(18)]}, {0: [clock for clock in range(18) if clock != 9]}]
    facts = [replace(each, steps=mine) for each, mine in zip(facts, steps, strict=True)]
    [found] = find_mistakes(facts)
    assert (found.rule, found.is_certain) == ("D5-skip", True)
    assert "rank 1 made 0 steps" in found.why
    unsure = [replace(each, has_all_steps=False) for each in facts]
    assert rules_of(unsure) == [("D-drift", True)]
    running = [replace(each, state=RUNNING) for each in unsure]
    assert rules_of(running) == [("D-drift", False)]


def written(rank: int, *events: Event) -> list[Look]:
    """Between the steps 0 and 1, something writes the parameter."""
    return [look(0, 7, 50, 8), look(1, 100 + rank, 60, 200 + rank, *events)]


def test_a_load_on_one_rank_is_told_from_other_writes() -> None:
    load = Event(LOADED, "Linear", False, "", [], [0], 0, 0, 0, [])
    together = (AVERAGED, REDUCED)
    one = facts_of([written(0, *together), written(1, load, *together)])
    [found] = find_mistakes(one)
    assert (found.rule, found.is_certain, found.where) == ("D6-load", True, "train.py:10")
    assert found.why == "only rank 1 called load_state_dict"
    looks = [written(rank, *together) for rank in RANKS]
    assert rules_of(facts_of(looks)) == [("D6-write", True)]
    apart = facts_of([written(0), written(1, load)])
    assert rules_of(apart) == [("D6-load", False)]
    assert rules_of(facts_of([written(0), written(1)])) == [("D6-write", False)]


def test_a_write_is_a_hint_if_a_call_may_have_written_or_steps_lie_between() -> None:
    call = Event(CALLED, "broadcast", False, "", [], [0], 8, 2, 1, [])
    called = facts_of([written(rank, call) for rank in RANKS])
    later = facts_of([[mine[0], replace(mine[1], step=9, clock=9)] for mine in map(written, RANKS)])
    everywhere = Event(LOADED, "Linear", False, "", [], [0], 0, 0, 0, [])
    loaded = facts_of([written(rank, everywhere) for rank in RANKS])
    assert [rules_of(each) for each in (called, later, loaded)] == [[("D-drift", False)]] * 3


def test_hyperparameters_and_state_are_the_cause_if_gradients_are_equal() -> None:
    together = (AVERAGED, REDUCED)
    same = [
        [look(0, 7, 50, 100 + rank, *together), look(1, 100 + rank, 60, 200 + rank, *together)]
        for rank in RANKS
    ]
    other = [
        [replace(each, settings=[[f"lr={0.1 / (rank + 1)}"]]) for each in mine]
        for rank, mine in enumerate(same)
    ]
    [found] = find_mistakes(facts_of(other))
    assert (found.rule, found.is_certain) == ("D9-hyper", True)
    assert "rank 0: lr=0.1; rank 1: lr=0.05" in found.why
    assert rules_of(facts_of(same)) == [("D10-state", True)]
    own = replace(WRAPPED, kind="train.Noisy")
    apart = [[replace(each, events=[LOCAL]) for each in mine] for mine in other]
    assert rules_of(facts_of(apart)) == [("D9-hyper", False)]
    for change in ({"has_hooks": True}, {"optimizer": own}, {"events": [LOCAL]}):
        unsure = [[replace(each, **change) for each in mine] for mine in same]
        assert rules_of(facts_of(unsure)) == [("D10-state", False)]


def test_learning_rates_that_are_equal_again_are_told_if_they_differed_since() -> None:
    together = (AVERAGED, REDUCED)

    def train(*of_each: Sequence[Rates]) -> list[RankFacts]:
        looks = [
            [look(0, 7, 50, 8, *together), look(9, 100 + rank, 60, 200 + rank, *together)]
            for rank in RANKS
        ]
        return [
            replace(facts, rates=[*rates])
            for facts, rates in zip(facts_of(looks), of_each, strict=True)
        ]

    at_four, at_six = Rates(0, 4, [0.2], [0.1]), Rates(0, 6, [0.2], [0.1])
    [found] = find_mistakes(train([at_six], [at_four]))
    assert (found.rule, found.is_certain) == ("D9-hyper", True)
    assert "differed from step 4 on (rank 0: lr=0.2; rank 1: lr=0.1)" in found.why
    of_another = replace(at_four, optimizer=1)
    for alike in (train([at_four], [at_four]), train([of_another], []), train([], [])):
        assert rules_of(alike) == [("D-drift", True)]
    later = Rates(0, 10, [0.2], [0.1])
    assert rules_of(train([later], [])) == [("D-drift", True)]


def test_ranks_that_share_what_they_measure_and_no_gradient_train_apart() -> None:
    measured = replace(GRADIENT, gradients=[], size=1)

    def train(*events: Event, **changes: object) -> list[RankFacts]:
        looks = [
            [
                look(step, 7 + apart * step, 50 + apart, 7 + apart * (step + 1), LOCAL, *events,
                     optimizer=BY_HAND)
                for step in range(STEPS)
            ]
            for apart in (1, 1000)
        ]  # fmt: skip
        return facts_of(looks, **{"models": [], "has_loader": True, **changes})

    apart = train(measured)
    assert rules_of(apart) == [("N1-alone", True)]
    assert train_apart(apart)
    assert train_apart(train())
    assert rules_of(train()) == []  # an ensemble may
    for joined in (
        train(replace(measured, size=8)),  # it may be a parameter
        train(replace(measured, flag=True)),  # in backward: parts of one model
        train(measured, has_threads=True),
        train(replace(measured, subject="send")),
        train(measured, models=[MODEL]),
    ):
        assert not train_apart(joined)
    assert rules_of(train(replace(measured, size=8))) == []
    assert rules_of(train(replace(measured, flag=True))) == []


def test_a_difference_by_rounding_is_a_hint() -> None:
    looks = [
        [
            replace(each, values=[[1.0 + rank * 1e-7, 2.0]])
            for each in (look(0, 7, 50, 100 + rank), look(1, 100 + rank, 60, 200 + rank))
        ]
        for rank in RANKS
    ]
    assert rules_of(facts_of(looks)) == [("D10-state", False)]


def test_a_model_of_other_names_is_another_model() -> None:
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    names = [["weight", "bias"], ["bias", "weight"], ["bias", "scale"]]
    two = [replace(MODEL, names=each, trained=[True] * 2, prints=[1, 2]) for each in names]
    order = [replace(facts[0], models=two[:1]), replace(facts[1], models=two[1:2])]
    other = [replace(facts[0], models=two[:1]), replace(facts[1], models=two[2:])]
    assert rules_of(order) == [("D11-order", True)]
    assert rules_of(other) == []


GRADIENT = Event(CALLED, "all_reduce", False, "", [0], [], 8, 2, 1, [])


def by_hand(rank: int, *events: Event, apart: int = 1000, gradient: int = 50) -> list[Look]:
    return [
        look(
            step, apart * rank + step, gradient + step, apart * rank + step + 1, LOCAL, *events,
            optimizer=BY_HAND,
        )
        for step in range(STEPS)
    ]  # fmt: skip


def test_replicas_that_start_apart_are_named_if_their_gradients_are_averaged() -> None:
    facts = facts_of([by_hand(rank, GRADIENT) for rank in RANKS])
    [found] = find_mistakes(facts)
    assert (found.rule, found.level) == ("M1-start", PROBABLE)


@pytest.mark.parametrize(
    "looks",
    [
        [by_hand(rank) for rank in RANKS],  # nobody has averaged
        [by_hand(rank, GRADIENT, apart=0) for rank in RANKS],
        [by_hand(rank, replace(GRADIENT, ranks=1)) for rank in RANKS],  # in parts
        [by_hand(rank, GRADIENT, replace(GRADIENT, subject="send")) for rank in RANKS],
        [by_hand(rank, GRADIENT, gradient=50 * (rank + 1)) for rank in RANKS],
        [by_hand(rank, GRADIENT)[:1] for rank in RANKS],  # one step proves nothing
    ],
)
def test_right_averaging_and_what_may_be_is_not_named(looks: list[list[Look]]) -> None:
    assert rules_of(facts_of(looks)) == []


def test_averaging_is_unknown_where_another_thread_communicates() -> None:
    looks = [by_hand(rank, GRADIENT) for rank in RANKS]
    assert rules_of(facts_of(looks, has_threads=True)) == []


def fed(rank: int, step: int, *, inputs: int | None, gradients: int | None) -> Look:
    forward = replace(AVERAGED, prints=[inputs])
    bucket = Event(BUCKET, "", False, "", [], [], 0, 0, 1, [gradients])
    return look(step, 7 + step, 50 + step, 8 + step, forward, bucket, REDUCED)


def feed(
    *, inputs: int = 0, gradients: int = 0, changing: int = 1, steps: int = 4
) -> list[list[Look]]:
    """Ranks whose inputs and gradients differ by so much."""
    return [
        [
            fed(
                rank, step, inputs=step * changing + 100 + inputs * rank,
                gradients=step + 200 + gradients * rank,
            )
            for step in range(steps)
        ]
        for rank in RANKS
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("looks", "rules"),
    [
        (feed(), [("E1-batches", True)]),
        (feed(inputs=1), []),
        (feed(gradients=1), []),  # other parts of the loss, or noise
        (feed(changing=0), []),  # one batch, a smoke test
        (feed(steps=2), []),
    ],
)
def test_equal_batches_are_told_if_inputs_and_gradients_are_equal(
    looks: list[list[Look]], rules: list[tuple[str, bool]]
) -> None:
    assert rules_of(facts_of(looks, has_loader=True)) == rules
    assert rules_of(facts_of(looks)) == [(rule, False) for rule, _ in rules]


def test_equal_batches_without_a_data_loader_are_probably_wrong_in_many_steps() -> None:
    assert rules_of(facts_of(feed(steps=FIRST_STEPS - 1))) == [("E1-batches", False)]
    assert rules_of(facts_of(feed(steps=FIRST_STEPS))) == [("E1-batches", True)]


def test_the_cure_for_equal_batches_is_for_where_they_come_from() -> None:
    [drawn] = find_mistakes(facts_of(feed()))
    assert drawn.fix.startswith("give each rank its own part of the data; where batches are drawn")
    loaded = facts_of(feed(), has_loader=True)
    [uncut] = find_mistakes(loaded)
    assert uncut.fix.startswith("give the DataLoader a DistributedSampler")
    cut = [
        replace(each, draws=draws(rank)[:1], batches=[Batch(0, 0, 0, [5], True)])
        for rank, each in enumerate(loaded)
    ]
    [alike] = find_mistakes(cut)
    assert alike.fix.startswith("the data set draws the same numbers on all ranks: give each rank")
    evaluated = [replace(each, batches=[Batch(0, 0, 0, [5], False)]) for each in cut]
    assert find_mistakes(evaluated)[-1].fix == uncut.fix


def draws(part: int, **changes: Any) -> list[Draw]:
    two = [
        Draw(0, 0, part, 2, 0, 0, True, 16, 16, 0, 3, {}, 0),
        Draw(0, 1, part, 2, 0, 1, True, 16, 16, 0, 9, {0: 4}, 1),
    ]
    return [replace(each, **changes) for each in two]


def drawing(**changes: Any) -> list[RankFacts]:
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    mine = [draws(0), draws(1, **changes)]
    return [replace(each, draws=drawn) for each, drawn in zip(facts, mine, strict=True)]


def test_samplers_of_other_seeds_or_epochs_are_told() -> None:
    assert rules_of(drawing()) == []
    [seed], [epoch] = (find_mistakes(drawing(seed=1)), find_mistakes(drawing(epoch=7)))
    assert (seed.rule, seed.level, seed.where) == ("S2-seed", PROBABLE, "train.py:10")
    assert "(rank 0: 0, rank 1: 1)" in seed.why
    assert (epoch.rule, epoch.since) == ("S3-epoch", 0)
    apart = [replace(each, models=[]) for each in drawing(seed=1)]
    assert rules_of(apart) == [("S2-seed", False)]
    other = [[replace(step, optimizer=BY_HAND) for step in each.looks] for each in apart]
    facts = [replace(each, looks=mine) for each, mine in zip(drawing(seed=1), other, strict=True)]
    assert ("S2-seed", False) in rules_of(facts)  # it is another model that is trained on them


def test_parts_that_no_rank_draws_are_a_hint_if_all_ranks_draw_of_them() -> None:
    cut = [replace(each, draws=[replace(each.draws[0], parts=3)]) for each in drawing()]
    assert rules_of(cut) == [("S9-replicas", False)]
    assert rules_of([cut[0], replace(cut[1], draws=[])]) == []


@pytest.mark.parametrize(
    "changes", [{"length": 8}, {"parts": 3}, {"rank": 0}, {"clock": 4}, {"number": 5}]
)
def test_samplers_that_cut_other_data_are_not_compared(changes: dict[str, int]) -> None:
    assert rules_of(drawing(seed=1, **changes)) == []


def repeated(
    *, epochs: tuple[int, int, int] = (0, 0, 0), steps: tuple[int, ...] = (0, 4, 8), prints: int = 1
) -> list[RankFacts]:
    """Three passes over one sampler: epochs, steps made before each, and what the first batch of
    the second pass is."""
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    drawn = [
        Draw(0, number, 0, 2, 0, epoch, True, 16, 16, 0, number, {0: made}, 1)
        for number, (epoch, made) in enumerate(zip(epochs, steps, strict=True))
    ]
    batches = [
        Batch(0, number, batch, [2 if batch else prints if number else 1], True)
        for number in range(3)
        for batch in range(2)
    ]
    return [replace(each, draws=drawn, batches=batches) for each in facts]


def test_one_order_in_each_epoch_is_told() -> None:
    [found] = find_mistakes(repeated())
    assert (found.rule, found.level, found.since) == ("S4-setepoch", PROBABLE, 4)


@pytest.mark.parametrize(
    "facts",
    [
        repeated(epochs=(0, 1, 2)),
        repeated(epochs=(0, 0, 1)),
        repeated(steps=(0, 0, 0)),  # nobody trains
        repeated(steps=(0, 4, 4)),  # the second pass evaluates
        repeated(prints=3),  # the data set shuffles itself
        repeated(prints=2),  # all batches are equal
    ],
)
def test_one_order_may_be_meant(facts: list[RankFacts]) -> None:
    assert rules_of(facts) == []


def test_an_optimizer_without_gradients_is_told_though_the_events_of_some_steps_are_not_whole() -> (
    None
):
    """Three whole steps are needed, each behind a backward pass; no step may have a gradient."""

    def rules(*steps: Look) -> list[tuple[str, bool]]:
        return rules_of(facts_of([steps] * 2))

    idle = [look(step, 7, NO_GRADIENT, 7, LOCAL, optimizer=BY_HAND) for step in range(4)]
    assert rules(*idle[:3]) == [("O1-nograd", True)]
    assert rules(*idle[:2]) == []
    unseen = replace(idle[3], is_whole=False, events=[])
    assert rules(*idle[:3], unseen) == [("O1-nograd", True)]
    assert rules(*idle[:2], unseen) == []
    assert rules(*idle[:3], replace(idle[3], events=[])) == []
    assert rules(*idle[:3], replace(unseen, gradients=[9], after=[8])) == []


def test_misuses_of_one_line_are_one_finding() -> None:
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    facts = [replace(each, misuses=[Misuse(GAPS, "broadcast", 1, 3 - each.rank)]) for each in facts]
    [found] = find_mistakes(facts)
    assert (found.rule, found.ranks, found.since, found.where) == (
        "G1-noncontig", (0, 1), 2, "train.py:20",
    )  # fmt: skip
    assert rules_of([RankFacts(each.rank, RUNNING, "x") for each in facts]) == []


def test_a_run_without_findings_says_what_it_has_seen() -> None:
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    first, seen, *_ = tell_all([], facts).splitlines()
    assert first == "playground: no silent mistake was seen: 8 steps of optimizers were compared"
    assert seen.startswith("looked at: 8 steps of optimizers, ")
    more = [replace(each, steps={0: [*range(9)]}) for each in facts]
    assert (
        "8 of 18 steps of optimizers were compared looked at: 8 of 18 steps of optimizers, "
        in say_nothing_of(more)
    )
    facts[1] = RankFacts(1, RUNNING, "it has not begun")
    assert f"not looked at: rank 1: it has not begun; {NEVER_SEEN}" in say_nothing_of(facts)
    facts[1] = RankFacts(1, RUNNING, is_full=True)
    said = f"not looked at: rank 1: its log is full, and has the first steps; {NEVER_SEEN}"
    assert said in say_nothing_of(facts)
    assert f" files not looked at: {NEVER_SEEN}" in say_nothing_of([facts[0]])


def test_parameters_that_are_divided_among_ranks_are_said_not_to_be_looked_at() -> None:
    parts: list[tuple[bool, list[int]] | None] = [(True, [0]), None, (False, [0, 1])]
    optimizer = replace(BY_HAND, parameters=["0/0", "0/1", "0/2"], shards=parts)
    facts = facts_of([[look(step, 7, 9, 8, optimizer=optimizer) for step in range(2)]] * 2)
    said = say_nothing_of(facts)
    divided = "parameters that are divided among ranks"
    assert f"4 steps of optimizers were compared, but for {divided} looked at: " in said
    assert f"not looked at: what becomes of the {divided} (1 DTensor); {NEVER_SEEN}" in said


def test_of_a_run_that_has_failed_it_is_said_until_when_nothing_was_seen() -> None:
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2)
    said = tell_all([], facts, has_failed=True).splitlines()
    assert said[0].startswith("playground: until the failure, no silent mistake was seen: 8 steps")
    facts = [replace(each, looks=[], has_calls=True) for each in facts]
    assert tell_all([], facts, has_failed=True).startswith("playground: until the failure, no sil")


def say_nothing_of(facts: Sequence[RankFacts]) -> str:
    """What is told if nothing is wrong, in one line."""
    return " ".join(tell_all([], facts).split())


def test_a_log_is_read_while_its_rank_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RankLog(tmp_path / file_name(0))
    log.add_step(0, 1)
    read_records = LogReader.read_records

    def read(self: LogReader, numbers: range) -> dict[int, bytes]:
        found = read_records(self, numbers)
        log.add_step(0, 2)
        return found

    monkeypatch.setattr(LogReader, "read_records", read)
    [facts] = read_ranks(tmp_path, 1)
    assert facts.has_all_steps
    assert facts.steps == {0: [1]}


def test_a_full_log_ends_at_one_moment(tmp_path: Path) -> None:
    log = RankLog(tmp_path / file_name(0))
    log.tell(THREADS)
    log.add_step(0, 1)
    log.tell(UNKNOWN, "x" * FORMAT.text)  # has no room
    log.tell(UNKNOWN, "it is short, and comes later")
    log.add_step(0, 2)
    log.state[STATE] = ENDED
    [facts] = read_ranks(tmp_path, 1)
    assert (facts.state, facts.is_full, facts.unknown) == (RUNNING, True, "")
    assert facts.has_threads
    assert not facts.has_all_steps
    assert facts.steps == {0: [1]}


def test_certain_findings_come_first() -> None:
    findings = [
        Finding(rule, SURE if certain else HINT, "what", (0,), since, "", "why", "fix")
        for rule, certain, since in (("a", False, 0), ("b", True, 5), ("c", True, 1))
    ]
    facts = facts_of([drifting(0)] * 2)
    told = tell_all(sorted(findings, key=lambda each: each.rule), facts)
    assert told.count("perhaps wrong") == 1
    assert told.count("(rank 0, since step 5)") == 1


@pytest.mark.parametrize("content", [b"", b"no log at all" * 100, bytes(10_000)])
def test_a_log_that_cannot_be_read_is_unknown(content: bytes, tmp_path: Path) -> None:
    (tmp_path / file_name(0)).write_bytes(content)
    found = read_ranks(tmp_path, 2)
    assert [each.looks for each in found] == [[], []]
    assert found[1].unknown == "it has not begun"
    assert find_mistakes(found) == []


def in_pairs(*more: Event) -> list[RankFacts]:
    """Four ranks that average in pairs."""
    optimizer = replace(BY_HAND, ranks=[0, 1, 2, 3])
    averaged = Event(CALLED, "all_reduce", False, "", [0], [], 8, 2, 1, [])
    looks = []
    for rank in range(4):
        apart = 1000 * (rank // 2 + 1)
        looks.append(
            [
                look(
                    step, apart + step if step else 7, apart, apart + step + 1, REDUCED, averaged,
                    *more, optimizer=optimizer,
                )
                for step in range(STEPS)
            ]
        )  # fmt: skip
    return facts_of(looks, models=[])


def test_groups_that_nothing_joins_train_models_apart() -> None:
    assert rules_of(in_pairs()) == [("M13-parts", False)]
    joining = Event(CALLED, "all_reduce", False, "", [], [0], 8, 4, 1, [])
    assert rules_of(in_pairs(joining)) == []
    sending = Event(CALLED, "send", False, "", [], [], 1, 4, 1, [])
    assert rules_of(in_pairs(sending)) == []


def laid_out(strides: Sequence[int] = (1, 2), **changes: Any) -> list[RankFacts]:
    """Two ranks reduce a table, whose strides on rank 1 are these."""
    plain = Layout("all_reduce", "0", [0, 1], 3, [2, 3], [3, 1], 1, 0)
    other = replace(plain, strides=[*strides], **changes)
    facts = [RankFacts(rank, ENDED, "", LINES) for rank in RANKS]
    return [replace(facts[0], layouts=[plain]), replace(facts[1], layouts=[other])]


def test_one_call_has_one_layout_on_all_ranks() -> None:
    [found] = find_mistakes(laid_out())
    assert (found.rule, found.level, found.where) == ("G2-strides", SURE, "train.py:20")
    assert "rank 0: (3, 1), rank 1: (1, 2)" in found.why
    assert rules_of(laid_out((3, 1))) == []
    assert rules_of(laid_out(clock=4)) == []  # another call
    assert rules_of(laid_out(shape=[3, 2])) == []  # the memory may be the same
    assert rules_of([laid_out()[0], RankFacts(1, RUNNING, "it has not begun")]) == []


def overwritten(**of_the_source: Any) -> list[RankFacts]:
    """Rank 1 has loaded weights that rank 0 overwrites."""
    facts = [RankFacts(rank, ENDED, "", LINES) for rank in RANKS]
    mine = replace(facts[1], has_restored=True, overwritten=[Overwritten(0, 1)])
    return [replace(facts[0], **of_the_source), mine]


def test_a_broadcast_over_what_was_loaded_is_told_unless_the_source_may_have_loaded() -> None:
    assert rules_of(overwritten()) == [("R1-source", True)]
    read = FileUse(True, "model.pt", [], [], 0, 0)
    for unknown in (
        {"has_restored": True}, {"has_messages": True}, {"files": [read]}, {"unknown": "no log"},
    ):  # fmt: skip
        assert rules_of(overwritten(**unknown)) == []


def test_parameters_without_an_optimizer_are_a_hint_when_the_program_has_ended() -> None:
    model = replace(MODEL, names=["weight", "bias"], trained=[True] * 2, prints=[7, 7])
    facts = facts_of([drifting(0, AVERAGED, REDUCED)] * 2, models=[model], unowned=["0#1/bias"])
    assert rules_of(facts) == [("O2-unowned", False)]
    assert rules_of([replace(each, state=FAILED) for each in facts]) == []
    assert rules_of([facts[0], replace(facts[1], unowned=[])]) == []  # rank 1 has an optimizer
    assert rules_of([replace(each, models=[MODEL]) for each in facts]) == []


def test_a_loss_that_is_reduced_is_a_hint_if_nothing_averages_gradients() -> None:
    reduced = Event(CALLED, "all_reduce", False, IN_GRAPH, [], [], 1, 2, 1, [])
    averaged = replace(reduced, note="", gradients=[0], size=8)

    def train(*events: Event) -> list[RankFacts]:
        looks = [[replace(each, optimizer=BY_HAND) for each in drifting(rank, *events)]
                 for rank in RANKS]  # fmt: skip
        own = [
            [replace(each, gradients=[10 * each.step + rank + 1]) for each in mine]
            for rank, mine in enumerate(looks)
        ]
        return facts_of(own, models=[])

    assert rules_of(train(reduced, LOCAL)) == [("M7-loss", False)]
    assert rules_of(train(replace(reduced, note=""), LOCAL)) == []
    assert rules_of(train(LOCAL, reduced)) == []  # it comes after backward
    assert rules_of(train(reduced, LOCAL, averaged)) == []


def test_calls_of_one_order_at_other_lines_are_a_hint() -> None:
    early = Event(CALLED, "all_reduce", False, "", [], [], 1, 2, 0, [])
    late = replace(early, line=1)
    orders = ((early, late), (late, early))
    looks = [[look(step, 1, 2, 3, *orders[rank]) for step in range(2)] for rank in RANKS]
    [found] = find_mistakes(facts_of(looks))
    assert (found.rule, found.level) == ("P1-shift", HINT)
    assert "rank 0: train.py:10, rank 1: train.py:20" in found.why
    for other in (
        (late, late), (early,), (late, replace(early, size=2)), (replace(late, ranks=3), early),
        (late, replace(early, line=-1)),
    ):  # fmt: skip
        looks[1] = [look(step, 1, 2, 3, *other) for step in range(2)]
        assert rules_of(facts_of(looks)) == []


KEPT = [each.name for each in fields(RankFacts) if each.default_factory is not MISSING]
"""What a rank keeps of its program, by the fields of its facts."""


@pytest.mark.parametrize("name", KEPT)
def test_all_that_a_rank_has_written_is_looked_at_by_rules(name: str) -> None:
    """But lines, which only say where something was."""
    nothing = RankFacts(0, ENDED)
    kept: Any = {"": 0} if isinstance(getattr(nothing, name), dict) else [None]
    assert not nothing.has_events
    assert replace(nothing, **{name: kept}).has_events == (name != "lines")
