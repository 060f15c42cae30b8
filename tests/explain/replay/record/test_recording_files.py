"""Recordings as files: what is whole is read, and what is not one is refused in one line."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from zipfile import ZIP_BZIP2, ZipFile

import pytest
import torch
from fixtures import Run

from playground import launch
from playground.algorithms import load_all_reduce
from playground.explain.replay.files import RENDERED, render
from playground.explain.replay.record.layout import (
    HEADER,
    LOG,
    LOGS,
    RECORD,
    SOURCE,
    EventRecord,
    Files,
    read_zip,
    write_zip,
)
from playground.explain.replay.record.reading import merge, read_recording
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.recording import COLLECTIVE, SCHEMA, SEND
from playground.explain.replay.record.run import Recorded, collect, describe_run
from playground.explain.replay.see import Recordings, without_option
from playground.world import RankFailed, UsageError
from playground.world.command_world import CommandWorld


def reduce_once(rank: int, size: int) -> int:
    load_all_reduce("ring")(torch.ones(4))
    return rank


def reduce_and_die(rank: int, size: int) -> None:
    reduce_once(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    load_all_reduce("ring")(torch.ones(4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two ranks, as a file."""
    folder = tmp_path_factory.mktemp("recording")
    launch(Recorded(reduce_once, folder / "ranks", describe_run(["mine"], "gloo", 2)), 2)
    write_zip(folder / "whole.playground", collect(folder / "ranks" / "0"))
    return folder / "whole.playground"


def test_a_file_holds_what_the_folder_held(packed: Path) -> None:
    folder = packed.parent / "ranks" / "0"
    from_file, from_folder = read_recording(packed), read_recording(folder)
    # as where nobody was left to make a file of it
    assert read_recording(packed.parent).ranks == from_folder.ranks
    assert from_file.ranks == from_folder.ranks
    assert from_file.sources == from_folder.sources
    assert "playground/algorithms/all_reduce.py" in from_file.texts


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_what_is_no_recording_is_refused_in_one_line(
    kept: int, packed: Path, tmp_path: Path
) -> None:
    file = tmp_path / "some.playground"
    file.write_bytes(packed.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"is not a recording .*make one with --see") as caught:
        read_recording(file)
    assert "\n" not in str(caught.value)


def place_of(number: int) -> int:
    """The offset of a record in `rank-R.events`, in bytes."""
    return HEADER.size + RECORD.size * number


def test_damage_is_named(packed: Path, tmp_path: Path) -> None:
    files, file = read_zip(packed), tmp_path / "damaged.playground"
    events = bytearray(files["rank-0.events"])
    record = EventRecord(*RECORD.unpack_from(events, place_of(5)))
    RECORD.pack_into(events, place_of(5), *record._replace(parent=5))
    for name, content, words in (
        ("run.json", b'{"schema": 1}', f"is of version 1, and this playground reads {SCHEMA}"),
        ("rank-0.tables", b"[1\n", "record the run again"),
        ("rank-1.events", b"x" * 200, "record the run again"),
        ("rank-0.events", bytes(events), "event 5 lies in event 5, which does not come before it"),
    ):
        write_zip(file, {**files, name: content})
        with pytest.raises(UsageError, match=words):
            read_recording(file)
    folder = shutil.copytree(packed.parent / "ranks" / "0", tmp_path / "ranks")
    (folder / "run.json").write_bytes(b"{")
    with pytest.raises(UsageError, match=f"{folder} is a damaged recording"):
        merge(collect(folder), folder)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="a folder without a recording"):
        read_recording(tmp_path)


MUCH = bytes(2**26)


