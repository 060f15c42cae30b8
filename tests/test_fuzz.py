"""Whatever is in a file that is read: it is read, or refused in one line, at once and without much
memory.

Recordings are damaged by a few changes each and read in a process of their own, which may take
`MEMORY` bytes more than it needs for whole ones, and `SECONDS` of the processor's time for each.

    python tests/test_fuzz.py 500 7     # so many of each format, seed 7
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from playground.base.errors import PlaygroundError

Files = dict[str, bytes]
SECONDS, MEMORY = 5, 200 * 2**20


def write_file(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def make_recording() -> Files:
    """What two ranks have recorded: a ring, a step of training with a bucket, a thread's lane."""
    from playground.explain.replay.record.layout import LANE_CODES, LOG, RUN
    from playground.explain.replay.record.recorder import Recorder
    from playground.explain.replay.record.recording import (
        BACKGROUND,
        BUCKET,
        COLLECTIVE,
        COMPUTE,
        GRADIENT,
        MOVE,
        PHASE,
        RECEIVE,
        SEND,
        VALUES,
    )
    from playground.explain.replay.record.run import describe_run

    with tempfile.TemporaryDirectory() as name:
        folder, group = Path(name), (0, 1)
        for rank in range(2):
            ticks = iter(range(rank * 50, 10**9, 1000))
            recorder = Recorder(
                folder, rank, log=replace(LOG, capacity=200, words=500),
                clock=lambda ticks=ticks: next(ticks),  # type: ignore[misc]
                device="cpu",
            )  # fmt: skip
            source = recorder.sources.find(1)
            ring = recorder.open(
                recorder.begin(
                    COLLECTIVE,
                    "all_reduce (ring)",
                    nbytes=16,
                    shape=(4,),
                    group=group,
                    source=source,
                )
            )
            recorder.instant(VALUES, "before", [1.0, 2.0, 3.0, 4.0], parent=ring)
            for step, phase in enumerate(("reduce-scatter", "all-gather")):
                with recorder.span(PHASE, phase):
                    offset = 2 * ((rank + step) % 2)
                    begin = partial(
                        recorder.begin, nbytes=8, shape=(2,), group=group, peer=1 - rank,
                        message=step, tag=7, source=source,
                    )  # fmt: skip
                    sent = begin(SEND, "isend", offset=offset)
                    arrived = begin(RECEIVE, "irecv", offset=2 - offset)
                    recorder.put_values(sent, [1.0, 2.0])
                    wait = recorder.begin_wait([sent, arrived], source)
                    recorder.end_all([wait, sent, arrived])
                    recorder.put_values(arrived, [3.0, 4.0])
                    recorder.end(
                        recorder.begin(COMPUTE, "add", nbytes=8, shape=(2,), offset=offset)
                    )
            recorder.put_values(ring, [4.0] * 4)
            recorder.close(ring)
            for _ in range(2):
                training = recorder.open(recorder.begin(PHASE, "training step", source=source))
                recorder.end(recorder.begin(MOVE, "scatter: cpu → cuda:0", nbytes=8, shape=(2,)))
                with recorder.span(COMPUTE, "forward"):
                    pass
                with recorder.span(COMPUTE, "backward"):
                    recorder.instant(GRADIENT, "fc.weight", nbytes=8, shape=(2,))
                    bucket = recorder.begin(BUCKET, "bucket 0", nbytes=8, shape=(2,), group=group)
                    called = recorder.begin(
                        COLLECTIVE, "all_reduce", nbytes=8, shape=(2,), group=group, source=source
                    )
                recorder.end_all([recorder.begin_wait([called], source), called, bucket])
                recorder.end(recorder.begin(COMPUTE, "step"))
                recorder.close(training)
            copy = recorder.begin(COMPUTE, "forward", parent=training + 2)
            recorder.set_lane(copy, LANE_CODES[BACKGROUND])
            recorder.end(copy)
            recorder.stop()
        (folder / RUN).write_text(describe_run(["allreduce", "-n", "2"], "gloo", 2))
        from playground.explain.replay.record.layout import read_folder

        return dict(read_folder(folder))


def write_recording(folder: Path, files: Files) -> None:
    """The members as one file."""
    from playground.explain.replay.record.layout import write_zip

    write_zip(folder / "run.playground", files)


def pack_recording() -> Files:
    with tempfile.TemporaryDirectory() as name:
        write_recording(Path(name), make_recording())
        return {"run.playground": (Path(name) / "run.playground").read_bytes()}


def see(file: Path) -> None:
    """All that `see` does with a recording but PNGs, which take long."""
    from playground.explain.replay.files import RENDERED, amount, render, render_steps
    from playground.explain.replay.record.reading import read_recording
    from playground.explain.replay.render.text_report import recording_texts
    from playground.figures.command import document_of
    from playground.ui import rendering
    from playground.ui.session import to_document

    recording = read_recording(file)
    amount(recording)
    rendering.render(recording_texts(recording), 80)
    to_document(document_of(recording))
    for ending in RENDERED:
        render(recording, file.with_name(f"rendered{ending}"))
    render_steps(recording, file.with_name("steps.svg"))


