"""Snapshots: what is saved is loaded, what training changes meanwhile is not in it, and what is damaged is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from playground.runtime import UsageError, device
from playground.survival import folder as under_test_folder, manifest, snapshots as under_test
from playground.survival.fingerprint import find_difference
from playground.survival.folder import (
    DAMAGED,
    INCOMPLETE,
    WHOLE,
    examine,
    find_newest,
    find_steps,
    require_unused,
    step_folder,
)
from playground.survival.snapshots import Buffers, Snapshots, State, load, load_all, restore
from playground.testing import World
from playground.training.net import Net

Worlds = Callable[..., World]
RUN = {"lr": 0.1, "data": {"limit": 600, "name": "digits"}, "sizes": [1, 2]}


def save(folder: Path, *steps: int, size: int = 1, keep: int = 3, run: Mapping[str, object] = RUN) -> None:
    """All ranks save these steps, one rank after the other."""
    for step in steps:
        for rank in range(size):
            with Snapshots(folder, run, rank=rank, size=size, keep=keep) as taken:
                taken.save(step, State(shared={"step": step, "weights": torch.arange(5) * step}, own={"rank": rank}))
            assert taken.problem == ""
            assert taken.written == step


def newest(folder: Path, run: Mapping[str, object] = RUN) -> Any:
    """The newest step that is whole, and what was said of those that are not."""
    said: list[str] = []
    found = find_newest(folder, run, said.append)
    return (found and found.step), said


def same(one: Any, other: Any) -> bool:
    """Whether two states are of the same types and the same bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


tensors = st.builds(
    lambda shape, dtype: torch.rand(shape).mul(100).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
)
leaves = st.one_of(tensors, st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.booleans(), st.none())
values = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), below, max_size=3),
        st.tuples(below, below),
    ),
    max_leaves=6,
)
states = st.dictionaries(st.text(max_size=3), values, max_size=3)


@settings(max_examples=30)
@given(states, states)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, shared: Any, own: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Snapshots(folder, RUN, rank=0, size=1) as taken:
        taken.save(7, State(shared=shared, own=own))
    found = find_newest(folder, RUN, pytest.fail)
    assert found is not None
    loaded = load(found, 0)
    assert same(loaded.shared, shared)
    assert same(loaded.own, own)


def test_a_model_and_its_optimizer_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def new() -> tuple[Net, torch.optim.Optimizer]:
        model = Net().to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 1, 28, 28)).logsumexp(1).sum().backward()
        optimizer.step()

    model, optimizer = new()
    step(model, optimizer)
    with Snapshots(tmp_path, RUN, rank=0, size=1) as taken:
        shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        taken.save(1, State(shared=shared, own={"rng": torch.get_rng_state()}))
        step(model, optimizer)  # while it is written
    found = find_newest(tmp_path, RUN, pytest.fail)
    assert found is not None
    loaded: Any = load(found, 0)
    again, its_optimizer = new()
    again.load_state_dict(loaded.shared["model"])
    its_optimizer.load_state_dict(loaded.shared["optimizer"])
    torch.set_rng_state(loaded.own["rng"])
    step(again, its_optimizer)
    assert same(again.state_dict(), model.state_dict())
    assert same(its_optimizer.state_dict(), optimizer.state_dict())


