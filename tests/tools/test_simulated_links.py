"""What `bench steps` says of simulated links."""

from __future__ import annotations

import pytest

from playground.tools.bench.steps import over_links
from playground.ui.run_options import RunOptions
from playground.ui.session import Session
from playground.world import UsageError


def test_links_are_simulated_on_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("tensor", RunOptions())
    assert over_links(session, 0.0) == ""
    assert over_links(session, 0.5) == ", over simulated links of 0.5 Gbit/s"
    monkeypatch.setattr(session.world, "device", "cuda")
    assert over_links(session, 0.0) == ""
    with pytest.raises(UsageError, match=r"^--link 0.5: the simulation delays CPUs"):
        over_links(session, 0.5)
