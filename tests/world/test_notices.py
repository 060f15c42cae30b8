"""Missing waits that several ranks tell alike are told once."""

from __future__ import annotations

import io
import os
import sys
from multiprocessing import Pipe

import pytest
from set_clock import Clock

from playground.world.launcher import notices
from playground.world.launcher.notices import HOLD, Notices, OutputWithNotices, WorldWithNotices
from playground.world.launcher.output import Output

TOLD = (
    "simulated GPU: rank {}: a wait is missing: aten::copy_ at train.py:15 reads a\n"
    "float32 tensor of shape [640]. Nothing orders it after aten::copy_ at\n"
    "train.py:14, which writes the same memory. To fix it, call\n"
    "torch.cuda.current_stream().wait_stream(s) before train.py:15, where s is the\n"
    "stream of train.py:14.\n"
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(notices, "time", clock)
    return clock


def test_a_notice_waits_for_all_ranks_for_a_while(clock: Clock) -> None:
    world = Notices(3)
    for rank in (1, 0):
        world.add(rank, "a")
        assert [*world.take()] == []
    assert world.seconds_left == HOLD
    world.add(2, "a")
    assert [*world.take()] == [(1, "simulated GPU: ranks 0-2: a\n")]
    assert world.seconds_left == float("inf")
    world.add(2, "b")
    clock.now += HOLD
    assert [*world.take()] == [(2, "simulated GPU: rank 2: b\n")]
    world.add(0, "c")
    assert [*world.take(all_notices=True)] == [(0, "simulated GPU: rank 0: c\n")]


def test_what_ranks_write_is_told_once_and_the_rest_of_their_output_stays(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), write_through=True)
    monkeypatch.setattr(sys, "stderr", shown)
    world = WorldWithNotices(3)
    pipes = [Pipe(duplex=False) for _ in range(3)]
    outputs = [
        OutputWithNotices(Output(rank, "stderr", ours), world)
        for rank, (ours, _) in enumerate(pipes)
    ]

    def tell(rank: int, text: str) -> str:
        """What is shown when a rank has written this."""
        before = shown.buffer.tell()
        os.write(pipes[rank][1].fileno(), text.encode())
        outputs[rank].relay()
        for each in outputs:
            each.relay_part(lambda: False)
        shown.buffer.seek(before)
        return shown.buffer.read().decode()

    assert tell(0, f"before\n{TOLD.format(0)}after\n") == "before\nafter\n"
    assert tell(1, TOLD.format(1)) == ""
    clock.now += HOLD
    told = tell(1, "later\n")
    assert told.startswith("later\nsimulated GPU: ranks 0-1: a wait is missing: aten::copy_ at")
    assert told.split()[-3:] == ["stream", "of", "train.py:14."]
    assert max(map(len, told.splitlines())) <= 80
    assert tell(2, TOLD.format(2)) == ""
    world.pass_on(all_notices=True)
    shown.buffer.seek(0)
    last = shown.buffer.read().decode().partition("stream of train.py:14.\n")[2]
    assert last == (
        "simulated GPU: rank 2, too: a wait is missing: aten::copy_ at train.py:15 after\n"
        "aten::copy_ at train.py:14.\n"
    )
    for ends in pipes:
        for end in ends:
            end.close()