def change_after_saving(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether every snapshot holds the tensors as they were when it was saved."""
    tensors = [torch.ones(2_000_000, device=device()) for _ in range(3)]
    with Snapshots(folder, RUN, rank=rank, size=size) as taken:
        for step in (1, 2, 3):
            for tensor in tensors:
                tensor.fill_(step)
            taken.save(step, State(shared={"tensors": tensors}))
            for tensor in tensors:
                tensor.fill_(-1)
    loaded: list[Any] = [under_test.load_part(step_folder(folder, step) / "rank-0.snapshot") for step in (1, 2, 3)]
    return [all((tensor == step).all() for tensor in each["shared"]["tensors"]) for step, each in enumerate(loaded, 1)]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_training_may_change_tensors_when_save_has_returned(tmp_path: Path, world: Worlds, backend: str) -> None:
    assert world(1, backend=backend).run(change_after_saving, tmp_path) == [[True] * 3]


def test_memory_is_allocated_once() -> None:
    buffers, state = Buffers(), {"a": torch.rand(3, 4).t(), "b": [torch.rand(2), 5]}
    address = buffers.fill(state).memory.data_ptr()
    doubled = {"a": torch.rand(3, 4).t(), "b": [torch.rand(2), 6]}
    second = buffers.fill(doubled)
    assert second.memory.data_ptr() == address
    assert same(restore(second.plain, second.memory), doubled)
    larger = {"a": torch.rand(99)}
    assert same(restore(*vars(buffers.fill(larger)).values()), larger)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", Path("/"), Snapshots], ids=lambda value: type(value).__name__)
def test_what_could_not_be_loaded_is_refused(tmp_path: Path, value: Any) -> None:
    with Snapshots(tmp_path, RUN, rank=0, size=1) as taken:
        with pytest.raises(TypeError, match=r"cannot hold shared\.model\.0, a "):
            taken.save(1, State(shared={"model": [value]}))
        taken.save(2, State())
    assert newest(tmp_path) == (2, [])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, 50, size=2, keep=2)
    assert find_steps(tmp_path) == [50, 40]
    save(tmp_path, 45, size=2, keep=1)  # of a run that went back: what is newer is not its business
    assert find_steps(tmp_path) == [50, 45]


def test_the_last_whole_one_is_kept_until_all_ranks_have_a_newer_one(tmp_path: Path) -> None:
    save(tmp_path, 10, size=2, keep=1)
    for step in (20, 30):
        with Snapshots(tmp_path, RUN, rank=0, size=2, keep=1) as taken:
            taken.save(step, State())
    assert find_steps(tmp_path) == [30, 20, 10]
    said = "the snapshot of step {} is incomplete (rank-1.snapshot is missing): looking for one before it"
    assert newest(tmp_path) == (10, [said.format(30), said.format(20)])
    save(tmp_path, 30, size=2, keep=1)
    assert find_steps(tmp_path) == [30]


def rank_saves(rank: int, size: int, folder: Path) -> tuple[int | None, dict[str, Any], bool]:
    with Snapshots(folder, RUN, rank=rank, size=size, keep=2) as taken:
        for step in range(1, 9):
            taken.save(step, State(shared={"from": rank}, own={"rng": torch.get_rng_state(), "rank": rank}))
    torch.distributed.barrier()
    found = find_newest(folder, RUN, lambda line: None)
    assert found is not None
    loaded: Any = load(found, rank)
    return found.step, loaded.shared, loaded.own["rank"] == rank and not taken.problem


def test_ranks_write_one_snapshot_together(tmp_path: Path, world: Worlds) -> None:
    assert world(3).run(rank_saves, tmp_path) == [(8, {"from": 0}, True)] * 3
    assert find_steps(tmp_path) == [8, 7]
    found = find_newest(tmp_path, RUN, pytest.fail)
    assert found is not None
    assert found.size == 3
    assert load(found, 3) == State(shared={"from": 0}, own={})


files = st.sampled_from(["rank-0.snapshot", "rank-1.snapshot"])


@settings(max_examples=25)
@given(files, st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_damaged_byte_is_noticed_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, name: str, where: float, change: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    save(folder, 1, 2, size=2)
    file = step_folder(folder, 2) / name
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= change
    file.write_bytes(content)
    step, [said] = newest(folder)
    assert step == 1
    assert "step 2 is damaged (the " in said
    assert name in said
    assert examine(folder, 2, read_contents=True).condition == DAMAGED


@settings(max_examples=25)
@given(files, st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_noticed(tmp_path_factory: pytest.TempPathFactory, name: str, where: float) -> None:
    folder = tmp_path_factory.mktemp("run")
    save(folder, 1, 2, size=2)
    file = step_folder(folder, 2) / name
    os.truncate(file, left := int(where * file.stat().st_size))
    assert newest(folder)[0] == 1
    assert examine(folder, 2, read_contents=False).condition == (DAMAGED if left else INCOMPLETE)


@pytest.mark.parametrize("name", ["rank-0.snapshot", "rank-1.snapshot"])
def test_a_file_that_is_gone_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2, size=2)
    (step_folder(tmp_path, 2) / name).unlink()
    found = examine(tmp_path, 2, read_contents=False)
    assert (found.condition, found.defects) == (INCOMPLETE, [f"{name} is missing"])
    assert newest(tmp_path)[0] == 1


def forge(folder: Path, state: object, tail: bytes = b"", **fields: Any) -> None:
    """Write a snapshot of step 2 whose checksums are right, whatever it says."""
    line = (state if isinstance(state, str) else json.dumps(state)).encode() + b"\n"
    whole = {
        "schema": 2, "step": 2, "size": 1, "nbytes": len(line + tail),
        "sha256": hashlib.sha256(line + tail).hexdigest(), "written": 1e9, "fingerprint": RUN, **fields,
    }  # fmt: skip
    first = json.dumps({name: value for name, value in whole.items() if value is not None})
    first = fields.get("line", first)
    head = f"{first}\n{hashlib.sha256(first.encode()).hexdigest()}\n".encode()
    step_folder(folder, 2).mkdir(exist_ok=True)
    (step_folder(folder, 2) / "rank-0.snapshot").write_bytes(head + line + tail)


EMPTY = {"dict": [["own", {"dict": []}], ["shared", {"dict": []}]]}


def test_a_snapshot_that_says_what_it_should_is_whole(tmp_path: Path) -> None:
    """So what the next tests change is why theirs are none."""
    forge(tmp_path, EMPTY)
    assert newest(tmp_path) == (2, [])


@pytest.mark.parametrize(
    "fields",
    [
        *({"size": value} for value in ("abc", 1.5, -3, 0, True, [1], None, 2**70)), {"step": "2"}, {"step": -1},
        {"nbytes": -1}, {"nbytes": "9"}, {"written": float("nan")}, {"written": 1e300}, {"written": "now"},
        {"sha256": 5}, {"fingerprint": [1]}, {"fingerprint": {"lr": float("inf")}}, {"schema": "\x1b[31m"},
        {"more": 1},
        {"line": "[]"}, {"line": "7"}, {"line": "[" * 100_000}, {"line": '{"a":' * 500 + "1" + "}" * 500},
        {"line": '"' + "9" * 3_000_000 + '"'}, {"line": "9" * 5000},
    ],
    ids=lambda fields: str(fields)[:30],
)  # fmt: skip
def test_a_manifest_that_no_run_writes_is_damaged(tmp_path: Path, fields: dict[str, Any]) -> None:
    """With a right checksum: its own, which anybody can compute."""
    save(tmp_path, 1)
    forge(tmp_path, EMPTY, **fields)
    assert newest(tmp_path) == (
        1, ["the snapshot of step 2 is damaged (the manifest of rank-0.snapshot is damaged): looking for one before it"]
    )  # fmt: skip


def test_of_millions_of_missing_files_a_few_are_named(tmp_path: Path) -> None:
    forge(tmp_path, EMPTY, size=30_000_000)
    found = examine(tmp_path, 2, read_contents=True)
    assert (found.condition, len(found.defects)) == (INCOMPLETE, 11)
    assert found.defects[-2:] == ["rank-10.snapshot is missing", "and so on"]


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": ["float32", [17], [1], 0]}, {"tensor": ["float32", [1], [1], 64]},
        {"tensor": ["float32", [2], [16], 0]}, {"tensor": ["float32", [2**40], [0], 0]},
        {"tensor": ["float32", [-1], [1], 0]}, {"tensor": ["float32", [1], [-1], 0]},
        {"tensor": ["float32", [1], [1], 2]}, {"tensor": ["uint8", [1], [1], -1]},
        {"tensor": ["float32", [1.0], [1], 0]}, {"tensor": ["../x", [1], [1], 0]}, {"tensor": [5, [1], [1], 0]},
        {"tensor": ["float32", [1, 1], [1], 0]}, {"tensor": [["float32"], [1], [1], 0]}, {"tensor": []}, {"tensor": 5},
        [{"tensor": ["uint8", [40], [1], 0]}, {"tensor": ["uint8", [40], [1], 0]}],
        {"dict": [[["a", "list"], 1]]}, {"dict": [[{"dict": []}, 1]]}, {"dict": [[{"tuple": [[]]}, 1]]},
        {"dict": [[1]]}, {"dict": 1}, {"tuple": 1}, {"set": []}, {}, {"tuple": [], "dict": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_no_run_writes_is_damaged(tmp_path: Path, value: object) -> None:
    forge(tmp_path, {"dict": [["own", {"dict": []}], ["shared", value]]}, bytes(64))
    found = examine(tmp_path, 2, read_contents=True)
    assert found.defects == ["the state in rank-0.snapshot is none that a run writes"]


@pytest.mark.parametrize("state", ["[" * 100_000, '{"tuple":[' * 500 + "]}" * 500, "no JSON", ""])
def test_a_state_that_is_no_json_is_damaged(tmp_path: Path, state: str) -> None:
    forge(tmp_path, state)
    assert examine(tmp_path, 2, read_contents=True).condition == DAMAGED


DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@pytest.mark.parametrize("name", DTYPES)
def test_the_bytes_of_an_element_follow_from_its_name(name: str) -> None:
    assert manifest.measure_tensor(name, [3], [1], 0, nbytes=3 * 16) == 3 * DTYPES[name].itemsize


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    forge(tmp_path, {"dict": [["own", {"tensor": ["float7_e1", [64], [1], 0]}], ["shared", 1]]}, bytes(64))
    found = examine(tmp_path, 2, read_contents=True).snapshot
    assert found is not None
    with pytest.raises(UsageError, match="a tensor of float7_e1, which this torch has not"):
        load(found, 0)


def test_what_a_snapshot_says_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    forge(tmp_path, EMPTY, fingerprint={**RUN, "lr": "\x1b[31mred", "\x1b]0;": 1})
    with pytest.raises(UsageError) as refused:
        newest(tmp_path)
    assert str(refused.value).isprintable()
    with pytest.raises(UsageError) as refused:
        newest(tmp_path, run={**RUN, "lr": "\x1b[31mred"})
    assert str(refused.value).isprintable()


def test_a_fifo_is_no_part_of_a_snapshot(tmp_path: Path) -> None:
    step_folder(tmp_path, 2).mkdir()
    os.mkfifo(step_folder(tmp_path, 2) / "rank-0.snapshot")
    assert examine(tmp_path, 2, read_contents=False).condition == DAMAGED


def test_parts_of_two_runs_make_no_snapshot(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, size=3)
    with Snapshots(tmp_path, RUN, rank=0, size=2) as taken:  # the same step again, on another number of ranks
        taken.save(2, State())
    assert newest(tmp_path)[0] == 1
    assert examine(tmp_path, 2, read_contents=True).defects == ["rank-1.snapshot is of another run"]
    save(tmp_path, 2, size=2)
    assert newest(tmp_path) == (2, [])
    assert examine(tmp_path, 2, read_contents=True).condition == WHOLE


def test_an_empty_folder_has_no_newest(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert newest(tmp_path / "none") == (None, [])
    assert newest(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        ({**RUN, "lr": 0.2}, "lr is 0.1 in the snapshot and 0.2 here; all must be the same"),
        ({**RUN, "data": {"limit": 600, "name": "mnist"}}, "data.name is digits in the snapshot and mnist here"),
        ({**RUN, "new": None}, "new is missing in the snapshot and null here"),
        ({"lr": 0.1, "sizes": (1, 2)}, "data is {"),
    ],
)
def test_a_snapshot_of_another_run_is_refused(tmp_path: Path, own: dict[str, Any], difference: str) -> None:
    save(tmp_path, 4)
    with pytest.raises(UsageError, match="step-00000004 is of another run") as refused:
        newest(tmp_path, run=own)
    assert difference in str(refused.value)
    assert "\n" not in str(refused.value)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(st.text(), below, max_size=3)),
    max_leaves=6,
)
fingerprints = st.dictionaries(st.text(max_size=2), json_values, max_size=4)


@given(fingerprints, fingerprints)
def test_two_fingerprints_differ_where_their_json_does(one: Any, other: Any) -> None:
    assert find_difference(one, one) is None
    difference = find_difference(one, other)
    assert (difference is None) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
    back = find_difference(other, one)
    assert (back is None) == (difference is None)


def test_the_newest_may_be_of_any_number_of_ranks(tmp_path: Path) -> None:
    save(tmp_path, 4, size=2)
    assert newest(tmp_path) == (4, [])
    save(tmp_path, 5, size=3)
    assert newest(tmp_path) == (5, [])


def test_version_1_is_named(tmp_path: Path) -> None:
    """It had the manifests in files of their own."""
    folder = step_folder(tmp_path, 2)
    folder.mkdir()
    for name in ("shared.json", "rank-0.json"):
        (folder / name).write_text('{"schema": 1}\n')
    with pytest.raises(UsageError, match=r"step-00000002: it has schema version 1, .* reads version 2; go on with the"):
        newest(tmp_path)


def test_all_ranks_parts_can_be_written_and_loaded_by_one(tmp_path: Path) -> None:
    states = [State(shared={"weights": torch.ones(3) * 5}, own={"rank": rank}) for rank in range(3)]
    with Snapshots(tmp_path, RUN, rank=0, size=3) as taken:
        taken.save_all(4, states)
    found = find_newest(tmp_path, RUN, pytest.fail)
    assert found is not None
    loaded = load_all(found)
    assert [state.own for state in loaded] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert all(same(state.shared, states[0].shared) for state in loaded)


def test_a_folder_of_another_number_of_ranks_is_not_used_again(tmp_path: Path) -> None:
    save(tmp_path, 1, size=3, keep=1)
    save(tmp_path, 2, 3, 4, size=2, keep=1)
    assert sorted(file.name for file in step_folder(tmp_path, 4).iterdir()) == ["rank-0.snapshot", "rank-1.snapshot"]


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    original = manifest.Manifest
    with monkeypatch.context() as patched:
        patched.setattr(under_test, "Manifest", lambda **values: original(schema=3, **values))
        with Snapshots(tmp_path, RUN, rank=0, size=1) as taken:
            taken.save(2, State())
    with pytest.raises(UsageError, match=r"step-00000002: it has schema version 3, .* reads version 2; go on with the"):
        newest(tmp_path)
    save(tmp_path, 3, keep=1)
    assert find_steps(tmp_path) == [3, 2], "not ours to remove"
    assert newest(tmp_path) == (3, [])


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """`small_files(n)`: from then on files may not grow above n bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [0, 100, 5000, 2_000_000])
def test_training_goes_on_when_the_disk_is_full(
    tmp_path: Path, small_files: Callable[[int], None], nbytes: int
) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = State(shared={"tensor": torch.ones(1_000_000)}, own={"rank": 0})
    with Snapshots(tmp_path, RUN, rank=0, size=1, keep=1) as taken:
        small_files(nbytes)
        taken.save(2, state)
        taken.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert taken.problem == (
            f"step 2 has no snapshot: there is no room in {tmp_path} (File too large); training went on"
        )
        assert (newest(tmp_path)[0], taken.written) == (1, None)
        assert [each.name for each in tmp_path.rglob(".*")] == [".lock"]
        taken.save(3, state)  # somebody has made room
    assert newest(tmp_path) == (3, [])
    assert find_steps(tmp_path) == [3]


