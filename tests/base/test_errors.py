"""What errors say, with which exit code, and that they reach another process whole."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

import playground
from playground.base.errors import (
    UNHEARD,
    Deadlock,
    ForkServerFailed,
    PeerDisconnected,
    PlaygroundError,
    Preempted,
    ProgramRefused,
    RankFailed,
    RankTimeout,
    RendezvousTimeout,
    StoreFailed,
    UsageError,
    has_timed_out,
)
from playground.base.wrapping import PREFIX, WIDTH, wrap_sentence
from playground.explain.hang import Kind
from playground.explain.hang.wording import Diagnosis

DIAGNOSIS = Diagnosis(
    kind=Kind.LOST, culprits=(1,), operation="barrier", line="train.py:1",
    proved=True, unknown="", sentence="rank 1 is in barrier", table="rank 1", cure="call the same",
)  # fmt: skip
STACKS = {0: "train.py:1 in step\n", 2: UNHEARD}
ERRORS: list[tuple[PlaygroundError, int, str]] = [
    (UsageError("-n 0: at least 1"), 2, "-n 0: at least 1"),
    (ForkServerFailed("was killed"), 1, "the fork server, which ranks come from, was killed"),
    (StoreFailed("was killed"), 1, "the process that serves the ranks' store was killed"),
    (RendezvousTimeout("2 of 3 ranks have come"), 1, "2 of 3 ranks have come"),
    (RankFailed(1, 3, "raised", "Traceback: …"), 1, "rank 1 of 3 raised\nTraceback: …"),
    (ProgramRefused("4 ranks do not divide 30"), 1, "4 ranks do not divide 30"),
    (PeerDisconnected(0, 2, "lost rank 1"), 1, "rank 0 of 2 lost rank 1"),
    (Preempted(7), 75, "preempted by SIGTERM after step 7"),
    (
        RankTimeout(3, 2.5, STACKS),
        1,
        "no sign of life for 2.5 s from rank 2 of 3: no answer: stopped, or\ninside C code that "
        "holds the GIL\nrank 0 stands at:\ntrain.py:1 in step\nrank 2 stands at:\n" + UNHEARD,
    ),
    (Deadlock(2, 0.5, {}, DIAGNOSIS), 1, str(DIAGNOSIS)),
]


@pytest.mark.parametrize(
    ("error", "code", "text"), ERRORS, ids=[type(error).__name__ for error, _, _ in ERRORS]
)
def test_it_says_what_has_happened_here_and_in_another_process(
    error: PlaygroundError, code: int, text: str
) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert type(each) is type(error)
        assert (each.exit_code, str(each)) == (code, text)
        assert f"{text}\n".startswith(f"{wrap_sentence(each.headline)}\n")
        assert type(each).__module__ == "playground"


def test_each_has_an_exit_code_and_a_text_of_its_own() -> None:
    def below(kind: type[PlaygroundError]) -> set[type[PlaygroundError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    ours = {kind for kind in below(PlaygroundError) if kind.__module__ == "playground"}
    assert ours - {PlaygroundError} == {type(error) for error, _, _ in ERRORS}
    assert all(kind.__doc__ for kind in ours)


@pytest.mark.parametrize(
    ("stacks", "who"),
    [
        ({1: "here"}, "rank 1 of 4: a hang"),
        ({0: "here", 3: "there"}, "ranks 0, 3 of 4: a hang"),
        ({0: UNHEARD, 1: UNHEARD}, "ranks 0-1 of 4: a hang"),
        ({0: "here", 1: UNHEARD, 2: UNHEARD}, "ranks 1-2 of 4: no answer"),
    ],
)
def test_ranks_that_have_not_answered_are_named_where_others_have(
    stacks: dict[int, str], who: str
) -> None:
    assert f"no sign of life for 3 s from {who}" in RankTimeout(4, 3, stacks).headline


def test_a_long_headline_is_wrapped_where_it_is_shown_and_nowhere_else() -> None:
    words = f"failed: RuntimeError: {'no backend ' * 12}for it"
    failure = RankFailed(1, 2, f"{words}\nsecond line", "Traceback: …")
    assert failure.headline == f"rank 1 of 2 {words}"
    *head, second, last = str(failure).splitlines()
    assert (" ".join(head), second, last) == (failure.headline, "second line", "Traceback: …")
    assert len(PREFIX + head[0]) <= WIDTH >= max(map(len, head))


def test_a_timeout_is_what_the_exception_says_and_not_what_the_code_does() -> None:
    code = 'Traceback:\n  File "a.py", line 3, in <module>\n    init(timeout=timeout)\n'
    assert not has_timed_out(f"{code}OSError: no host")
    assert has_timed_out(f"{code}RuntimeError: Timed out waiting 4000ms")


def test_others_stand_below_the_failure_with_what_the_recorders_say() -> None:
    failure = RankFailed(1, 2, "raised")
    failure.others, failure.diagnosis = {0: "train.py:3 in step"}, DIAGNOSIS
    assert str(failure) == (
        f"rank 1 of 2 raised\nrank 0 stands at:\ntrain.py:3 in step\n{DIAGNOSIS}"
    )
    failure.outcomes = {3: "finished", 0: "failed in the same way", 2: "finished"}
    failure.others, failure.diagnosis = {}, None
    assert str(failure).splitlines()[1:] == ["rank 0 failed in the same way", "ranks 2-3 finished"]
    assert str(Preempted(3)) == "preempted by SIGTERM after step 3"
    assert playground.RankFailed is RankFailed


def test_a_rank_that_lost_another_has_a_line_below_what_that_one_did() -> None:
    failure = PeerDisconnected(1, 2, "failed: RuntimeError: Connection reset by peer", "a stack")
    failure.diagnosis = replace(DIAGNOSIS, culprits=(0,))
    said = "rank 1 then lost its connection to rank 0 (Connection reset by peer)"
    assert str(failure) == f"{DIAGNOSIS}\n{said}"
    failure.diagnosis = replace(DIAGNOSIS, culprits=(1,))
    assert str(failure).endswith("by peer\na stack")
