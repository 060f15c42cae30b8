"""Whether a process goes on: two looks at its threads and sockets, compared."""

from __future__ import annotations

from dataclasses import replace

from playground.runtime.flight_recorder.activity import Activity, compare


def test_data_is_under_way_if_either_look_has_seen_it() -> None:
    quiet = Activity(may_act="", in_flight=False, runnable=frozenset(), transferred=(), ticks=())
    for changed in ({"in_flight": True}, {"transferred": ([1, 2],)}):
        busy = replace(quiet, **changed)
        assert [compare(*looks) for looks in ((busy, quiet), (quiet, busy))] == [("", True)] * 2
    acts = replace(quiet, may_act="what it does")
    assert [compare(*looks) for looks in ((acts, quiet), (quiet, acts))] == [
        ("what it does", False)
    ] * 2
    assert compare(quiet, quiet) == ("", False)
    assert compare(quiet, replace(quiet, ticks=(b"1/0",))) == ("what its threads compute", False)
    assert compare(None, quiet)[1]
    assert compare(quiet, None)[1]
