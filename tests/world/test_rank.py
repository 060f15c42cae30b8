"""A rank and its line to the launcher: what it reports and returns, and how it fails."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fork_a_talker
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import playground
from playground.world import PeerDisconnected, RankFailed, report
from playground.world.rank.rank import failure

launch = partial(playground.launch, fresh=True)
"""Every test here is about the life of new processes."""


def test_a_child_of_a_rank_does_not_speak_for_it() -> None:
    heard: list[dict[str, Any]] = []
    assert launch(fork_a_talker, 2, on_report=lambda rank, event: heard.append(event)) == [0, 1]
    assert heard == [{"told_by": "rank"}] * 2


class Odd:
    """Can be made from its pickle in a rank only, and fails in the launcher as a lost connection
    does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return make_odd, (self.pid,)


def make_odd(pid: int) -> Odd:
    if os.getpid() != pid:
        raise EOFError("only there")
    return Odd(pid)


class Unwilling:
    def __reduce__(self) -> Any:
        raise OSError("the disk that this lies on is gone")


def report_unwillingly(rank: int, size: int) -> None:
    report(what=Unwilling())


def test_a_report_that_cannot_be_sent_is_not_taken_for_a_lost_launcher() -> None:
    with pytest.raises(
        RankFailed, match=r"^rank 0 of 1 failed: OSError: the disk that this lies on is gone"
    ):
        launch(report_unwillingly, 1)


def report_odd(rank: int, size: int) -> None:
    report(odd=Odd(os.getpid()))
    time.sleep(1000)


def test_a_report_that_cannot_be_read_is_not_taken_for_a_lost_rank() -> None:
    with pytest.raises(
        RankFailed, match=r"^rank 0 of 1 sent what cannot be read here \(EOFError: only there"
    ):
        launch(report_odd, 1)


def test_a_connection_of_the_user_s_is_no_peer() -> None:
    words = "Connection reset by peer"
    assert type(failure(ConnectionResetError(104, words), 0, 1)) is RankFailed
    assert type(failure(RuntimeError(words), 0, 1)) is PeerDisconnected


def test_what_a_worker_has_raised_is_the_headline_with_its_line() -> None:
    raised = (
        "Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        f'  File "{__file__}", line 12, in __getitem__\n    raise ValueError\n'
        "ValueError: bad sample 17\nof two lines"
    )
    failed = failure(ValueError(raised), 1, 2)
    assert failed.headline == (
        "rank 1 of 2 failed: ValueError: bad sample 17 (test_rank.py:12, in DataLoader worker "
        "process 0)"
    )


@pytest.mark.parametrize(
    ("signal", "cure"), [("Killed", "lack of memory"), ("Bus error", "df -h /dev/shm")]
)
def test_why_a_worker_was_killed_is_said(signal: str, cure: str) -> None:
    killed = RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")
    killed.__cause__ = RuntimeError(f"DataLoader worker (pid 12) is killed by signal: {signal}. ")
    assert cure in failure(killed, 0, 2).headline


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def leave_out(rank: int, size: int) -> None:
    model = DistributedDataParallel(Partly())
    for _ in range(2):
        model(torch.ones(2)).backward()


def test_parameters_that_the_loss_leaves_out_are_named() -> None:
    with pytest.raises(RankFailed) as caught:
        launch(leave_out, 2)
    said = " ".join(str(caught.value).split())
    assert ": on rank " in said
    assert ", the loss does not depend on unused.weight, unused.bias: leave them out" in said


def nothing_to_send(rank: int, size: int) -> Any:
    return lambda: None


def test_a_result_that_does_not_pickle_is_explained() -> None:
    with pytest.raises(RankFailed, match="returned what cannot be sent to the launcher"):
        launch(nothing_to_send, 1)


@pytest.mark.parametrize(
    "message",
    [
        "nccl2 requires at least one CUDA device",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "Distributed package doesn't have NCCL built in",
    ],
)
def test_nccl_without_a_gpu_is_told_in_a_line_and_with_the_program_s_own(message: str) -> None:
    """By what torch 2.13 to 2.15 say."""
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(message)
    failed = failure(caught.value, 0, 2)
    assert failed.headline == (
        "rank 0 of 2 failed: the program asks for nccl, and this machine shows no GPU: leave the "
        "backend out: torch chooses gloo here, and nccl where there are GPUs; or simulate GPUs, "
        "with --gpus"
    )
    *_, place, line = str(failed).splitlines()
    assert place.startswith(f'  File "{__file__}"')
    assert line.strip() == "raise RuntimeError(message)"


def test_two_ranks_on_one_gpu_are_told_in_a_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on …")
    assert failure(caught.value, 1, 2).headline == (
        "rank 1 of 2 failed: Duplicate GPU detected: ranks 0 and 1 use the same GPU: call "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is put on a GPU'
    )


TWO_GPUS = """
def move(device):
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and "
        "cuda:0!"
    )

move("cuda:0")
"""


@pytest.mark.parametrize(
    ("local_rank", "text", "cure"),
    [
        ("1", TWO_GPUS, "this rank owns cuda:1; the text names cuda:0 at two_gpus.py:8"),
        ("1", TWO_GPUS.replace('move("cuda:0")', 'move("cuda")'), ""),
        ("2", TWO_GPUS, ""),
    ],
)
def test_of_tensors_on_two_gpus_the_line_is_told_that_names_another_rank_s(
    local_rank: str, text: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    file = tmp_path / "two_gpus.py"
    file.write_text(text)
    with pytest.raises(RuntimeError) as raised:
        exec(compile(text, file, "exec"), {})
    headline = failure(raised.value, 1, 2).headline
    assert headline.endswith(f"cuda:0!: {cure}" if cure else "cuda:0!")
