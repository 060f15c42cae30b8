"""Training that is stopped leaves its document: the epochs it had finished, and what stopped it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.console.options import RunOptions
from playground.console.session import Session
from playground.console.training import EpochPrinter
from playground.runtime import RankFailed, UsageError
from playground.runtime.rank.rank import Event
from playground.training.results import Epoch

Run = Callable[..., Any]
EPOCH = Epoch(
    epoch=1, loss=2.0, loss_per_rank=[2.0, 2.0], train_accuracy=0.2, test_accuracy=0.3, tested=10, seconds=1.0,
    samples_per_second=100.0,
)  # fmt: skip


@pytest.mark.parametrize(("command", "number"), [("sgd", signal.SIGINT), ("ddp", signal.SIGTERM)])
def test_a_signal_after_two_epochs(
    number: signal.Signals, command: str, run_cli: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = EpochPrinter.__call__

    def take_and_stop(self: EpochPrinter, rank: int, event: Event) -> None:
        take(self, rank, event)
        if len(self.epochs) == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(EpochPrinter, "__call__", take_and_stop)
    words = ["--dataset", "digits", "--data-dir", data_dir, "--limit", 64, "--epochs", 1000, "--json"]
    shown = run_cli(command, *words)
    assert shown.code == 128 + number
    document = json.loads(shown.out)
    assert (document["complete"], document["stopped_by"]) == (False, number.name)
    assert [epoch["epoch"] for epoch in document["epochs"]] == [1, 2]
    assert document["best"] in document["epochs"]
    assert document["dataset"]["train"] == 64


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_rank_that_dies_is_named(epochs: int, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session("sgd", RunOptions(as_json=True))
    printer = EpochPrinter(session)
    printer(1, {"finished": EPOCH})  # every rank reports; the first one is listened to
    for _ in range(epochs):
        printer(0, {"step": 3})
        printer(0, {"finished": EPOCH})
    with pytest.raises(RankFailed), printer.document_if_stopped(dataset={"name": "digits"}):
        raise RankFailed(1, 2, "was killed by SIGKILL", "its traceback")
    document = json.loads(capsys.readouterr().out)
    assert document["stopped_by"] == "rank 1 of 2 was killed by SIGKILL"
    assert len(document["epochs"]) == epochs
    assert document["best"] == (document["epochs"][0] if epochs else None)


def test_where_nothing_was_trained_there_is_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session("sgd", RunOptions(as_json=True))
    with pytest.raises(UsageError), EpochPrinter(session).document_if_stopped():
        raise UsageError("the ranks were given different settings")
    assert capsys.readouterr().out == ""