def test_what_is_crafted_is_refused_in_one_line(packed: Path, tmp_path: Path) -> None:
    """At once, and without much memory."""
    files, file, folder = read_zip(packed), tmp_path / "crafted.playground", tmp_path / "folder"
    write_zip(file, {"rank-0.events": MUCH, "rank-1.events": MUCH})
    bomb = file.read_bytes()
    # of how long they are
    lying = bomb.replace(len(MUCH).to_bytes(4, "little"), (20_000).to_bytes(4, "little"))
    with ZipFile(file, "w", ZIP_BZIP2) as other:
        other.writestr("run.json", b"{}")
    folder.mkdir()
    with (folder / "rank-0.log").open("wb") as sparse:
        sparse.truncate(2 * len(MUCH))
    os.mkfifo(tmp_path / "fifo.playground")
    events = bytearray(files["rank-0.events"])
    for place in range(2, 6):
        record = EventRecord(*RECORD.unpack_from(events, place_of(place)))
        RECORD.pack_into(events, place_of(place), *record._replace(values=4))
    nested = events[: place_of(0)] + b"".join(
        RECORD.pack(*record._replace(parent=place - 1, values=-1)) for place in range(101)
    )
    struct.pack_into("<q", nested, 8, 101)  # its capacity
    crafted: list[tuple[bytes | Path, str]] = [
        (bomb, "expands to more than 100 times its size"),
        (lying, "is not a recording"),
        (file.read_bytes(), "is not a recording .compressed in another way"),
        (folder, "expands to more than 100 times its size"),
        (tmp_path / "fifo.playground", "is neither a file nor a folder"),
        (Path("/dev/zero"), "is neither a file nor a folder"),
        (zipped({**files, "rank-0.events": bytes(events)}, tmp_path), "more values than there are"),
        (
            zipped({**files, "rank-0.events": bytes(nested)}, tmp_path),
            "event 100 lies in more than 99 others",
        ),
        (zipped({**files, "run.json": b"[" * 10**5}, tmp_path), "nested too deeply"),
        (
            zipped({**files, "run.json": b'{"size": 1000000000}'}, tmp_path),
            "1000000000 is no number",
        ),
    ]
    for what, words in crafted:
        if isinstance(what, bytes):
            file.write_bytes(what)
            what = file
        tracemalloc.start()
        try:
            with pytest.raises(UsageError, match=words) as caught:
                read_recording(what)
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()
        assert "\n" not in str(caught.value)


def zipped(files: Files, folder: Path) -> bytes:
    write_zip(folder / "zipped", files)
    return (folder / "zipped").read_bytes()


@pytest.mark.parametrize("times", [60, pytest.param(200, marks=pytest.mark.stress)])
def test_whatever_is_flipped_or_missing_one_line_says_so(
    times: int, packed: Path, tmp_path: Path
) -> None:
    draw, files, file = random.Random(1), read_zip(packed), tmp_path / "damaged.playground"
    refusals = []
    for number in range(times):
        name = draw.choice([name for name in files if not name.startswith("text/")])
        content = bytearray(files[name])
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.choice(
                (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
            )
        file.write_bytes(
            zipped({**files, name: bytes(content[: draw.randint(1, 2 * len(content))])}, tmp_path)
        )
        if number % 4 == 0:  # the file, and not what is in it
            content = bytearray(packed.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        try:
            recording = read_recording(file)
            for ending in RENDERED:
                render(recording, tmp_path / f"rendered{ending}")
        except UsageError as error:
            refusals.append(str(error))
    assert times / 10 < len(refusals) < times * 9 / 10
    assert not any("\n" in each for each in refusals)


def test_nothing_but_text_reaches_terminals_and_pictures(
    packed: Path, tmp_path: Path, run_cli: Run
) -> None:
    """Names, hosts, sources and the command of a recording are whatever somebody has written
    there."""
    evil = "\x1b]0;owned\x07\x9b31m\0\ud800\uffff\u202e"
    files = dict(read_zip(packed))
    run = json.loads(files["run.json"])
    files["run.json"] = json.dumps(
        {**run, "command": [evil], "backend": evil, "versions": {evil: evil}}
    ).encode()
    lines = [json.loads(line) for line in files["rank-0.tables"].splitlines()]
    for line in lines:
        if line[0] == "name":
            line[1] += evil
        elif line[0] == "source":
            line[1] = [evil, line[1][1], evil, evil]
        elif line[0] == "start":
            line[1] |= {"device": evil}
    files["rank-0.tables"] = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    write_zip(tmp_path / "evil.playground", files)
    shown = run_cli("see", tmp_path / "evil.playground")
    assert (shown.code, shown.err) == (0, "")
    assert r"\x1b]0;owned\x07\x9b31m\x00\ud800\uffff\u202e" in shown.out.replace("\n", "")
    for ending in RENDERED:
        file = tmp_path / f"evil{ending}"
        assert run_cli("see", tmp_path / "evil.playground", "-o", file).code == 0
        if ending == ".svg":
            ElementTree.parse(file)
        assert not re.search(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\uffff\u202e]", file.read_text(encoding="utf-8")
        )


@pytest.mark.parametrize("name", ["ring.playground", "ring\udcff.html"])
def test_see_keeps_the_recording(name: str, run_cli: Run, tmp_path: Path) -> None:
    """Also in a file whose name is no UTF-8."""
    file = tmp_path / name
    outcome = run_cli("allreduce", "-n", "2", "--elements", "2", "--see", file)
    assert outcome.code == 0, outcome.err
    assert [each.name for each in tmp_path.iterdir()] == [name]
    if file.suffix == ".playground":
        assert (
            f"--see: {name} shows {sum(1 for _ in read_recording(file).events())} events"
            in outcome.err
        )
        assert read_recording(file).command == ("allreduce", "-n", "2", "--elements", "2")


def test_files_that_a_folder_of_anybody_names_are_not_read(tmp_path: Path) -> None:
    """Only where the ranks' own recording becomes a file are the lines of the program put into
    it."""
    (tmp_path / "diary.txt").write_text("dear diary")
    folder = tmp_path / "ranks"
    folder.mkdir()
    recorder = Recorder(folder, 0, log=replace(LOG, capacity=10, words=10), device="cpu")
    recorder.write(SOURCE, ("diary.txt", 1, "f", str(tmp_path / "diary.txt")))
    recorder.stop()
    recording = read_recording(folder)
    assert [source.file for source in recording.sources] == ["diary.txt"]
    assert recording.texts == {}
    assert "text/diary.txt" in collect(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ring.gif", "the ending says what is written"),
        ("no/ring.svg", "no such folder"),
        (f"{'r' * 246}.html", "File name too long"),
    ],
)
def test_see_refuses_before_the_run(name: str, words: str, run_cli: Run, tmp_path: Path) -> None:
    outcome = run_cli("allreduce", "-n", "2", "--see", tmp_path / name)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_what_led_to_a_failure_is_shown_and_the_failure_is_told(tmp_path: Path) -> None:
    file = tmp_path / "failed.playground"
    world = CommandWorld(2)
    world.around = Recordings(file)
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        world.run(reduce_and_die)
    killed = read_recording(file).ranks[1]
    assert killed.is_cut_off
    assert [event.end < float("inf") for event in killed.events if event.kind == COLLECTIVE] == [
        True
    ]
    assert len([event for event in killed.events if event.kind == SEND]) == 2
    assert list(tmp_path.iterdir()) == [file]