INTEGERS = [
    0,
    1,
    -1,
    -2,
    2,
    63,
    255,
    2**15,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**62,
    2**63 - 1,
    -(2**63),
]
DEEP = "a place for what is nested deeply"
VALUES: list[object] = [
    None, True, False, "", "abc", "\x1b[31m\0\u202e", "\ud800", "9" * 5000, "-3", DEEP, [], {},
    [[]], [1, "a", None],
    {"a": 1}, 0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 10**30, *INTEGERS,
]  # fmt: skip


def edit(random: Random, content: bytes) -> bytes:
    """One change."""
    first, second = sorted(random.randrange(len(content) + 1) for _ in range(2))
    match random.choice(("json", "json", "json", "number", "flip", "cut", "remove", "repeat")):
        case "json":
            return edit_json(random, content, first)
        case "number":
            form = random.choice("<>") + random.choice("bhiq")
            size = struct.calcsize(form)
            number = random.choice(INTEGERS) % 2 ** (8 * size)
            first = random.choice((first, first // size * size))
            return content[:first] + struct.pack(form.upper(), number) + content[first + size :]
        case "flip":
            return (
                content[:first]
                + bytes(each ^ 1 << random.randrange(8) for each in content[first : first + 1])
                + content[first + 1 :]
            )
        case "cut":
            return content[:first]
        case "remove":
            return content[:first] + content[second:]
    return content[:first] + content[first:second] * random.randint(2, 5) + content[second:]


def edit_json(random: Random, content: bytes, start: int) -> bytes:
    """Another value somewhere in the JSON that begins next after `start`. It stays as long, where
    that can be."""
    begin = min((place for sign in b"{[" if (place := content.find(sign, start)) >= 0), default=0)
    try:
        value, length = json.JSONDecoder().raw_decode(
            content[begin : begin + 20_000].decode("latin-1")
        )
    except (ValueError, RecursionError):
        return content
    holder: Any = [value]
    key: Any = 0
    while isinstance(holder[key], (dict, list)) and holder[key] and random.randrange(5):
        holder = holder[key]
        key = random.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
    if holder == [value] or random.randrange(4):
        holder[key] = random.choice(VALUES)
    else:
        del holder[key]
    edited = json.dumps(value).replace(json.dumps(DEEP), "[" * 50_000).encode()
    return content[:begin] + edited.ljust(length) + content[begin + length :]


def damage(random: Random, files: Files) -> Files:
    """These files, one of them with a few changes."""
    name = random.choice(sorted(files))
    content = files[name]
    for _ in range(random.randint(1, 3)):
        content = edit(random, content)
    return {**files, name: content}


class TooLong(BaseException):
    """Reading took more than `SECONDS` of the processor's time."""


def stop(number: int, frame: object) -> None:
    raise TooLong


def attempt(write: Callable[[Path, Files], None], files: Files, folder: Path) -> bool:
    """Whether they are read; False if they are refused. Raises whatever else comes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder, files)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        see(folder / "run.playground")
        return True
    except PlaygroundError as error:
        refusal = str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert "\n" not in refusal, f"more than one line: {refusal}"
    assert "allocate" not in refusal, f"memory beyond the limit was asked for: {refusal}"
    return False


FORMATS = {
    "recording": (pack_recording, write_file),
    "recording's members": (make_recording, write_recording),
}
"""What makes whole files, and what writes damaged ones: as they are, or with checksums of what is
damaged."""


def main(examples: int, seed: int) -> None:
    """Damage each format so often, saying how many files were read and refused."""
    warnings.simplefilter("ignore")  # of libraries, about what is in a file
    signal.signal(signal.SIGPROF, stop)
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, write) in FORMATS.items():
            files = make()
            assert attempt(write, files, Path(folder) / "files"), "whole files must be read"
            has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, resource.RLIM_INFINITY))
            counts = Counter[bool]()
            for number in range(examples):
                try:
                    counts[
                        attempt(
                            write,
                            damage(Random(f"{seed} {name} {number}"), files),
                            Path(folder) / "files",
                        )
                    ] += 1
                except BaseException as error:
                    error.add_note(f"{name}, seed {seed}, number {number}")
                    raise
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(f"{name}: {counts[True]} read, {counts[False]} refused", flush=True)


@pytest.mark.parametrize("examples", [8, pytest.param(500, marks=pytest.mark.stress)])
def test_what_is_damaged_is_read_or_refused(
    examples: int, fork_program: Callable[..., Any]
) -> None:
    program = fork_program("test_fuzz", examples, 1 if examples == 8 else Random().randrange(2**32))
    printed, problems = program.communicate(timeout=1200)
    assert program.returncode == 0, printed + problems
    assert len(printed.splitlines()) == len(FORMATS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
