"""Programs drawn at random, in which every message that is sent is received and nobody waits for
ever."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from recordings import Action, Call, Compute, Pause, Receive, Send, Wait, play

from playground.explain.replay.record.recording import Recording

few = settings(max_examples=15)
SIZES = (4, 4096, 65536)
moments = st.floats(0, 1e-3)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Programs of a few ranks that work, exchange messages and call collectives, round by round."""
    size = draw(st.integers(2, 4))
    programs: list[list[Action]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 4))):
        for actions in programs:
            actions.append(draw(st.builds(Compute, moments) | st.builds(Pause, moments)))
        if draw(st.integers(0, 3)) == 0:
            call = Call("all_reduce", draw(st.sampled_from(SIZES)), blocking=draw(st.booleans()))
            for actions in programs:
                actions.append(call)
        add_messages(draw, programs)
        for actions in programs:
            actions += [*([Pause(draw(moments))] if draw(st.booleans()) else []), Wait()]
    return play(programs, draw(st.floats(1e-6, 1e-3)), draw(st.floats(0, 1e-8)))


def add_messages(draw: st.DrawFn, programs: list[list[Action]]) -> None:
    """Any number of messages, between any two of these ranks."""
    ranks = st.integers(0, len(programs) - 1)
    pairs = st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1])
    for sender, receiver in draw(st.lists(pairs, max_size=4)):
        nbytes, tag = draw(st.sampled_from(SIZES)), draw(st.integers(0, 1))
        programs[sender].append(Send(receiver, nbytes, tag=tag))
        programs[receiver].append(Receive(sender, nbytes, tag=tag))
