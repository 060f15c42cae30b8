"""Whatever is in a file that is read: it is read, or refused in one line, at once and without much memory.

Each row of `FORMATS` makes files that are whole and reads them as a command does. They are damaged by a few changes
each and read in a process of their own, which may take `MEMORY` bytes more than it needs for whole ones, and `SECONDS`
of the processor's time for each.

    python tests/test_fuzz.py 500 7 recording MNIST     # so many of each, seed 7
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from playground.runtime.errors import PlaygroundError

Files = dict[str, bytes]
SECONDS, MEMORY = 5, 200 * 2**20


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Format:
    """Something that is read."""

    make: Callable[[], Files]
    """Whole files, by name."""
    read: Callable[[Path], object]
    """Reads those in a folder. Raises `PlaygroundError` for damaged ones, and nothing else."""
    write: Callable[[Path, Files], None] = write_files
    """Writes them into a folder: where there are checksums, with those of the damaged content."""


def make_recording() -> Files:
    """What two ranks have recorded: a ring, a step of training with a bucket, a thread's lane."""
    from playground.see.record import (
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
    from playground.see.record.layout import LANE_CODES, RUN
    from playground.see.record.recorder import Recorder
    from playground.see.record.run import describe_run

    with tempfile.TemporaryDirectory() as name:
        folder, group = Path(name), (0, 1)
        for rank in range(2):
            ticks = iter(range(rank * 50, 10**9, 1000))
            recorder = Recorder(
                folder, rank, capacity=200, value_capacity=500, clock=lambda ticks=ticks: next(ticks),  # type: ignore[misc]
                device="cpu",
            )  # fmt: skip
            source = recorder.sources.find(1)
            ring = recorder.open(recorder.begin(COLLECTIVE, "all_reduce (ring)", 16, (4,), group, source=source))
            recorder.instant(VALUES, "before", [1.0, 2.0, 3.0, 4.0], parent=ring)
            for step, phase in enumerate(("reduce-scatter", "all-gather")):
                with recorder.span(PHASE, phase):
                    offset = 2 * ((rank + step) % 2)
                    sent = recorder.begin(SEND, "isend", 8, (2,), group, 1 - rank, step, 7, offset, source)
                    arrived = recorder.begin(RECEIVE, "irecv", 8, (2,), group, 1 - rank, step, 7, 2 - offset, source)
                    recorder.put_values(sent, [1.0, 2.0])
                    wait = recorder.begin_wait([sent, arrived], source)
                    recorder.end_all([wait, sent, arrived])
                    recorder.put_values(arrived, [3.0, 4.0])
                    recorder.end(recorder.begin(COMPUTE, "add", 8, (2,), offset=offset))
            recorder.put_values(ring, [4.0] * 4)
            recorder.close(ring)
            for _ in range(2):
                training = recorder.open(recorder.begin(PHASE, "training step", source=source))
                recorder.end(recorder.begin(MOVE, "scatter: cpu → cuda:0", 8, (2,)))
                with recorder.span(COMPUTE, "forward"):
                    pass
                with recorder.span(COMPUTE, "backward"):
                    recorder.instant(GRADIENT, "fc.weight", nbytes=8, shape=(2,))
                    bucket = recorder.begin(BUCKET, "bucket 0", 8, (2,), group)
                    called = recorder.begin(COLLECTIVE, "all_reduce", 8, (2,), group, source=source)
                recorder.end_all([recorder.begin_wait([called], source), called, bucket])
                recorder.end(recorder.begin(COMPUTE, "step"))
                recorder.close(training)
            copy = recorder.begin(COMPUTE, "forward", parent=training + 2)
            recorder.set_lane(copy, LANE_CODES[BACKGROUND])
            recorder.end(copy)
            recorder.stop()
        (folder / RUN).write_text(describe_run(["allreduce", "-n", "2"], "gloo", 2))
        from playground.see.record.layout import read_files

        return dict(read_files(folder))


def write_recording(folder: Path, files: Files) -> None:
    """The members as one file."""
    from playground.see.record.layout import write_zip

    write_zip(folder / "run.playground", files)


def pack_recording() -> Files:
    with tempfile.TemporaryDirectory() as name:
        write_recording(Path(name), make_recording())
        return {"run.playground": (Path(name) / "run.playground").read_bytes()}


def see(file: Path) -> None:
    """All that `see` does with a recording but PNGs, which take long."""
    from playground.console.rendering import render
    from playground.console.session import to_document
    from playground.see.command import document_of, read
    from playground.see.files import PAINTED, amount, paint, paint_steps
    from playground.see.paint.words import recording_texts

    recording = read(file)
    amount(recording)
    render(recording_texts(recording), 80)
    to_document(document_of(recording))
    for ending in PAINTED:
        paint(recording, file.with_name(f"painted{ending}"))
    paint_steps(recording, file.with_name("steps.svg"))


FORMATS = {
    "recording": Format(pack_recording, lambda folder: see(folder / "run.playground")),
    "recording's members": Format(make_recording, lambda folder: see(folder / "run.playground"), write_recording),
}


INTEGERS = [0, 1, -1, -2, 2, 63, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]
DEEP = "a place for what is nested deeply"
VALUES: list[object] = [
    None, True, False, "", "abc", "\x1b[31m\0\u202e", "\ud800", "9" * 5000, "-3", DEEP, [], {}, [[]], [1, "a", None],
    {"a": 1}, 0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 10**30, *INTEGERS,
]  # fmt: skip
ANY_VALUE = st.one_of(st.sampled_from(VALUES), st.integers(), st.floats(), st.text(max_size=5))


def edit(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """One change."""
    kind = draw(st.sampled_from(("json", "json", "number", "flip", "cut", "remove", "repeat")))
    first, second = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
    if kind == "json":
        return edit_json(draw, content, first)
    if kind == "number":
        form, number = draw(st.sampled_from("<>")) + draw(st.sampled_from("bhiq")), draw(st.sampled_from(INTEGERS))
        size = struct.calcsize(form)
        if draw(st.booleans()):
            first = first // size * size
        number = (number + 2 ** (8 * size - 1)) % 2 ** (8 * size) - 2 ** (8 * size - 1)
        return content[:first] + struct.pack(form, number) + content[first + size :]
    if kind == "flip" and first < len(content):
        return content[:first] + bytes([content[first] ^ (1 << draw(st.integers(0, 7)))]) + content[first + 1 :]
    if kind == "cut":
        return content[:first]
    if kind == "remove":
        return content[:first] + content[second:]
    return content[:first] + content[first:second] * draw(st.integers(2, 5)) + content[second:]


def edit_json(draw: Callable[[Any], Any], content: bytes, start: int) -> bytes:
    """Another value somewhere in the JSON that begins next after `start`. It stays as long, where that can be."""
    begin = min((place for sign in b"{[" if (place := content.find(sign, start)) >= 0), default=-1)
    begin = content.find(b"{") if begin < 0 else begin
    text = content[begin : begin + 20_000].decode("latin-1") if begin >= 0 else ""
    try:
        value, length = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return content
    root: dict[str, Any] = {"": value}
    holder: Any = root
    key: Any = ""
    while isinstance(holder[key], (dict, list)) and holder[key] and draw(st.integers(0, 4)):
        holder = holder[key]
        key = draw(st.sampled_from([*holder] if isinstance(holder, dict) else range(len(holder))))
    change = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
    if change == "remove" and holder is not root:
        del holder[key]
    elif change == "add" and isinstance(holder[key], (dict, list)):
        added = draw(st.sampled_from(VALUES))
        holder[key].append(added) if isinstance(holder[key], list) else holder[key].update({"more": added})
    else:
        holder[key] = draw(ANY_VALUE)
    edited = json.dumps(root[""]).replace(json.dumps(DEEP), "[" * 50_000).encode()
    return content[:begin] + edited.ljust(length) + content[begin + length :]


@st.composite
def damage(draw: Callable[[Any], Any], files: Files) -> Files:
    """These files, one of them with a few changes."""
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    for _ in range(draw(st.integers(1, 3))):
        content = edit(draw, content)
    return {**files, name: content}


class TooLong(BaseException):
    """Reading took more than `SECONDS` of the processor's time."""


def stop(number: int, frame: object) -> None:
    raise TooLong


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """In this block, this process may take `MEMORY` bytes more than it has."""
    gc.collect()
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def attempt(format_: Format, files: Files, folder: Path) -> bool:
    """Whether they are read; False if they are refused. Raises whatever else comes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    format_.write(folder, files)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        format_.read(folder)
        return True
    except PlaygroundError as error:
        refusal = str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert "\n" not in refusal, f"more than one line: {refusal}"
    assert "allocate" not in refusal, f"memory beyond the limit was asked for: {refusal}"
    return False


def fuzz(name: str, examples: int, number: int, folder: Path) -> tuple[int, int]:
    """How many of so many damaged files were read, and refused. Raises what any of them raised."""
    format_ = FORMATS[name]
    files = format_.make()
    assert attempt(format_, files, folder), "whole files must be read"
    ANY_VALUE.validate()  # hypothesis sorts Unicode's characters once, in memory that no file has asked for
    counts = [0, 0]

    @settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @given(damage(files))
    def check(damaged: Files) -> None:
        counts[attempt(format_, damaged, folder)] += 1

    with limited_memory():
        seed(number)(check)()
    return counts[True], counts[False]


def main(examples: int, number: int, *names: str) -> None:
    """Fuzz each format in turn, saying how many files were read and refused; exit 1 if anything else came of one."""
    import warnings

    warnings.simplefilter("ignore")  # of libraries, about what is in a file
    signal.signal(signal.SIGPROF, stop)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FORMATS:
            try:
                read, refused = fuzz(name, examples, number, Path(folder) / "files")
                print(f"{name}: {read} read, {refused} refused", flush=True)
            except (Exception, TooLong):
                failed = True
                print(f"{name}: {traceback.format_exc()}", flush=True)
    sys.exit(failed)


@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.stress)])
def test_what_is_damaged_is_read_or_refused(examples: int, fork_program: Callable[..., Any]) -> None:
    program = fork_program("test_fuzz", examples, 1 if examples == 15 else Random().randrange(2**32))
    printed, problems = program.communicate(timeout=1200)
    assert program.returncode == 0, printed + problems
    counts = [line.rpartition(": ")[2].split() for line in printed.splitlines()]
    assert len(counts) == len(FORMATS)
    assert all(int(read) + int(refused) >= examples // 2 for read, _, refused, _ in counts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
