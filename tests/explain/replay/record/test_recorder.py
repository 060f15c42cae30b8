"""The recorder: events in a file, whole whenever it is read, whatever threads wrote them and
however many."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from playground.explain.replay.record.layout import HEADER, LOG, MAX_VALUES, RECORD, read_folder
from playground.explain.replay.record.reading import merge, read_recording
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.recording import (
    COMPUTE,
    GRADIENT,
    PHASE,
    RECEIVE,
    SEND,
    VALUES,
    WAIT,
    RankRecording,
)


def new_recorder(folder: Path, capacity: int = 100) -> Recorder:
    folder.mkdir(exist_ok=True)
    return Recorder(folder, 0, log=replace(LOG, capacity=capacity), device="cpu")


def read(folder: Path) -> RankRecording:
    return read_recording(folder).ranks[0]


def test_an_event_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    phase = recorder.open(recorder.begin(PHASE, "all-gather"))
    source = recorder.sources.find(1)
    sent = recorder.begin(
        SEND,
        "isend",
        nbytes=12,
        shape=(3,),
        group=(0, 2),
        peer=2,
        message=7,
        tag=5,
        offset=9,
        source=source,
    )
    recorder.put_values(sent, [1.0, -2.5, 1e300])
    arrived = recorder.begin(RECEIVE, "recv", nbytes=4)
    wait = recorder.begin_wait([sent, arrived], recorder.sources.find(1))
    for number in (wait, sent):
        recorder.end(number)
    recorder.note_sender(arrived, 3, 1)
    recorder.close(phase)
    recorder.stop()
    recording = read_recording(tmp_path)
    events = recording.ranks[0].events
    assert [(event.kind, event.name, event.parent) for event in events] == [
        (PHASE, "all-gather", None), (SEND, "isend", 0), (RECEIVE, "recv", 0), (WAIT, "wait", 0)
    ]  # fmt: skip
    message = events[1]
    assert (message.nbytes, message.shape, message.group, message.peer) == (12, (3,), (0, 2), 2)
    assert (message.message, message.tag, message.offset, message.values) == (
        7,
        5,
        9,
        (1.0, -2.5, 1e300),
    )
    assert (
        recording.sources[message.source or 0].function
        == "test_an_event_comes_back_as_it_was_recorded"
    )
    assert (events[2].peer, events[2].message, events[2].end) == (3, 1, float("inf"))
    assert events[3].awaits == (1, 2)
    assert 0 <= events[0].start <= message.start <= events[3].end <= message.end <= events[0].end
    assert not recording.ranks[0].is_cut_off


def test_events_for_which_there_is_no_room_are_counted(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, capacity=5)
    for number in range(8):
        recorder.end(recorder.begin(COMPUTE, f"number {number}"))
    assert [event.name for event in read(tmp_path).events] == [
        f"number {number}" for number in range(5)
    ]
    recorder.stop()
    assert read(tmp_path).dropped == 3


RECORD_ALL = """
import sys
from pathlib import Path
from playground.explain.replay.record.recorder import Recorder

recorder = Recorder(Path(sys.argv[1]), 0, device="cpu")
for number in range(3000):
    recorder.end(recorder.begin("compute", f"{number}"))
recorder.stop()
"""


def test_without_room_on_the_disk_a_rank_runs_unrecorded(tmp_path: Path) -> None:
    """Here because no file may have more than 2 MB."""
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2**21}, resource.RLIM_INFINITY))"
    command = [sys.executable, "-c", f"import resource; {limit}\n{RECORD_ALL}", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--see: nothing can be written to" in ended.stderr
    assert "rank 0 runs unrecorded" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_threads_have_lanes_and_spans_of_their_own(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path, capacity=3000)

    def work() -> None:
        outer = recorder.open(recorder.begin(PHASE, "background"))
        for _ in range(500):
            recorder.end(recorder.begin(COMPUTE, "inside background"))
        recorder.close(outer)

    threads = [threading.Thread(target=work) for _ in range(3)]
    outer = recorder.open(recorder.begin(PHASE, "main"))
    for thread in threads:
        thread.start()
    for _ in range(500):
        recorder.end(recorder.begin(COMPUTE, "inside main"))
    for thread in threads:
        thread.join()
    recorder.close(outer)
    recorder.stop()
    events = read(tmp_path).events
    assert len(events) == 4 * 501
    for event in events:
        if event.parent is not None:
            assert event.name == f"inside {events[event.parent].name}"
            assert event.lane == events[event.parent].lane == event.name.split()[-1]


def test_what_comes_after_the_end_or_from_a_forked_process_is_lost_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playground.explain.replay.record import rank

    recorder = new_recorder(tmp_path)
    monkeypatch.setattr(rank, "_recorder", recorder)
    child = os.fork()
    if not child:
        recorder.instant(GRADIENT, "of the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    numbers = [recorder.begin(COMPUTE, "of the rank") for _ in range(3)]
    monkeypatch.setattr(rank, "_recorder", None)
    recorder.stop()
    recorder.end(numbers[2])
    recorder.set_lane(numbers[2], 1)
    recorder.put_values(recorder.begin(VALUES, "never heard of"), [1.0])
    assert [(event.name, event.end) for event in read(tmp_path).events] == [
        ("of the rank", float("inf"))
    ] * 3


def test_whatever_is_missing_what_is_read_is_the_beginning(tmp_path: Path) -> None:
    """Events that were cut off anywhere: those before are all there, as they were."""
    recorder = new_recorder(tmp_path)
    for number, count in enumerate((0, 3, MAX_VALUES, MAX_VALUES + 1, 1)):
        recorder.instant(VALUES, f"{number}", [float(number)] * count)
    recorder.stop()
    files = read_folder(tmp_path)
    events, whole = merge(files).ranks[0].events, files["rank-0.events"]
    for cut in range(0, len(whole) + 1, 13):
        left = merge({**files, "rank-0.events": whole[:cut]}).ranks[0].events
        assert left == events[: max(0, (cut - HEADER.size) // RECORD.size)]
