"""A recording in words: who waited for whom and why."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf

from playground.base.ranks import name_ranks
from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.analyse.timeline import Lane, ref_of
from playground.explain.replay.analyse.waits import (
    CAUSES,
    LATE,
    UNTOLD,
    Blamer,
    Chain,
    Waits,
    WaitState,
    seconds_by_cause,
)
from playground.explain.replay.record.recording import MAIN, SEND, Event, Recording
from playground.ui.rendering import render
from playground.ui.tables import RANK_COLUMN, Column, Table
from playground.ui.text import Prose, bad, heading, prose
from playground.ui.units import format_seconds, plural

Text = str | Prose | Table


def recording_texts(recording: Recording) -> list[Text]:
    """A recording in words and tables."""
    waits = Waits(recording)
    parts = [
        summary_texts(recording),
        end_texts(recording),
        missing_texts(recording),
        wait_texts(recording, waits),
        chain_texts(waits),
    ]
    return [text for part in parts if part for text in ("", *part)][1:]


def summary_texts(recording: Recording) -> list[Text]:
    """The command, its world, and its duration."""
    ranks = recording.ranks
    devices = dict.fromkeys(rank.device.split(":")[0] for rank in ranks)
    count = plural(sum(len(rank.events) for rank in ranks), "event")
    seconds = recording.end - recording.start
    return [
        prose(heading(f"playground {' '.join(recording.command)}")),
        f"  {plural(recording.size, 'rank')} on {recording.backend}, {', '.join(devices)}",
        f"  {format_seconds(seconds)}, {count}",
    ]


def end_texts(recording: Recording) -> list[Text]:
    """What was said of a run that failed."""
    first, *rest = recording.ended.split("\n")
    return [prose(bad("It failed"), f": {first}"), *rest] if first else []


def missing_texts(recording: Recording) -> list[Text]:
    """A line on what is missing, if anything is."""
    unmatched = match_messages(recording).unmatched
    ranks = recording.ranks
    lines = [
        f"rank {each.rank}: no room for {plural(each.dropped, 'event')}"
        for each in ranks
        if each.dropped
    ]
    stood = recording.standstill is not None
    lines += [f"rank {each.rank}: cut off" for each in ranks if each.is_cut_off and not stood]
    if unmatched:
        first, count = unmatched[0], plural(len(unmatched), "message")
        other = "anyone" if first.peer is None else f"rank {first.number_of_peer}"
        if first.is_with_stranger:
            other += f" of {len(first.group)}, which does not exist"
        end = f"rank {first.rank}'s {first.kind} {'to' if first.kind == SEND else 'from'} {other}"
        lines.append(f"{count} of which only one end is recorded, first {end}")
    in_call = [each.rank for each in ranks if any(isinf(event.end) for event in each.events)]
    stood = stood and bool(in_call)
    were = f"{name_ranks(in_call)} {'were' if in_call[1:] else 'was'} in a call when the run ended."
    missing = [prose(bad("Not recorded"), ": " + "; ".join(lines))] if lines else []
    return [*([were.capitalize()] if stood else []), *missing]


def wait_texts(recording: Recording, waits: Waits) -> list[Text]:
    """The waits by cause: a row for each rank and thread that waited."""
    if recording.runs_ahead:
        return [prose(heading("Waits"), f" and what caused them: {UNTOLD}")]
    of_lane: dict[Lane, list[WaitState]] = {}
    for wait in waits.all:
        of_lane.setdefault((wait.event.rank, wait.event.lane), []).append(wait)
    if not of_lane:
        none = "none in a call; run --profile tells what DDP waits for"
        why = "none has ended: see above" if recording.standstill else none
        return [prose(heading("Waits"), f": {why}")]
    sums = {lane: seconds_by_cause(its) for lane, its in of_lane.items()}
    causes = [cause for cause in CAUSES if any(seconds[cause] for seconds in sums.values())]
    with_lanes = any(lane != MAIN for _, lane in of_lane)
    names = (*(cause.replace(" ", "\n", 1) for cause in causes), "all")
    times = [*(Column(name, "ms", right=True) for name in names), Column("of run", "%", right=True)]
    threads = [Column("thread")] if with_lanes else []
    table = Table(RANK_COLUMN, *threads, Column("waits", right=True), *times)
    for (rank, lane), seconds in sums.items():
        whole = sum(seconds.values())
        cells = [*(milliseconds(each) for each in (*(seconds[cause] for cause in causes), whole))]
        share = f"{100 * whole / (recording.end - recording.start):.0f}"
        thread = [lane] if with_lanes else []
        table.add(str(rank), *thread, f"{len(of_lane[rank, lane]):,}", *cells, share)
    return [prose(heading("Waits"), ", by what caused them"), table]


def chain_texts(waits: Waits) -> list[Text]:
    """The longest wait that another rank caused, and the chain of its causes."""
    late = [wait for wait in waits.longest() if wait.cause in LATE.values()]
    if not late:
        return []
    chain = Blamer(waits).blame(max(late, key=lambda wait: wait.late))
    first = chain.waits[0]
    where = f": rank {first.event.rank} at {line_text(waits, first.event)}, "
    took = (
        f"{format_seconds(first.seconds)}, of which {format_seconds(first.late)} until the "
        "other came"
    )
    return [prose(heading("Longest wait for another rank"), where, took), *link_lines(chain, waits)]


def link_lines(chain: Chain, waits: Waits) -> Iterator[str]:
    """A line for each wait of a chain, and one for the work that ends it."""
    for wait in chain.waits:
        what = "something that is not recorded" if wait.awaited is None else "the transfer itself"
        if (peer := wait.peer) is not None and wait.cause in LATE.values():
            what = f"rank {peer.rank}'s {peer.name} at {line_text(waits, peer)}"
        yield f"  rank {wait.event.rank} waited for {what}"
    if (busy := chain.busy) is not None:
        what = f"{busy.event.name} at" if busy.is_recorded else f"before {busy.event.name} at"
        yield (
            f"  rank {busy.rank} was busy for {format_seconds(busy.seconds)}: {what} "
            f"{line_text(waits, busy.event)}"
        )


def line_text(waits: Waits, event: Event) -> str:
    """The line of the program of an event, or of the innermost event around it that has one."""
    timeline = waits.timeline
    around = [event, *(timeline.by_ref[ref] for ref in timeline.around(ref_of(event)))]
    sources = (each.source for each in around if each.source is not None)
    if (number := next(sources, None)) is None:
        return "an unknown line"
    source = timeline.recording.sources[number]
    return f"{source.file}:{source.line}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def to_words(recording: Recording) -> str:
    """A recording in words and tables, in lines of at most 80 characters."""
    return render(recording_texts(recording), 80)
