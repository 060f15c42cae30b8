"""What differs between backends: refusals, versions, devices. No GPU is needed for any of it."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import json
import os
import re
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Start, Worlds
from gpus import COLD
from processes import session_ends
from ranks import go_wrong

from playground import launch
from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.runtime import RankFailed, RankTimeout, UsageError, host
from playground.runtime.backends import BACKENDS, backend_for, get_backend, nccl, refusal
from playground.runtime.launcher.entry import CommandWorld
from playground.runtime.launcher.rank_handle import describe_exit
from playground.testing import World

NCCL = BACKENDS["nccl"]


def test_backends_by_name_and_by_device() -> None:
    assert {name: backend.device_type for name, backend in BACKENDS.items()} == {
        "gloo": "cpu", "nccl": "cuda", "shm": "cpu",
    }  # fmt: skip
    assert backend_for("cuda") is NCCL
    assert backend_for("cpu") is BACKENDS["gloo"]
    with pytest.raises(UsageError, match="'smoke signals' is unknown: choose one of gloo, nccl"):
        get_backend("smoke signals")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        # torch 2.11 to 2.14, 2.15
        ("nccl", "monitored_barrier is only implemented for GLOO backend."),
        ("nccl", "monitored_barrier requires a group with a CPU-capable backend (e.g. GLOO)."),
        ("nccl", "ProcessGroupNCCL does not support recvAnysource"),
        ("nccl", "Unhandled ReduceOp"),
        ("nccl", "Input tensor data type is not supported for NCCL process group: ComplexHalf"),
        ("nccl", "Unsupported Float8 type for NCCL reduction"),
        ("gloo", "Cannot use ReduceOp.AVG with Gloo"),
        ("gloo", "result type Float can't be cast to the desired output type Long"),
        ("gloo", "Invalid data type"),
    ],
)
def test_refusals_are_recognised(backend: str, words: str) -> None:
    assert (
        BACKENDS[backend].refusal(RuntimeError(f"{words}\nException raised from somewhere"))
        == words
    )


def test_shm_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = BACKENDS["shm"]
    for found in ("2.14.1+cu130", "2.9.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, found=found: found)
        with pytest.raises(
            UsageError,
            match=re.escape(f"needs torch 2.15, and here is {found}: --all-reduce shared"),
        ):
            shm.check(2)


def test_other_errors_are_not_taken_for_refusals() -> None:
    words = (
        "",
        "NCCL error: unhandled system error",
        "the system failed\nwhat is not supported is another matter",
    )
    for error in (*map(RuntimeError, words), KeyError("x")):
        assert not any(backend.refusal(error) for backend in BACKENDS.values())


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        return one

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this is not supported")


def refuse_in_torch(rank: int, size: int) -> list[str]:
    """What the backend refuses, and what code of ours does that torch calls, or nobody."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND),
        lambda: Hooked.apply(torch.ones(1, requires_grad=True)).backward(),
    ]
    words = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        words.append(refusal(caught.value))
    return [*words, refusal(RuntimeError("this is not supported"))]


def test_what_the_program_raises_is_no_refusal(world: Worlds) -> None:
    assert (
        world(2).run(refuse_in_torch)
        == [["Cannot use ReduceOp.BAND with non-integral dtype", "", ""]] * 2
    )


@pytest.mark.parametrize(
    ("value", "later"), [(None, False), ("0", False), ("1", True), ("TRUE", True)]
)
def test_ranks_of_gloo_connect_later_if_torch_is_told_so(
    value: str | None, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", value or "")
    assert BACKENDS["gloo"].connects_later() is later


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


def test_an_implementation_that_hides_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("ProcessGroupNCCL", False), ("ProcessGroupNCCL2", True)):
        monkeypatch.setattr(type(NCCL), "implementation", lambda self, name=name: name)
        assert (name in NCCL.describe_overlap()) is said


def name_the_implementation(rank: int, size: int) -> str:
    return BACKENDS["gloo"].implementation()


def test_the_class_that_does_the_work_is_named(world: Worlds) -> None:
    assert world(1).run(name_the_implementation) == ["ProcessGroupGloo"]


def test_an_aborted_rank_is_explained_where_the_backend_aborts() -> None:
    assert describe_exit(-signal.SIGABRT, BACKENDS["gloo"]) == "was killed by SIGABRT"
    assert describe_exit(-signal.SIGKILL, NCCL) == "was killed by SIGKILL"
    assert describe_exit(-signal.SIGABRT, NCCL).startswith(
        "was ended by NCCL's watchdog (SIGABRT): an operation"
    )


def test_what_nccl_logs_when_it_aborts_is_not_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(NCCL), "check", lambda self, local_ranks, joined=False: "")
    for backend, level in (("gloo", "FATAL"), ("nccl", "ERROR")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "to be restored")
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        CommandWorld(1, backend=backend)
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == level
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    CommandWorld(1)
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO", "the user's"


def test_a_rank_that_gloo_waits_for_in_vain_is_named_in_words() -> None:
    error = RuntimeError("wait timeout after 4000ms, keys: /attempt 0/group 1//cpu//0/2")
    words = "rank 2 came to the meeting, but did not connect within 4 s"
    assert BACKENDS["gloo"].explain_init_failure(error) == words
    assert BACKENDS["gloo"].explain_init_failure(RuntimeError("")) == "RuntimeError('')"


def choose_kernels(rank: int, size: int) -> list[bool]:
    NCCL.use_deterministic_kernels()
    fused = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
    cudnn = torch.backends.cudnn
    return [
        cudnn.deterministic,
        cudnn.benchmark,
        *(getattr(torch.backends.cuda, each)() for each in fused),
    ]


def test_deterministic_kernels_are_cudnn_s_own_and_no_fused_attention() -> None:
    assert launch(choose_kernels, 1, fresh=True) == [[True, False, False, False, False]]


def test_a_host_that_refuses_scheduling_policies_runs_ranks_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuse(*words: Any) -> None:
        asked.append(words)
        raise OSError(errno.EINVAL, "Invalid argument")  # what gVisor says

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * len(os.sched_getaffinity(0))))
    host.use_batch_scheduling()
    host.keep_to_one_core()
    assert len(asked) == 2


@pytest.mark.gpu
@pytest.mark.stress
def test_a_run_leaves_cleanly_and_nothing_behind(start_cli: Start, nccl_size: int) -> None:
    run = start_cli("collectives", "--backend", "nccl", "-n", nccl_size, "--json")
    out, err = run.communicate(timeout=COLD)
    assert (run.returncode, json.loads(out)["world_size"]) == (0, nccl_size), err
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


def uses_cuda(rank: int, size: int) -> bool:
    """Whether a rank on gloo, having worked, has touched a GPU."""
    tensor = torch.ones(1000)
    for name in ALGORITHMS:
        load_all_reduce(name)(tensor)
    dist.all_reduce(tensor)
    return torch.cuda.is_initialized()


@pytest.mark.gpu
def test_gloo_leaves_the_gpus_alone(world: Worlds) -> None:
    assert world(2).run(uses_cuda) == [False, False]
    assert BACKENDS["gloo"].check(2) == ""
