"""Recordings as files: what is whole is read, and what is not one is refused in one line."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from playground import launch
from playground.algorithms import load_all_reduce
from playground.console.see import Recordings, without_option
from playground.recording.container import Members, read_file, write_file
from playground.recording.merge import read_recording
from playground.recording.recorded import Recorded
from playground.recording.recording import COLLECTIVE, SCHEMA, SEND, Recording
from playground.recording.run import pack, record_run, write_run
from playground.runtime import RankFailed, UsageError
from playground.runtime.entry import World


def reduce_once(rank: int, size: int) -> int:
    load_all_reduce("ring")(torch.ones(4))
    return rank


def reduce_and_die(rank: int, size: int) -> None:
    reduce_once(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    load_all_reduce("ring")(torch.ones(4))


def test_a_run_and_its_recording() -> None:
    results, recording = record_run(reduce_once, 2, command=("mine",))
    assert (results, recording.size, recording.command) == ([0, 1], 2, ("mine",))
    assert "playground/algorithms/ring.py" in recording.texts
    assert recording.texts["playground/algorithms/ring.py"].startswith('"""The ring')


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two ranks, as a file."""
    folder = tmp_path_factory.mktemp("recording")
    launch(Recorded(reduce_once, folder / "ranks"), 2)
    write_run(folder / "ranks" / "0", ["mine"], "gloo", 2)
    pack(folder / "ranks" / "0", folder / "whole.playground")
    return folder / "whole.playground"


def test_what_a_killed_rank_has_recorded_is_there(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 3 was killed by SIGKILL"):
        launch(Recorded(reduce_and_die, tmp_path), 3)
    killed = read_recording(tmp_path / "0").ranks[1]
    assert killed.is_cut_off
    assert [event.end < float("inf") for event in killed.events if event.kind == COLLECTIVE] == [True]
    assert len([event for event in killed.events if event.kind == SEND]) == 4


def test_a_file_holds_what_the_folder_held(packed: Path) -> None:
    folder = packed.parent / "ranks" / "0"
    from_file, from_folder = read_recording(packed), read_recording(folder)
    assert read_recording(packed.parent).ranks == from_folder.ranks  # as where nobody was left to make a file of it
    assert from_file.ranks == from_folder.ranks
    assert from_file.sources == from_folder.sources
    assert "playground/algorithms/ring.py" in from_file.texts


def read_as_far_as_it_goes(file: Path) -> Recording | None:
    try:
        return read_recording(file)
    except UsageError:
        return None


def test_wherever_a_file_is_cut_off_what_is_whole_is_read(packed: Path, tmp_path: Path) -> None:
    whole, content = read_recording(packed), packed.read_bytes()
    shorter = tmp_path / "cut.playground"
    read = 0
    for length in range(len(content) - 1, 30, -max(1, len(content) // 40)):
        shorter.write_bytes(content[:length])
        recording = read_as_far_as_it_goes(shorter)
        if recording is None:
            continue
        read += 1
        assert all(rank.is_cut_off for rank in recording.ranks)
        for rank, all_of_it in zip(recording.ranks, whole.ranks, strict=False):
            told = [(event.kind, event.name, event.start) for event in rank.events]
            assert told == [(event.kind, event.name, event.start) for event in all_of_it.events][: len(told)]
    assert read > 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a recording: make one with --see"),
        (b"%PDF-1.7\nsomething", "is not a recording"),
        (b"playground recording %d\nx" % (SCHEMA + 1), f"reads version {SCHEMA}: read it with a newer one"),
        (b"playground recording 0\nx", f"of version 0 and this playground reads version {SCHEMA}: record the run anew"),
        (b"playground recording 1\nnothing of zlib's", "is a damaged recording"),
    ],
)
def test_what_is_no_recording_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "some.playground"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        read_recording(file)
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_version_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(packed.parent / "ranks" / "0", tmp_path / "ranks")
    run = folder / "run.json"
    run.write_text(run.read_text().replace(f'"schema": {SCHEMA}', '"schema": 0'))
    with pytest.raises(UsageError, match=f"of version 0 and this playground reads version {SCHEMA}"):
        read_recording(folder)


def test_a_file_is_not_written_through_a_link(packed: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.playground.unfinished").symlink_to(tmp_path / "diary")
    (tmp_path / "diary").write_text("dear diary")
    write_file(tmp_path / "run.playground", read_file(packed))
    assert (tmp_path / "diary").read_text() == "dear diary"
    assert not (tmp_path / "run.playground").is_symlink()


def test_damage_is_named(packed: Path, tmp_path: Path) -> None:
    files = dict(read_file(packed).files)
    for name, content in (("rank-0.tables", b"[1\n"), ("rank-1.events", b"x" * 200), ("run.json", b"{")):
        write_file(tmp_path / "damaged.playground", Members({**files, name: content}))
        with pytest.raises(UsageError, match="record the run anew"):
            read_recording(tmp_path / "damaged.playground")
    with pytest.raises(UsageError, match="a folder without a recording"):
        read_recording(tmp_path)


RunCli = Callable[..., Any]


def test_see_keeps_the_recording(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "ring.playground"
    outcome = run_cli("allreduce", "--algorithm", "ring", "-n", "2", "--see", file)
    assert outcome.code == 0
    assert f"--see: ring.playground shows {sum(1 for _ in read_recording(file).events())} events" in outcome.err
    assert read_recording(file).command == ("allreduce", "--algorithm", "ring", "-n", "2")
    assert [each.name for each in tmp_path.iterdir()] == ["ring.playground"]


def test_a_run_that_failed_is_shown(tmp_path: Path) -> None:
    """What led to it is what one wants to see, and the failure is told all the same."""
    file = tmp_path / "failed.playground"
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        World(2, around=Recordings(file).around).run(reduce_and_die)
    assert read_recording(file).ranks[1].is_cut_off
    assert list(tmp_path.iterdir()) == [file]


def test_each_world_of_a_command_has_its_recording(tmp_path: Path) -> None:
    file = tmp_path / "ring.playground"
    others = tmp_path / "ring.playground.worlds"
    anybodys = tmp_path / "ring-2.playground"
    anybodys.write_text("mine")
    for count in (3, 1):  # fewer: what the command before has left is gone
        world = World(1, around=Recordings(file).around)
        for _ in range(count):
            world.run(reduce_once)
        assert len(read_recording(file).ranks) == 1
        assert sorted(each.name for each in others.glob("*")) == [f"{n}.playground" for n in range(2, count + 1)]
        assert others.exists() == (count > 1)
    assert anybodys.read_text() == "mine"


def test_what_is_in_the_way_of_more_worlds_is_left_alone(tmp_path: Path) -> None:
    in_the_way = tmp_path / "ring.playground.worlds"
    in_the_way.mkdir()
    (in_the_way / "notes.txt").write_text("mine")
    World(1, around=Recordings(tmp_path / "ring.playground").around).run(reduce_once)
    assert (in_the_way / "notes.txt").read_text() == "mine"
    in_the_way = tmp_path / "other.playground.worlds"
    in_the_way.write_text("mine")
    with pytest.raises(UsageError, match="no folder"):
        Recordings(tmp_path / "other.playground")


@pytest.mark.parametrize("option", [("--see", "see.html"), ("--see=see.html",), ()])
def test_a_command_is_shown_without_what_records_it(option: tuple[str, ...]) -> None:
    assert without_option(["allreduce", *option, "-n", "1"]) == ["allreduce", "-n", "1"]


@pytest.mark.parametrize(("name", "words"), [("ring.gif", "choose an ending"), ("no/ring.svg", "no such folder")])
def test_see_refuses_before_the_run(name: str, words: str, run_cli: RunCli, tmp_path: Path) -> None:
    outcome = run_cli("allreduce", "-n", "2", "--see", tmp_path / name)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
