"""nccl: which GPUs and libraries it needs, and what it says. Ranks on GPUs fail, hang and
end as those on gloo do."""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Start, Worlds
from gpus import COLD
from processes import session_ends
from ranks import go_wrong

from playground.base.host import SIMULATED_GPUS
from playground.testing import World
from playground.world import RankFailed, RankTimeout, UsageError
from playground.world.backends import BACKENDS, find_cure, nccl

NCCL = BACKENDS["nccl"]


class Library:
    """In place of a shared library: functions that write a number where they are told to."""

    def __init__(self, **numbers: int) -> None:
        for name, number in numbers.items():
            setattr(self, name, lambda place, number=number: self.write(place, number))

    def write(self, place: Any, number: int) -> int:
        place._obj.value = number
        return 0


def libraries(monkeypatch: pytest.MonkeyPatch, **found: Library) -> None:
    def load(name: str | None) -> Library:
        if name is None:  # what the process has without loading anything
            return found.get("preloaded", Library())
        stem = name.split(".")[0]
        if stem not in found:
            raise OSError(f"{name}: cannot open shared object file")
        return found[stem]

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_nccl_s_version_is_that_of_the_library_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what torch was compiled with
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 1, 0))
    libraries(monkeypatch, libnccl=Library(ncclGetVersion=23007))
    assert nccl.nccl_version() == (2, 30, 7)
    libraries(monkeypatch)  # it is part of torch's own
    assert nccl.nccl_version() == (2, 1, 0)
    libraries(
        monkeypatch, libnccl=Library(ncclGetVersion=23007), preloaded=Library(ncclGetVersion=22809)
    )
    assert nccl.nccl_version() == (2, 28, 9)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert nccl.nccl_version() == (0,)


def test_the_driver_says_which_cuda_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, version in ((13_000, (13, 0)), (12_080, (12, 8)), (12_100, (12, 10))):
        libraries(monkeypatch, libcuda=Library(cuDriverGetVersion=number))
        assert nccl.driver_supports() == version
    libraries(monkeypatch)
    assert nccl.driver_supports() is None


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, version: tuple[int, ...] = (2, 28, 9)
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(nccl, "nccl_version", lambda: version)
    monkeypatch.setattr(nccl, "driver_supports", lambda: (99, 0))


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, gpus=2)
    assert NCCL.check(2) == ""
    with pytest.raises(UsageError) as refused:
        NCCL.check(3)
    assert str(refused.value) == (
        "3 ranks on 2 GPUs: NCCL 2.28.9 wants a GPU for each rank (sharing needs 2.30): use -n 2 "
        "or --backend gloo"
    )
    with pytest.raises(UsageError, match="3 ranks on 2 GPUs"):
        NCCL.check(3, joined=True)
    with_gpus(monkeypatch, gpus=2, version=(2, 30, 7))
    assert NCCL.check(3) == "3 ranks share 2 GPUs (NCCL_MULTI_RANK_GPU_ENABLE=1, NCCL 2.30.7)"
    with_gpus(monkeypatch, gpus=1)
    assert NCCL.check(4, joined=True) == "", "it may be the rank's own"
    with pytest.raises(UsageError, match=r"4 ranks on 1 GPU: NCCL 2\.28\.9"):
        NCCL.check(4)


