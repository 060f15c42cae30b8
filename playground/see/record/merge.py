"""The recordings of all ranks as one. Does not import torch."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_int, expect_list, expect_text, parse_json
from playground.see.record.clocks import Clock
from playground.see.record.container import Members, check_version, read_members
from playground.see.record.layout import EVENTS, MAX_RANKS, RANK_FILE, RUN, TABLES, VALUES, file_name
from playground.see.record.rank_file import SECOND, EventReader, RankTables, read_tables
from playground.see.record.recording import SCHEMA, RankRecording, Recording, Source

TEXT = "text/"
"""What the names of the members begin with that are files of the program."""


def read_recording(path: str | Path) -> Recording:
    """The recording in a file, or in a folder that ranks have written to and nobody has packed.

    Of one that was cut off, and of ranks that were killed, it is what is whole. Raises `UsageError` if it is no
    recording, is damaged or was written by another version, or if clocks of its ranks that differ were never compared;
    `OSError` if it cannot be read.
    """
    return merge(read_members(Path(path)), path)


@contextlib.contextmanager
def refused_if_damaged(name: str | Path) -> Iterator[None]:
    """Raise `UsageError` for whatever reading a damaged recording, of this name, raises in this block."""
    try:
        yield
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise UsageError(f"{name} is a damaged recording ({error}): record the run anew") from None


def merge(members: Members, name: str | Path = "this") -> Recording:
    """What a container or a folder of this name holds, on one clock. Raises `UsageError` as `read_recording`."""
    with refused_if_damaged(name):
        return merge_files(members)


def merge_files(members: Members) -> Recording:
    """The same. Raises `ValueError`, `LookupError`, `TypeError` or `struct.error`, too, for what is damaged."""
    files = members.files
    run = expect_dict(parse_json(files.get(RUN, b"{}")))
    check_version("this", expect_int(run.get("schema", SCHEMA)))
    present = [int(name[1]) for name in map(RANK_FILE.fullmatch, files) if name and name[2] == TABLES]
    size = expect_int(run.get("size", max(present, default=-1) + 1), 0, MAX_RANKS)
    ranks = [read_tables(files.get(file_name(rank, TABLES), b"")) for rank in range(size)]
    require_compared(ranks)
    sources = list(dict.fromkeys(source for rank in ranks for source, _ in rank.sources))
    return Recording(
        command=tuple(map(expect_text, expect_list(run.get("command", [])))),
        backend=expect_text(run.get("backend", "")),
        versions={expect_text(name): expect_text(each) for name, each in expect_dict(run.get("versions", {})).items()},
        began=next(rank.about.time for rank in ranks if rank.about), ranks=merge_ranks(ranks, sources, members),
        sources=tuple(sources), texts=texts_in(files),
    )  # fmt: skip


def merge_ranks(ranks: Sequence[RankTables], sources: Sequence[Source], members: Members) -> tuple[RankRecording, ...]:
    """The ranks' parts, their times counted from the moment at which the first of them began."""
    host = ranks[0].about.host_id if ranks[0].about else None
    clocks = [Clock(tuple(rank.samples), bool(rank.about and rank.about.host_id == host)) for rank in ranks]
    began = min(clock.to_rank_0(rank.about.clock) for rank, clock in zip(ranks, clocks, strict=True) if rank.about)
    numbers = {source: number for number, source in enumerate(sources)}
    readers = [
        EventReader(number, rank, [numbers[source] for source, _ in rank.sources], clock, began)
        for number, (rank, clock) in enumerate(zip(ranks, clocks, strict=True))
    ]
    return tuple(read_rank(reader, members) for reader in readers)


def read_rank(reader: EventReader, members: Members) -> RankRecording:
    """One rank's part."""
    rank, about, ended = reader.rank, reader.tables.about, reader.tables.ended
    if about is None:
        return RankRecording(rank=rank, host="", device="", events=(), is_cut_off=True)
    records, values = (members.files.get(file_name(rank, kind), b"") for kind in (EVENTS, VALUES))
    events, dropped = reader.read(records, values)
    return RankRecording(
        rank=rank, host=about.host, device=about.device, events=tuple(events), dropped=dropped,
        is_cut_off=members.is_cut_off or ended is None,
        clock_bound=reader.clock.bound(ended or reader.last_start(records)) / SECOND, cores=about.cores,
    )  # fmt: skip


def texts_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """The files of the program, by the names that sources have."""
    found = {name.removeprefix(TEXT): text for name, text in files.items() if name.startswith(TEXT)}
    return {name: text.decode(errors="replace") for name, text in found.items()}


def require_compared(ranks: Sequence[RankTables]) -> None:
    """Raise `UsageError` if no rank has begun, or if one on another host than rank 0's has not compared its clock with
    rank 0's."""
    if not any(rank.about for rank in ranks):
        raise UsageError("the recording ends before its first rank begins: record the run anew")
    first = ranks[0].about
    for number, rank in enumerate(ranks):
        if first and rank.about and rank.about.host_id != first.host_id and not rank.samples:
            raise UsageError(
                f"the clock of rank {number} on {rank.about.host} was never compared with that of rank 0 on "
                f"{first.host}, so that their times do not belong together: record the run anew"
            )
