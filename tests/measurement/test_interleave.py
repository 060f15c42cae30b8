"""How devices are waited for while times are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from playground.measurement.interleave import synchronize


def test_only_the_devices_that_worked_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
    synchronize([torch.device("cpu", 0), torch.device("cpu", 1)])
    assert waited_for == []
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    synchronize(gpus)
    assert waited_for == gpus
