"""Sends with their receives, and the calls of one collective."""

from __future__ import annotations

from dataclasses import replace

from drawn_programs import few, recordings
from hypothesis import given, strategies as st
from recordings import Call, Receive, Send, Wait, play, recording_of

from playground.see.analyse import match_collectives, match_messages
from playground.see.record import RECEIVE, SEND, Recording


@few
@given(recordings())
def test_every_message_has_both_its_ends(recording: Recording) -> None:
    messages = match_messages(recording)
    assert messages.unmatched == ()
    assert len(messages.matched) == len([*recording.events(SEND)])
    for message in messages.matched:
        send, receive = message.send, message.receive
        assert (send.kind, receive.kind) == (SEND, RECEIVE)
        assert (send.rank, send.peer) == (receive.peer, receive.rank)
        assert (send.nbytes, send.tag, send.message) == (receive.nbytes, receive.tag, receive.message)
        assert send.start < receive.end


@few
@given(recordings(), st.data())
def test_an_end_that_is_lost_leaves_the_other_one(recording: Recording, data: st.DataObject) -> None:
    ends = [*recording.events(SEND, RECEIVE)]
    if not ends:
        return
    lost = data.draw(st.sampled_from(ends))
    events = [[event for event in rank.events if event != lost] for rank in recording.ranks]
    messages = match_messages(recording_of(events))
    (left,) = messages.unmatched
    assert (left.rank, left.peer, left.message) == (lost.peer, lost.rank, lost.message)
    assert len(messages.matched) == len(ends) / 2 - 1


def test_a_receive_from_anyone_that_never_ended_is_nobodys() -> None:
    recording = play([[Send(1, 8)], [Receive(0, 8), Wait()]])
    (receive,) = recording.events(RECEIVE)
    waiting = replace(receive, peer=None, message=None)
    messages = match_messages(recording_of([recording.ranks[0].events, [waiting]]))
    assert {event.kind for event in messages.unmatched} == {SEND, RECEIVE}
    assert messages.matched == ()


def test_the_same_message_twice_is_not_hidden() -> None:
    recording = play([[Send(1, 8)], [Receive(0, 8), Wait()]])
    (send,) = recording.events(SEND)
    again = replace(send, number=1)
    messages = match_messages(recording_of([[send, again], recording.ranks[1].events]))
    assert messages.unmatched == (again,)
    assert len(messages.matched) == 1


def test_the_so_manyth_call_of_each_rank_is_one_collective() -> None:
    recording = play([[Call("barrier", 0), Call("all_reduce", 4), Call("all_reduce", 8)]] * 3)
    calls = match_collectives(recording)
    assert [{event.nbytes for event in call.values()} for call in calls] == [{0}, {4}, {8}]
    assert [set(call) for call in calls] == [{0, 1, 2}] * 3
