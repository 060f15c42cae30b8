"""Sends with their receives, and the calls of one collective."""

from __future__ import annotations

from dataclasses import replace

from drawn_programs import few, recordings
from hypothesis import given, strategies as st
from recordings import Call, Receive, Send, Wait, play, recording_of

from playground.explain.replay.analyse.matching import match_collectives, match_messages
from playground.explain.replay.record.recording import RECEIVE, SEND, Recording


@few
@given(recordings(), st.data())
def test_every_message_has_both_its_ends_and_one_that_is_lost_leaves_the_other(
    recording: Recording, data: st.DataObject
) -> None:
    matched, unmatched = match_messages(recording)
    assert (len(matched), unmatched) == (len([*recording.events(SEND)]), [])
    for send, receive in matched:
        assert (send.kind, receive.kind) == (SEND, RECEIVE)
        assert (send.rank, send.peer) == (receive.peer, receive.rank)
        assert (send.nbytes, send.tag, send.message) == (
            receive.nbytes,
            receive.tag,
            receive.message,
        )
        assert send.start < receive.end
    if matched:
        lost = data.draw(st.sampled_from([*recording.events(SEND, RECEIVE)]))
        events = [[event for event in rank.events if event != lost] for rank in recording.ranks]
        left, [alone] = match_messages(recording_of(events))
        assert (alone.rank, alone.peer, alone.message) == (lost.peer, lost.rank, lost.message)
        assert len(left) == len(matched) - 1


def test_what_has_no_other_end_and_what_has_two_is_not_hidden() -> None:
    """A receive from anyone that never ended, and the same message twice."""
    recording = play([[Send(1, 8)], [Receive(0, 8), Wait()]])
    (send,), (receive,) = recording.events(SEND), recording.events(RECEIVE)
    waiting = replace(receive, peer=None, message=None)
    assert match_messages(recording_of([[send], [waiting]])) == ([], [send, waiting])
    again = replace(send, number=1)
    assert match_messages(recording_of([[send, again], [receive]])) == ([(send, receive)], [again])


def test_the_so_manyth_call_of_each_rank_is_one_collective() -> None:
    recording = play([[Call("barrier", 0), Call("all_reduce", 4), Call("all_reduce", 8)]] * 3)
    calls = match_collectives(recording)
    assert [{event.nbytes for event in call.values()} for call in calls] == [{0}, {4}, {8}]
    assert [set(call) for call in calls] == [{0, 1, 2}] * 3
