"""Which threads the proof of a deadlock leaves aside."""

from __future__ import annotations

import threading

import pytest

from playground.runtime.threads import OurThread, OurTimer


@pytest.mark.parametrize("kind", [OurThread, OurTimer])
def test_a_thread_of_ours_is_told_by_its_class(kind: type[threading.Thread]) -> None:
    assert issubclass(kind, OurThread)
    renamed = threading.Thread(name=kind.__name__)
    assert not isinstance(renamed, OurThread)


def test_a_timer_calls_its_function_after_its_time_unless_it_is_cancelled() -> None:
    called: list[str] = []
    timers = [OurTimer(0.01, called.append, ["in time"]), OurTimer(60, called.append, ["late"])]
    for timer in timers:
        timer.start()
    timers[1].cancel()
    for timer in timers:
        timer.join()
    assert called == ["in time"]