def test_the_first_world_of_a_command_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "ring.playground"
    world = CommandWorld(1)
    world.around = Recordings(file)
    assert [world.run(reduce_once) for _ in range(2)] == [[0], [0]]
    assert len([*read_recording(file).events(COLLECTIVE)]) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_recording_that_cannot_be_written_is_no_failure_of_the_run(
    tmp_path: Path, run_cli: Run
) -> None:
    file = tmp_path / "ring.playground"
    (tmp_path / f".{file.name}.unfinished").mkdir()
    outcome = run_cli("allreduce", "-n", "2", "--see", file)
    assert outcome.code == 0, outcome.err
    assert "ring_reduce_scatter" in outcome.out
    assert "--see ring.playground: no recording could be written (" in outcome.err
    folder = tmp_path / "ring.playground.ranks" / "0"
    assert f"`playground see {folder}` shows what the ranks have written" in outcome.err
    assert run_cli("see", folder).code == 0


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path, run_cli: Run) -> None:
    folder, mine = tmp_path / "ring.playground.ranks", tmp_path / "mine"
    (mine / "0").mkdir(parents=True)
    (mine / "0" / "note.txt").write_text("mine")
    # what a launcher that was killed has left
    for name in ("run.json", "rank-0.log"):
        (mine / "0" / name).write_text("")
    folder.symlink_to(mine)
    for _ in range(2):
        outcome = run_cli("allreduce", "-n", "2", "--see", tmp_path / "ring.playground")
        assert (outcome.code, outcome.out) == (2, "")
        assert "is in the way of what ranks record: move it, or name another" in outcome.err
        assert (folder / "0" / "note.txt").read_text() == "mine"
        if folder.is_symlink():
            folder.unlink()
            mine.rename(folder)
    (folder / "0" / "note.txt").unlink()
    assert run_cli("allreduce", "-n", "2", "--see", tmp_path / "ring.playground").code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["ring.playground"]


@pytest.mark.parametrize("option", [("--see", "see.html"), ("--see=see.html",), ()])
def test_a_command_is_shown_without_what_records_it(option: tuple[str, ...]) -> None:
    assert without_option(["allreduce", *option, "-n", "1"]) == ["allreduce", "-n", "1"]


def test_names_need_not_be_utf_8(tmp_path: Path, run_cli: Run) -> None:
    file = tmp_path / "ring\udcff.playground"
    assert run_cli("allreduce", "-n", 2, "--see", file).code == 0
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.mark.stress
def test_a_launcher_that_is_killed_early_leaves_nothing_that_cannot_be_seen(
    tmp_path: Path, start_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    for delay in (0.05, 0.2, 0.4, 0.8):
        process = start_cli("p2p", "-n", "2", "--see", tmp_path / "p2p.playground")
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        folder = tmp_path / "p2p.playground.ranks"
        if folder.exists():
            assert [*folder.rglob(LOGS)]
