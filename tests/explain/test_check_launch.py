"""`playground.launch` checks what its ranks train; what it returns and raises stays the same."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from processes import ENOUGH
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground import RankFailed, UsageError, launch, report
from playground.explain.right import run


def train(rank: int, size: int, leaves_out_a_step: bool = False, go_on: Path | None = None) -> int:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank + 1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).square().sum().backward()
        if not (leaves_out_a_step and step == 1 and rank == 0):
            optimizer.step()
    end = time.monotonic() + ENOUGH
    while go_on and not go_on.exists():
        assert time.monotonic() < end
        report(waits=True)
        time.sleep(0.01)
    return rank


def fail_at_the_end(rank: int, size: int) -> None:
    train(rank, size, leaves_out_a_step=True)
    assert rank, "on purpose"


def test_a_mistake_is_told_and_results_are_returned(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(train, 2, args=(True,)) == [0, 1]
    err = capfd.readouterr().err
    assert err.count("playground: wrong [D5-skip]") == 1
    assert f"({Path(__file__).name}:{train.__code__.co_firstlineno + 9})" in err


def test_what_is_certain_is_told_while_the_ranks_run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    go_on, said = tmp_path / "go on", []

    def listen(rank: int, event: dict[str, Any]) -> None:
        said.append(capfd.readouterr().err)
        if "wrong [D5-skip]" in "".join(said):
            go_on.touch()

    assert launch(train, 2, args=(True, go_on), on_report=listen) == [0, 1]
    assert "".join(said).count("wrong [") == 1
    assert "wrong [" not in capfd.readouterr().err  # it was told a moment ago


def test_a_mistake_is_told_when_a_rank_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="on purpose"):
        launch(fail_at_the_end, 2)
    assert "playground: wrong [D5-skip]" in capfd.readouterr().err


def test_of_a_right_function_and_without_the_check_nothing_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(train, 2) == [0, 1]
    assert launch(train, 2, args=(True,), check=False) == [0, 1]

    def refuse(purpose: str) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "temporary_folder", refuse)
    assert launch(train, 2, args=(True,)) == [0, 1]
    assert "playground:" not in capfd.readouterr().err


def find_process(rank: int, size: int) -> int:
    return os.getpid()


def test_ranks_are_kept_as_without_the_check() -> None:
    """By pytest, which keeps worlds: the check leaves a process as it was."""
    before = launch(find_process, 2)
    assert launch(find_process, 2) == before == launch(find_process, 2, check=False)


def test_the_impossible_is_refused_as_without_the_check() -> None:
    for checks in (True, False):
        with pytest.raises(UsageError, match="one host takes 1 to"):
            launch(train, 0, check=checks)
        with pytest.raises(UsageError, match=r"<function .*<lambda>.* cannot be sent"):
            launch(lambda rank, size: None, 2, check=checks)
