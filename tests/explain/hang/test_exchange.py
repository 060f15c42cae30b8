"""What ranks of a world that somebody else has started tell each other through the store, and when
rank 0 says that they are in a deadlock."""

from __future__ import annotations

import pickle
from dataclasses import replace

from random_programs import collective, receive, run
from torch.distributed import HashStore

from playground.base.untrusted import unpickle
from playground.explain.hang import UNASKED, Doing, RankState
from playground.explain.hang.box import Box
from playground.explain.hang.exchange import Exchange
from playground.explain.hang.states import Gpu

SUM, ROOT_0 = collective("all_reduce"), collective("broadcast", peer=0)


def test_a_deadlock_is_asked_for_again_after_a_rank_has_moved() -> None:
    """It may stand again where it stood, and then says nothing new."""
    box, store = Box(0, 2, "a world"), HashStore()
    box.begin_program()
    exchange = Exchange(store, 0, 2, box, 0)
    tell(store, *run([SUM, ROOT_0], [ROOT_0, SUM]))
    for asked, answer in enumerate(("moved", "still"), 1):
        assert exchange.find_deadlock() is None
        assert store.add("asked", 0) == asked
        for rank, word in enumerate(("still", answer)):
            store.set(f"answer {asked} of {rank}", word)
        found = exchange.find_deadlock()
        assert bool(found) == (answer == "still")


def test_what_a_rank_has_told_anew_since_it_was_judged_is_judged_again() -> None:
    """Rank 1 has gone on since, stands still there, and says so before it is asked."""
    box, store = Box(0, 2, "a world"), HashStore()
    box.begin_program()
    exchange = Exchange(store, 0, 2, box, 0)
    tell(store, *run([SUM, ROOT_0], [ROOT_0, SUM]))
    assert exchange.find_deadlock() is None
    assert store.add("asked", 0) == 1
    tell(store, run([SUM, ROOT_0], [SUM, ROOT_0])[1])
    for rank in range(2):
        store.set(f"answer 1 of {rank}", "still")
    assert exchange.find_deadlock() is None
    assert store.add("asked", 0) == 1  # nothing is suspected any more


def test_nobody_is_asked_about_a_deadlock_that_is_not_proved() -> None:
    box, store = Box(0, 2, "a world"), HashStore()
    box.begin_program()
    exchange = Exchange(store, 0, 2, box, 0)
    tell(store, *(replace(one, may_act="a thread") for one in run([SUM, ROOT_0], [ROOT_0, SUM])))
    assert exchange.find_deadlock() is None
    assert store.add("asked", 0) == 0


def tell(store: HashStore, *states: RankState) -> None:
    for state in states:
        store.set(f"state {state.rank}", pickle.dumps(replace(state, counts={**state.counts})))
        store.add("states", 1)


def test_what_ranks_tell_each_other_is_said_and_not_proved() -> None:
    """Nobody has asked the others what else they do."""
    box, store = Box(0, 3, "a world"), HashStore()
    box.begin_program()
    exchange = Exchange(store, 0, 3, box, 0)
    tell(store, *run([], [receive(2, 3)], [receive(1, 3)])[1:])
    found = exchange.explain()
    assert found
    assert (found.kind, found.culprits, found.proved) == ("receive against receive", (1, 2), False)
    assert found.unknown == f"{UNASKED} (ranks 1-2)"


def test_a_rank_answers_whether_it_is_as_it_has_told() -> None:
    box, store = Box(1, 2, "a world"), HashStore()
    box.begin_program()
    exchange = Exchange(store, 1, 2, box, 0)

    def ask() -> bytes:
        asked = store.add("asked", 1)
        exchange.look()
        return store.get(f"answer {asked} of 1")

    assert ask() == b"moved", "it is in the program, and has told nothing"
    box.end_program()
    assert b"still" in {ask() for _ in range(100)}


def test_a_rank_that_has_finished_tells_the_others() -> None:
    box, store = Box(1, 2, "a world"), HashStore()
    box.begin_program()
    box.end_program()
    exchange = Exchange(store, 1, 2, box, 0)
    for _ in range(100):  # the ticks of this process may have gone on in some
        exchange.look()
    assert store.check(["state 1"])
    assert unpickle(store.get("state 1"), RankState, Doing, Gpu).doing == Doing.FINISHED