def test_a_snapshot_that_another_rank_removes_meanwhile_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    look_at_part = under_test_folder.examine_part

    def remove_first(found: Any, *more: Any) -> None:
        if found.step == 1:
            shutil.rmtree(found.folder, ignore_errors=True)
        look_at_part(found, *more)

    monkeypatch.setattr(under_test_folder, "examine_part", remove_first)
    save(tmp_path, 2, keep=1)
    assert find_steps(tmp_path) == [2]


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(under_test, "prune", fail)
    with Snapshots(tmp_path, RUN, rank=0, size=1) as taken:
        taken.save(1, State())
    why = f"{tmp_path} cannot be written to (Input/output error); training went on"
    assert taken.problem == f"snapshots before step 1 were not removed: {why}"
    assert newest(tmp_path) == (1, [])


def test_a_folder_that_disappears_is_told(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "run", RUN, rank=0, size=1) as taken:
        shutil.rmtree(tmp_path / "run")
        taken.save(1, State())
    assert taken.problem.endswith("run cannot be written to (No such file or directory); training went on")


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/self", "No such file or directory")],
)
def test_a_folder_that_cannot_be_made_or_written_to_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"{why}; choose a folder that can be written to"):
        Snapshots(tmp_path / name, RUN, rank=0, size=1)


def test_a_new_run_wants_a_folder_without_snapshots(tmp_path: Path) -> None:
    require_unused(tmp_path / "none")
    require_unused(tmp_path)
    save(tmp_path, 1, 12)
    with pytest.raises(UsageError, match=r"holds snapshots \(up to step 12\): go on from them, or choose a folder"):
        require_unused(tmp_path)


def test_an_error_of_the_writer_is_raised_in_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(under_test, "prune", fail)
    taken = Snapshots(tmp_path, RUN, rank=0, size=1)
    taken.save(1, State())
    with pytest.raises(ZeroDivisionError):
        taken.wait()
    taken.close()
    assert taken.written == 1


def test_none_are_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep 0: it must be at least 1"):
        Snapshots(tmp_path, RUN, rank=0, size=1, keep=0)
