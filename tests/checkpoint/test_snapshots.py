"""Snapshots: what is saved is loaded, what is damaged is named, and a folder belongs to one run
that all ranks see."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import pickle
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpus import hold_the_gpu
from torch import nn

from playground import launch, report
from playground.checkpoint import folder as folder_under_test, snapshots as under_test
from playground.checkpoint.folder import (
    KEPT,
    SnapshotSettings,
    find_snapshots,
    lock_folder,
    make_folder,
    name_file,
    write_snapshot,
)
from playground.checkpoint.snapshots import (
    Snapshot,
    SnapshotWriter,
    choose_snapshot,
    deserialise,
    open_folder,
    read_snapshot,
    serialise,
)
from playground.lessons.data_parallel.machine import parallel_apply
from playground.runtime import UsageError, device, files
from playground.testing import World

RUN: dict[str, object] = {"lr": 0.1, "limit": None, "data": "digits"}


def snapshot(step: int, **shared: Any) -> Snapshot:
    return Snapshot(
        step=step,
        fingerprint=RUN,
        shared={"weights": torch.arange(5) * step, **shared},
        own=[{"rank": 0}],
    )


def save(folder: Path, *steps: int) -> None:
    writer = SnapshotWriter(folder)
    for step in steps:
        writer.save(snapshot(step))
    writer.close()


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in find_snapshots(folder)]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The step that a run resumes from, and what it says of damaged snapshots."""
    said: list[str] = []
    monkeypatch.setattr(under_test, "report", lambda notice: said.append(notice))

    def choose_step(run: dict[str, object] = RUN) -> tuple[int | None, Any]:
        found = choose_snapshot(tmp_path, run)
        return found.step if found else None, said

    return choose_step


def change_after_saving(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether every snapshot holds the tensors as they were when it was saved."""
    tensors = [torch.ones(2_000_000, device=device()) for _ in range(3)]
    writer = SnapshotWriter(folder)
    for step in (1, 2, 3):
        for tensor in tensors:
            tensor.fill_(step)
        writer.save(snapshot(step, tensors=tensors))
        for tensor in tensors:
            tensor.fill_(-1)
    writer.close()
    loaded = [read_snapshot(file) for _, file in find_snapshots(folder)]
    return [
        all((tensor == each.step).all() for tensor in each.shared["tensors"]) for each in loaded
    ]


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.stress])]
)
def test_training_may_change_tensors_when_save_has_returned(
    tmp_path: Path, world: Any, backend: str
) -> None:
    assert world(1, backend=backend).run(change_after_saving, tmp_path) == [[True] * 3]


def test_a_file_is_torch_s_own(tmp_path: Path) -> None:
    save(tmp_path, 7)
    [(step, file)] = find_snapshots(tmp_path)
    found = torch.load(file, weights_only=True)
    assert (step, found["step"], found["fingerprint"], found["own"]) == (7, 7, RUN, [{"rank": 0}])
    assert torch.equal(found["shared"]["weights"], torch.arange(5) * 7)


class MortalOS:
    """`os`, for a process that is killed at its n-th call that changes the disk: that one and all
    after it do not happen. A write takes half of what it is given, as the system may. `calls` names
    what has happened."""

    def __init__(self, lives: float = float("inf")) -> None:
        self.lives, self.calls = lives, list[str]()

    def __getattr__(self, name: str) -> Any:
        return (
            partial(self.call, name)
            if name in ("open", "write", "fsync", "rename", "unlink")
            else getattr(os, name)
        )

    def call(self, name: str, *args: Any) -> Any:
        if len(self.calls) >= self.lives:
            raise Killed
        what = " folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else ""
        self.calls.append(name + what)
        return (
            os.write(args[0], args[1][: (len(args[1]) + 1) // 2])
            if name == "write"
            else getattr(os, name)(*args)
        )


class Killed(BaseException):
    """Nothing catches it."""


def test_the_disk_has_the_new_snapshot_before_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in this order does a process that is killed, or a power failure, leave the new one whole
    or absent."""
    mortal = MortalOS()
    for module in (folder_under_test, files):
        monkeypatch.setattr(module, "os", mortal)
    for step in range(1, KEPT + 2):
        write_snapshot(tmp_path, step, b"12")
    written = ["open", "write", "write", "fsync", "rename", "open", "fsync folder"]
    assert mortal.calls == [*written * (KEPT + 1), "unlink"]


def test_a_process_killed_at_any_call_leaves_the_old_snapshot_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Callable[..., Any]
) -> None:
    """And what it leaves is in nobody's way: the next snapshot is written, and the same step may be
    saved again."""
    contents = {step: serialise(vars(snapshot(step))) for step in range(1, 40)}
    for step in range(1, KEPT + 1):
        write_snapshot(tmp_path, step, contents[step])
    newest, seen = KEPT, set[int]()
    for lives in range(24):
        for more in (1, 0):  # the next one; and the newest again, as by a run that was sent back
            with monkeypatch.context() as patched, contextlib.suppress(Killed):
                mortal = MortalOS(lives)
                for module in (folder_under_test, files):
                    patched.setattr(module, "os", mortal)
                write_snapshot(tmp_path, newest + more, contents[newest + more])
            found, said = choose()
            seen.add(found - newest)
            assert (found - newest in (0, more), said, len(steps_in(tmp_path)) >= KEPT) == (
                True,
                [],
                True,
            )
            newest = found
    assert seen == {0, 1}
    assert len(steps_in(tmp_path)) == KEPT, "nobody is killed any more"


