"""Recorded remote calls: every message has both ends, in whatever order threads send, and who
waited for the reply."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from fixtures import Worlds

from playground.lessons.rpc.agent import ENVELOPE, Agent, current_agent
from playground.lessons.rpc.lesson import REPLY
from playground.trace.analyse import Timeline, match_messages
from playground.trace.record import RECEIVE, SEND, WAIT
from playground.trace.record.run import Recorded, read_recording

CALLS = 5
NUMEL = 1000


def ask_in_turn(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """Calls the next rank, from inside a call."""
    return tensor + current_agent().call(rank, torch.neg, tensor)


def call_the_next_rank(rank: int, size: int) -> list[float]:
    with Agent() as agent:
        others = [
            agent.call_async(1, ask_in_turn, 2, torch.ones(NUMEL))
            for _ in range(CALLS if rank == 0 else 0)
        ]
        return [other.wait().abs().sum().item() for other in others]


def test_messages_of_remote_calls(world: Worlds, tmp_path: Path) -> None:
    """Rank 0 calls rank 1, which calls rank 2: each time an envelope and a tensor each way; and
    then they part."""
    results = world(3).run(Recorded(call_the_next_rank, tmp_path))
    recording = read_recording(tmp_path / "0")
    assert results == [[0.0] * CALLS, [], []]
    matched, unmatched = match_messages(recording)
    assert unmatched == []
    assert all(
        send.nbytes == receive.nbytes and send.start <= receive.end for send, receive in matched
    )
    tensors = Counter(
        (event.rank, event.peer) for event in recording.events(SEND) if event.nbytes != ENVELOPE
    )
    assert tensors == dict.fromkeys([(0, 1), (1, 2), (2, 1), (1, 0)], CALLS)
    sources = {
        recording.sources[event.source].function
        for event in recording.events(SEND)
        if event.source is not None
    }
    assert {"call_the_next_rank", "ask_in_turn"} <= sources
    timeline = Timeline(recording)
    waits = [
        event for event in recording.events(WAIT) if timeline.awaited(event)[0].kind == RECEIVE
    ]
    assert {event.lane for event in waits} == {"main"}
    replies = [timeline.awaited(event)[0] for event in waits if event.rank == 0]
    assert {reply.peer for reply in replies if reply.tag > REPLY} == {1}
    assert {reply.peer for reply in replies if reply.tag == REPLY} == {1, 2}  # they stop listening
    assert all(event.end < float("inf") for event in recording.events())