def test_simulated_gpus_are_counted_without_importing_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SIMULATED_GPUS, "2")
    monkeypatch.delenv(nccl.VISIBLE, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert NCCL.check(2) == ""
    with pytest.raises(ImportError):
        NCCL.check(3)
    monkeypatch.setenv(nccl.VISIBLE, "0")
    with pytest.raises(ImportError):
        NCCL.check(2)


@pytest.mark.parametrize(
    ("gpus", "joined", "told"),
    [
        (
            1,
            False,
            {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"},
        ),
        (1, True, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (4, False, {}),
    ],
)
def test_ranks_that_share_a_gpu_tell_nccl_so(
    gpus: int, joined: bool, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    names = (*nccl.SHARES, *nccl.ENDS_SOON)
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    assert NCCL.claim_device(3, 4, joined) == torch.device("cuda", 3 % gpus)
    assert {name: os.environ[name] for name in names if name in os.environ} == told | nccl.ENDS_SOON
    for name in names:
        monkeypatch.setenv(name, "the user's")
    NCCL.claim_device(3, 4, joined)
    assert {os.environ[name] for name in names} == {"the user's"}


def test_a_machine_without_what_nccl_needs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, gpus=0)
    with pytest.raises(
        UsageError, match="needs a GPU and this machine shows none: use --backend gloo"
    ):
        NCCL.check(1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="backend nccl is not part of this torch"):
        NCCL.check(1)


def test_what_nccl_says_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "last_error", lambda: "")
    assert NCCL.explain_init_failure(RuntimeError("first\nlast")) == "last"
    monkeypatch.setattr(nccl, "last_error", lambda: "the very same")
    assert NCCL.explain_init_failure(RuntimeError("NCCL: the very same")) == "NCCL: the very same"
    monkeypatch.setattr(nccl, "last_error", lambda: "no socket interface found")
    assert (
        NCCL.explain_init_failure(RuntimeError("system error"))
        == "system error: no socket interface found"
    )


def test_what_nccl_says_in_several_lines_is_told_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(ncclGetLastError=Speaker(b"no interface\n found \xff"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert nccl.last_error() == "no interface found \ufffd"


class Speaker:
    """In place of a function of C that returns a text."""

    def __init__(self, words: bytes) -> None:
        self.words = words

    def __call__(self, communicator: None) -> bytes:
        return self.words


def test_a_tensor_of_another_rank_s_gpu_has_a_cure() -> None:
    for said in (
        "Expected tensor on cuda:0 but found tensor on cuda:1",  # ProcessGroupNCCL2
        "Tensor found on device cuda:1, tensor not on device passed to init_process_group",
    ):
        assert find_cure(RuntimeError(said)) == nccl.TAKE_OWN_GPU
    assert find_cure(RuntimeError("Expected all tensors to be on the same device")) == ""


@pytest.mark.parametrize(
    ("ranks", "gpus", "cure"),
    [
        ("2", "1", "2 ranks, 1 simulated GPU: --gpus 2"),
        ("8", "4", "8 ranks, 4 simulated GPUs: --gpus 8"),
        ("2", "4", nccl.TAKE_OWN_GPU),
    ],
)
def test_more_ranks_than_gpus_are_told_with_their_numbers(
    ranks: str, gpus: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setenv(SIMULATED_GPUS, gpus)
    assert find_cure(RuntimeError("CUDA error: invalid device ordinal\nGPU device may be")) == cure


def test_an_implementation_that_hides_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("ProcessGroupNCCL", False), ("ProcessGroupNCCL2", True)):
        monkeypatch.setattr(type(NCCL), "implementation", lambda self, name=name: name)
        assert (name in NCCL.describe_overlap()) is said


@pytest.mark.gpu
@pytest.mark.stress
def test_a_run_leaves_cleanly_and_nothing_behind(start_cli: Start, nccl_size: int) -> None:
    run = start_cli("collectives", "--backend", "nccl", "-n", nccl_size)
    out, err = run.communicate(timeout=COLD)
    right = "largest difference from the expected numbers 0.0\n"
    assert (run.returncode, out.count(right)) == (0, nccl_size), err
    assert session_ends(run.pid)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "failed: ValueError: this rank has had enough"),
        pytest.param("kill", "was killed by SIGKILL", marks=pytest.mark.stress),
    ],
)
def test_the_rank_that_failed_is_named(how: str, reason: str, pair: int, nccl: World) -> None:
    with pytest.raises(RankFailed) as caught:
        nccl.run(go_wrong, how, pair - 1)
    assert str(caught.value).startswith(f"rank {pair - 1} of {pair} {reason}")


@pytest.mark.gpu
@pytest.mark.stress
def test_a_hang_is_reported_with_every_rank_s_place(pair: int, world: Worlds) -> None:
    with pytest.raises(RankTimeout, match=r"time\.sleep\(1000\)"):
        world(pair, backend="nccl", timeout=30).run(go_wrong, "hang", 1)
