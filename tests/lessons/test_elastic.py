"""Ranks are killed, training resumes, and the last snapshots have the same bits: the board alone,
and the command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run
from processes import ENOUGH, by_hand, free_port
from torch import nn

from playground import launch
from playground.checkpoint.snapshots import Snapshot, SnapshotWriter
from playground.lessons.elastic import experiment, hosts, lesson, page
from playground.lessons.elastic.experiment import BOARD_FILE, compare, count_differing
from playground.lessons.elastic.page import Comparison, Witness, draw_kills
from playground.lessons.mnist import Net
from playground.lessons.partition import broadcast_parameters, partition_dataset
from playground.runtime import PlaygroundError, RankFailed
from playground.training.data import Images

SAMPLES, BATCH, STEPS = 28, 8, 4
"""Steps of an epoch, the last of them on 4 samples."""
EVERY = 3


class Killed(Exception):
    """Ends a training after a step."""


def train_board(
    data: Images, file: Path, kill: int = 0, epochs: int = 2
) -> tuple[list[int], dict[int, Any]]:
    """Train as the board does until all ranks are killed after the step `kill`, or to the end.
    Returns the steps after which it resumed, and each epoch's counts."""
    resumed, totals = list[int](), dict[int, Any]()

    def after_step(step: int) -> None:
        if step == kill:
            raise Killed

    with contextlib.suppress(Killed):
        lesson.run(
            dist.get_rank(), dist.get_world_size(), data, file, EVERY, BATCH, epochs,
            after_resume=resumed.append,
            after_step=after_step, after_epoch=lambda epoch, model,
            counts: totals.update({epoch: counts.tolist()}),
        )  # fmt: skip
    return resumed, totals


def train_plainly(rank: int, size: int, data: Images, totals: dict[int, Any]) -> nn.Module:
    """Two epochs without snapshots. `totals` gets the counts of each."""
    torch.manual_seed(1234)
    train_set, _ = partition_dataset(data, BATCH)
    model = Net().to(memory_format=torch.channels_last)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    torch.manual_seed(1235 + rank)
    for epoch in (1, 2):
        counts = torch.zeros(3, dtype=torch.float64)
        for step, (images, labels) in enumerate(train_set):
            samples = min(BATCH, len(data) - step * BATCH)
            counts += lesson.take_step(model, optimizer, images, labels, samples / size)
        totals[epoch] = counts.tolist()
    return model


def resume_after_each_step(rank: int, size: int, digits: Path, folder: Path) -> bool:
    """Whether the board trains as a plain loop does, and ends with the same bits wherever it is
    killed."""
    data, expected = Images(digits, "train", SAMPLES), dict[int, Any]()
    plain = train_plainly(rank, size, data, expected)
    assert train_board(data, folder / "whole.pt") == ([], expected)
    for kill in range(1, 2 * STEPS + 1):
        file, saved = folder / f"{kill}.pt", (kill - 1) // EVERY * EVERY
        train_board(data, file, kill)
        resumed, totals = train_board(data, file)
        assert resumed == [saved] * (saved > 0)
        assert totals == {epoch: expected[epoch] for epoch in (1, 2) if epoch * STEPS >= saved}
    train_board(data, folder / "longer.pt", epochs=1)
    assert train_board(data, folder / "longer.pt") == ([STEPS], expected)
    if rank == 0:
        model = torch.load(folder / "whole.pt")["model"]
        assert all(tensor.equal(model[name]) for name, tensor in plain.state_dict().items())
        whole = (folder / "whole.pt").read_bytes()
        assert [file.name for file in folder.glob("*.pt") if file.read_bytes() != whole] == []
    return rank > 0 or len(list(folder.iterdir())) == 2 * STEPS + 2


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3))]
)
def test_the_board_resumes_after_any_step_with_the_same_bits(
    size: int, world: Any, digits_folder: Path, tmp_path: Path
) -> None:
    """Parameters, momentum, random numbers, totals: the files have the same bytes. It is a plain
    loop's training; and one that is over goes on for more epochs."""
    assert world(size).run(resume_after_each_step, digits_folder, tmp_path) == [True] * size


def load_snapshot_of_two(rank: int, size: int, file: Path) -> str:
    torch.save({"epoch": 1, "step": 3, "own": [{}, {}]}, file)
    model = torch.nn.Linear(1, 1)
    try:
        lesson.load(file, model, torch.optim.SGD(model.parameters()))
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_of_ranks_does_not_resume_the_board_s_training(
    world: Any, tmp_path: Path
) -> None:
    file = tmp_path / "snapshot.pt"
    assert world(1).run(load_snapshot_of_two, file) == [
        f"2 ranks took the snapshot {file}, and 1 are to resume"
    ]


