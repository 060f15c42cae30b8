"""Chrome traces: every event is there, slices of a thread never overlap half, arrows lead from
slice to slice."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import combinations
from typing import Any

import pytest
from recordings import Receive, Send, Wait, play, ring, training

from playground.explain.replay.record.recording import Recording
from playground.explain.replay.render.chrome import to_chrome


def trace(recording: Recording) -> list[dict[str, Any]]:
    return list(json.loads(to_chrome(recording))["traceEvents"])


def assert_nested(slices: list[tuple[float, float]]) -> None:
    """No two overlap unless one contains the other."""
    for one, other in combinations(slices, 2):
        (first, first_end), (second, second_end) = sorted(
            [one, other], key=lambda each: (each[0], -each[1])
        )
        assert not first < second < first_end < second_end


@pytest.mark.parametrize("recording", [ring(4, straggler=1), training(2)], ids=["ring", "training"])
def test_every_event_is_there_once(recording: Recording) -> None:
    entries = trace(recording)
    for rank in recording.ranks:
        its = [each["args"] for each in entries if each["pid"] == rank.rank and "args" in each]
        numbers = [args["number"] for args in its if "number" in args]
        assert sorted(numbers) == [event.number for event in rank.events]
    threads = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            threads[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for slices in threads.values():
        assert_nested(slices)


def test_every_message_is_an_arrow_between_slices() -> None:
    entries = trace(ring(4))
    ends = {(each["ph"], each["id"]): each for each in entries if each["ph"] in "sf"}
    assert Counter(phase for phase, _ in ends) == {"s": 24, "f": 24}
    slices = {
        (each["pid"], each["tid"], each["ts"])
        for each in entries
        if each["name"] in ("sent", "arrived")
    }
    for end in ends.values():
        assert (end["pid"], end["tid"], end["ts"]) in slices
    for number in range(24):
        assert ends["s", number]["ts"] <= ends["f", number]["ts"]


def test_what_never_ended_is_still_json() -> None:
    entries = trace(play([[Send(1, 8), Wait()], [Receive(0, 8), Receive(0, 8), Wait()]]))
    ends = [each for each in entries if each["name"] == "irecv" and each["ph"] == "b"]
    assert [each["args"].get("cut off") for each in ends] == [True, True]