def test_the_newest_are_kept_and_those_of_a_later_step(tmp_path: Path) -> None:
    save(tmp_path, 50)
    save(tmp_path, 1, 2, 3, 4, 5)
    assert steps_in(tmp_path) == [50, 5, 4, 3]
    assert KEPT == 3


def test_steps_of_any_number_of_digits_are_found_in_their_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        write_snapshot(tmp_path, step, b"some bytes")
    assert steps_in(tmp_path) == [1_000_000_000, 100_000_000, 99_999_999]


def test_what_was_left_unfinished_is_no_part_of_the_next_snapshot(tmp_path: Path) -> None:
    """A run was killed while it wrote more than what comes now. And no descriptor stays open."""
    before = os.listdir("/proc/self/fd")
    (tmp_path / ".unfinished").write_bytes(b"longer than what comes now")
    write_snapshot(tmp_path, 1, b"some bytes")
    [(_, file)] = find_snapshots(tmp_path)
    assert file.read_bytes() == b"some bytes"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_checksum_is_that_of_all_bytes() -> None:
    content = bytes(1 << 20)
    changed = [
        content[:place] + b"1" + content[place + 1 :]
        for place in (0, 5_000, 70_000, len(content) - 1)
    ]
    assert len({name_file(7, each) for each in (content, *changed)}) == 5


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    for name in (".unfinished", ".lock"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    write_snapshot(tmp_path, 1, b"some bytes")
    with pytest.raises(
        UsageError, match=r"\.lock: Too many levels of symbolic links; choose another folder"
    ):
        lock_folder(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


class Runs:
    """What would make a folder, were it loaded as Python's objects are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_no_code_in_a_snapshot_is_run(tmp_path: Path) -> None:
    content = under_test.serialise({"step": 1, "shared": Runs(tmp_path / "made")})
    file = tmp_path / name_file(1, content)
    file.write_bytes(content)
    with pytest.raises(pickle.UnpicklingError):
        read_snapshot(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: bytes([content[0] ^ 1]) + content[1:]],
    ids=["empty", "a bit"],
)
def test_a_damaged_snapshot_is_named_and_passed_over(
    damage: Callable[[bytes], bytes], tmp_path: Path, choose: Callable[..., Any]
) -> None:
    save(tmp_path, 1, 2)
    newest = find_snapshots(tmp_path)[0][1]
    newest.write_bytes(damage(newest.read_bytes()))
    said = (
        f"snapshot {newest.name} is damaged, its checksum is not that in its name: looking for "
        "one before it"
    )
    assert choose() == (1, [said])


def test_what_is_not_a_regular_file_is_no_snapshot(
    tmp_path: Path, choose: Callable[..., Any]
) -> None:
    """None is waited for: a FIFO, a device without end, a folder, a socket, a link that leads
    nowhere."""
    save(tmp_path, 1)
    names = [f"step-0000000{step}-0123456789abcdef.pt" for step in (2, 3, 4, 5, 6)]
    fifo, device, folder, listening, link = (tmp_path / name for name in names)
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):
        server.bind(listening.name)
    link.symlink_to("nowhere")
    said = [
        f"snapshot {name} is damaged, it is not a regular file: looking for one before it"
        for name in names
    ]
    assert choose() == (1, said[::-1])


def test_a_fifo_in_the_place_of_the_unfinished_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".unfinished")
    write_snapshot(tmp_path, 1, b"some bytes")
    assert steps_in(tmp_path) == [1]


def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Neither by the lock nor by a snapshot, in a folder in which somebody else has put it."""
    theirs = tmp_path / "diary"
    theirs.write_text("dear diary")
    for name in (".lock", ".unfinished"):
        (tmp_path / name).symlink_to(theirs)
    with pytest.raises(
        UsageError, match=r"\.lock: Too many levels of symbolic links; choose another folder$"
    ):
        SnapshotWriter(tmp_path)
    write_snapshot(tmp_path, 1, b"some bytes")
    assert theirs.read_text() == "dear diary"


def test_what_a_run_resumes_from(tmp_path: Path, choose: Callable[..., Any]) -> None:
    assert choose() == (None, [])
    save(tmp_path, 1, 2)
    assert choose() == (2, [])


@pytest.mark.parametrize(
    "run", [RUN | {"lr": 0.5}, {"data": "digits", "limit": None}, RUN | {"seed": 1}]
)
def test_a_snapshot_of_another_run_is_refused(
    run: dict[str, object], tmp_path: Path, choose: Callable[..., Any]
) -> None:
    save(tmp_path, 1)
    with pytest.raises(
        UsageError, match=r"(lr|seed) is (0\.1|missing) in the snapshot and (0\.5|missing|1) here"
    ):
        choose(run)


def test_a_full_disk_is_reported_and_leaves_the_snapshot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full as far as a process can tell that may not write files of more than 100
    kB."""
    said: list[str] = []
    monkeypatch.setattr(under_test, "report", lambda problem: said.append(problem))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = SnapshotWriter(tmp_path)
    writer.save(snapshot(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        writer.save(snapshot(2, large=torch.zeros(100_000)))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == [
        f"step 2 has no snapshot: {tmp_path} cannot be written to (File too large); training went "
        "on"
    ]
    assert (writer.written, steps_in(tmp_path)) == (1, [1])
    assert {file.name for file in tmp_path.iterdir()} == {
        ".lock",
        find_snapshots(tmp_path)[0][1].name,
    }


@pytest.mark.parametrize(
    "meets", [lambda writer: writer.close(), lambda writer: writer.save(snapshot(2))]
)
def test_an_error_of_the_thread_that_is_not_the_disk_s_is_raised_in_the_training(
    meets: Callable[[SnapshotWriter], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what comes next, closing too: the last snapshot would be missing, and nobody would
    know."""

    def fail(*args: Any) -> None:
        raise MemoryError("no room for a copy")

    writer = SnapshotWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(under_test, "write_snapshot", fail)
        writer.save(snapshot(1))
        with pytest.raises(MemoryError, match="no room for a copy"):
            meets(writer)
    assert writer.written is None
    with contextlib.suppress(MemoryError):
        writer.close()
    assert not writer.unlock.alive


HOLD = """
import os, sys, time
from pathlib import Path
from playground.checkpoint.folder import lock_folder

lock_folder(Path(sys.argv[1]))
if os.fork():
    print(flush=True)
sys.stdin.read(1)
"""
"""A process that holds the lock until it is killed, and a child that outlives it."""


def test_a_folder_belongs_to_one_run_and_never_to_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        with pytest.raises(
            UsageError, match="another run is writing its own there; wait for its end, or choose"
        ):
            lock_folder(tmp_path)
        assert sum(slept) == pytest.approx(1)

        def end(seconds: float) -> None:
            holder.kill()
            holder.wait()

        monkeypatch.setattr(time, "sleep", end)  # so that a run that is ending is waited for
        os.close(lock_folder(tmp_path))


def test_a_writer_that_nobody_closes_gives_the_folder_back(tmp_path: Path) -> None:
    """As that of a run that has raised: its process may begin another, and so may others."""
    unlock = SnapshotWriter(tmp_path).unlock
    gc.collect()
    assert not unlock.alive
    save(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_the_disk_has_no_locks_nobody_is_kept_out(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", fail)
    descriptors = [lock_folder(tmp_path), lock_folder(tmp_path)]
    assert {os.path.realpath(f"/proc/self/fd/{each}") for each in descriptors} == {
        str(tmp_path.resolve() / ".lock")
    }
    for each in descriptors:
        os.close(each)


def test_a_folder_is_free_when_its_run_has_closed_it(tmp_path: Path) -> None:
    """For another process: of locks of its own, a process sees nothing."""
    writer = SnapshotWriter(tmp_path)
    code = (
        "import sys; from pathlib import Path; from playground.checkpoint.folder import "
        "lock_folder as lock"
    )
    words = [sys.executable, "-c", f"{code}; lock(Path(sys.argv[1]))", str(tmp_path)]
    writer.close()
    assert subprocess.run(words).returncode == 0
    os.close(lock_folder(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("whose", ["folder", "link to it"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link to it"
    folder.mkdir()
    link.symlink_to(folder)
    make_folder(link)
    os.chown(tmp_path / whose, 12345, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"choose a folder of your own$"):
        make_folder(link)
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(
        UsageError, match="other users can put links there; choose a folder of your own"
    ):
        make_folder(tmp_path)
    make_folder(tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="File exists; choose a folder that can be written to"):
        make_folder(tmp_path / "file")


def open_on_hosts(rank: int, size: int, folders: list[Path]) -> bool:
    """Whether this rank writes; `folders` is what each rank's host has under the name of the
    folder."""
    writer, newest = open_folder(SnapshotSettings(folder=folders[rank]), RUN)
    report(found=newest and newest.step)
    if writer:
        writer.close()
    return writer is not None


def test_hosts_must_share_the_folder(tmp_path: Path) -> None:
    own = [tmp_path / "one", tmp_path / "other"]
    link = tmp_path / "other mount"
    link.symlink_to(own[0])
    found: list[Any] = []
    make_folder(own[0])
    save(own[0], 3)
    shared = launch(
        open_on_hosts, 2, args=([own[0], link],), on_report=lambda rank, event: found.append(event)
    )
    assert (shared, found) == ([True, False], [{"found": 3}] * 2)
    with pytest.raises(
        UsageError, match=r"other: what rank 0 writes is not seen here; all hosts must share it$"
    ):
        launch(open_on_hosts, 2, args=(own,))
    assert list(own[1].iterdir()) == []


def open_together(rank: int, size: int, folders: list[Path]) -> int | str | None:
    """The step that this rank resumes from, or why it is refused."""
    try:
        writer, newest = open_folder(SnapshotSettings(folder=folders[rank]), RUN)
    except UsageError as error:
        return str(error)
    if writer:
        writer.close()
    return newest.step if newest else None


def test_all_ranks_resume_from_what_rank_0_finds(tmp_path: Path, world: Any) -> None:
    save(tmp_path, 3)
    assert world(2).run(open_together, [tmp_path] * 2) == [3, 3]


def test_where_one_rank_has_no_folder_all_are_told(tmp_path: Path, world: Any) -> None:
    (tmp_path / "file").touch()
    told = world(2).run(open_together, [tmp_path / "folder", tmp_path / "file"])
    assert all("File exists; choose a folder that can be written to" in each for each in told)


def open_at_once(rank: int, size: int, folder: Path) -> int | str | None:
    """As `open_together`, without waiting for a run that is ending."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_under_test, "time", SimpleNamespace(sleep=lambda seconds: None))
        return open_together(rank, size, [folder] * size)


def test_where_another_run_writes_all_are_told(tmp_path: Path, world: Any) -> None:
    descriptor = lock_folder(tmp_path)
    told = world(2).run(open_at_once, tmp_path)
    os.close(descriptor)
    assert all("another run is writing its own there" in each for each in told)


def use_what_is_under_way(rank: int, size: int) -> dict[str, list[float]]:
    """What a snapshot's copy, and a replica in its thread, have of a tensor that the GPU has still
    to compute."""
    tensor = torch.empty(2, device=device())

    def copy() -> list[float]:
        values: list[float] = deserialise(serialise(tensor)).tolist()
        return values

    def compute() -> list[float]:
        [output] = parallel_apply([nn.ReLU()], [(tensor,)], None, [device()])
        values: list[float] = output.tolist()
        return values

    found = {}
    for use in (copy, compute):
        tensor.zero_()
        tensor += 1
        use()  # the kernels are loaded, the memory is there
        hold_the_gpu()
        tensor += 1
        found[use.__name__] = use()
    return found


@pytest.mark.gpu
def test_what_is_under_way_is_waited_for(nccl_size: int, nccl: World) -> None:
    assert (
        nccl.run(use_what_is_under_way) == [{"copy": [2.0, 2.0], "compute": [2.0, 2.0]}] * nccl_size
    )
