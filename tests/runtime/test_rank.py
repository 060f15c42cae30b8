"""breakpoint() in a rank."""

from __future__ import annotations

import pytest

from playground import RankFailed, launch


def stop_here(rank: int, size: int) -> str:
    breakpoint()
    return "unchanged"


def test_breakpoint_is_refused_and_can_be_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match=r"breakpoint\(\) needs a keyboard, and ranks have none"):
        launch(stop_here, 2)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert launch(stop_here, 2) == ["unchanged"] * 2