@pytest.mark.parametrize("call", ["save", "fsync", "replace"])
def test_a_kill_while_the_board_writes_leaves_the_snapshot_before(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        if call == "save":
            args[1].write(b"half of it")
        raise Killed

    file = tmp_path / "snapshot.pt"
    lesson.write(file, {"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(torch if call == "save" else os, call, die)
        with pytest.raises(Killed):
            lesson.write(file, {"step": 2})
    assert torch.load(file) == {"step": 1}
    lesson.write(file, {"step": 3})
    assert torch.load(file) == {"step": 3}
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_the_board_s_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "snapshot.pt", list[int]()

    def sync(descriptor: int) -> None:
        assert not file.exists()
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", sync)
    lesson.write(file, {"step": torch.arange(10_000)})
    assert synced == [file.stat().st_size]


@pytest.fixture
def elastic(run_cli: Run, few_digits: None) -> Run:
    """The command, on a few digits."""

    def run(*words: Any) -> Any:
        return run_cli("elastic", "--dataset", "digits", "--limit", 384, *words)

    return run


@pytest.mark.parametrize(
    ("way", "size"), [("ddp", 3), pytest.param("sgd", 2, marks=pytest.mark.stress)]
)
def test_kills_leave_no_trace(way: str, size: int, elastic: Run) -> None:
    shown = elastic("--way", way, "-n", size, "--kills", 2, "--snapshot-every", 1, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert document["comparison"]["differing"] == 0
    # random numbers, parameters and momentum
    assert document["comparison"]["nbytes"] > size * 5056 + 2 * 87_360
    assert len(document["recoveries"]) == 2
    for recovery in document["recoveries"]:
        assert recovery["failure"].endswith(f"of {size} was killed by SIGKILL")
        assert recovery["killed_after"] - 2 <= recovery["resumed_after"] < recovery["killed_after"]


def test_a_trace_in_the_last_snapshot_is_no_success(
    elastic: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with 1, and says how much differs."""
    count = Comparison(tensors=9, nbytes=4000, differing=3)
    monkeypatch.setattr(page, "conduct", lambda *args: ([], count))
    shown = elastic("--kills", 1)
    assert shown.code == 1
    assert shown.err.startswith(
        "playground: the training that was killed ended elsewhere: 3 of 4,000 bytes differ"
    )
    assert "left no trace" not in shown.out


def test_every_tensor_of_every_rank_is_compared(tmp_path: Path) -> None:
    def save(name: str, *totals: float) -> Path:
        (tmp_path / name).mkdir()
        writer = SnapshotWriter(tmp_path / name)
        shared = {"model": [{"weight": torch.ones(4)}, "a word"], "position": {"total": 7}}
        own: list[Any] = [{"history": {"total": torch.tensor([total, 2.0])}} for total in totals]
        writer.save(Snapshot(step=7, fingerprint={}, shared=shared, own=own))
        writer.close()
        return tmp_path / name

    one = save("one", 1.0, 1.0)
    same = Comparison(tensors=4, nbytes=48, differing=0)
    assert compare(0, 1, one, save("same", 1.0, 1.0)) == same
    assert compare(0, 1, one, save("other", 1.0, -1.0)) == replace(same, differing=1)  # a sign
    with pytest.raises(ValueError, match="shorter"):
        compare(0, 1, one, save("fewer ranks", 1.0))
    for folder, total in ((tmp_path / "board's", 1.0), (tmp_path / "board's other", -1.0)):
        folder.mkdir()
        own = [{"totals": torch.tensor([1.0, 2.0])}, {"totals": torch.tensor([total, 2.0])}]
        torch.save({"step": 7, "model": {"weight": torch.ones(4)}, "own": own}, folder / BOARD_FILE)
    board = compare(0, 1, tmp_path / "board's", tmp_path / "board's other")
    assert board == replace(same, differing=1)
    with pytest.raises(PlaygroundError, match="holds no snapshot"):
        compare(0, 1, one, tmp_path / "none")


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (torch.ones(2, 3).t(), torch.ones(3, 2), 0),
        (torch.ones(4), torch.ones(2, 2), 16),
        (torch.ones(4), torch.ones(4, dtype=torch.int32), 16),
        (torch.ones(2), torch.ones(5), 20),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), 0),
        (torch.tensor(258, dtype=torch.int64), torch.tensor(0, dtype=torch.int64), 2),
    ],
)
def test_bytes_that_differ_are_counted(
    one: torch.Tensor, other: torch.Tensor, differing: int
) -> None:
    assert count_differing(one, other) == count_differing(other, one) == differing


def test_a_failure_that_was_not_drawn_ends_it() -> None:
    witness = Witness()
    witness.note_failure(RankFailed(0, 2, "is out of reach"), 1)
    with pytest.raises(PlaygroundError, match="out of reach: that was none of the kills"):
        witness.hear(0, {"stepped": 1})


def test_word_of_the_next_kill_may_come_first() -> None:
    """Before that of the step which another rank took before it: each rank has a pipe of its
    own."""
    witness = Witness()
    for killed_after, resumed_after in ((3, 0), (4, 2)):
        witness.hear(1, {"killed": killed_after})
        if killed_after == 4:
            witness.hear(0, {"stepped": 1})
        witness.note_failure(RankFailed(1, 2, "was killed by SIGKILL"), 1)
        if resumed_after:
            witness.hear(0, {"resumed": {"total": resumed_after}})
    witness.hear(0, {"stepped": 3})
    assert [(each.killed_after, each.resumed_after) for each in witness.recoveries] == [
        (3, 0),
        (4, 2),
    ]


def test_more_kills_than_steps_are_refused(elastic: Run) -> None:
    shown = elastic("--kills", 3)
    assert (shown.code, shown.out) == (2, "")
    assert "--kills 3 in a training of 3 steps: choose fewer" in shown.err


def test_a_world_that_is_joined_is_not_killed(
    elastic: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in by_hand(0, 1, "29500").items():
        monkeypatch.setenv(name, value)
    shown = elastic()
    assert (shown.code, shown.out) == (2, "")
    assert "elastic kills ranks and starts new ones: run it without torchrun" in shown.err


def test_a_step_counts_once_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(experiment, "synchronize", lambda: order.append("synchronized"))
    monkeypatch.setattr(experiment, "report", lambda **event: order.extend(event))
    experiment.die_if_due(0, (), 3)
    assert order == ["synchronized", "stepped"]


def test_kills_come_one_after_the_other() -> None:
    kills = draw_kills(9, 3, 10, seed=1)
    assert [step for _, step in kills] == list(range(1, 10))
    assert {rank for rank, _ in kills} <= {0, 1, 2}
    assert draw_kills(2, 3, 10, seed=1) == draw_kills(2, 3, 10, seed=1)


def test_the_number_of_ranks_changes_and_the_losses_do_not(tmp_path: Path) -> None:
    """Each start resumes from the newest snapshot, so that steps after it are taken twice."""
    undisturbed = dict(launch(hosts.run, 2, args=(tmp_path / "undisturbed.pt",))[0])
    starts, losses = [], dict[int, float]()
    for size, end in ((2, 30), (1, 61), (2, 100)):
        taken = launch(hosts.run, size, args=(tmp_path / "changing.pt", end))[0]
        starts.append(taken[0][0])
        losses |= dict(taken)
    assert starts == [1, 29, 61]
    assert losses == pytest.approx(undisturbed, abs=1e-6, rel=0)
    assert undisturbed[100] < undisturbed[1] / 2


@pytest.mark.stress
def test_a_host_leaves_and_another_joins(tmp_path: Path) -> None:
    """Two agents of torchrun, of which the second is ended and later started again. (More steps
    than any machine takes meanwhile: nothing here ends by itself.)"""
    said, port = tmp_path / "said.txt", free_port()
    agents: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        rendezvous = [
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        ]
        soon = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        soon += f",join_timeout=120,is_host={int(not agents)}"
        words = ["--nnodes=1:2", "--local-addr=127.0.0.1", "--max-restarts=10", *rendezvous, soon]
        program = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            hosts.__file__,
            f"{tmp_path}/snapshot.pt",
        ]
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with said.open("ab") as file:
            return subprocess.Popen(
                [*program, "5000"], env=environ, stdout=file, stderr=subprocess.DEVNULL
            )

    def taken() -> list[tuple[int, int, float]]:
        found = re.findall(
            r"^step (\d+), world size (\d): loss ([\d.]+)$", said.read_text(), re.MULTILINE
        )
        return [(int(step), int(size), float(loss)) for step, size, loss in found]

    try:
        agents.append(start())
        for size in (2, 1, 2):
            before, end = len(taken()), time.monotonic() + 4 * ENOUGH
            if size == 1:
                agents[-1].send_signal(signal.SIGTERM)
            else:
                agents.append(start())
            while [ranks for _, ranks, _ in taken()[before:]].count(size) < 6:
                assert time.monotonic() < end, said.read_text()
                assert agents[0].poll() is None
                time.sleep(0.1)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait()
    losses = {step: loss for step, _, loss in taken()}
    undisturbed = dict(launch(hosts.run, 2, args=(tmp_path / "undisturbed.pt", max(losses)))[0])
    assert losses == pytest.approx(undisturbed, abs=1e-6, rel=0)
    assert [step for step, _, _ in taken()] != sorted(losses), "no step was taken again"
